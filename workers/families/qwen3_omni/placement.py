"""Where the rows of a Qwen3-Omni prompt stand: placeholders, their order, and positions on three axes.

The rules are those of transformers' ``Qwen3OmniMoeProcessor`` (order) and ``get_rope_index`` (positions):
text counts on all axes at once; a picture's rows lie in a plane at one time; a film's planes are as far apart
as its frames, in units of ``position_id_per_seconds``; a film's own sound runs from the same start as the
film, and the rows of both stand in the order of their times, film first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from adapters.chunk import Payload
from workers.engine import ItemError
from workers.families.conversation import Medium


class Span(NamedTuple):
    """The rows of one medium in a prompt, or those of a film and its own sound."""

    sound: int = 0  #: rows of sound
    grid: tuple[int, int, int] | None = None  #: patches of a picture or film along time, height and width
    seconds: float | None = None  #: between a film's planes
    in_film: bool = False  #: the sound is the film's own


class Rules:
    """A checkpoint's numbers. Works on the thinker's config and, if it knows the same names, the talker's."""

    def __init__(self, config: Any, merge: int) -> None:
        self.pads = {
            "audio": config.audio_token_id,
            "image": config.image_token_id,
            "video": config.video_token_id,
        }
        self._media = frozenset(self.pads.values())
        self._merge = merge
        self._per_second = config.position_id_per_seconds

    def is_medium(self, token: int) -> bool:
        """Whether the token stands for a row of a medium."""
        return token in self._media

    def counts(self, ids: Sequence[int]) -> dict[str, int]:
        """How many of a prompt's tokens are of which kind: "text_tokens", "audio_tokens", ..."""
        of_media = {f"{kind}_tokens": ids.count(token) for kind, token in self.pads.items()}
        return {"text_tokens": len(ids) - sum(of_media.values()), **of_media}

    def rows(self, span: Span) -> int:
        """How many rows a span takes."""
        return span.sound + self._seen(span)

    def _seen(self, span: Span) -> int:
        """Rows of a picture or film."""
        if span.grid is None:
            return 0
        time, height, width = span.grid
        return time * (height // self._merge) * (width // self._merge)

    def order(self, span: Span, kind: str) -> list[int]:
        """The placeholders of a span, row by row. ``kind`` is what the chat template wrote."""
        if not span.in_film:
            return [self.pads[kind]] * self.rows(span)
        return [self.pads["video" if is_film else "audio"] for is_film in self._interleaved(span)]

    def _interleaved(self, span: Span) -> Iterator[bool]:
        """For each row of a film with its own sound, in their order: whether it is one of the film's."""
        assert span.grid is not None
        assert span.seconds is not None
        time, height, width = span.grid
        plane = (height // self._merge) * (width // self._merge)
        heard = 0
        for number in range(time):
            while heard < span.sound and heard < number * span.seconds * self._per_second:
                heard += 1
                yield False
            for _ in range(plane):
                yield True
        for _ in range(heard, span.sound):
            yield False

    def positions(self, ids: Sequence[int], spans: Sequence[Span]) -> torch.Tensor:
        """float32 [3, n] of a prompt's tokens (placeholders one a row) with these spans in it, in order."""
        parts: list[torch.Tensor] = []
        left, at, start = iter(spans), 0, 0.0
        while at < len(ids):
            if ids[at] not in self._media:
                stop = next((n for n in range(at, len(ids)) if ids[n] in self._media), len(ids))
                parts.append(_line(stop - at, start))
            else:
                span = next(left)
                stop = at + self.rows(span)
                parts += self._span(span, start)
            at = stop
            start = float(parts[-1].max()) + 1
        return torch.cat(parts, 1) if parts else torch.zeros(3, 0)

    def _span(self, span: Span, start: float) -> list[torch.Tensor]:
        if span.grid is None:
            return [_line(span.sound, start)]
        planes = self._planes(span.grid, span.seconds, start)
        if not span.in_film:
            return [planes]
        return self._woven(span, planes, _line(span.sound, start))

    def _woven(self, span: Span, planes: torch.Tensor, line: torch.Tensor) -> list[torch.Tensor]:
        """A film and its sound in their order, in two parts: the second is what is left of the longer one.

        What follows goes on after that, as with transformers.
        """
        film = torch.tensor(list(self._interleaved(span)))
        woven = torch.empty(3, len(film))
        woven[:, film], woven[:, ~film] = planes, line
        others = (film != film[-1]).nonzero()
        split = int(others.max()) + 1 if len(others) else 0
        return [woven[:, :split], woven[:, split:]]

    def _planes(self, grid: tuple[int, int, int], seconds: float | None, start: float) -> torch.Tensor:
        time, height, width = grid[0], grid[1] // self._merge, grid[2] // self._merge
        times = torch.arange(time) * torch.tensor(1.0 if seconds is None else seconds) * self._per_second
        axes = (times, torch.arange(height), torch.arange(width))
        planes = torch.meshgrid(*(axis.float() for axis in axes), indexing="ij")
        return torch.stack([axis.flatten() for axis in planes]) + start


def _line(count: int, start: float) -> torch.Tensor:
    return (torch.arange(count).float() + start).expand(3, -1)


def spans_of(media: Sequence[Medium], encoded: Mapping[tuple[str, int], Payload]) -> list[Span]:
    """The spans of a prompt's media. Raises ItemError (400) for one that the request does not bring."""
    return [_span_of(medium, encoded) for medium in media]


def _span_of(medium: Medium, encoded: Mapping[tuple[str, int], Payload]) -> Span:
    own = found(encoded, medium.kind, medium.index)
    if medium.kind == "audio":
        return Span(sound=len(own["embeds"]))
    time, height, width = own["grid"]
    grid = (int(time), int(height), int(width))
    if medium.kind == "image":
        return Span(grid=grid)
    if medium.audio is None:
        return Span(grid=grid, seconds=own["seconds_per_grid"])
    sound = len(found(encoded, "audio", medium.audio)["embeds"])
    return Span(sound=sound, grid=grid, seconds=own["seconds_per_grid"], in_film=True)


def found(encoded: Mapping[tuple[str, int], Payload], kind: str, index: int) -> Payload:
    """What the encoder made of a medium. Raises ItemError (400) if the request doesn't bring it."""
    if (kind, index) not in encoded:
        raise ItemError(f"messages: there is no {kind} {index}", status=400, param="messages")
    return encoded[kind, index]
