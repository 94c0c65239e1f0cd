"""What the kernel tells of the host's memory."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")


def host_available_bytes(meminfo: Path = MEMINFO, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Read MemAvailable, and the room of this process's container where that is less."""
    available = _bytes_by_name(meminfo)["MemAvailable"]
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            used = int((cgroup / "memory.current").read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            cache = int(stat["inactive_file"]) + int(stat["active_file"])
            available = min(available, int(limit) - used + cache)
    except OSError:
        pass  # no container limit (cgroup v2) to read
    return max(0, available)


def host_total_bytes(meminfo: Path = MEMINFO) -> int:
    """Read MemTotal."""
    return _bytes_by_name(meminfo)["MemTotal"]


def host_swap_used_bytes(meminfo: Path = MEMINFO) -> int:
    """Read how much of the swap is in use; 0 where there is none."""
    told = _bytes_by_name(meminfo)
    return max(0, told.get("SwapTotal", 0) - told.get("SwapFree", 0))


def _bytes_by_name(meminfo: Path) -> dict[str, int]:
    """Read the lines that are sizes: `MemTotal:  99 kB`."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[2:] == ["kB"]}
