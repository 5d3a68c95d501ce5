"""Choosing tokens with Hugging Face's semantics, for a whole batch at once.

The order is that of ``GenerationMixin``: repetition penalty, minimum length, suppressed tokens, temperature,
top-k, top-p. A draw is a function of a request's seed, the token's place and the codebook alone, so that
neither company nor a break changes an answer: one uniform number in [0, 1), and the token at which the
distribution function passes it, over the vocabulary in its order, or, where top-k or top-p cut it, over the
candidates from the likeliest on.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from workers.engines.ar.sequence import Sequence

#: Temperatures below are greedy, as in vLLM: logits that are divided by them may be infinite.
COLDEST = 1e-5
_LEAST_PENALTY = 1e-6  # the same for the repetition penalty
_CANDIDATES = 1024  # sorted first; nearly always they hold all that top-p keeps


def uniform(seed: int, place: int, codebook: int = 0) -> float:
    """A number in [0, 1) with 53 random bits: SplitMix64's mixing function (Steele et al., 2014), in turn."""
    state = 0
    for part in (seed, place, codebook):
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


_MASK = 2**64 - 1


@dataclass
class Draws:
    """The draws of one step, a row for each job."""

    seeds: SequenceOf[int]
    places: SequenceOf[int]  #: tokens before the one to be chosen
    greedy: torch.Tensor  #: bool [B]

    def uniform(self, codebook: int) -> torch.Tensor:
        """float64 [B] in [0, 1)."""
        pairs = zip(self.seeds, self.places, strict=True)
        numbers = [uniform(seed, place, codebook) for seed, place in pairs]
        return torch.tensor(numbers, dtype=torch.float64, device=self.greedy.device)

    def pick(
        self,
        logits: torch.Tensor,
        codebook: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> torch.Tensor:
        """int [B] of logits [B, vocab]; the likeliest for greedy jobs. Codebook 0 is the token's own draw."""
        best = logits.argmax(-1)
        if bool(self.greedy.all()):
            return best
        rows = logits.shape[0]
        chosen = draw(logits.float() / temperature, [top_k] * rows, [top_p] * rows, self.uniform(codebook))
        return torch.where(self.greedy, best, chosen)


class Sampler:
    """Chooses the tokens of a step.

    Args:
        suppressed: Tokens that are never chosen.
        stops: Tokens that end an answer; not chosen before a request's ``min_tokens``.
        stops_are_tokens: Whether a request that ignores them may get them.
    """

    def __init__(
        self,
        suppressed: SequenceOf[int],
        stops: SequenceOf[int],
        device: torch.device,
        *,
        stops_are_tokens: bool = True,
    ) -> None:
        self._stops_are_tokens = stops_are_tokens
        self._suppressed = torch.tensor(list(suppressed), dtype=torch.long, device=device)
        self._stops = torch.tensor(list(stops), dtype=torch.long, device=device)

    def draws(self, batch: SequenceOf[Sequence], device: torch.device) -> Draws:
        """The draws that belong to the next token of each job."""
        return Draws(
            [one.choice.seed for one in batch],
            [len(one.codes) for one in batch],
            torch.tensor([one.choice.temperature == 0 for one in batch], device=device),
        )

    def choose(self, logits: torch.Tensor, batch: SequenceOf[Sequence], draws: Draws) -> torch.Tensor:
        """int [B] of logits [B, vocab], which are changed."""
        logits = self.processed(logits.float(), batch)
        best = logits.argmax(-1)
        drawn = [row for row, one in enumerate(batch) if one.choice.temperature > 0]
        if drawn:
            choices = [batch[row].choice for row in drawn]
            heat = logits.new_tensor([choice.temperature for choice in choices])
            best[drawn] = draw(
                logits[drawn] / heat[:, None],
                [choice.top_k for choice in choices],
                [choice.top_p for choice in choices],
                draws.uniform(0)[drawn],
            )
        return best

    def processed(self, logits: torch.Tensor, batch: SequenceOf[Sequence]) -> torch.Tensor:
        """What greedy and sampling have in common; float32 [B, vocab], changed in place."""
        for row, one in enumerate(batch):
            choice = one.choice
            if choice.repetition_penalty != 1.0:
                self._seen_by(one, logits.device).penalise(logits[row], choice.repetition_penalty)
            never = choice.ignore_eos and not self._stops_are_tokens
            if (never or len(one.codes) < choice.min_tokens) and self._stops.numel():
                logits[row].index_fill_(0, self._stops, -torch.inf)
        if self._suppressed.numel():
            logits.index_fill_(1, self._suppressed, -torch.inf)
        return logits

    @staticmethod
    def _seen_by(one: Sequence, device: torch.device) -> Seen:
        if one.seen is None:
            one.seen = Seen([*one.prompt.ids, *(codes[0] for codes in one.codes)], device)
        elif one.codes:
            one.seen.add(one.codes[-1][:1])
        return one.seen


class Seen:
    """The different tokens of a job so far, as the repetition penalty wants them. Grows by doubling."""

    def __init__(self, tokens: Iterable[int], device: torch.device) -> None:
        self._known: set[int] = set()
        self._ids = torch.empty(64, dtype=torch.long, device=device)
        self.add(tokens)

    def add(self, tokens: Iterable[int]) -> None:
        """Takes further tokens."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._known]
        if not new:
            return
        start = len(self._known)
        self._known.update(new)
        if len(self._known) > len(self._ids):
            more = self._ids.new_empty(max(len(self._ids), len(new)))
            self._ids = torch.cat([self._ids, more])
        self._ids[start : len(self._known)] = torch.tensor(new, device=self._ids.device)

    def penalise(self, scores: torch.Tensor, penalty: float) -> None:
        """Scores [vocab] of these tokens: divided by the penalty, or multiplied where negative. In place."""
        ids = self._ids[: len(self._known)]
        ids = ids[ids < len(scores)]  # a prompt may have tokens that are never chosen
        old, penalty = scores[ids], max(penalty, _LEAST_PENALTY)
        scores[ids] = torch.where(old < 0, old * penalty, old / penalty)


def draw(
    logits: torch.Tensor, top_k: SequenceOf[int], top_p: SequenceOf[float], numbers: torch.Tensor
) -> torch.Tensor:
    """Tokens int [B] drawn from logits [B, vocab], each row cut by its own top_k and top_p.

    Args:
        logits: float32, with the temperature applied.
        top_k: 0 for all tokens; tokens that tie with the last of the k stay, as with Hugging Face.
        top_p: The likeliest tokens that together have this much stay, the one that passes it included.
        numbers: float64 [B] in [0, 1), one draw a row.
    """
    tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    whole = [row for row in range(len(logits)) if not top_k[row] and top_p[row] >= 1]
    if whole:
        tokens[whole] = _passed(torch.softmax(logits[whole], -1), numbers[whole])
    cut = [row for row in range(len(logits)) if top_k[row] or top_p[row] < 1]
    width = min(logits.shape[1], _CANDIDATES)
    while cut:
        chosen, known = _draw_cut(
            logits[cut], [top_k[row] for row in cut], [top_p[row] for row in cut], numbers[cut], width
        )
        tokens[cut] = chosen
        cut = [row for row, enough in zip(cut, known.tolist(), strict=True) if not enough]
        width = logits.shape[1]
    return tokens


def _draw_cut(
    logits: torch.Tensor,
    top_k: SequenceOf[int],
    top_p: SequenceOf[float],
    numbers: torch.Tensor,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws among the ``width`` likeliest tokens. Also bool [B]: these hold all that may be drawn."""
    values, ids = _likeliest(logits, width)
    vocabulary = logits.shape[1]
    ks = [min(k, vocabulary) or vocabulary for k in top_k]
    last = values.gather(1, torch.tensor([[min(k, width) - 1] for k in ks], device=values.device))
    whole = torch.tensor([[k >= vocabulary] for k in ks], device=values.device)
    kept = whole | (values >= last)
    # Of the tokens beyond the width only the sum is needed, and only if top-k keeps them.
    total = torch.where(
        whole[:, 0], logits.logsumexp(-1), values.masked_fill(~kept, -torch.inf).logsumexp(-1)
    )
    shares = torch.exp(values - total[:, None]).masked_fill_(~kept, 0)
    before = shares.double().cumsum(-1) - shares
    nucleus = torch.tensor(top_p, dtype=torch.float64, device=values.device)[:, None]
    inside = kept & ((before < nucleus) | (nucleus >= 1))
    inside[:, 0] = True
    summed = whole[:, 0] | torch.tensor([k <= width for k in ks], device=values.device)
    known = (summed & ~inside[:, -1]) | (width == vocabulary)
    place = _passed(shares.masked_fill_(~inside, 0), numbers)
    return ids.gather(1, place[:, None])[:, 0], known


def _likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids [B, width], falling; equal ones in the order of their ids, whatever the width."""
    if width == logits.shape[1]:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, ids
    ids = logits.topk(width, -1).indices.sort(-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _passed(shares: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where the distribution function of shares [B, n] (of any sum) passes the number: int [B]."""
    sums = shares.double().cumsum(-1)
    place = torch.searchsorted(sums, numbers[:, None] * sums[:, -1:], right=True)
    last = (sums < sums[:, -1:]).sum(-1, keepdim=True)  # the last one with a share, should rounding pass it
    return torch.minimum(place, last)[:, 0]
