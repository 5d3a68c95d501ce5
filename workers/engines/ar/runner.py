"""The torch side of a step: rows in, one forward pass, tokens out. On the engine's thread."""

from __future__ import annotations

import logging
from typing import Any

import torch

from workers.engine import ItemError
from workers.engines.ar.attention import PagedStep, Pages
from workers.engines.ar.blocks import Blocks
from workers.engines.ar.cpu import Threads
from workers.engines.ar.family import Forward, Model, Step
from workers.engines.ar.graphs import Graphs
from workers.engines.ar.packed import pack
from workers.engines.ar.prefixes import Prefixes
from workers.engines.ar.sampling import Sampler
from workers.engines.ar.schedule import Piece
from workers.engines.ar.sequence import Sequence
from workers.engines.engine_thread import is_fatal

log = logging.getLogger("engine")

#: What a step gave a job: its next token or why it has none; jobs that only read their prompt are absent.
Outcome = dict[Sequence, Step | Exception]


class Runner:
    """Computes steps for one model.

    Args:
        model: Loaded.
        blocks: How many blocks of memory there are, and their size.
        graphs: The batch sizes to capture as CUDA graphs; [] for none.
        threads: Of a step on a CPU; 0: as suits it.
        kept_blocks: Of prompts' beginnings, for later prompts; 0: none are kept.
    """

    def __init__(
        self, model: Model, blocks: Blocks, graphs: list[int], threads: int = 0, kept_blocks: int = 0
    ) -> None:
        self.model = model
        self.device = model.device
        self._threads = Threads(threads) if self.device.type == "cpu" else None
        if self._threads is not None:
            pack(model)
        self.pages = Pages(model.layout, blocks.total, blocks.size, self.device)
        self._sampler = Sampler(
            model.suppressed_ids, model.stop_ids, self.device, stops_are_tokens=model.stops_are_tokens
        )
        self._stops = frozenset(model.stop_ids)
        self._layers = sorted(set(model.hidden_layers))
        self.prefixes = Prefixes(model.layout, self.pages, kept_blocks, self._layers) if kept_blocks else None
        self._graphs = Graphs(model, self.pages, graphs) if graphs else None
        if self._graphs is not None:
            self._graphs.prepare()

    def step(self, pieces: list[Piece]) -> Outcome:
        """Computes the pieces, single rows first. What raises for one job fails that one alone."""
        try:
            return self._step(pieces)
        except Exception as error:
            if is_fatal(error):
                raise
            if len(pieces) == 1:
                return {pieces[0].sequence: error}
            log.warning("a step failed, its jobs are computed one by one", exc_info=True)
        outcome: Outcome = {}
        for piece in pieces:
            outcome |= self.step([piece])
        return outcome

    def _step(self, pieces: list[Piece]) -> Outcome:
        if self._threads is not None:
            rows = sum(piece.stop - piece.start for piece in pieces)
            self._threads.use(rows, streamed=any(piece.sequence.fed for piece in pieces))
        for piece in pieces:
            piece.sequence.sound = False
        embeds, positions, extras = self._inputs(pieces)
        forward = self._forward(pieces, embeds, positions, extras)
        ends, at = [], 0
        for piece in pieces:
            at += piece.stop - piece.start
            ends.append(at - 1)
        self._hold_hidden(pieces, forward)
        for piece in pieces:
            piece.sequence.computed = piece.stop
        sampling = [number for number, piece in enumerate(pieces) if piece.samples]
        if not sampling:
            return {}
        chosen = [ends[number] for number in sampling]
        last = forward.last if len(chosen) == len(forward.last) else forward.last[chosen]
        return self._sample([pieces[number].sequence for number in sampling], last)

    # --- rows

    def _inputs(self, pieces: list[Piece]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """embeds [T, hidden], positions [axes, T], extras by name [T, ...]."""
        embeds = self._embeds(pieces)
        positions = torch.cat([self._positions(piece) for piece in pieces], 1).to(self.device)
        return embeds, positions, self._extras(pieces, len(embeds))

    def _embeds(self, pieces: list[Piece]) -> torch.Tensor:
        generated = [
            (piece.sequence, row - piece.sequence.prompt_rows)
            for piece in pieces
            for row in range(max(piece.start, piece.sequence.prompt_rows), piece.stop)
        ]
        made = self._embed_generated(generated) if generated else None
        if made is not None and all(piece.start >= piece.sequence.prompt_rows for piece in pieces):
            return made
        parts: list[torch.Tensor] = []
        at = 0
        for piece in pieces:
            edge = piece.sequence.prompt_rows
            if piece.start < edge:
                parts.append(self._prompt_rows(piece.sequence, piece.start, min(piece.stop, edge)))
            if made is not None and piece.stop > edge:
                count = piece.stop - max(piece.start, edge)
                parts.append(made[at : at + count])
                at += count
        return torch.cat(parts)

    def _embed_generated(self, generated: list[tuple[Sequence, int]]) -> torch.Tensor:
        codes = torch.tensor([one.codes[token] for one, token in generated], device=self.device)
        rows = self._streamed(generated) if generated[0][0].streamed else None
        return self.model.embed(codes, rows)

    def _streamed(self, generated: list[tuple[Sequence, int]]) -> torch.Tensor:
        """[k, hidden]. Rows from another stage lie on the CPU, those that the model has made with it."""
        rows: list[Any] = [one.row(token) for one, token in generated]
        if any(row.device != rows[0].device for row in rows):
            rows = [row.to(self.device) for row in rows]
        return torch.stack(rows).to(self.device, self.model.layout.dtype)

    def _prompt_rows(self, one: Sequence, start: int, stop: int) -> torch.Tensor:
        if one.prompt.embeds is not None:
            return one.prompt.embeds[start:stop].to(self.device, self.model.layout.dtype)
        ids = torch.tensor(one.prompt.ids[start:stop], device=self.device)
        return self.model.embed(ids[:, None], None)

    def _positions(self, piece: Piece) -> torch.Tensor:
        """int [axes, rows of the piece]"""
        one, axes = piece.sequence, self.model.axes
        prompt, edge = one.prompt, one.prompt_rows
        first = edge if prompt.next_position is None else prompt.next_position
        parts = []
        if piece.start < edge:
            stop = min(piece.stop, edge)
            if prompt.positions is None:
                parts.append(torch.arange(piece.start, stop).expand(axes, -1))
            else:
                parts.append(prompt.positions[:, piece.start : stop].cpu())
        if piece.stop > edge:
            start, stop = max(piece.start, edge) - edge, piece.stop - edge
            if prompt.answer_positions is None:
                parts.append(torch.arange(first + start, first + stop).expand(axes, -1))
            else:
                parts.append(prompt.answer_positions[:, start:stop])
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def _extras(self, pieces: list[Piece], total: int) -> dict[str, torch.Tensor]:
        extras: dict[str, torch.Tensor] = {}
        at = 0
        for piece in pieces:
            one = piece.sequence
            stop = min(piece.stop, one.prompt_rows)
            for name, rows in one.prompt.extras.items() if piece.start < stop else ():
                if name not in extras:
                    shape = (total, *rows.shape[1:])
                    extras[name] = torch.zeros(shape, dtype=rows.dtype, device=self.device)
                extras[name][at : at + stop - piece.start] = rows[piece.start : stop]
            at += piece.stop - piece.start
        return extras

    # --- the pass

    def _forward(
        self,
        pieces: list[Piece],
        embeds: torch.Tensor,
        positions: torch.Tensor,
        extras: dict[str, torch.Tensor],
    ) -> Forward:
        step = PagedStep(self.pages, pieces)
        if self._graphs is not None and not step.prompts and not extras:
            replayed = self._graphs.replay(embeds, positions, step)
            if replayed is not None:
                return replayed
        return self.model.forward(embeds, positions, step, extras)

    def _hold_hidden(self, pieces: list[Piece], forward: Forward) -> None:
        """Keeps the wanted layers' rows until the job's next token; none that are computed again."""
        if not self._layers:
            return
        at = 0
        for piece in pieces:
            one, first = piece.sequence, at - piece.start
            at += piece.stop - piece.start
            start = max(piece.start, one.handed_out)
            if start >= piece.stop:
                continue
            one.handed_out = piece.stop
            for layer in self._layers:
                hidden = forward.hidden[layer]
                rows = (hidden[0] if hidden.dim() == 3 else hidden)[first + start : first + piece.stop]
                one.held.setdefault(layer, []).append(rows.to("cpu", copy=True))

    # --- tokens

    def _sample(self, batch: list[Sequence], last: torch.Tensor) -> Outcome:
        logits = self.model.logits(last).float()
        sound = torch.isfinite(logits.amax(-1)).tolist()
        outcome: Outcome = {}
        for one, good in zip(batch, sound, strict=True):
            one.sound = good
            if not good:  # its blocks are wiped when they are given back
                outcome[one] = ItemError(f"the logits of token {len(one.codes)} are not finite")
        if outcome:
            kept = [row for row, good in enumerate(sound) if good]
            batch, last, logits = [batch[row] for row in kept], last[kept], logits[kept]
            if not batch:
                return outcome
        draws = self._sampler.draws(batch, self.device)
        chosen = self._sampler.choose(logits, batch, draws)
        tokens = chosen.tolist()
        frames = [[token] for token in tokens]
        if self.model.codebooks > 1:
            frames = self.model.codes(last, chosen, draws).tolist()
        for one, token, frame in zip(batch, tokens, frames, strict=True):
            outcome[one] = self._take(one, token, frame)
        return outcome

    def _take(self, one: Sequence, token: int, frame: list[int]) -> Step:
        stops = token in self._stops and not one.choice.ignore_eos
        codes = frame[:1] if stops else frame
        one.codes.append(codes)
        finish = "stop" if stops else "length" if len(one.codes) >= one.limit else None
        hidden = {layer: torch.cat(pieces) for layer, pieces in one.held.items()}
        one.held = {}
        if self.prefixes is not None and not one.made:
            self.prefixes.keep(one, hidden)
        one.made += 1
        return Step(token, codes, hidden, finish)


def pool_blocks(model: Model, kv_cache_gib: float, block_size: int) -> int:
    """How many blocks fit into the memory that the setting gives. Raises ValueError if it is none."""
    blocks = fitting_blocks(model, kv_cache_gib, block_size)
    if blocks < 1:
        size = Pages.bytes_per_block(model.layout, block_size)
        raise ValueError(f"kv_cache_gib: {kv_cache_gib} GiB hold no block of {size} bytes")
    return blocks


def fitting_blocks(model: Model, gib: float, block_size: int) -> int:
    """How many blocks so much memory holds."""
    return int(gib * 2**30 / Pages.bytes_per_block(model.layout, block_size))


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes whose steps are captured: 1, 2, 4, then multiples of 8."""
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*sizes, *range(8, max_num_seqs, 8), max_num_seqs]
