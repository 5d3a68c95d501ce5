"""Cutting growing text into sentences, each given out as soon as its end is certain.

The text is read character by character, so the sentences don't depend on how it was divided, and the time
is linear in its length. Joined, the pieces are the text again, white space included.
"""

from __future__ import annotations

LIMIT = 240  #: characters; a longer sentence is cut at a clause, else at a word, else anywhere

_STOPS = ".!?…؟।۔"
_WIDE_STOPS = "。！？"  # no space follows these
_OPENERS = "\"'“‘«([*_~#>-"
_CLOSERS = "\"'”’»)]*_~」』）"
_CLAUSE = ",;:—–،、，；"

# What stands before a full stop without ending a sentence: always, before numbers, before small letters.
_NEVER_LAST = {"mr", "mrs", "ms", "dr", "prof", "st", "mt", "gen", "col", "sgt", "capt", "lt", "rev", "hon"}
_NEVER_LAST |= {"gov", "sen", "rep", "vs", "viz", "cf", "approx", "e.g", "i.e", "eg", "ie"}
_BEFORE_NUMBERS = {"no", "nos", "nr", "fig", "figs", "vol", "pp", "p", "eq", "sec", "ch", "art"}
_SOMETIMES_LAST = {"etc", "inc", "ltd", "co", "corp", "jr", "sr", "dept", "est", "al", "min", "max", "avg"}
_SOMETIMES_LAST |= {"a.m", "p.m", "b.c", "a.d", "ph.d"}


class Splitter:
    """Takes text piece by piece and gives sentences back."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._begin([])

    def feed(self, text: str) -> list[str]:
        """The sentences that are complete now."""
        done: list[str] = []
        for char in text:
            self._push(char, done)
        return done

    def flush(self) -> list[str]:
        """What is left at the end of the text."""
        done = ["".join(self._text)] if self._text else []
        self._begin([])
        return done

    def _begin(self, text: list[str]) -> None:
        self._text = text  # the sentence so far
        self._words = 0  # finished words in it
        self._word = 0  # where its last word begins
        self._clause = 0  # where its last clause begins
        self._spaced = False  # white space has followed the last word,
        self._newline = False  # a line break among it
        self._wide = False  # a wide stop has come, and at most closing marks since

    def _push(self, char: str, done: list[str]) -> None:
        if char.isspace():
            if not self._spaced:
                self._words += self._word < len(self._text)
                self._spaced = True
            self._newline |= char == "\n"
            self._text.append(char)
            if self._text[-2:-1] and self._text[-2] in _CLAUSE:
                self._clause = len(self._text)
        else:
            if self._spaced:
                self._next_word(char, done)
            elif self._wide and char not in _CLOSERS + _WIDE_STOPS:
                self._emit(done)
            self._wide = char in _WIDE_STOPS or (self._wide and char in _CLOSERS)
            self._text.append(char)
        if len(self._text) >= self._limit:
            self._cut(done)

    def _next_word(self, char: str, done: list[str]) -> None:
        """A word begins after white space: is it the first of another sentence?"""
        if self._words:
            word = "".join(self._text[self._word :]).rstrip()
            line_ends = self._newline and not char.islower()
            if self._wide or line_ends or ends_sentence(word, char, first=self._words == 1):
                self._emit(done)
        self._word = len(self._text)
        self._spaced = self._newline = False

    def _emit(self, done: list[str]) -> None:
        done.append("".join(self._text))
        self._begin([])

    def _cut(self, done: list[str]) -> None:
        """Makes a piece of a sentence that gets too long; never keeps more than two thirds of the limit."""
        places = (self._clause, self._word, len(self._text))
        at = next(place for place in places if place > self._limit // 3)
        rest = self._text[at:]
        done.append("".join(self._text[:at]))
        self._begin([])
        for char in rest:
            self._push(char, done)


def ends_sentence(word: str, following: str, *, first: bool) -> bool:
    """Whether a sentence ends with this word.

    Args:
        word: The word with all marks around it.
        following: The first character of the next word.
        first: The word is its sentence's first.
    """
    core = word.rstrip(_CLOSERS)
    body = core.rstrip(_STOPS)
    stop = core[len(body) :]
    if not stop:
        return False
    if "!" in stop or "?" in stop:
        return core == word or not following.islower()  # "Really?" he said.
    if stop != ".":
        return stop in "؟।۔" or not following.islower()  # an ellipsis may go on
    return _full_stop_ends(body.lstrip(_OPENERS), following, first=first)


def _full_stop_ends(body: str, following: str, *, first: bool) -> bool:
    name = body.lower()
    if name in _NEVER_LAST:
        return False
    if name in _BEFORE_NUMBERS:
        return not following.isdigit()
    if name in _SOMETIMES_LAST:
        return not following.islower()
    if first and name.isdigit() and len(name) <= 2:
        return False  # the number of a list's item
    initials = body.split(".")  # "J", "U.S"
    return body == "I" or not all(len(part) == 1 and part.isupper() for part in initials)
