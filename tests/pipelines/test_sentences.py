"""Sentences come early, whole, and the same however the text arrives; what can't be said is not said."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.chunk import Payload
from pipelines.voice.sentences import LIMIT, Splitter
from pipelines.voice.speakable import CodeFilter, speakable
from pipelines.voice.transfers import sentences

#: Text dense with what the splitter and the filters look at.
TEXTS = st.lists(
    st.sampled_from(
        [
            *" \n.!?,;:`*_#|[]()\"'”。！…",
            "```",
            "Dr. ",
            "e.g. ",
            "3.14",
            "1. ",
            "Hello ",
            "world",
            "é",
            "😀",
            "x" * 90,
        ]
    )
    | st.text(max_size=5),
    max_size=120,
).map("".join)


def cuts(text: str, sizes: list[int]) -> list[str]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(text[at : at + size])
        at += size
    return [*pieces, text[at:]]


def split(*pieces: str) -> list[str]:
    splitter = Splitter()
    done = [sentence for piece in pieces for sentence in splitter.feed(piece)]
    return done + splitter.flush()


async def said(*pieces: str) -> list[str]:
    async def payloads() -> AsyncIterator[Payload]:
        for piece in pieces:
            yield {"text": piece}
        yield {"finish_reason": "stop"}

    return [payload["text"] async for payload in sentences(payloads())]


@given(TEXTS, st.lists(st.integers(0, 9), max_size=100))
@settings(max_examples=300)
def test_nothing_is_lost_and_division_does_not_matter(text: str, sizes: list[int]) -> None:
    whole = split(text)
    assert "".join(whole) == text
    assert split(*cuts(text, sizes)) == whole
    assert max(map(len, whole), default=0) <= LIMIT


@given(TEXTS, st.lists(st.integers(0, 9), max_size=100))
@settings(max_examples=100)
def test_code_is_dropped_however_the_text_is_divided(text: str, sizes: list[int]) -> None:
    whole, divided = CodeFilter(), CodeFilter()
    assert whole.feed(text) == "".join(divided.feed(piece) for piece in cuts(text, sizes))


@given(st.text(max_size=LIMIT) | TEXTS.map(lambda text: text[:LIMIT]))
@settings(max_examples=300)
def test_what_is_said_is_one_line_with_something_in_it(text: str) -> None:
    sentence = speakable(text)
    assert sentence == " ".join(sentence.split())
    assert not sentence or any(char.isalnum() for char in sentence)
    sentence.encode()  # no lone surrogates
    assert not set(sentence) & set("*`|[]{}\\\ufe0f")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello there! How are you? Fine.", ["Hello there!", "How are you?", "Fine."]),
        (
            "Dr. Smith met Mrs. Jones vs. the U.S. Army. Yes.",
            ["Dr. Smith met Mrs. Jones vs. the U.S. Army.", "Yes."],
        ),
        ("It costs $3.50, i.e. 3.5 dollars. Good.", ["It costs $3.50, i.e. 3.5 dollars.", "Good."]),
        ("At 5 p.m. he left. At 6 p.m. She came.", ["At 5 p.m. he left.", "At 6 p.m.", "She came."]),
        ("I am J. R. Smith. It was I. Then we left.", ["I am J. R. Smith.", "It was I.", "Then we left."]),
        ("No. I won't. See no. 5 and fig. 3.", ["No.", "I won't.", "See no. 5 and fig. 3."]),
        ('"Really?" he said. "Yes!" She left.', ['"Really?" he said.', '"Yes!"', "She left."]),
        ("Well... maybe. So… It is.", ["Well... maybe.", "So…", "It is."]),
        ("lower case. is also text. ok", ["lower case.", "is also text.", "ok"]),
        ("1. Paris is big.\n2. Rome\n- Bonn", ["1, Paris is big.", "2, Rome", "Bonn"]),
        ("# Cities\nParis is a\nlarge city.", ["Cities", "Paris is a large city."]),
        ("你好。世界！「好。」好", ["你好。", "世界！", "「好。」", "好"]),
        ("क्या? हाँ। ठीक।", ["क्या?", "हाँ।", "ठीक।"]),
        ("**Bold** and _so_ `f(x)`, see [this](https://a.b/c?d=e).", ["Bold and so f(x), see this."]),
        ("Go to https://www.example.org/a/b?c=d now.", ["Go to example.org now."]),
        ("Look:\n```python\nprint(1). No\n```\nDone.", ["Look:", "Done."]),
        ("3 * 4 is 12. snake_case <b>is</b> | fine", ["3 times 4 is 12.", "snake case is fine"]),
        ("Nice 😀👨‍👩‍👧! 25 °C 1️⃣.", ["Nice!", "25 °C 1."]),
    ],
)
async def test_sentences_are_what_a_reader_would_say(text: str, expected: list[str]) -> None:
    assert await said(text) == expected
    assert await said(*text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", ".", "...", "😀", "\n\n", "---", "```\ncode\n```", "**", "\x00", "|---|"]
)
async def test_what_can_not_be_said_gives_nothing(text: str) -> None:
    assert await said(text) == []


def test_a_sentence_leaves_with_the_first_letter_of_the_next() -> None:
    splitter = Splitter()
    assert splitter.feed("The capital is Paris.") == []  # "Paris.fr"?
    assert splitter.feed(" It") == ["The capital is Paris. "]


def test_text_without_a_full_stop_still_flows() -> None:
    text = "and so on, " * 100
    pieces = split(text)
    assert all(len(piece) <= LIMIT for piece in pieces)
    assert all(piece.endswith(", ") for piece in pieces)  # cut at clauses
    assert all(piece.endswith(" ") for piece in split("word " * 200))  # else at words
    assert [len(piece) for piece in split("x" * (2 * LIMIT + 1))] == [LIMIT, LIMIT, 1]  # else anywhere


@pytest.mark.parametrize(
    "pattern", ["Hello. ", "a", "[a ", "` ", "``` ", ".", "! ", "\n", ", ", "Dr. ", "((", "http://"]
)
async def test_the_time_is_linear_whatever_the_text(pattern: str) -> None:
    async def seconds(repeats: int) -> float:
        text = pattern * repeats
        began = time.process_time()
        await said(*(text[at : at + 100] for at in range(0, len(text), 100)))
        return time.process_time() - began

    await seconds(1000)
    small, large = await seconds(2_000), await seconds(20_000)
    assert large < 30 * small + 0.1  # ten times the text; a quadratic way would take a hundred times
