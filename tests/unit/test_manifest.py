"""The manifest inside a file: found, checked, refused where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_core.checkpoint.manifest import check_manifest, num_pieces
from engram_core.errors import CheckpointError
from tests.gguf_bytes import I8, Gguf, Tensor, toy

KEY = "deepseek41.engram.manifest_bytes"


def with_manifest(count: int = 1, piece_bytes: int = 1 << 26, kind: str = "u32") -> Gguf:
    file = toy()
    file.set(KEY, kind, piece_bytes)
    file.tensors.append(("engram.manifest", Tensor((32, count), I8, bytes(32 * count))))
    return file


def test_file_without_a_manifest_has_none(tmp_path: Path) -> None:
    assert check_manifest(toy().write(tmp_path / "a.gguf")) is None


def test_wrong_digests_are_all_named(tmp_path: Path) -> None:
    path = with_manifest().write(tmp_path / "a.gguf")
    found = check_manifest(path)
    assert found is not None
    assert (found.num_pieces, found.bad) == (1, (0,))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (with_manifest(count=2), r"expected I8 \[1, 32\], got I8 \[2, 32\]"),
        (with_manifest(piece_bytes=4_095), "4096 to 1073741824 bytes, got 4095"),
        (with_manifest(piece_bytes=2**31), "4096 to 1073741824 bytes, got 2147483648"),
        (with_manifest(piece_bytes=1, kind="bool"), "4096 to 1073741824 bytes, got True"),
    ],
    ids=["too_many", "pieces_too_small", "pieces_too_large", "no_number"],
)
def test_manifest_that_does_not_fit_is_refused(tmp_path: Path, file: Gguf, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_manifest(file.write(tmp_path / "a.gguf"))


def test_manifest_without_its_size_is_refused(tmp_path: Path) -> None:
    file = with_manifest()
    file.drop(KEY)
    with pytest.raises(CheckpointError, match=r"manifest_bytes.*got None"):
        check_manifest(file.write(tmp_path / "a.gguf"))


def test_pieces_cover_every_byte() -> None:
    assert [num_pieces(n, 10) for n in (0, 1, 10, 11)] == [0, 1, 1, 2]
