"""Pipeline files that can't run are refused at load: with file, key, value and what is allowed.

Every case of the table is the good document with one change.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import catalog
from pipelines.checks import check_local_devices
from pipelines.errors import PipelineError
from pipelines.loader import load, load_all

GOOD: dict[str, Any] = {
    "name": "good",
    "outputs": {"text": "a", "audio": "b"},
    "endpoints": {"chat": {"input": "request", "outputs": ["text", "audio"]}},
    "stages": {
        "a": {"engine": "function", "options": {"op": "say"}},
        "b": {"engine": "vllm", "model": "owner/name", "resources": {"devices": ["cuda:0", "cuda:1"]}},
    },
    "edges": [{"from": "request", "to": "a"}, {"from": "a", "to": "b", "window": {"frames": 4}}],
}

DELETE = ...


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good document with one value set or deleted; a path is like ``edges.0.from``."""
    document = copy.deepcopy(GOOD)
    at: Any = document
    *parents, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in parents:
        at = at[step] if isinstance(at, list) else at.setdefault(step, {})
    if value is DELETE:
        del at[last]
    elif isinstance(at, list) and last == len(at):
        at.append(value)
    else:
        at[last] = value
    return document


def write(folder: Path, document: Any) -> Path:
    file = folder / "pipeline.yaml"
    file.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    return file


def refused(file: Path, *overrides: str) -> PipelineError:
    began = time.monotonic()
    with pytest.raises(PipelineError) as caught:
        load(file, overrides)
    assert time.monotonic() - began < 60  # some would take for ever
    assert "\n" not in str(caught.value)
    return caught.value


FUNCTION = {"engine": "function"}

