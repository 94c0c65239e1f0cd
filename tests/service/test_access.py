"""Keys, scopes, hot reload, the Host check."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service import calls
from service.access import KEYLESS, Access, Keyring, add_key, read_keys
from service.problems import Misdirected, Unauthenticated
from service.settings import Settings, SettingsError
from tests.service.door import InProcess, refused


def line(name: str, scope: str, key: str) -> str:
    return f"{name} {scope} {hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# who may\n\n" + line("alice", "use", "a-key") + line("root", "admin", "r"))
    return path


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def test_key_is_found_by_its_hash(keys_file: Path) -> None:
    access = Access(Settings(keys_file=keys_file))
    assert access.identify(bearer("a-key"), over_unix_socket=False).name == "alice"
    assert access.identify([(b"authorization", b"bearer r")], over_unix_socket=True).name == "root"


@pytest.mark.parametrize(
    "headers",
    [[], bearer("x"), bearer(""), [(b"authorization", b"Basic a-key")], bearer("a-key") * 2],
)
def test_everything_else_is_unauthenticated(
    keys_file: Path, headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(Unauthenticated):
        Access(Settings(keys_file=keys_file)).identify(headers, over_unix_socket=True)


@pytest.mark.parametrize(
    "text",
    [
        "alice use",
        "alice use abc",
        "alice owner " + "0" * 64,
        "al/ice use " + "0" * 64,
        "alice use " + "0" * 64 + " more",
        line("a", "use", "x") + line("a", "use", "y"),
        line("a", "use", "x") + line("b", "use", "x"),
    ],
)
def test_malformed_keys_file_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"line [12]"):
        Keyring(path)


def test_missing_keys_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Access(Settings(keys_file=tmp_path / "none"))


def test_changed_file_is_read_again_and_tells_whose_key_is_gone(keys_file: Path) -> None:
    keyring = Keyring(keys_file)
    assert keyring.refresh() == set()
    keys_file.write_text(line("bob", "use", "b-key") + line("root", "admin", "new"))
    assert keyring.refresh() == {"alice", "root"}
    assert keyring.find(b"a-key") is None
    assert keyring.find(b"b-key") is not None


def test_broken_change_keeps_the_keys(keys_file: Path) -> None:
    keyring = Keyring(keys_file)
    keys_file.write_text("nonsense")
    with pytest.raises(SettingsError):
        keyring.refresh()
    assert keyring.find(b"a-key") is not None


def test_replaced_file_is_noticed_by_its_inode(keys_file: Path, tmp_path: Path) -> None:
    keyring, stamp = Keyring(keys_file), keys_file.stat()
    other = tmp_path / "other"
    other.write_text(keys_file.read_text().replace("alice", "carol"))
    os.utime(other, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    other.replace(keys_file)
    assert keyring.refresh() == {"alice"}


def test_added_key_opens_the_door_and_is_kept_as_a_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    token = add_key(path, "alice", "use")
    assert path.stat().st_mode & 0o777 == 0o600
    assert token not in path.read_text()
    found = Keyring(path).find(token.encode())
    assert found is not None
    assert (found.name, found.scope) == ("alice", "use")


def test_added_key_begins_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(line("bob", "use", "b").rstrip("\n"))
    add_key(path, "alice", "admin")
    assert [key.name for key in read_keys(path)] == ["bob", "alice"]


@pytest.mark.parametrize(("name", "scope"), [("a b", "use"), ("", "use"), ("a", "all")])
def test_malformed_key_is_not_added(tmp_path: Path, name: str, scope: str) -> None:
    with pytest.raises(SettingsError):
        add_key(tmp_path / "keys", name, scope)


def test_name_is_added_once(keys_file: Path) -> None:
    with pytest.raises(SettingsError, match="alice"):
        add_key(keys_file, "alice", "use")


@pytest.mark.parametrize("host", [b"localhost", b"127.0.0.1:8321", b"[::1]:1", b"LocalHost:8321"])
def test_own_names_are_answered_without_keys(host: bytes) -> None:
    access = Access(Settings())
    assert access.identify([(b"host", host)], over_unix_socket=False) is KEYLESS


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [b""],
        [b"evil.example"],
        [b"localhost", b"localhost"],
        [b"localhost:x"],
        [b"127.0.0.1@e"],
    ],
)
def test_other_names_are_misdirected(hosts: list[bytes]) -> None:
    with pytest.raises(Misdirected):
        Access(Settings()).identify([(b"host", host) for host in hosts], over_unix_socket=False)


def test_unix_socket_needs_no_host() -> None:
    assert Access(Settings()).identify([], over_unix_socket=True) is KEYLESS


def test_routes_are_closed_without_a_key_and_probes_are_open(
    make_door: Callable[..., InProcess], keys_file: Path
) -> None:
    door = make_door(keys_file=keys_file)
    for path in ("/v1/info", "/v1/sessions/1", "/nowhere"):
        assert refused(door.get(path)) == (401, "unauthenticated")
    for path in ("/livez", "/readyz", "/health", "/metrics"):
        assert door.get(path, host="other.example").status_code == 200


def test_admin_reads_info_and_no_sessions(
    make_door: Callable[..., InProcess], keys_file: Path
) -> None:
    door = make_door(keys_file=keys_file)
    headers = {"authorization": "Bearer r"}
    assert door.get("/v1/info", headers=headers).status_code == 200
    assert refused(door.get("/v1/sessions/1", headers=headers)) == (403, "forbidden")


def test_foreign_session_is_unknown(make_door: Callable[..., InProcess], tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(line("alice", "use", "a") + line("bob", "use", "b"))
    door = make_door(keys_file=path)
    alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    made = door.post("/v1/sessions", json={}, headers=alice).json()
    own = f"/v1/sessions/{made['session_id']}"
    assert refused(door.get(own, headers=bob)) == (404, "unknown_session")
    assert door.delete(own, headers=alice).status_code == 204


def test_key_removed_while_its_body_comes_does_nothing(
    make_door: Callable[..., InProcess], keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door = make_door(keys_file=keys_file)
    receive = calls.receive_json

    async def slowly(*args: Any) -> Any:
        body = await receive(*args)
        keys_file.write_text(line("root", "admin", "r"))
        assert door.state.access.keyring is not None
        assert door.state.access.keyring.refresh() == {"alice"}
        return body

    monkeypatch.setattr(calls, "receive_json", slowly)
    answer = door.post("/v1/sessions", json={}, headers={"authorization": "Bearer a-key"})
    assert refused(answer) == (401, "unauthenticated")
    assert door.state.model.engine.counters["sessions_open"] == 0
