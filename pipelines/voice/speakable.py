"""From what a language model writes to what a voice can say: no code, no markup, no pictures."""

from __future__ import annotations

import re
import unicodedata

_FENCE = 3  # backticks


class CodeFilter:
    """Drops fenced code blocks from growing text, and the backticks around inline code."""

    def __init__(self) -> None:
        self._ticks = 0  # backticks just seen
        self._fenced = False

    def feed(self, text: str) -> str:
        """The part of the text that is prose. A block leaves a line break behind."""
        if not self._ticks and "`" not in text:
            return "" if self._fenced else text
        prose: list[str] = []
        for char in text:
            if char == "`":
                self._ticks += 1
                continue
            if self._ticks >= _FENCE:
                self._fenced = not self._fenced
                prose.append("\n")
            self._ticks = 0
            if not self._fenced:
                prose.append(char)
        return "".join(prose)


_REWRITES = [
    (re.compile(r"!?\[([^\[\]]*)\]\([^()\s]*\)"), r"\1"),  # links and images: their text
    (re.compile(r"https?://(?:www\.)?([^\s/<>()]+)[^\s<>()]*"), r"\1"),  # addresses: their host
    (re.compile(r"</?[A-Za-z][^<>]*>"), " "),  # HTML tags
    (re.compile(r"^[ \t]*(?:#{1,6}|>+|[-*+•])[ \t]+", re.MULTILINE), ""),  # headings, quotes, list bullets
    (re.compile(r"^([ \t]*\d{1,2})[.)][ \t]+", re.MULTILINE), r"\1, "),  # numbers of list items: a pause
    (re.compile(r"(?<=[\w)]) \* (?=[\w(])"), " times "),
    (re.compile(r"(?<=\w)_(?=\w)|[|\\]"), " "),  # snake_case, tables, escapes
    (re.compile(r"[*`]+|_+|~~+|[\[\]{}]|\$\$"), ""),  # emphasis, what is left of links, formulas
]
_SPACE = re.compile(r"\s+")
_BEFORE_STOP = re.compile(r" (?=[.,;:!?](?: |$))")  # left where an emoji was
# Symbols that a voice has a word for; the other "other symbols" are pictures.
_SAID = "°©®™№"
# Surrogates, private and unassigned characters can't be said; format characters join emoji.
_SILENT = ("So", "Sk", "Cs", "Co", "Cn", "Cf")


def speakable(text: str) -> str:
    """One sentence as a voice should get it: a single line, or empty when there is nothing to say in it.

    Takes sentences of bounded length (see :class:`pipelines.voice.sentences.Splitter`).
    """
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = "".join(_said(char) for char in unicodedata.normalize("NFC", text))
    text = _BEFORE_STOP.sub("", _SPACE.sub(" ", text).strip())
    return text if any(char.isalnum() for char in text) else ""


def _said(char: str) -> str:
    if char.isascii():
        return char if char.isprintable() else " "
    category = unicodedata.category(char)
    if category in _SILENT or "\ufe00" <= char <= "\ufe0f" or char == "\u20e3":
        return char if char in _SAID else ""  # variation selectors and keycaps belong to emoji too
    return " " if category in ("Cc", "Zl", "Zp", "Zs") else char
