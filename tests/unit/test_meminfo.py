"""What the kernel tells of the host's memory, and of a container's."""

from __future__ import annotations

from pathlib import Path

from engram_core.meminfo import host_available_bytes, host_swap_used_bytes, host_total_bytes


def fake_host(folder: Path, **files: str) -> Path:
    (folder / "meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   2048 kB\n")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder / "meminfo"


def test_available_memory_is_that_of_the_host(tmp_path: Path) -> None:
    meminfo = fake_host(tmp_path)
    assert host_available_bytes(meminfo, tmp_path) == 2048 * 1024
    fake_host(tmp_path, memory_max="max\n")
    assert host_available_bytes(meminfo, tmp_path) == 2048 * 1024


def test_a_container_limit_counts_without_its_page_cache(tmp_path: Path) -> None:
    stat = "anon 1\ninactive_file 300\nactive_file 200\n"
    meminfo = fake_host(tmp_path, memory_max="2000", memory_current="1000", memory_stat=stat)
    assert host_available_bytes(meminfo, tmp_path) == 2000 - 1000 + 500


def test_this_machine_can_be_read() -> None:
    assert host_available_bytes() > 0


def test_total_memory_is_read(tmp_path: Path) -> None:
    assert host_total_bytes(fake_host(tmp_path)) == 99 * 1024
    assert host_total_bytes() >= host_available_bytes()


def test_swap_in_use_is_read(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nSwapTotal:  8 kB\nSwapFree:  5 kB\nHugePages_Total: 0\n")
    assert host_swap_used_bytes(meminfo) == 3 * 1024
    meminfo.write_text("MemTotal: 9 kB\n")
    assert host_swap_used_bytes(meminfo) == 0
    assert host_swap_used_bytes() >= 0
