"""Qwen3-Omni's code predictor: from a frame's first code to all of its codes.

A small transformer of its own for each frame. Its first row is the talker's hidden state, the second the
first code's embedding; from then on each row is the embedding of the code that the row before gave. All
sequences of a step are computed together.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.engines.ar.sampling import Draws

#: What transformers' talker gives its predictor where it samples at all.
_TOP_K, _TOP_P = 50, 0.8


class Predictor:
    """Runs transformers' predictor, layer by layer, over a key-value memory of one frame.

    Args:
        module: ``Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration``.
    """

    def __init__(self, module: Any) -> None:
        self._model = module.model
        self._heads = module.lm_head
        self._books = module.config.num_code_groups - 1  #: codes that it adds to a frame
        self.embeddings: list[Any] = list(module.model.codec_embedding)  #: of the codes that it adds

    def codes(self, last: torch.Tensor, first: torch.Tensor, draws: Draws) -> torch.Tensor:
        """All codes of frames: [B, hidden] and the first codes' embeddings [B, hidden] -> int [B, q - 1]."""
        memory = _Memory(self._model.config, len(last), self._books + 1, last)
        turns = self._turns(last)
        self._row(last, 0, turns, memory)
        row, made = first, []
        for book in range(self._books):
            hidden = self._row(row, book + 1, turns, memory)
            code = draws.pick(self._heads[book](hidden), book + 1, top_k=_TOP_K, top_p=_TOP_P)
            made.append(code)
            row = self.embeddings[book](code)
        return torch.stack(made, 1)

    def _turns(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary cosines and sines of all rows, [1, rows, head_dim] each."""
        places = torch.arange(self._books + 1, device=like.device)[None]
        cosines, sines = self._model.rotary_emb(like, places)
        return cosines, sines

    def _row(self, row: torch.Tensor, place: int, turns: Any, memory: _Memory) -> torch.Tensor:
        """One row of each frame through the layers: [B, hidden] -> [B, hidden]."""
        memory.place = place
        here = tuple(turn[:, place : place + 1] for turn in turns)
        hidden = row[:, None]
        for layer in self._model.layers:
            hidden = layer(hidden, attention_mask=None, past_key_values=memory, position_embeddings=here)
        normed: torch.Tensor = self._model.norm(hidden)[:, 0]
        return normed


class _Memory:
    """Keys and values of the rows of one frame, as transformers' attention asks for them."""

    def __init__(self, config: Any, batch: int, rows: int, like: torch.Tensor) -> None:
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, rows, config.head_dim)
        self._kept = like.new_empty(shape)
        self.place = 0  #: of the row that comes now

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes one row [batch, heads, 1, head_dim]; returns all rows so far."""
        kept = self._kept[layer]
        kept[0, :, :, self.place] = keys[:, :, 0]
        kept[1, :, :, self.place] = values[:, :, 0]
        return kept[0, :, :, : self.place + 1], kept[1, :, :, : self.place + 1]
