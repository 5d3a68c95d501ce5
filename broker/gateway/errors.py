"""Errors as HTTP callers see them: a status and OpenAI's error object, naming the field at fault."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import msgspec

from adapters.handle import AdapterError, ArenaFull
from broker.client import BrokerError
from broker.gateway.choices import choices
from broker.protocol import Error

log = logging.getLogger("gateway")

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<field>\w+)`")
MAX_CAUSE = 200  #: characters of what a decoder says: it may quote the caller's whole value
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that can't be served.

    Attributes:
        status: HTTP status.
        code: A word for programs ("model_not_found", "overloaded", "stage_failed", ...).
        param: The field at fault ("messages[0].content"), if one is.
        retry_after_s: When another try makes sense; absent: it does not, or nobody knows.
        allow: The methods that there are instead, if it is that.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
        self.allow = allow

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status >= 500:
            return "server_error"
        return _TYPES.get(self.status, "invalid_request_error")

    def body(self, request_id: str) -> bytes:
        """The JSON error object; ``request_id`` is our own id of the HTTP request."""
        detail = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
            "request_id": request_id,
        }
        return msgspec.json.encode({"error": detail})

    def headers(self) -> dict[str, str]:
        """Headers that belong to the error's response."""
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.allow is not None:
            headers["Allow"] = self.allow
        return headers


def from_broker(error: Error) -> ApiError:
    """What the broker says of a refused or failed request, for the caller."""
    return ApiError(
        error.message,
        error.param,
        status=error.status if 400 <= error.status <= 599 else 500,
        code=error.type,
        retry_after_s=error.retry_after_s,
    )


def from_decoding(error: Exception, prefix: str = "", kind: Any = None) -> ApiError:
    """A body that is no JSON, or whose field has the wrong type or range.

    Args:
        error: msgspec's error, or RecursionError for JSON that is nested too deep.
        prefix: Path of the decoded object in the whole body.
        kind: What it should have been; where a field has a few values only, they are told.
    """
    if isinstance(error, RecursionError):
        return ApiError("the body is nested too deep", code="invalid_json")
    if not isinstance(error, msgspec.ValidationError):
        return ApiError(f"the body is not valid JSON: {error}", code="invalid_json")
    match = _PLACE.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    if len(what) > MAX_CAUSE:
        what = f"{what[:MAX_CAUSE]}..."
    if kind is not None and (known := choices(kind, path)):
        what = f"{what}; one of {', '.join(known)}"
    if missing := _MISSING.search(what):
        path = f"{path}.{missing['field']}"
    path = (prefix + path).lstrip(".")
    return ApiError(f"{path}: {what}" if path else what, path or None, code="invalid_value")


def from_exception(error: BaseException) -> ApiError:
    """Any failure of a request, for the caller; what nobody expected goes to the log, not to the caller."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BrokerError):
        return from_broker(error.error)
    if isinstance(error, ArenaFull) and not error.retryable:
        return ApiError(
            f"what comes along is more than the shared memory here can take: {error}",
            status=413,
            code="too_large",
        )
    if isinstance(error, AdapterError):
        again = 1.0 if error.retryable else None
        return ApiError(
            str(error),
            status=503 if again else 500,
            code="overloaded" if again else None,
            retry_after_s=again,
        )
    log.error("a request failed unexpectedly", exc_info=error)
    return ApiError("internal error", status=500, code="internal_error")