CASES = [
    # misspelt and misplaced keys, at each level
    ("stagez", {}, "stagez", "unknown key 'stagez'; did you mean stages? Allowed: name, outputs"),
    ("stages/a/modle", "x", "stages.a.modle", "did you mean model? Allowed: engine, model, when"),
    ("stages/a/edges", [], "stages.a.edges", "unknown key 'edges'"),
    ("stages/a/batch/max_num_seq", 3, "stages.a.batch.max_num_seq", "did you mean max_num_seqs?"),
    ("stages/a/options/sample_rat", 3, "stages.a.options.sample_rat", "did you mean sample_rate?"),
    ("edges/0/form", "a", "edges[0].form", "did you mean from? Allowed: from, to"),
    ("edges/1/window/rigth", 3, "edges[1].window.rigth", "did you mean right?"),
    ("edges/1/window/largest", 3, "edges[1].window.largest", "3 is less than the window's frames, 4"),
    ("endpoints/chat/outputz", [], "endpoints.chat.outputz", "did you mean outputs?"),
    ("limits/max_request", 3, "limits.max_request", "did you mean max_requests?"),
    # what is missing
    ("name", DELETE, "", "the key 'name' is missing"),
    ("edges", DELETE, "", "the key 'edges' is missing"),
    ("stages/a/engine", DELETE, "stages.a", "the key 'engine' is missing"),
    ("stages", {}, "stages", "at least one stage"),
    ("outputs", {}, "outputs", "at least one output"),
    ("endpoints/chat/outputs", [], "endpoints.chat.outputs", "there are text, audio"),
    # values of the wrong kind or out of range
    ("name", "Bad Name", "name", "'Bad Name'"),
    ("stages/a/batch", 3, "stages.a.batch", "3: expected a map"),
    ("stages/a/batch/max_num_seqs", 0, "stages.a.batch.max_num_seqs", "0: expected int >= 1"),
    ("stages/a/batch/max_num_seqs", "8", "stages.a.batch.max_num_seqs", "'8': expected int, got str"),
    ("stages/a/retry/timeout_s", -1, "stages.a.retry.timeout_s", "-1: expected float > 0"),
    ("stages/a/retry/timeout_s", float("inf"), "stages.a.retry.timeout_s", "finite"),
    ("stages/a/options/op", "sing", "stages.a.options.op", "'sing' is none of the values; "),
    ("stages/a/options/delay_s", 10**30, "stages.a.options.delay_s", "too large"),
    ("stages/a", "function", "stages.a", "'function': expected a map"),
    ("stages", ["a"], "stages", "expected a map"),
    ("edges", {"from": "a"}, "edges", "expected a list"),
    ("edges/0", "a -> b", "edges[0]", "'a -> b': expected a map"),
    ("edges/0/transport", "pigeon", "edges[0].transport", "Allowed: auto, "),
    ("edges/0/prefetch", {"window": 0}, "edges[0].prefetch.window", "0: expected int >= 1"),
    ("edges/0/prefetch", {"windows": 2}, "edges[0].prefetch.windows", "did you mean window?"),
    ("edges/0/batch", {"accumulate_ms": -1}, "edges[0].batch.accumulate_ms", ">= 0"),
    ("edges/0/batch", {"max_batch_size": 0}, "edges[0].batch.max_batch_size", "0: expected int >= 1"),
    ("edges/0/checkpoint", "tape", "edges[0].checkpoint", "Allowed: none, memory, disk"),
    # engines, models, devices
    ("stages/a/engine", "vlm", "stages.a.engine", "did you mean vllm? Allowed: vllm, ar, omni-encoder"),
    ("stages/a/engine", "os.system", "stages.a.engine", '"module:Class"'),
    ("stages/b/model", DELETE, "stages.b.model", "the engine vllm needs a model"),
    ("stages/a/model", "owner/name", "stages.a.model", "takes no model"),
    ("stages/b/model", "whisper-bas", "stages.b.model", "did you mean whisper-base?"),
    ("stages/b/model", "smollm2", "stages.b.model", "did you mean smollm2-135m-instruct?"),
    ("stages/b/model", "/no/such/folder", "stages.b.model", "'/no/such/folder' is no model, folder or"),
    ("stages/b/model", "", "stages.b.model", "'' is no model"),
    ("stages/a/when", "smell", "stages.a.when", "Allowed: audio, image, video"),
    ("stages/a/when", ["audio", "smell"], "stages.a.when", "'smell' is no input modality"),
    ("stages/a/when", [], "stages.a.when", "empty list"),
    ("inputs", ["smell"], "inputs", "Allowed: audio, image, video"),
    ("stages/b/resources/tensor_parallel_size", 4, "stages.b.resources.tensor_parallel_size", "lists only 2"),
    ("stages/a/resources/tensor_parallel_size", 2, "stages.a.resources.tensor_parallel_size", "one device"),
    ("stages/b/resources/devices", "7", "stages.b.resources.devices", "'7' is no device"),
    ("stages/b/resources/devices", [], "stages.b.resources.devices", "empty list"),
    ("stages/b/resources/devices", ["cuda:0", "tpu"], "stages.b.resources.devices", "'tpu' is no device"),
    ("stages/a/resources/replicas", "many", "stages.a.resources.replicas", "'many': expected int or a map"),
    ("stages/a/resources/replicas", -1, "stages.a.resources.replicas", "-1: expected int >= 0"),
    ("stages/a/resources/replicas", {"mx": 2}, "stages.a.resources.replicas.mx", "Allowed: min, max"),
    ("stages/a/resources/replicas", {"max": 0}, "stages.a.resources.replicas.max", "0: expected int >= 1"),
    ("stages/a/resources/replicas", {"min": 3, "max": 2}, "stages.a.resources.replicas.min", "max 2"),
    ("stages/a/resources/scaling", {"up": 2}, "stages.a.resources.scaling.up", "did you mean up_s?"),
    ("stages/a/resources/scaling", {"down_s": -1}, "stages.a.resources.scaling.down_s", ">= 0"),
    # names that lead nowhere
    ("outputs/audio", "c", "outputs.audio", "no stage 'c'; Allowed: a, b"),
    ("edges/1/from", "c", "edges[1].from", "no stage 'c'; Allowed: request, a, b"),
    ("edges/1/to", "request", "edges[1].to", "no stage 'request'"),
    ("endpoints/chat/input", "c", "endpoints.chat.input", "no stage 'c'"),
    (
        "endpoints/chat/outputs/0",
        "video",
        "endpoints.chat.outputs[0]",
        "no output 'video'; Allowed: text, audio",
    ),
    ("endpoints/speach", {"outputs": ["text"]}, "endpoints.speach", "did you mean speech?"),
    (
        "endpoints/speech",
        {"input": "b", "outputs": ["text"]},
        "endpoints.speech.outputs[0]",
        "needs the stage a",
    ),
    ("endpoints/chat/max_steps", 9, "endpoints.chat.max_steps", "means nothing to chat"),
    ("endpoints/images", {"outputs": ["text"]}, "endpoints.images.outputs", "needs the output image"),
    ("endpoints/images", {"outputs": ["text"], "max_steps": 0}, "endpoints.images.max_steps", "1"),
    ("endpoints/videos", {"outputs": ["audio"]}, "endpoints.videos.outputs", "needs the output video"),
    ("endpoints/speech", {"input": "a", "outputs": ["text"]}, "endpoints.speech.outputs[0]", "own input"),
    ("edges/1/transfer", "no_colon", "edges[1].transfer", 'expected "package.module:function"'),
    ("edges/1/transfer", "../x:f", "edges[1].transfer", "'../x:f'"),
    # graphs that can't run
    ("edges/2", {"from": "b", "to": "a"}, "edges", "a cycle: "),
    ("edges/2", {"from": "a", "to": "a"}, "edges[2]", "can't feed itself"),
    ("edges/2", {"from": "a", "to": "b"}, "edges[2]", "already there as edges[1]"),
    ("edges/0", DELETE, "stages.a", "nothing reaches this stage"),
    ("outputs/audio", "a", "stages.b", "no stage consumes what this one makes"),
    ("stages/request", FUNCTION, "stages.request", "stands for what the caller sent"),
    ("stages/Big", FUNCTION, "stages.Big", "begins with a small letter"),
]


