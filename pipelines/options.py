"""The built-in engines: where each one's code is, and the settings it takes under ``options:``.

The settings live here, and not beside the engines, so that a misspelt one is refused when the pipeline is
loaded, by a process that imports no engine. Options that belong to no single engine (batch sizes, devices,
threads, retries) are fields of :class:`pipelines.graph.Stage`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from pipelines.graph import Stage

Fraction = Annotated[float, Meta(gt=0, le=1)]
Factor = Annotated[float, Meta(gt=0, le=100)]
Seconds = Annotated[float, Meta(ge=0, le=3600)]
Hertz = Annotated[int, Meta(ge=1000, le=192_000)]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all engines' settings."""


class VllmOptions(Options, frozen=True):
    """Engine ``vllm``. Names are vLLM's own where vLLM has the setting."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  #: auto: float32 on a CPU
    max_model_len: Annotated[int, Meta(ge=16)] | None = None  #: tokens, prompt and answer; None: the model's
    max_num_batched_tokens: Annotated[int, Meta(ge=16)] | None = None  #: of one step; None: vLLM's choice
    gpu_memory_utilization: Fraction = 0.9  #: share of a GPU's memory; no effect on a CPU
    kv_cache_gib: Annotated[float, Meta(gt=0)] = 1.0  #: size of the KV cache on a CPU; no effect on a GPU
    quantization: str | None = None
    attention_backend: str | None = None
    #: No graph capture or compilation. None: yes on a CPU, where it takes two minutes and gains little
    enforce_eager: bool | None = None
    enable_prefix_caching: bool = True
    #: Handed on beside the tokens, for models that vLLM can do it with. Numbered, ascending, as transformers'
    #: ``hidden_states``: 0 the embeddings, i after the i-th layer, the last one after the final norm too
    hidden_layers: list[Annotated[int, Meta(ge=0)]] = []
    trust_remote_code: bool = False
    system_prompt: str | None = None  #: put before conversations that bring none of their own
    #: Of an answer whose request names no limit. None: what fits into the context
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    engine_args: dict[str, Any] = {}  #: any other argument of vLLM's AsyncEngineArgs, by its name


class Sampling(Options, frozen=True):
    """How tokens are chosen where a request does not say. None: as the checkpoint says."""

    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: Fraction | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None


class ArOptions(Options, frozen=True):
    """Engine ``ar``: any transformers decoder, step by step. Names are vLLM's where vLLM has the setting."""

    family: str = "workers.engines.ar.text:TextModel"  #: "package.module:Class" of the model file
    family_options: dict[str, Any] = {}  #: the model file's own settings
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  #: auto: float32 on a CPU
    max_model_len: Annotated[int, Meta(ge=16)] | None = None  #: rows of prompt and answer; None: the model's
    max_num_batched_tokens: Annotated[int, Meta(ge=16)] = 2048  #: rows of a step; long prompts take several
    kv_cache_gib: Annotated[float, Meta(gt=0)] = 1.0  #: size of the key-value memory, allocated once
    #: Memory besides, for the beginnings that prompts have in common (hidden states that are handed on lie in
    #: the host's, as many rows); 0: each prompt is read from its start
    prefix_cache_gib: Annotated[float, Meta(ge=0)] = 0.25
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 32  #: rows of one block of these
    enforce_eager: bool = False  #: on a GPU: no graph capture of steps that read no prompt
    hidden_layers: list[Annotated[int, Meta(ge=0)]] = []  #: handed on as transformers' ``hidden_states``
    sampling: Sampling = Sampling()
    system_prompt: str | None = None  #: put before conversations that bring none of their own
    #: Of an answer whose request names no limit. None: what fits into max_model_len
    max_tokens: Annotated[int, Meta(ge=1)] | None = None


