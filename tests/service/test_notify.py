"""systemd hears when the service is ready and when it stops (docker/engram.service)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.notify import READY, STOPPING, notify
from tests.integration.server import Server


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket a service manager listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.settimeout(60)
        listening.bind(str(tmp_path / "n"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        yield listening


def test_server_says_ready_once_it_is_and_stopping_when_it_drains(
    manager: socket.socket, small_gguf: Path
) -> None:
    server = Server(small_gguf)
    assert manager.recv(64) == READY
    server.wait_until_ready()
    assert server.stop() == 0
    assert manager.recv(64) == STOPPING


def test_abstract_name_is_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = f"engram-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind("\0" + name)
        listening.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        notify(READY)
        assert listening.recv(64) == READY


@pytest.mark.parametrize("address", ["", "relative", "/nobody/listens/here"])
def test_no_manager_is_no_error(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify(STOPPING)
