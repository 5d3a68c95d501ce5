"""Hidden states out of a running vLLM: a KV connector that reads them where vLLM has just put them.

vLLM's method ``extract_hidden_states`` writes the states of chosen layers into its KV cache, as if they were
one layer more, before the end of each step. :class:`HiddenRows` is told of the end of each step and copies
the new rows out of there; the engine runs in the same process and takes them with the step's tokens. All
that this needs of vLLM are settings (:func:`workers.engines.vllm_setup.hidden_args`): nothing is replaced.

A request's rows are read in the step that gives it a token, all that it has not had yet. So nothing is kept
from step to step, and a row that was computed in an earlier step, found in the prefix cache, or computed a
second time after a preemption comes out once, in order.

This module needs vllm and is imported by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec


class Wanted(NamedTuple):
    """The rows that one request gets after a step."""

    name: str
    first: int  #: place of the first one
    end: int  #: the place after the last one
    blocks: tuple[list[int], ...]  #: numbers of the request's cache blocks, for each group of layers


class StepRows(KVConnectorMetadata):  # type: ignore[misc]  # vllm counts as untyped
    """What the half of the connector beside the scheduler tells the half beside the model in each step."""

    def __init__(self, wanted: list[Wanted]) -> None:
        self.wanted = wanted


class HiddenRows(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connector. vLLM makes two of it: one beside its scheduler, one beside its model.

    A request that wants rows has ``kv_transfer_params``: {"rows_for": a name for :meth:`take`, "rows_from":
    the place of the first row}.
    """

    requires_kv_delivery = False  # a preempted request is computed again, so its blocks may go

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._requests: dict[str, Any] = {}  #: vLLM's id -> its request, of those that want rows
        self._next: dict[str, int] = {}  #: vLLM's id -> place of the first row that is not out
        self._rows: dict[str, torch.Tensor] = {}
        self.last_norm: Callable[[torch.Tensor], torch.Tensor] | None = None  #: for the last layer's rows

    # --- beside the scheduler

    def on_new_request(self, request: Any) -> None:
        """Remembers it, if it wants rows."""
        wish = request.kv_transfer_params or {}
        if "rows_for" in wish:
            self._requests[request.request_id] = request
            self._next[request.request_id] = wish["rows_from"]

    def build_connector_meta(self, scheduler_output: Any) -> StepRows:
        """Says which rows can go out after the step that is about to run."""
        wanted = []
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            first, end = self._next[request_id], request.num_computed_tokens + tokens
            if end < request.num_tokens or end <= first:  # no token comes of it, or rows that are out
                continue
            blocks = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            wanted.append(Wanted(request.kv_transfer_params["rows_for"], first, end, blocks))
            self._next[request_id] = end
        return StepRows(wanted)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets it: answered or cancelled."""
        self._requests.pop(request.request_id, None)
        self._next.pop(request.request_id, None)
        return False, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    # --- beside the model

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Finds the hidden states' part: [blocks, layers, tokens of a block, hidden]."""
        self._group, layer = _hidden_group(self._kv_cache_config.kv_cache_groups)
        self._cache = kv_caches[layer]

    def wait_for_save(self) -> None:
        """Copies the rows of this step: on the device in one go, then to the host."""
        wanted = self._get_connector_metadata().wanted
        if not wanted:
            return
        size = self._cache.shape[2]
        places = [torch.arange(want.first, want.end) for want in wanted]
        blocks = [
            torch.tensor(want.blocks[self._group])[place // size]
            for want, place in zip(wanted, places, strict=True)
        ]
        device = self._cache.device
        rows = self._cache[torch.cat(blocks).to(device), :, (torch.cat(places) % size).to(device)]
        if self.last_norm is not None:
            rows[:, -1] = self.last_norm(rows[:, -1].contiguous())
        parts = rows.cpu().split([len(place) for place in places])
        self._rows |= {want.name: part for want, part in zip(wanted, parts, strict=True)}

    def take(self) -> dict[str, torch.Tensor]:
        """Name -> the rows of the step just run [k, layers, hidden], on the CPU."""
        rows, self._rows = self._rows, {}
        return rows

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Rows are taken at the step's end, not layer by layer."""


def _hidden_group(groups: Sequence[Any]) -> tuple[int, str]:
    """Number of the cache group that holds the hidden states, and the name of their layer in it."""
    for number, group in enumerate(groups):
        spec = group.kv_cache_spec  # of all its layers, or of each
        each = getattr(spec, "kv_cache_specs", None) or dict.fromkeys(group.layer_names, spec)
        for layer, kind in each.items():
            if isinstance(kind, HiddenStateCacheSpec):
                return number, layer
    raise ValueError("options.hidden_layers: vllm keeps no hidden states in its cache")


class NoDrafts(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler without speculation, which ``extract_hidden_states`` counts as.

    That method proposes each token a second time, as a draft. Checking it costs a row of computation a token,
    and draws random numbers in another order, so that a resumed answer would go on differently.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.num_spec_tokens = 0

    def schedule(self, *arguments: Any, **settings: Any) -> Any:
        """One step's work. The model's side still proposes its one draft, which is how it saves states."""
        output = super().schedule(*arguments, **settings)
        output.num_spec_tokens_to_schedule = 1
        return output

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Drops the drafts."""


def check(config: Any, layers: Sequence[int], model: str | None) -> None:
    """Raises ValueError, before anything is loaded, if vLLM can't hand on these layers of this model."""
    kind, _ = ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
    if not supports_eagle3(kind):
        raise ValueError(
            f"options.hidden_layers: vllm hands on no hidden states of model {model} ({kind.__name__})"
        )
    count = config.model_config.get_total_num_hidden_layers()
    if list(layers) != sorted(set(layers)) or layers[-1] > count:
        raise ValueError(
            f"options.hidden_layers: is {list(layers)}; it must be ascending, without repeats, and between 0 "
            f"(the embeddings) and {count} (after the last layer and its norm)"
        )
    if config.parallel_config.world_size > 1:
        raise ValueError("options.hidden_layers: needs a model on one device, since it can't cross processes")


def connect(engine: Any, layers: Sequence[int]) -> HiddenRows:
    """The connector beside the model of an engine in this process."""
    connector: HiddenRows = get_kv_transfer_group()
    if layers[-1] == engine.model_config.get_total_num_hidden_layers():
        (connector.last_norm,) = engine.collective_rpc(_last_norm)
    return connector


def _last_norm(worker: Any) -> Any:
    """The norm after the last layer, which vLLM's last hidden state lacks and transformers' has."""
    model = worker.get_model()
    if hasattr(model, "get_language_model"):
        model = model.get_language_model()
    return getattr(model, "model", model).norm