class OmniEncoderOptions(Options, frozen=True):
    """Engine ``omni-encoder``: clips, pictures and films to rows of an omni model's thinker."""

    family: str  #: "package.module:Class" of the towers
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"  #: auto: float32 on a CPU
    #: A picture is scaled to so many pixels at least and at most. None: as the checkpoint says
    min_pixels: Annotated[int, Meta(ge=1)] | None = None
    max_pixels: Annotated[int, Meta(ge=1)] | None = None
    video_min_pixels: Annotated[int, Meta(ge=1)] | None = None  #: the same of a film's frame
    video_max_pixels: Annotated[int, Meta(ge=1)] | None = None


class OmniCode2WavOptions(Options, frozen=True):
    """Engine ``omni-code2wav``: a talker's codes to a waveform."""

    family: str  #: "package.module:Class" of the decoder
    family_options: dict[str, Any] = {}  #: the decoder's own settings
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "float32"
    voices: list[str] = []  #: names that callers may give, the default first


class DiffusionTextOptions(Options, frozen=True):
    """Engine ``diffusion-text``: prompts to what a denoiser is conditioned on."""

    family: str  #: "package.module:Class" of the text encoder
    family_options: dict[str, Any] = {}  #: the text encoder's own settings
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = (
        "auto"  #: auto: float32 on a CPU, else bfloat16
    )


class DiffusionOptions(Options, frozen=True):
    """Engine ``diffusion``: a denoiser, batched step by step."""

    family: str  #: "package.module:Class" of the denoiser
    family_options: dict[str, Any] = {}  #: the denoiser's own settings
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = (
        "auto"  #: auto: float32 on a CPU, else bfloat16
    )
    #: Of guidance with a negative prompt. batched: both branches of a request in one pass where their shapes
    #: agree; sequential: one after the other, which needs less memory; parallel: at the same time, the
    #: negative one by a second process with a copy of the model. Both have resources.threads threads, and
    #: with resources.tensor_parallel_size: 2 a GPU each
    cfg: Literal["batched", "sequential", "parallel"] = "batched"
    #: Leaves most of the model out in steps in which little changes, at some cost to the picture.
    #: teacache: one of our own; first-block: diffusers' FirstBlockCache; dbcache: cache-dit's. The latter two
    #: compute each request by itself
    cache: Literal["none", "teacache", "first-block", "dbcache"] = "none"
    cache_threshold: Annotated[float, Meta(ge=0)] = 0.25  #: how much may have changed; 0: nothing, so no gain
    #: The cache is used from this share of a request's steps on, and up to that one; never in the first step
    #: and in the last one
    cache_start: Annotated[float, Meta(ge=0, le=1)] = 0.0
    cache_end: Annotated[float, Meta(ge=0, le=1)] = 1.0
    #: Of TeaCache's polynomial, the highest power first, as scripts/calibrate_teacache finds them. They
    #: belong to the model
    cache_coefficients: list[float] = []
    cache_blocks: Annotated[int, Meta(ge=1)] = 1  #: of dbcache: how many blocks run in every step
    checkpoint_steps: Annotated[int, Meta(ge=1)] = 4  #: a request that lost its worker goes on from there


class DiffusionVaeOptions(Options, frozen=True):
    """Engine ``diffusion-vae``: latents to pixels."""

    family: str  #: "package.module:Class" of the VAE
    family_options: dict[str, Any] = {}  #: the VAE's own settings
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = (
        "auto"  #: auto: float32 on a CPU, else bfloat16
    )
    encodes: bool = False  #: the other way: a request's pictures to what a denoiser is conditioned on


class VitsAcousticOptions(Options, frozen=True):
    """Engine ``vits-acoustic``: text to latent frames. None: what the voice itself was made with."""

    noise_scale: Annotated[float, Meta(ge=0, le=2)] | None = None  #: variation of the sound
    noise_w: Annotated[float, Meta(ge=0, le=2)] | None = None  #: variation of the phonemes' lengths
    length_scale: Factor | None = None  #: 2.0 speaks half as fast; a request's `speed` divides it
    #: A seed gives the same speech to the bit, whatever else runs: each sentence has a pass to itself. False:
    #: up to batch.max_batch_size share one, which can pay on a GPU.
    exact: bool = True
    voices: list[str] = []  #: names that callers may give the voice, beside "default"; []: the model's own


