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
        rows, made = torch.stack([last, first], 1), []
        for book in range(self._books):
            hidden = self._last(rows, turns, memory)
            code = draws.pick(self._heads[book](hidden), book + 1, top_k=_TOP_K, top_p=_TOP_P)
            made.append(code)
            rows = self.embeddings[book](code)[:, None]
        return torch.stack(made, 1)

    def _turns(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary cosines and sines of all rows, [1, rows, head_dim] each."""
        places = torch.arange(self._books + 1, device=like.device)[None]
        cosines, sines = self._model.rotary_emb(like, places)
        return cosines, sines

    def _last(self, rows: torch.Tensor, turns: Any, memory: _Memory) -> torch.Tensor:
        """The next rows of each frame through the layers: [B, k, hidden] -> the last one's, [B, hidden]."""
        end = memory.rows + rows.shape[1]
        here = tuple(turn[:, memory.rows : end] for turn in turns)
        hidden = rows
        for layer in self._model.layers:
            hidden = layer(hidden, attention_mask=None, past_key_values=memory, position_embeddings=here)
        memory.rows = end
        normed: torch.Tensor = self._model.norm(hidden[:, -1])
        return normed


class _Memory:
    """Keys and values of the rows of one frame, as transformers' attention asks for them."""

    def __init__(self, config: Any, batch: int, rows: int, like: torch.Tensor) -> None:
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, rows, config.head_dim)
        self._kept = like.new_empty(shape)
        self.rows = 0  #: that all layers have taken

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes further rows [batch, heads, k, head_dim]; returns all rows so far."""
        kept, end = self._kept[layer], self.rows + keys.shape[2]
        kept[0, :, :, self.rows : end] = keys
        kept[1, :, :, self.rows : end] = values
        return kept[0, :, :, :end], kept[1, :, :, :end]
