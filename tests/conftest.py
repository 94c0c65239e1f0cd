"""Shared by all tests: hypothesis profiles, small checkpoints, the server processes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.builders import Shape, write_gguf, write_safetensors
from tests.integration.server import Server, running
from tests.oracle import Oracle

_COMMON = {
    "deadline": None,
    "database": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("default", max_examples=40, **_COMMON)
# A fault need not be shrunk to be caught.
settings.register_profile(
    "faults", max_examples=25, derandomize=True, phases=[Phase.generate], **_COMMON
)
settings.load_profile(os.environ.get("LAWS_PROFILE", "default"))


def pytest_configure() -> None:
    """In a run of `tests/faults.py` the product must be the patched copy, not the working tree."""
    copy = os.environ.get("FAULTS_COPY")
    if copy is not None:
        import engram_core  # only here: collecting tests must not import the product

        found = Path(engram_core.__file__)
        if not found.is_relative_to(copy):
            raise pytest.UsageError(f"{found} is outside the copy {copy}")


@pytest.fixture(scope="session")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layout A, Q2_K table and wkv, layers 1 and 14, head_dim 256, dim 64, two streams."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return write_gguf(path, Shape(head_dim=256), table="Q2_K", wkv="Q2_K", seed=1)


@pytest.fixture(scope="session")
def official_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The official directory, FP8 tables and FP8 wkv, head_dim 64."""
    return write_safetensors(
        tmp_path_factory.mktemp("official") / "small", Shape(head_dim=64), seed=2
    )


@pytest.fixture(scope="session")
def official_oracle(official_dir: Path) -> Oracle:
    return Oracle.open(official_dir)


@pytest.fixture(scope="session")
def gguf_oracle(small_gguf: Path) -> Oracle:
    return Oracle.open(small_gguf)


@pytest.fixture(scope="session")
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="eg") as folder:
        yield Path(folder)


KEYS = {"alice": "alice-key", "bob": "bob-key", "root": "root-key"}


@pytest.fixture(scope="session")
def server(official_dir: Path, socket_folder: Path) -> Iterator[Server]:
    """Without keys, TCP and Unix socket; small limits, so that they can be reached."""
    flags = ("--max-tokens", "512", "--max-sessions", "300", "--in-flight-bytes", "16MiB")
    uds = socket_folder / "a.sock"
    with running(official_dir, "--host", "127.0.0.1", *flags, uds=uds) as started:
        yield started


@pytest.fixture(scope="session")
def keyed_server(small_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With keys (two users and an admin), few sessions and few held tokens."""
    keys_file = tmp_path_factory.mktemp("keys") / "keys"
    keys_file.write_text(
        "".join(
            f"{name} {'admin' if name == 'root' else 'use'} "
            f"{hashlib.sha256(key.encode()).hexdigest()}\n"
            for name, key in KEYS.items()
        )
    )
    flags = ("--keys-file", str(keys_file), "--max-sessions", "8", "--max-held-tokens", "4096")
    with running(small_gguf, *flags, "--max-tokens", "512") as started:
        yield started


@pytest.fixture(scope="session")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo checkpoint with its real vocabulary, as `make demo` serves it."""
    from engram_core.tools.synth import synth  # only here: see pytest_configure

    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    synth(path, preset="demo", fmt="gguf", quant="Q2_K", seed=1)
    with running(path) as started:
        yield started