@pytest.mark.parametrize(("path", "value", "key", "says"), CASES, ids=lambda x: str(x)[:40])
def test_a_fault_is_refused_by_its_key(tmp_path: Path, path: str, value: Any, key: str, says: str) -> None:
    file = write(tmp_path, changed(path, value))
    error = refused(file)
    assert error.key == key
    assert says in error.problem
    assert error.file == str(file)
    assert str(error).startswith(str(file))


def test_edges_that_ask_one_stage_for_different_batches_are_named(tmp_path: Path) -> None:
    document = changed("edges/2", {"from": "request", "to": "b", "batch": {"max_batch_size": 3}})
    document["edges"][1]["batch"] = {"max_batch_size": 4, "accumulate_ms": 2}
    error = refused(write(tmp_path, document))
    assert error.key == "edges[2].batch.max_batch_size"
    assert "3, but the edge from a to b (edges[1]) says 4" in str(error)
    document["edges"][2]["batch"] = {"max_batch_size": 4}
    batch = load(write(tmp_path, document)).batching("b").batch
    assert (batch.max_batch_size, batch.wait_ms, batch.max_num_seqs) == (4, 2, 8)


def test_the_good_document_is_good(tmp_path: Path) -> None:
    assert load(write(tmp_path, GOOD)).order() == ["a", "b"]
    assert load(tmp_path).name == "good"  # a folder with a pipeline.yaml


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: [", "line 1"),
        ("name: a\nname: b", "line 2, column 1: no valid YAML: the key 'name' is there twice"),
        ("stages: {a: {engine: function}, a: {engine: vllm}}", "the key 'a' is there twice"),
        ("outputs: {no: a}", "outputs.False: the key False is no text; put it in quotes"),
        ("name: 2024-02-30", "no valid YAML"),
        ("name: 2024-02-20", "name: datetime.date(2024, 2, 20): a date can't be used; put it in quotes"),
        ("name: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: &a [1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n" + "".join(
            f"{chr(99 + i)}: &{chr(99 + i)} [{','.join(9 * ['*' + chr(98 + i)])}]\n" for i in range(12)
        ), "more than"),
        ("a: &a [*a]", "a value within itself"),
        ("x: " + "[" * 5000, "nested more than 50 deep"),
        ("x: " + "y" * (1 << 20), "larger than"),
        ("- a\n- b", "expected a map with name"),
        ("", "expected a map with name"),
        ("name: \x00", "no valid YAML"),
    ],
    ids=range(14),
)  # fmt: skip
def test_text_that_is_no_document_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in str(refused(write(tmp_path, text)))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_bytes(b"name: \xff\xfe")
    assert "no valid YAML" in str(refused(file))


def test_a_name_that_is_no_pipeline_lists_those_that_ship() -> None:
    with pytest.raises(
        PipelineError, match=r"voise: no such file.*did you mean voice\? Allowed: echo, flux, "
    ):
        load("voise")


@pytest.mark.parametrize("name", sorted(catalog.pipelines()))
def test_what_ships_is_good(name: str) -> None:
    assert load(name).name == name


def test_two_pipelines_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="another pipeline's name"):
        load_all(["echo", write(tmp_path, changed("name", "echo"))])
    assert [pipeline.name for pipeline in load_all(["echo", "voice"])] == ["echo", "voice"]


def test_nothing_that_a_pipeline_names_is_imported(tmp_path: Path) -> None:
    document = changed(
        "stages/a", {"engine": "surely.not.there:Engine", "options": {"anything": [1, {"x": 2}]}}
    )
    document["edges"][1]["transfer"] = "surely.not.there:function"
    assert load(write(tmp_path, document)).stages["a"].options == {"anything": [1, {"x": 2}]}


def test_a_model_folder_is_meant_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    pipeline = load(write(tmp_path, changed("stages/b/model", "./weights")))
    assert pipeline.stages["b"].model == str(tmp_path / "weights")


def test_a_gpu_that_this_machine_lacks_is_named(tmp_path: Path) -> None:
    pipeline = load(write(tmp_path, changed("stages/b/resources/devices", ["cuda:0", "cuda:7"])))
    check_local_devices(pipeline, present=8)
    with pytest.raises(PipelineError, match=r"stages\.b\.resources\.devices: 'cuda:7' .* has 2 GPUs"):
        check_local_devices(pipeline, present=2)
