"""deploy/kubernetes is true: what it runs, asks and names is there. Nothing here needs a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
import yaml

import broker.cli
from broker.gateway.app import make_app
from broker.gateway.context import Context
from broker.gateway.keys import ApiKeys
from broker.gateway.link import BrokerLink
from broker.gateway.metrics import Metrics
from broker.gateway.room import Room
from broker.gateway.settings import Settings
from broker.gateway.silence import Silence
from broker.keys import Keys, make
from broker.protocol import Inspect, Report
from pipelines.loader import load
from tests.core.driver import Driver
from workers.cli import worker
from workers.health import HealthFile

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
SOURCES = "".join(
    p.read_text()
    for part in ("adapters", "broker", "pipelines", "workers")
    for p in (ROOT / part).rglob("*.py")
)


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


DEPLOYMENTS = {
    document["metadata"]["name"]: document
    for name in ("broker.yaml", "workers.yaml")
    for document in documents(name)
    if document["kind"] == "Deployment"
}
WORKERS = {name: document for name, document in DEPLOYMENTS.items() if name != "omni-broker"}


def pod(deployment: str) -> dict[str, Any]:
    spec: dict[str, Any] = DEPLOYMENTS[deployment]["spec"]["template"]["spec"]
    return spec


def container(deployment: str) -> dict[str, Any]:
    (one,) = pod(deployment)["containers"]
    return dict(one)


def parsed(deployment: str) -> dict[str, Any]:
    """The options that a container's command line sets, as the command itself understands them."""
    one = container(deployment)
    program, *subcommand = one["command"]
    if program == "omni-broker":
        command = typer.main.get_command(broker.cli.app).commands[subcommand[0]]  # type: ignore[attr-defined]
    else:
        app = typer.Typer()
        app.command()(worker)
        command = typer.main.get_command(app)
    return dict(command.make_context(program, list(one["args"])).params)


def value(one: dict[str, Any], start: str) -> str:
    (found,) = [text.removeprefix(start) for text in one["args"] if text.startswith(start)]
    return str(found)


def test_all_files_are_yaml_and_the_kustomization_knows_them() -> None:
    text = (FOLDER / "kustomization.yaml").read_text()
    for file in FOLDER.glob("*.yaml"):
        assert documents(file.name), file
        assert file.name in ("kustomization.yaml", "adapter.yaml") or f"- {file.name}" in text
    for name in documents("kustomization.yaml")[0]["resources"]:
        assert (FOLDER / name).is_file()


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_commands_take_the_options_they_are_given(name: str) -> None:
    assert parsed(name)["keys"] == Path("/keys/own")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_variables_are_read_by_something(name: str) -> None:
    for variable in container(name)["env"]:
        assert f'"{variable["name"]}"' in SOURCES, variable


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_pod_mounts_what_it_has_and_has_what_it_mounts(name: str) -> None:
    spec = pod(name)
    mounted = {m["name"] for c in (*spec["initContainers"], *spec["containers"]) for m in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}
    assert (
        DEPLOYMENTS[name]["spec"]["selector"]["matchLabels"].items()
        <= DEPLOYMENTS[name]["spec"]["template"]["metadata"]["labels"].items()
    )


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_an_arena_fits_into_half_of_the_shared_memory(name: str) -> None:
    (shm,) = [volume["emptyDir"]["sizeLimit"] for volume in pod(name)["volumes"] if volume["name"] == "shm"]
    there = int(shm[:-2]) * {"Mi": 1, "Gi": 1024}[shm[-2:]]
    (arena,) = [v["value"] for v in container(name)["env"] if v["name"] == "OMNI_SHM_MB"]
    assert 2 * int(arena) <= there


def test_every_stage_has_its_workers_and_they_may_finish_what_they_hold() -> None:
    pipeline = load(value(container("omni-broker"), "--pipeline="))
    assert {parsed(name)["stage"] for name in WORKERS} == set(pipeline.stages)
    for name in WORKERS:
        options = parsed(name)
        assert options["pipeline"] == pipeline.name
        assert options["drain_s"] >= pipeline.stages[options["stage"]].retry.timeout_s
        assert pod(name)["terminationGracePeriodSeconds"] > 2 * options["drain_s"]


def test_ports_and_names_fit_together() -> None:
    services = {d["metadata"]["name"]: d["spec"] for d in documents("broker.yaml") if d["kind"] == "Service"}
    ports = {port["name"]: port["containerPort"] for port in container("omni-broker")["ports"]}
    options = parsed("omni-broker")
    assert ports["http"] == options["port"]
    assert options["listen"] == f"tcp://0.0.0.0:{ports['workers']}"
    assert ports["clients"] == ports["workers"] + 1
    for service in services.values():
        assert {port["targetPort"] for port in service["ports"]} <= set(ports)
        assert service["selector"] == DEPLOYMENTS["omni-broker"]["spec"]["selector"]["matchLabels"]
    for name in WORKERS:
        host, port = re.fullmatch(r"tcp://(.+):(\d+)", parsed(name)["broker"]).groups()  # type: ignore[union-attr]
        assert int(port) in [p["port"] for p in services[host]["ports"]]
        assert services[host]["publishNotReadyAddresses"], "workers come before the broker is ready"


