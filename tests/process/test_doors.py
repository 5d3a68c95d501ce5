"""Who can come in, and who can't: addresses, keys, other users of the machine, callers without an API key."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import pickle
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.client import BrokerGone, Client
from broker.gateway.settings import Settings, SettingsError
from broker.keys import make
from scripts.ports import free_port
from tests.house import House, PatientClient, line, write

Houses = Callable[..., House]


@pytest.fixture(autouse=True)
def no_keys_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the developer has set is not seen."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("OMNI_KEYS", "OMNI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A folder with fresh keys."""
    make(tmp_path / "keys")
    return tmp_path / "keys"


def ask(
    home: House, text: str = "hello", headers: dict[str, str] | None = None, **fields: Any
) -> dict[str, Any]:
    """A chat's answer, the error's body with "status" where it is refused."""
    body = {"messages": [{"role": "user", "content": text}], **fields}
    request = urllib.request.Request(
        f"{home.base_url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {})},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
            return answer
    except urllib.error.HTTPError as error:
        with error:
            return {"status": error.code, "headers": error.headers, **json.load(error)}


# --- addresses


def listening(pids: dict[int, str]) -> dict[str, set[str]]:
    """The TCP addresses (as the kernel writes them) and the paths at which these processes listen."""
    inodes: set[str] = set()
    for pid in pids:
        with suppress(OSError):  # it has ended meanwhile
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    if found := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link)):
                        inodes.add(found[1])
    addresses: dict[str, set[str]] = {"tcp": set(), "unix": set()}
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:  # LISTEN
                addresses["tcp"].add(fields[1].partition(":")[0])
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[6] in inodes and len(fields) > 7:
            addresses["unix"].add(fields[7])
    return addresses


def test_by_default_everything_listens_on_loopback_or_in_a_closed_folder(echo: House) -> None:
    addresses = listening(echo.processes())
    assert addresses["tcp"] == {"0100007F"}, "127.0.0.1"
    assert {Path(path).name for path in addresses["unix"]} == {"workers.sock", "clients.sock"}
    for path in addresses["unix"]:
        folder = Path(path).parent.stat()
        assert stat.S_IMODE(folder.st_mode) == 0o700
        assert folder.st_uid == os.getuid()


def test_a_pickle_sent_over_http_runs_nothing(echo: House, tmp_path: Path) -> None:
    marker = tmp_path / "marker"

    class Touch:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {marker}",)

    for path in ("/v1/chat/completions", "/v1/audio/speech", "/v1/audio/transcriptions"):
        for kind in ("application/json", "application/octet-stream", "application/x-python-pickle"):
            request = urllib.request.Request(
                echo.base_url + path, pickle.dumps(Touch()), {"Content-Type": kind}
            )
            with (
                pytest.raises(urllib.error.HTTPError) as refused,
                urllib.request.urlopen(request, timeout=60),
            ):
                pass
            refused.value.close()
            assert refused.value.code == 400
    assert ask(echo)["choices"][0]["message"]["content"]
    assert not marker.exists()


_AS_ANOTHER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for path in sys.argv[1:]:
    if path.endswith(".sock"):
        attempts = [lambda: socket.socket(socket.AF_UNIX).connect(path)]
    else:
        attempts = [lambda: open(path, "rb"), lambda: open(path, "r+b"), lambda: os.listdir(path)]
        attempts += [lambda: os.chmod(path, 0o777), lambda: os.unlink(path)]
    for attempt in attempts:
        try:
            attempt()
        except OSError as error:
            assert isinstance(error, (PermissionError, NotADirectoryError, IsADirectoryError)), (path, error)
        else:
            sys.exit(f"another user could reach {path}")
