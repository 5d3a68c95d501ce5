"""Where a conversation's media stand among its tokens, and the positions of all rows.

A medium takes one row for each row of its embedding. Positions have three axes: time, height and width. Text
and sound go on by one on all of them; a picture's rows have their place in it, and a film's also their time,
25 a second, which is also sound's pace. A film with its sound is cut into pieces of two seconds, which take
turns. Whatever comes next begins after the largest position of what came last.

The rules are those of transformers' ``Qwen2_5OmniProcessor`` and ``get_rope_index``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from adapters.chunk import Payload
from workers.engine import ItemError
from workers.families.conversation import Medium

Positions = NDArray[np.int64]
Encoded = Mapping[tuple[str, int], Payload]  #: (kind, index) -> what the encoder made of it


class Settings(NamedTuple):
    """What of a thinker's configuration matters here."""

    pads: Mapping[str, int]  #: kind -> its placeholder
    audio_start: int
    audio_end: int
    merge: int  #: patches along height and width that become one row
    pace: int  #: positions a second
    piece: int  #: positions of one piece of a film with sound

    @classmethod
    def of(cls, config: Any) -> Settings:
        """From transformers' configuration of a thinker."""
        return cls(
            {"audio": config.audio_token_id, "image": config.image_token_id, "video": config.video_token_id},
            config.audio_start_token_id,
            config.audio_end_token_id,
            config.vision_config.spatial_merge_size,
            config.position_id_per_seconds,
            int(config.position_id_per_seconds * config.seconds_per_chunk),
        )


class Placed(NamedTuple):
    """Rows ``start`` to ``stop`` of a medium's embedding stand from row ``at`` on."""

    at: int
    kind: str
    number: int  #: which one of its kind
    start: int
    stop: int


class Rows:
    """The rows of one conversation.

    Args:
        ids: Its tokens, with one placeholder for each medium.
        media: In the order of their placeholders.
        encoded: What the encoder made of them. Raises ItemError for a medium that is missing there.
    """

    def __init__(
        self, settings: Settings, ids: Sequence[int], media: Sequence[Medium], encoded: Encoded
    ) -> None:
        self._settings = settings
        self._encoded = encoded
        self.ids: list[int] = []
        self.placed: list[Placed] = []
        self._positions: list[Positions] = []  #: piece by piece
        self._next = 0
        waiting, kinds = iter(media), set(settings.pads.values())
        shared = False  # the token after a film's sound has the position of the one before it
        for token in ids:
            if token in kinds:
                shared = self._add(next(waiting))
            else:
                self._token(token, shared=shared)
                shared = False

    @property
    def positions(self) -> Positions:
        """[3, n]"""
        return np.concatenate(self._positions, 1)

    @property
    def next_position(self) -> int:
        """Of the first token of the answer."""
        return int(max(piece.max() for piece in self._positions)) + 1

    def count(self, kind: str) -> int:
        """Rows of all media of a kind."""
        return sum(part.stop - part.start for part in self.placed if part.kind == kind)

    def _add(self, medium: Medium) -> bool:
        if medium.kind == "video" and medium.audio is not None:
            self._film_with_sound(medium.index, medium.audio)
            return True
        count = self._length(medium.kind, medium.index)
        where = _line(count) if medium.kind == "audio" else self._grid(medium.kind, medium.index)
        self._part(medium.kind, medium.index, 0, count, where + self._next)
        return False

    def _film_with_sound(self, film: int, sound: int) -> None:
        self._token(self._settings.audio_start, shared=True)
        start = self._next
        sights, sounds = self._grid("video", film), _line(self._length("audio", sound))
        cuts = [pieces(sights[0], self._settings.piece), pieces(sounds[0], self._settings.piece)]
        for turn in range(max(map(len, cuts))):
            for kind, index, where, cut in (
                ("video", film, sights, cuts[0]),
                ("audio", sound, sounds, cuts[1]),
            ):
                if turn < len(cut):
                    first, last = cut[turn]
                    self._part(kind, index, first, last, where[:, first:last] + start)
        self._token(self._settings.audio_end, shared=False)

    def _token(self, token: int, *, shared: bool) -> None:
        position = self._next - 1 if shared else self._next
        self.ids.append(token)
        self._positions.append(np.full((3, 1), position, np.int64))
        self._next = position + 1

    def _part(self, kind: str, index: int, start: int, stop: int, where: Positions) -> None:
        if start == stop:
            return
        self.placed.append(Placed(len(self.ids), kind, index, start, stop))
        self.ids += [self._settings.pads[kind]] * (stop - start)
        self._positions.append(where)
        self._next = int(where.max()) + 1

    def _length(self, kind: str, index: int) -> int:
        return len(self._payload(kind, index)["embeds"])

    def _grid(self, kind: str, index: int) -> Positions:
        """Positions of a picture's or film's rows, from 0 on: [3, n]."""
        made = self._payload(kind, index)
        times, height, width = made["grid"]
        merge = self._settings.merge
        # In single precision and cut, as transformers does.
        pace = np.float32(made.get("seconds_per_grid", 1.0))
        moments = (np.arange(times, dtype=np.float32) * pace * np.float32(self._settings.pace)).astype(
            np.int64
        )
        axes = np.meshgrid(moments, np.arange(height // merge), np.arange(width // merge), indexing="ij")
        return np.stack([axis.reshape(-1) for axis in axes])

    def _payload(self, kind: str, index: int) -> Payload:
        payload = self._encoded.get((kind, index))
        if payload is None:
            raise ItemError(f"messages: there is no {kind} {index}", status=400, param="messages")
        return payload


def _line(count: int) -> Positions:
    return np.broadcast_to(np.arange(count), (3, count))


def pieces(times: NDArray[np.int64], length: int) -> list[tuple[int, int]]:
    """Where growing times are cut into pieces of a length: (first, last + 1) of each.

    After a gap of several pieces each time is a piece of its own until the count has caught up; transformers
    does so, and the model has learnt it.
    """
    cuts: list[tuple[int, int]] = []
    start = 0
    for place, time in enumerate(times.tolist()):
        if time >= (len(cuts) + 1) * length:
            cuts.append((start, place))
            start = place
    return [*cuts, (start, len(times))]
