"""Tokens are chosen as Hugging Face chooses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.engines.ar.family import Prompt
from workers.engines.ar.sampling import Draws, Sampler, draw, uniform
from workers.engines.ar.sequence import Choice, Sequence

CPU = torch.device("cpu")
VOCABULARY = 3000
STOPS, SUPPRESSED = [5, 17], [1, 2, 2999]


def sequences(choices: list[Choice]) -> list[Sequence]:
    made = []
    for number, choice in enumerate(choices):
        one = Sequence("test", Prompt([number, 7, 7, 40 + number]), choice, 100)
        one.codes = [[100 + number], [7]]
        made.append(one)
    return made


CHOICES = [
    Choice(1),
    Choice(2, temperature=0.5),
    Choice(3, top_k=40),
    Choice(4, top_p=0.8),
    Choice(5, temperature=1.7, top_k=2000, top_p=0.99),
    Choice(6, temperature=0.9, top_k=50, top_p=0.5, repetition_penalty=1.3, min_tokens=5),
    Choice(7, repetition_penalty=0.7, top_p=0.01),
    Choice(8, top_k=1),
    Choice(9, temperature=40.0, top_p=0.97),  # nearly flat: thousands of tokens stay
]


def shares(choice: Choice, one: Sequence, logits: torch.Tensor) -> torch.Tensor:
    """The distribution that transformers draws from: [vocab]."""
    ids = torch.tensor([[*one.prompt.ids, *(codes[0] for codes in one.codes)]])
    processors: list[Any] = [RepetitionPenaltyLogitsProcessor(choice.repetition_penalty)]
    if choice.min_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(4, choice.min_tokens, STOPS, device="cpu"))
    processors += [SuppressTokensLogitsProcessor(SUPPRESSED, device="cpu")]
    processors += [TemperatureLogitsWarper(choice.temperature)]
    if choice.top_k:
        processors.append(TopKLogitsWarper(choice.top_k))
    if choice.top_p < 1:
        processors.append(TopPLogitsWarper(choice.top_p))
    scores = LogitsProcessorList(processors)(ids, logits[None].clone())
    return torch.softmax(scores, -1)[0]


def test_every_draw_is_the_one_that_transformers_distribution_gives() -> None:
    torch.manual_seed(0)
    logits = torch.randn(len(CHOICES), VOCABULARY) * 3
    batch = sequences(CHOICES)
    sampler = Sampler(SUPPRESSED, STOPS, CPU)
    greedy = torch.zeros(len(batch), dtype=torch.bool)
    for place in range(40):
        draws = Draws([one.choice.seed for one in batch], [place] * len(batch), greedy)
        tokens = sampler.choose(logits.clone(), batch, draws)
        numbers = draws.uniform(0)
        for row, one in enumerate(batch):
            wanted = shares(one.choice, one, logits[row]).double()
            assert wanted[tokens[row]] > 0
            cut = one.choice.top_k or one.choice.top_p < 1
            order = torch.argsort(wanted, descending=True, stable=True) if cut else torch.arange(VOCABULARY)
            at = int((order == tokens[row]).nonzero())
            before = wanted[order[:at]].sum()
            assert before - 1e-5 <= numbers[row] <= before + wanted[tokens[row]] + 1e-5


def test_tokens_that_tie_with_the_last_of_top_k_stay() -> None:
    logits = torch.full((1, 6), -1.0)
    logits[0, [1, 3, 4]] = 2.0
    numbers = torch.arange(0.01, 1, 0.05, dtype=torch.float64)
    drawn = {int(draw(logits, [2], [1.0], number[None])) for number in numbers}
    assert drawn == {1, 3, 4}


def test_company_does_not_change_a_draw() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCABULARY) * torch.tensor([0.01, 1, 2, 3, 4, 5])[:, None]
    top_k, top_p = [0, 10, 0, 1500, 0, 3], [0.95, 1.0, 0.9, 0.6, 1.0, 0.5]
    for _ in range(20):
        numbers = torch.rand(6, dtype=torch.float64)
        together = draw(logits, top_k, top_p, numbers).tolist()
        alone = [
            int(draw(logits[n : n + 1], top_k[n : n + 1], top_p[n : n + 1], numbers[n : n + 1]))
            for n in range(6)
        ]
        assert together == alone


def test_draws_follow_the_distribution() -> None:
    torch.manual_seed(2)
    logits = torch.randn(1, 12)
    wanted = torch.softmax(logits[0], -1)
    count = 20_000
    numbers = torch.tensor([uniform(3, place) for place in range(count)], dtype=torch.float64)
    tokens = draw(logits.expand(count, -1), [0] * count, [1.0] * count, numbers)
    seen = torch.bincount(tokens, minlength=12) / count
    assert float((seen - wanted).abs().max()) < 0.012  # four standard deviations and more


def test_draws_depend_on_seed_place_and_codebook_alone() -> None:
    numbers = {
        uniform(seed, place, codebook)
        for seed in (0, 1, 2**63, -1)
        for place in range(50)
        for codebook in (0, 1, 2)
    }
    assert len(numbers) == 4 * 50 * 3
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(4, 9, 1) == uniform(4 + 2**64, 9, 1)


@pytest.mark.parametrize("codebook", [1, 7])
def test_codebooks_are_greedy_for_greedy_jobs(codebook: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(4, 50)
    greedy = torch.tensor([True, False, True, False])
    draws = Draws([1, 1, 2, 2], [0, 0, 3, 3], greedy)
    picked = draws.pick(logits, codebook, top_k=10, top_p=0.8)
    best = logits.argmax(-1)
    assert picked[greedy].tolist() == best[greedy].tolist()
    again = Draws([2, 1], [3, 0], torch.tensor([False, False])).pick(
        logits[[3, 1]], codebook, top_k=10, top_p=0.8
    )
    assert again.tolist() == picked[[3, 1]].tolist()
