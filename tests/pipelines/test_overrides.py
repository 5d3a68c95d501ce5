"""Every setting of a stage can be set from the command line and has its effect; other keys are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from pipelines import catalog
from pipelines.errors import PipelineError
from pipelines.graph import Batch, Resources, Retry, Stage
from pipelines.loader import load, load_all
from pipelines.options import ENGINES

#: A value other than the default for each key that has one of a simple type.
VALUES: dict[str, Any] = {
    "check_finite": False,
    "when": "image",
    "devices": ["cpu", "cpu"],
    "max_num_seqs": 33,
    "max_batch_size": 5,
    "wait_ms": 2.5,
    "replicas": 4,
    "scaling": {"up_s": 1.5},
    "threads": 3,
    "attempts": 7,
    "timeout_s": 12.5,
    "dtype": "bfloat16",
    "max_model_len": 77,
    "max_num_batched_tokens": 99,
    "gpu_memory_utilization": 0.5,
    "kv_cache_gib": 2.0,
    "quantization": "fp8",
    "attention_backend": "TORCH_SDPA",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "trust_remote_code": True,
    "system_prompt": "Be brief: say = and a.b",
    "max_tokens": 9,
    "engine_args": {"seed": 3},
    "hidden_layers": [1],
    "family": "somebodys.module:Class",
    "family_options": {"frames": 24},
    "sampling": {"top_k": 5},
    "cfg": "sequential",
    "cache": "dbcache",
    "cache_start": 0.1,
    "cache_end": 0.9,
    "cache_coefficients": [1.0, 0.0],
    "encodes": True,
    "exact": False,
    "voices": ["en"],
    "noise_scale": 0.1,
    "noise_w": 0.2,
    "length_scale": 1.5,
    "compute_type": "float32",
    "language": "de",
    "beam_size": 2,
    "op": "sum",
    "delay_s": 0.5,
    "sample_rate": 8000,
    "frequency_hz": 100.0,
    "word_s": 0.7,
    "size": 9,
}

#: Engine -> a pipeline and a stage that has it.
STAGE_OF = {
    "vllm": ("voice", "thinker"),
    "ar": ("qwen2_5_omni", "thinker"),
    "omni-encoder": ("qwen2_5_omni", "encoder"),
    "omni-code2wav": ("qwen2_5_omni", "code2wav"),
    "diffusion-text": ("sd3", "text"),
    "diffusion": ("sd3", "denoiser"),
    "diffusion-vae": ("sd3", "vae"),
    "film": ("wan2_2", "film"),
    "vits-acoustic": ("voice", "talker"),
    "vits-decoder": ("voice", "code2wav"),
    "whisper": ("voice", "ears"),
    "function": ("echo", "say"),
}


def keys_of(engine: str) -> list[str]:
    options = [field.encode_name for field in msgspec.structs.fields(ENGINES[engine].options)]
    general = [
        field.encode_name for kind in (Batch, Resources, Retry) for field in msgspec.structs.fields(kind)
    ]
    if engine != "vllm":
        general.remove("tensor_parallel_size")  # the others run on one device
    return ["when", "check_finite", *general, *options]


def found(stage: Stage, key: str) -> Any:
    for place in (stage, stage.batch, stage.resources, stage.retry):
        if hasattr(place, key):
            return plain(getattr(place, key))
    return stage.options.get(key)


def plain(value: Any) -> Any:
    """A struct as the keys that were set in it."""
    if not isinstance(value, msgspec.Struct):
        return value
    fields = msgspec.structs.fields(type(value))
    return {f.name: getattr(value, f.name) for f in fields if getattr(value, f.name) != f.default}


@pytest.mark.parametrize(("engine", "key"), [(e, k) for e in ENGINES for k in keys_of(e)])
def test_each_setting_has_its_effect(engine: str, key: str) -> None:
    pipeline, stage = STAGE_OF[engine]
    settings = [f"{stage}.{key}={yaml.safe_dump(VALUES.get(key, 2), default_flow_style=True, width=999)}"]
    if key == "tensor_parallel_size":
        settings.append(f"{stage}.devices=[cpu, cpu]")
    before = load(pipeline).stages[stage]
    after = load(pipeline, settings).stages[stage]
    assert found(after, key) == VALUES.get(key, 2)
    assert found(before, key) != found(after, key)


def test_a_key_can_be_said_in_full_and_with_dashes() -> None:
    for key in ("max_num_seqs", "max-num-seqs", "batch.max_num_seqs", "batch.max-num-seqs"):
        assert load("voice", [f"thinker.{key}=3"]).stages["thinker"].batch.max_num_seqs == 3


def test_the_later_one_wins_and_other_settings_stay() -> None:
    stage = load("voice", ["talker.max_num_seqs=3", "talker.max_num_seqs=4"]).stages["talker"]
    assert (stage.batch.max_num_seqs, stage.batch.max_batch_size) == (4, 8)


def test_null_takes_a_setting_back() -> None:
    assert load("voice", ["thinker.max_model_len="]).stages["thinker"].options["max_model_len"] is None


def test_model_and_engine_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    stage = load("voice", ["thinker.model=./mine"]).stages["thinker"]
    assert stage.model == str(tmp_path / "mine")
    # The engine decides which options there are, wherever on the command line it stands.
    stage = load("echo", ["say.options.anything=[1]", "say.engine=my.engines:Mine"]).stages["say"]
    assert stage.options["anything"] == [1]


def test_an_override_reaches_only_the_pipelines_with_that_stage() -> None:
    echo, voice = load_all(["echo", "voice"], ["say.max_num_seqs=3", "thinker.max_num_seqs=4"])
    assert (echo.stages["say"].batch.max_num_seqs, echo.stages["tone"].batch.max_num_seqs) == (3, 256)
    assert voice.stages["thinker"].batch.max_num_seqs == 4


def test_an_override_can_name_its_pipeline(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(catalog.pipelines()["echo"].read_text().replace("name: echo", "name: other"))
    echo, twin = load_all(["echo", other], ["other/say.max_num_seqs=3"])
    assert (echo.stages["say"].batch.max_num_seqs, twin.stages["say"].batch.max_num_seqs) == (256, 3)
    with pytest.raises(PipelineError, match=r"no stage 'othr/say'; did you mean other/say\?"):
        load_all(["echo", other], ["othr/say.max_num_seqs=3"])


def test_stages_that_share_a_map_are_set_apart(tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text(
        "name: shared\noutputs: {text: b}\n"
        "stages:\n  a: &a {engine: function, batch: {max_num_seqs: 2}}\n  b: *a\n"
        "edges: [{from: request, to: a}, {from: a, to: b}]\n"
    )
    stages = load(file, ["b.max_num_seqs=5"]).stages
    assert (stages["a"].batch.max_num_seqs, stages["b"].batch.max_num_seqs) == (2, 5)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (
            "thinker.max_num_seq=3",
            "unknown key 'max_num_seq'; did you mean max_num_seqs? Allowed: engine, model",
        ),
        ("thinker.edges=[]", "unknown key 'edges'"),
        ("thinker.batch=3", "unknown key 'batch'"),
        ("thinker.batch.timeout_s=3", "unknown key 'batch.timeout_s'"),
        ("thinker.beam_size=3", "unknown key 'beam_size'"),  # another engine's
        ("9.max_num_seqs=3", "no stage '9'; Allowed: ears, thinker, talker, code2wav"),
        ("thinkr.max_num_seqs=3", "did you mean thinker?"),
        ("thinker.max_num_seqs", "expected stage.key=value"),
        ("thinker=3", "expected stage.key=value"),
        (".max_num_seqs=3", "expected stage.key=value"),
        ("", "expected stage.key=value"),
        ("thinker.max_num_seqs=[", "no valid YAML"),
        ("thinker.max_num_seqs=lots", "stages.thinker.batch.max_num_seqs: 'lots': expected int, got str"),
        ("thinker.timeout_s=.inf", "finite"),
        ("thinker.tensor_parallel_size=4", None),
        ("thinker.engine_args={a: 1, a: 2}", "there twice"),
    ],
)
def test_a_bad_setting_is_refused_by_name(setting: str, says: str | None) -> None:
    if says is None:  # more ranks than listed devices, in two settings
        with pytest.raises(PipelineError, match="4 ranks, but devices lists only 1"):
            load("voice", [setting, "thinker.devices=cuda:0"])
        return
    with pytest.raises(PipelineError) as caught:
        load("voice", [setting])
    assert says in str(caught.value)


def test_teacache_goes_to_the_stages_whose_coefficients_are_known_and_says_so_where_there_are_none() -> None:
    flux, sd3 = load_all(["flux", "sd3"], teacache=True)
    assert flux.stages["denoiser"].options["cache"] == "teacache"
    assert "cache" not in sd3.stages["denoiser"].options
    (without,) = load_all(["flux"])
    assert "cache" not in without.stages["denoiser"].options
    (chosen,) = load_all(["flux"], ["denoiser.cache=none"], teacache=True)
    assert chosen.stages["denoiser"].options["cache"] == "none"
    (given,) = load_all(["sd3"], ["denoiser.cache_coefficients=[1.0, 0.0]"], teacache=True)
    assert given.stages["denoiser"].options["cache"] == "teacache"
    with pytest.raises(PipelineError, match=r"--enable-teacache.*calibrate_teacache"):
        load_all(["sd3"], teacache=True)
