"""`--model`: one model for all stages of a pipeline that have one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pipelines import catalog
from pipelines.errors import PipelineError
from pipelines.loader import load, load_all

DOCUMENT = {
    "name": "pair",
    "outputs": {"text": "last"},
    "stages": {
        "first": {"engine": "function"},
        "middle": {"engine": "whisper", "model": "whisper-base"},
        "last": {"engine": "vllm", "model": "owner/name"},
    },
    "edges": [
        {"from": "request", "to": "first"},
        {"from": "first", "to": "middle"},
        {"from": "middle", "to": "last"},
    ],
}


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The pipeline's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(DOCUMENT, sort_keys=False))
    return str(tmp_path / "pair.yaml")


def models(pipeline: str, *chosen: str, settings: tuple[str, ...] = ()) -> list[str | None]:
    return [stage.model for stage in load(pipeline, settings, chosen).stages.values()]


def test_it_goes_to_every_stage_that_has_one(pair: str, tmp_path: Path) -> None:
    assert models(pair, "Qwen/Qwen2.5-Omni-3B") == [None, *["Qwen/Qwen2.5-Omni-3B"] * 2]
    assert models(pair, "pair=smollm2-135m-instruct") == [None, *["smollm2-135m-instruct"] * 2]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert models(pair, "./mine") == [None, *[str(tmp_path / "mine")] * 2]


def test_a_stages_own_setting_wins_and_so_does_the_later_one(pair: str) -> None:
    assert models(pair, "a/one", "a/two", settings=("last.model=a/three",)) == [None, "a/two", "a/three"]


def test_with_several_pipelines_it_names_its_own(pair: str) -> None:
    voice, mine = load_all(["voice", pair], models=["pair=a/b"])
    assert voice.stages["thinker"].model == "smollm2-135m-instruct"
    assert mine.stages["last"].model == "a/b"


def test_tiny_random_is_the_pipelines_own(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = catalog.MODELS["whisper-base"]
    monkeypatch.setitem(catalog.MODELS, "pair-tiny-random", tiny)
    assert models(pair, "tiny-random") == [None, *["pair-tiny-random"] * 2]


@pytest.mark.parametrize(
    ("pipelines", "model", "says"),
    [
        (["echo"], "gpt2", "no stage of echo has a model"),
        (["voice"], "tiny-random", "voice has no such model; pipelines with one: "),
        (["voice"], "voise=gpt2", "no pipeline 'voise'; did you mean voice?"),
        (["voice", "echo"], "gpt2", "whose? Say PIPELINE=NAME with one of voice, echo"),
        (["voice"], "./no/such/folder", "is no model, folder or Hugging Face id"),
        (["voice"], "whisper-bas", "did you mean whisper-base?"),
        (["voice"], "", "'' is no model"),
    ],
)
def test_what_can_not_be_is_refused_by_name(pipelines: list[str], model: str, says: str) -> None:
    with pytest.raises(PipelineError) as refused:
        load_all(pipelines, models=[model])
    assert says in str(refused.value)
    assert str(refused.value).startswith(f"--model {model}: ")