print("nothing")
"""


def as_another(targets: list[Path]) -> str:
    """What a process of another user says of its tries."""
    command = [sys.executable, "-P", "-c", _AS_ANOTHER, *map(str, targets)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
async def test_another_user_reaches_neither_sockets_nor_folders_nor_arenas(
    house: Houses, tmp_path: Path
) -> None:
    home = house("--pipeline", write(tmp_path, line("a")), "--no-workers", "--no-gateway", ready=False)
    home.until((home.run_dir / "clients.sock").exists)
    async with home.client() as client:
        payload = {"x": np.zeros(1 << 20, np.float32)}
        stream = client.submit("line", outputs=["text"], given={"request": [payload]})
        async with await stream:
            arenas = list(home.shm_dir.iterdir())
            assert any(path.stat().st_size >= 4 << 20 for path in arenas)
            # Only what each of them is itself shall count: the way to it is open, as to /dev/shm it is.
            home.folder.chmod(0o755)
            home.shm_dir.chmod(0o1777)
            folders = [home.run_dir, *home.folder.glob("state*")]
            targets = [*folders, *(path for folder in folders for path in folder.iterdir()), *arenas]
            said = await asyncio.to_thread(as_another, targets)
    assert said == "nothing\n"


# --- keys


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5555", "tcp://[::]:5555", "tcp://192.0.2.1:5555"])
def test_start_refuses_an_open_address_without_keys(house: Houses, address: str) -> None:
    home = house()
    result = home.command("start", "--pipeline", "echo", "--listen", address)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "omni-broker keys" in result.stderr


@pytest.mark.parametrize(
    "address", ["ipc:///tmp/x", "0.0.0.0:5555", "tcp://0.0.0.0", "tcp://0.0.0.0:99999", "tcp://[::1"]
)
def test_start_refuses_what_is_no_tcp_address(house: Houses, keys: Path, address: str) -> None:
    result = house().command("start", "--pipeline", "echo", "--listen", address, "--keys", str(keys))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "tcp://host:port" in result.stderr


def test_start_refuses_keys_that_are_a_workers_or_open_to_others(house: Houses, keys: Path) -> None:
    home = house()
    command = ("start", "--pipeline", "echo", "--listen", "tcp://0.0.0.0:5555", "--keys", str(keys))
    (keys / "server.key_secret").chmod(0o640)
    assert "chmod go=" in home.command(*command).stderr
    (keys / "server.key_secret").unlink()
    assert "no server.key_secret" in home.command(*command).stderr


def test_a_port_that_is_taken_is_named(house: Houses, keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address in (
            f"tcp://127.0.0.1:{port}",
            f"tcp://127.0.0.1:{port - 1}",
        ):  # the workers', the clients'
            refused = house().command(
                "start", "--pipeline", "echo", "--port", "0", "--listen", address, "--keys", str(keys)
            )
            assert refused.returncode == 2
            says = f"can't listen at {address}: Address already in use; choose another with --listen"
            assert refused.stderr == f"omni-broker: {says}\n"


async def test_over_tcp_the_right_keys_work_and_no_others(
    house: Houses, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that joins over TCP does the work; wrong keys and none are as if nobody were there."""
    address = f"tcp://127.0.0.1:{free_port(2)}"
    options = ("--listen", address, "--keys", str(keys), "--no-workers")
    document = line("a")
    document["stages"]["a"]["options"] = {"op": "say"}
    home = house("--pipeline", write(tmp_path, document), *options, ready=False)
    home.worker("a", "--broker", address, "--keys", str(keys))
    home.until(home.is_ready)
    assert ask(home, "over the wire")["choices"][0]["message"]["content"] == "over the wire"

    place = ("--broker", address, "--keys", str(keys))
    assert "line/a" in home.command("status", "--once", *place).stdout
    assert home.command("ask", "by its keys", *place).stdout == "by its keys\n"
    make(tmp_path / "other")
    for folder in (None, tmp_path / "other"):
        if folder is not None:
            monkeypatch.setenv("OMNI_KEYS", str(folder))
        client = Client(address)
        with pytest.raises(BrokerGone, match="OMNI_KEYS"):
            await client.connect(1.0)
    monkeypatch.setenv("OMNI_KEYS", str(keys))
    async with PatientClient(address) as client:
        assert (await client.inspect("ready"))["missing"] == []
    monkeypatch.setenv("OMNI_KEYS", str(tmp_path / "other"))
    async with home.client() as client:  # ipc asks for none
        assert "line" in client.pipelines


# --- API keys


