"""Builds vLLM's engine for a stage: environment, arguments, defaults that depend on the device."""

from __future__ import annotations

import logging
import os
import warnings
from importlib.util import find_spec
from typing import Any

from pipelines import models, torch_companions
from pipelines.graph import Stage
from pipelines.options import VllmOptions
from workers.optional import MissingLibrary

GIB = 2**30


def build(stage: Stage, options: VllmOptions, device: str) -> Any:
    """Loads the model into an ``LLMEngine`` of this process; takes many seconds.

    Raises MissingLibrary, ModelError, BrokenEnvironment, and ValueError for settings that vLLM refuses.
    """
    model = models.ensure(stage.model or "")
    set_environment(stage, device, offline=model.is_dir())
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # for what it says on import
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise MissingLibrary(
            f"vllm: {error}; run: pip install 'omni-broker[cpu]', or 'omni-broker[gpu]' where there is a GPU"
        ) from error
    torch_companions.check()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    try:
        arguments = EngineArgs(**engine_args(stage, options, device, str(model)))
    except TypeError as error:
        raise ValueError(f"options.engine_args: {error}") from error
    from workers.engines.vllm_draws import draw_by_place

    config = _config(arguments, stage.model)
    if options.hidden_layers:
        from workers.engines import vllm_hidden

        vllm_hidden.check(config, options.hidden_layers, stage.model)
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    engine.collective_rpc(draw_by_place)
    return engine


def _config(arguments: Any, model: str | None) -> Any:
    try:
        return arguments.create_engine_config()
    except ValueError as error:
        # vLLM's own message is that the architecture can't be inspected.
        if "inspect" in str(error) and find_spec("torchvision") is None:
            raise MissingLibrary(
                f"model {model}: vllm can't import its code, which for most models that see needs "
                "torchvision; install the build of it that fits the installed torch"
            ) from error
        raise


def set_environment(stage: Stage, device: str, *, offline: bool) -> None:
    """What vLLM, torch and OpenMP read once, when they are first imported. What the user has set stays."""
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if offline:
        defaults |= {"HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        # Waiting threads that spin take the cores from the other stages of the pipeline.
        defaults |= {
            "OMP_NUM_THREADS": str(stage.resources.threads or cpu_threads()),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if device.startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(device, os.environ.get("CUDA_VISIBLE_DEVICES"))


def cpu_threads() -> int:
    """Half of the cores that this process may use: the other stages of a pipeline want some too."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def visible_gpus(device: str, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for "cuda:1,cuda:3", counted within what was visible before."""
    numbers = [int(name.partition(":")[2] or 0) for name in device.split(",")]
    names = visible.split(",") if visible else None
    return ",".join(names[number] if names else str(number) for number in numbers)


def engine_args(stage: Stage, options: VllmOptions, device: str, model: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``.

    On a CPU dtype "auto" is float32. bfloat16 is 1.3 to 1.8 times as fast where the CPU has it in
    hardware, but a greedy answer then depends on what else is in the batch: six answers of eight differed
    from those given alone, none in float32.
    """
    on_cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "float32" if on_cpu and options.dtype == "auto" else options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_num_seqs": stage.batch.max_num_seqs,
        "tensor_parallel_size": stage.resources.tensor_parallel_size,
        "quantization": options.quantization,
        "attention_backend": options.attention_backend,
        "enforce_eager": on_cpu if options.enforce_eager is None else options.enforce_eager,
        "enable_prefix_caching": options.enable_prefix_caching,
        "trust_remote_code": options.trust_remote_code,
        "mm_processor_cache_gb": 1,  # for features of pictures and so on; vLLM makes two, of 4 by itself
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gib * GIB)
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    arguments |= options.engine_args
    if options.hidden_layers:
        ours = hidden_args(options.hidden_layers)
        if taken := sorted(ours.keys() & options.engine_args.keys()):
            raise ValueError(
                f"options.engine_args.{taken[0]}: hidden_layers sets it, so it can't be set here"
            )
        arguments |= ours
    return {name: value for name, value in arguments.items() if value is not None}


def hidden_args(layers: list[int]) -> dict[str, Any]:
    """What makes vLLM put these layers' hidden states where :mod:`workers.engines.vllm_hidden` finds them."""
    module = "workers.engines.vllm_hidden"
    wanted = {"eagle_aux_hidden_state_layer_ids": layers}
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": wanted},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenRows",
            "kv_connector_module_path": module,
            "kv_role": "kv_producer",
        },
        "scheduler_cls": f"{module}.NoDrafts",
        "async_scheduling": False,  # a step's rows are taken before the next one runs
    }