class VitsDecoderOptions(Options, frozen=True):
    """Engine ``vits-decoder``: latent frames to a waveform. It has no settings."""


class WhisperOptions(Options, frozen=True):
    """Engine ``whisper``: speech to text with faster-whisper."""

    compute_type: str = "int8"  #: CTranslate2's: "int8", "float16", "float32", ...
    language: str | None = None  #: ISO code; None: detected for each clip
    beam_size: Annotated[int, Meta(ge=1, le=32)] = 5


class FilmOptions(Options, frozen=True):
    """Engine ``film``: frames to MP4. It has no settings."""


class FunctionOptions(Options, frozen=True):
    """Engine ``function``: small functions without a model, for trying things out and for tests."""

    op: Literal["pass", "say", "tone", "picture", "film", "sum"] = "pass"
    delay_s: Seconds = 0.0  #: pause before each payload
    max_model_len: Annotated[int, Meta(ge=1)] | None = None  #: words of prompt and answer of `say`; None: any
    sample_rate: Hertz = 24_000  #: of `tone`
    frequency_hz: Annotated[float, Meta(gt=0, le=20_000)] = 440.0  #: of `tone`
    word_s: Annotated[float, Meta(gt=0, le=10)] = 0.2  #: length of `tone` for one word
    size: Annotated[int, Meta(ge=1, le=1024)] = 64  #: edge of `picture` and `film`, pixels


class EngineInfo(NamedTuple):
    """A built-in engine: "module:Class", its settings, and whether a stage must name a model."""

    implementation: str
    options: type[Options]
    model: bool
    gpu: bool = False  #: whether `devices: auto` means a GPU where there is one


#: Every built-in engine by the name that a stage gives.
ENGINES: dict[str, EngineInfo] = {
    "vllm": EngineInfo("workers.engines.vllm:VllmEngine", VllmOptions, model=True, gpu=True),
    "ar": EngineInfo("workers.engines.ar.engine:ArEngine", ArOptions, model=True, gpu=True),
    "omni-encoder": EngineInfo(
        "workers.engines.omni_encoder:OmniEncoderEngine", OmniEncoderOptions, model=True, gpu=True
    ),
    "omni-code2wav": EngineInfo(
        "workers.engines.omni_code2wav:OmniCode2WavEngine", OmniCode2WavOptions, model=True, gpu=True
    ),
    "diffusion-text": EngineInfo(
        "workers.engines.diffusion_text:DiffusionTextEngine", DiffusionTextOptions, model=True, gpu=True
    ),
    "diffusion": EngineInfo(
        "workers.engines.diffusion.engine:DiffusionEngine", DiffusionOptions, model=True, gpu=True
    ),
    "diffusion-vae": EngineInfo(
        "workers.engines.diffusion_vae:DiffusionVaeEngine", DiffusionVaeOptions, model=True, gpu=True
    ),
    "vits-acoustic": EngineInfo(
        "workers.engines.vits_acoustic:VitsAcousticEngine", VitsAcousticOptions, model=True
    ),
    "vits-decoder": EngineInfo(
        "workers.engines.vits_decoder:VitsDecoderEngine", VitsDecoderOptions, model=True
    ),
    "whisper": EngineInfo("workers.engines.whisper:WhisperEngine", WhisperOptions, model=True),
    "film": EngineInfo("workers.engines.film:FilmEngine", FilmOptions, model=False),
    "function": EngineInfo("workers.engines.function:FunctionEngine", FunctionOptions, model=False),
}

T = TypeVar("T", bound=Options)


def options_of(stage: Stage, kind: type[T]) -> T:
    """A stage's ``options`` as its engine's struct. Raises ``msgspec.ValidationError`` naming a bad key."""
    return msgspec.convert(stage.options, kind)
