"""Tokens to text: nothing lost at any break, in the middle of a character or of a stop string."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import models
from workers.engines.detokenize import TextStream

pytestmark = pytest.mark.models

WORDS = [
    "Paris",
    " is",
    "\n\n",
    "END",
    "E",
    "EN",
    "ND",
    " 😀",
    "👩‍👩‍👧",
    "é",
    "日本",
    "naïve",
    "<|im_end",
    "|>",
    ".",
]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=20).map("".join)
stops = st.lists(st.sampled_from(["END", "EEN", "\n\n", "😀", "is", "本n", "|>E"]), max_size=3)


@cache
def tokenizer() -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models.ensure("smollm2-135m-instruct") / "tokenizer.json"))
    tokenizer.encode_special_tokens = True  # as plain text, that is
    return tokenizer


def tokens_of(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False).ids)


def up_to_a_stop(text: str, stop: list[str]) -> str:
    ends = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    return text[: min(ends)[1]] if ends else text


@settings(max_examples=200)
@given(texts, stops)
def test_pieces_joined_are_the_text_up_to_the_first_stop(text: str, stop: list[str]) -> None:
    stream = TextStream(tokenizer(), tokens_of("Hello"), stop)
    joined = "".join(stream.push([token]) for token in tokens_of(text)) + stream.finish()
    assert joined == up_to_a_stop(text, stop)
    assert stream.stopped == (joined != text)


@settings(max_examples=100)
@given(texts, stops, st.integers(0, 40))
def test_a_stream_fed_again_goes_on_from_the_very_letter(text: str, stop: list[str], cut: int) -> None:
    tokens = tokens_of(text)
    before = TextStream(tokenizer(), [], stop)
    out = "".join(before.push([token]) for token in tokens[:cut])
    after = TextStream(tokenizer(), [], stop)
    assert after.push(tokens[:cut]) == out
    assert out + after.push(tokens[cut:]) + after.finish() == up_to_a_stop(text, stop)


def test_text_is_held_back_only_while_a_stop_string_may_come_of_it() -> None:
    stream = TextStream(tokenizer(), [], ["\n\nUser"])
    pieces = [stream.push([token]) for token in tokens_of("Yes.\n\nNo")]
    assert pieces[0] == "Yes"  # a stop string can't begin here, so it is out at once
    assert "".join(pieces) == "Yes.\n\nNo"


def test_a_stop_string_before_min_tokens_is_plain_text() -> None:
    text = "END and END"
    stream = TextStream(tokenizer(), [], ["END"], min_tokens=len(tokens_of("END")))
    assert stream.push(tokens_of(text)) + stream.finish() == "END and "


def test_tokens_after_a_stop_string_are_not_counted() -> None:
    tokens = tokens_of("One. END Two. Three.")
    stream = TextStream(tokenizer(), [], ["END"])
    assert stream.push(tokens) == "One. "
    assert stream.tokens == len(tokens_of("One. END"))


def test_bytes_that_are_no_text_do_not_end_the_stream() -> None:
    half = tokens_of("😀")[:1]
    stream = TextStream(tokenizer(), [])
    text = stream.push(half * 5 + tokens_of(" fine")) + stream.finish()
    assert text.endswith(" fine")
