"""Multipart forms: fields and files, none of them larger than allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from broker.gateway.context import coming
from broker.gateway.errors import ApiError, from_decoding

MAX_FIELD = 64 * 1024  #: bytes of a form field that is no file
MAX_FIELDS = 64
_JSON = {"sampling_params_list"}  #: fields that no form has a way to write

T = TypeVar("T")


class Form(NamedTuple):
    """What a form holds."""

    fields: dict[str, str | list[str]]
    files: dict[str, list[bytes]]  #: each name's, in the order in which they came

    def convert(self, kind: type[T]) -> T:
        """The fields as a struct: numbers and booleans come as text, lists of objects as JSON.

        Raises ApiError that names a field.
        """
        fields: dict[str, Any] = dict(self.fields)
        for name in _JSON & fields.keys():
            try:
                fields[name] = msgspec.json.decode(fields[name])
            except (msgspec.DecodeError, TypeError, RecursionError):
                raise ApiError(f"{name}: write it as JSON", name, code="invalid_json") from None
        try:
            return msgspec.convert(fields, kind, strict=False)
        except msgspec.ValidationError as error:
            raise from_decoding(error, kind=kind) from None

    def file(self, name: str) -> bytes | None:
        """The only file of a name, None without one. Raises ApiError for several."""
        files = self.files.get(name, [])
        if len(files) > 1:
            raise ApiError(f"{name}: one file, not {len(files)}", name, code="invalid_form")
        return files[0] if files else None


async def read(request: web.Request, files: Mapping[str, int], stall_s: float) -> Form:
    """Reads a form.

    Args:
        request: Whose body it is.
        files: The fields that are files (``image`` or ``image[]``), and the bytes that each may have.
        stall_s: Nothing of it may take longer to come.

    Raises ApiError: 400 for what is no form, 413 for a part, or a body, that is too large, 408 for a caller
    that sends nothing any more.
    """
    if request.content_type != "multipart/form-data":
        name = next(iter(files))
        raise ApiError(f"send a multipart/form-data body with {name}", name)
    form, left = Form({}, {}), request.client_max_size
    try:
        reader = await request.multipart()
        for _ in range(MAX_FIELDS):
            async with coming(stall_s):
                part = await reader.next()
            if part is None:
                return form
            if not isinstance(part, BodyPartReader) or part.name is None:
                raise ApiError("a part of the form has no name", code="invalid_form")
            name = part.name.removesuffix("[]")
            if name in files:
                data = await _bounded(part, files[name], left, stall_s)
                form.files.setdefault(name, []).append(data)
            else:
                data = await _bounded(part, MAX_FIELD, left, stall_s)
                _add(form.fields, part.name, data.decode())
            left -= len(data)
    except HttpProcessingError as error:  # a part's head is none, or is too large; it may be quoted there
        said = error.message.partition("\n")[0].rstrip(":")
        raise ApiError(f"the head of a part of the form can't be read: {said}", code="invalid_form") from None
    except (ValueError, RuntimeError) as error:  # what aiohttp raises for a broken multipart body
        raise ApiError(f"the form can't be read: {error}", code="invalid_form") from None
    raise ApiError(f"more than {MAX_FIELDS} form fields", code="invalid_form")


def _add(fields: dict[str, str | list[str]], name: str, value: str) -> None:
    """``name[]`` may come several times and makes a list. Raises ApiError where `name` came too."""
    if name.endswith("[]"):
        values = fields.setdefault(name[:-2], [])
        if not isinstance(values, list):
            raise ApiError(f"{name[:-2]}: once with [] and once without", name[:-2], code="invalid_form")
        values.append(value)
    else:
        fields[name] = value


async def _bounded(part: BodyPartReader, limit: int, left: int, stall_s: float) -> bytes:
    """A part's bytes. Raises ApiError (413) as soon as there are too many, or the body has no room for it."""
    data = bytearray()
    while True:
        async with coming(stall_s):
            chunk = await part.read_chunk(64 * 1024)
        if not chunk:
            return bytes(data)
        data += chunk
        if len(data) > limit:
            raise ApiError(f"{part.name}: larger than {limit} bytes", part.name, status=413, code="too_large")
        if len(data) > left:
            raise ApiError("the body is too large", status=413, code="too_large")
