"""API keys: which headers let a caller in, and which files are taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from multidict import CIMultiDict

from broker.gateway.errors import ApiError
from broker.gateway.keys import ApiKeys, ApiKeysError

LINES = ["# who has which", "", "alice sk-a1   # laptop", "alice sk-a2", "bob\tsk-b", "sk-nobody"]


@pytest.fixture
def keys() -> ApiKeys:
    """Three tenants."""
    return ApiKeys.parse(LINES, "a test")


def headers(value: str) -> CIMultiDict[str]:
    return CIMultiDict({"authorization": value})


@pytest.mark.parametrize(
    ("value", "tenant"),
    [
        ("Bearer sk-a1", "alice"),
        ("Bearer sk-a2", "alice"),
        ("bearer sk-b", "bob"),
        ("Bearer   sk-b ", "bob"),
    ],
)
def test_a_key_names_its_tenant(keys: ApiKeys, value: str, tenant: str) -> None:
    assert keys.tenant(headers(value)) == tenant


def test_a_key_without_a_name_has_the_same_tenant_in_every_run(keys: ApiKeys) -> None:
    tenant = keys.tenant(headers("Bearer sk-nobody"))
    assert tenant == ApiKeys.parse(["sk-nobody"], "").tenant(headers("Bearer sk-nobody"))
    assert tenant
    assert "nobody" not in tenant


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer sk-a",
        "Bearer sk-a1x",
        "Bearer sk-a1 sk-b",
        "Bearer SK-A1",
        "Basic sk-a1",
        "sk-a1",
        "Bearer alice",
        "Bearer \udcff\udcfe",
        "Bearer " + "k" * 8000,
    ],
)
def test_anything_else_is_a_401_that_shows_no_key(keys: ApiKeys, value: str) -> None:
    with pytest.raises(ApiError) as refused:
        keys.tenant(headers(value))
    assert refused.value.status == 401
    assert refused.value.code == "invalid_api_key"
    assert "sk-" not in refused.value.message


def test_no_header_at_all_says_what_to_send(keys: ApiKeys) -> None:
    with pytest.raises(ApiError, match="Authorization: Bearer"):
        keys.tenant({})


def test_without_keys_everybody_is_let_in() -> None:
    keys = ApiKeys.parse(["# none yet"], "a test")
    assert not keys
    assert keys.tenant({}) == keys.tenant(headers("Bearer whatever")) == ""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    path.write_text("\n".join(LINES))
    path.chmod(mode)
    with pytest.raises(ApiKeysError, match="chmod go="):
        ApiKeys.load(path)
    path.chmod(0o600)
    assert ApiKeys.load(path).tenant(headers("Bearer sk-b")) == "bob"


@pytest.mark.parametrize("text", ["a b secret-3", "a\nb sécret-3", "a secret-3\nb secret-3"])
def test_a_bad_line_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ApiKeysError, match=f"{path}, line [12]") as refused:
        ApiKeys.load(path)
    assert "cret-3" not in str(refused.value)


def test_a_file_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysError, match="can't be read: No such file"):
        ApiKeys.load(tmp_path / "nothing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ApiKeysError, match="no text file"):
        ApiKeys.load(tmp_path / "binary")