def test_without_an_api_key_only_probes_are_answered(house: Houses, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice sk-alice # a comment\n")
    file.chmod(0o600)
    env = {"OMNI_API_KEY": "sk-env"}
    home = house("--pipeline", "echo", "--api-keys", str(file), env=env)
    refusal = ask(home)
    assert refusal["status"] == 401
    assert refusal["error"]["code"] == "invalid_api_key"
    assert refusal["headers"]["WWW-Authenticate"] == "Bearer"
    assert ask(home, headers={"Authorization": "Bearer sk-wrong"})["status"] == 401
    for key in ("sk-alice", "sk-env"):
        assert ask(home, headers={"Authorization": f"Bearer {key}"})["choices"]
    assert home.get("/health")[0] == 200
    home.until(home.is_ready)  # it says so without a key
    assert home.get("/metrics")[0] == home.get("/v1/models")[0] == 401

    os.kill(home.process_of("broker.gateway"), signal.SIGKILL)
    home.until(home.is_ready)
    assert ask(home)["status"] == 401, "the next gateway has them too"
    for pid in home.processes():
        for file_name in ("cmdline", "environ"):
            try:
                seen = Path(f"/proc/{pid}/{file_name}").read_bytes()
            except OSError:
                continue  # it has ended meanwhile
            started_with_it = file_name == "environ" and pid == home.process.pid  # type: ignore[union-attr]
            assert b"sk-alice" not in seen
            assert b"sk-env" not in seen or started_with_it
    assert stat.S_IMODE((home.run_dir / "api-keys").stat().st_mode) == 0o600


def test_a_key_that_is_empty_does_not_open_the_door(house: Houses) -> None:
    """`--api-key "$KEY"` where KEY isn't set: who wrote that wanted a closed door."""
    for arguments, env in (
        (["--api-key", ""], {}),
        (["--api-key", "sk-1", "--api-key", "# none"], {}),
        ([], {"OMNI_API_KEY": " "}),
        (["--api-key", "sk-1"], {"OMNI_API_KEY": ""}),
    ):
        result = house(env=env).command("start", "--pipeline", "echo", *arguments)
        assert result.returncode == 2
        assert "holds no key" in result.stderr
        assert result.stderr.count("\n") == 1


def test_the_name_of_a_key_in_the_variable_is_no_key(house: Houses) -> None:
    home = house("--pipeline", "echo", env={"OMNI_API_KEY": "alice sk-alice\nbob sk-bob"})
    for key in ("sk-alice", "sk-bob"):
        assert ask(home, headers={"Authorization": f"Bearer {key}"})["choices"]
    for key in ("alice", "bob"):
        assert ask(home, headers={"Authorization": f"Bearer {key}"})["status"] == 401


def test_a_file_of_api_keys_that_others_can_read_is_refused(house: Houses, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-1\n")
    file.chmod(0o644)
    result = house().command("start", "--pipeline", "echo", "--api-keys", str(file))
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "chmod go=" in result.stderr
    file.chmod(0o600)
    file.write_text("# nobody yet\n")
    assert "holds no key" in house().command("start", "--pipeline", "echo", "--api-keys", str(file)).stderr


def test_an_open_gateway_without_api_keys_warns(house: Houses) -> None:
    home = house("--pipeline", "echo", "--host", "0.0.0.0", "--no-workers", ready=False)
    home.until(lambda: "listening on" in home.log)
    assert "anybody may ask" in home.log
    quiet = house("--pipeline", "echo", "--host", "0.0.0.0", "--no-workers", "--api-key", "k", ready=False)
    quiet.until(lambda: "listening on" in quiet.log)
    assert "anybody may ask" not in quiet.log


# --- links


@pytest.fixture
def clip_url() -> Iterator[str]:
    """Where a second of audio can be fetched."""
    from broker.gateway.audio import wav_header

    body = wav_header(16_000, 32_000) + bytes(32_000)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/clip.wav"
        server.shutdown()
        thread.join()


def test_links_are_fetched_from_the_hosts_that_start_was_told(
    house: Houses, tmp_path: Path, clip_url: str
) -> None:
    document = line("a")
    document["stages"]["a"] = {"engine": "function", "options": {"op": "sum"}, "when": "audio"}
    pipeline = write(tmp_path, document)
    content = [{"type": "audio_url", "audio_url": {"url": clip_url}}]

    def answer(*options: str) -> dict[str, Any]:
        home = house("--pipeline", pipeline, *options)
        return ask(home, content)  # type: ignore[arg-type]

    assert "--allow-media-host" in answer()["error"]["message"]
    assert "not public" in answer("--allow-media-host", "127.0.0.1")["error"]["message"]
    hosts = ("--allow-media-host", ".example.org", "--allow-media-host", "127.0.0.1", "--allow-media-private")
    assert answer(*hosts)["choices"]


@pytest.mark.parametrize("host", ["*", "*.example.org", "http://example.org", "example.org/x", "", ".", "-x"])
def test_a_host_that_is_none_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="--allow-media-host"):
        Settings(allow_media_host=[host])


def test_the_command_makes_keys_once(house: Houses, tmp_path: Path) -> None:
    home = house()
    result = home.command("keys", str(tmp_path / "mine"))
    assert result.returncode == 0, result.stderr
    assert "--keys" in result.stdout
    again = home.command("keys", str(tmp_path / "mine"))
    assert again.returncode == 2
    assert "never overwritten" in again.stderr
