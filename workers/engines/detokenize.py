"""Token ids to text as they come, with stop strings.

The engine runs vLLM without its own detokeniser, for one reason: here the text that is out is a function of
the tokens alone. Fed again with the tokens of an earlier attempt, a stream stands exactly where that attempt
stood, in the middle of a character or of a stop string if need be, and the continuation fits to the letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """The text of one answer. Holds back what may still become a character or a stop string.

    Args:
        tokenizer: A ``tokenizers.Tokenizer``.
        prompt: The tokens before the answer; some tokenizers write a first word differently.
        stop: Strings that end the answer and are not part of it.
        min_tokens: Stop strings that are complete before this many tokens are plain text.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = (), min_tokens: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = self._make_decoder(prompt)
        self._stop = stop
        self._min_tokens = min_tokens
        self._held = ""
        self.tokens = 0  #: taken so far
        self.stopped = False  #: a stop string is complete; what comes after it is not taken

    def push(self, token_ids: Sequence[int]) -> str:
        """Takes tokens up to a stop string, and returns the text that is certain now."""
        certain = ""
        for token in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            self._held += self._decode(token)
            if self.tokens > self._min_tokens:
                self._look_for_stop()
            certain += self._release(0 if self.stopped else self._undecided())
        return certain

    def finish(self) -> str:
        """The rest, when no more tokens come. An unfinished character is not part of it."""
        return self._release(0)

    def _release(self, keep: int) -> str:
        certain = len(self._held) - keep
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _look_for_stop(self) -> None:
        """Cuts at the stop string that is complete first; it can only begin in the held text."""
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self._held = self._held[: min(ends)[1]]
            self.stopped = True

    def _undecided(self) -> int:
        """Length of the longest end of the held text that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop):
                return length
        return 0

    def _decode(self, token: int) -> str:
        try:
            return self._decoder.step(self._tokenizer, token) or ""
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # A model may write bytes that are no UTF-8; the decoder then gives up, so begin with a new one.
            self._decoder = self._make_decoder(())
            return self._decoder.step(self._tokenizer, token) or ""

    @staticmethod
    def _make_decoder(prompt: Sequence[int]) -> Any:
        from tokenizers.decoders import DecodeStream

        return DecodeStream(ids=list(prompt), skip_special_tokens=True)