async def test_probes_and_scrapes_ask_for_what_there_is() -> None:
    settings = Settings()
    link = BrokerLink("ipc:///nowhere")
    app = make_app(
        Context(link, settings, Metrics(), ApiKeys(), Room(settings.max_decoded_mb)),
        Silence(settings.stall_s),
    )
    there = {
        route.resource.canonical for route in app.router.routes() if route.method == "GET" and route.resource
    }
    one = container("omni-broker")
    asked = {one[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")}
    (monitor,) = [document for document in documents("autoscaling.yaml") if document["kind"] == "PodMonitor"]
    asked |= {endpoint["path"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    assert asked <= there


@pytest.mark.parametrize("name", WORKERS)
def test_a_workers_probes_understand_its_health_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / "health"
    one, file = container(name), HealthFile(path)
    assert str(parsed(name)["health_file"]) == "/tmp/omni-worker"

    def probe(which: str) -> bool:
        command = [word.replace("/tmp/omni-worker", str(path)) for word in one[which]["exec"]["command"]]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    assert not probe("livenessProbe")
    assert not probe("readinessProbe")
    file.write("starting")
    assert probe("livenessProbe")
    assert not probe("readinessProbe")
    file.write("ready")
    assert probe("readinessProbe")
    old = time.time() - 60
    os.utime(path, (old, old))
    assert not probe("livenessProbe")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_keys_from_a_secret_are_good_where_they_are_copied_to(tmp_path: Path, name: str) -> None:
    made, secret, keys = tmp_path / "made", tmp_path / "secret", tmp_path / "keys"
    make(made)
    for folder in (secret, keys):
        folder.mkdir()
        folder.chmod(0o777)  # as a volume is
    (volume,) = [v["secret"] for v in pod(name)["volumes"] if v["name"] == "secret"]
    wanted = (
        [item["path"] for item in volume["items"]] if "items" in volume else [f.name for f in made.iterdir()]
    )
    for file in wanted:
        (secret / file).write_bytes((made / file).read_bytes())
        (secret / file).chmod(0o644)
    (init,) = pod(name)["initContainers"]
    script = init["command"][2].replace("/secret", str(secret)).replace("/keys", str(keys))
    subprocess.run([*init["command"][:2], script], check=True)
    loaded = Keys.load(keys / "own")
    assert loaded.client_secret is not None
    assert (loaded.server_secret is not None) == (name == "omni-broker"), (
        "workers need no secret of the broker's"
    )


def test_autoscalers_use_figures_that_are_there_and_the_brokers_own_ranges() -> None:
    one = container("omni-broker")
    settings = [text.removeprefix("--stage=") for text in one["args"] if text.startswith("--stage=")]
    pipeline = load(value(one, "--pipeline="), settings)
    driver = Driver(pipeline)
    client = driver.client()
    driver.say(client, Inspect(1, "metrics"))
    metrics = Metrics().text(msgspec.msgpack.decode(driver.take(client, Report)[-1].body)).decode()
    adapter = (FOLDER / "adapter.yaml").read_text()
    scalers = [d["spec"] for d in documents("autoscaling.yaml") if d["kind"] == "HorizontalPodAutoscaler"]
    for scaler in scalers:
        target = scaler["scaleTargetRef"]["name"]
        assert "replicas" not in WORKERS[target]["spec"], "a second word on how many there are"
        stage = parsed(target)["stage"]
        resources = pipeline.stages[stage].resources
        assert (scaler["minReplicas"], scaler["maxReplicas"]) == (resources.least, resources.most)
        for metric in (metric["external"]["metric"] for metric in scaler["metrics"]):
            labels = ",".join(f'{name}="{text}"' for name, text in metric["selector"]["matchLabels"].items())
            assert f"{metric['name']}{{{labels}}}" in metrics
            assert metric["name"] in adapter
    scaled = {
        stage
        for stage in pipeline.stages
        if pipeline.stages[stage].resources.least < pipeline.stages[stage].resources.most
    }
    assert scaled == {parsed(scaler["scaleTargetRef"]["name"])["stage"] for scaler in scalers}


def test_the_image_is_made_of_what_there_is() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    assert (ROOT / "scripts" / "setup").is_file()
    for variable in ("OMNI_VENV", "OMNI_EXTRAS"):
        assert f"{variable}=" in text
        assert variable in (ROOT / "scripts" / "setup").read_text()
