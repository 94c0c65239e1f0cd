"""The settings: one frozen object, built once at start from flags, environment, file, defaults.

A flag `--max-tokens`, the variable `ENGRAM_MAX_TOKENS` and the key `max_tokens` of a TOML file
(`engram serve --config FILE`) are the same setting; the first of them that is given counts.
"""

from __future__ import annotations

import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from engram_client import wire
from service.strict import nearest

PREFIX = "ENGRAM_"
MIB, GIB = 1 << 20, 1 << 30

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB, "TiB": 1 << 40}
_DEVICE = re.compile(r"auto|cpu|cuda:(0|[1-9][0-9]?)", re.ASCII)


class SettingsError(Exception):
    """A setting that is unknown or malformed: one line for the operator."""


def _count(value: Any) -> int:
    """Read an integer strictly, from text or TOML."""
    if type(value) is int:
        return value
    if not isinstance(value, str):
        raise ValueError("an integer is expected")
    try:
        return wire.parse_int(value, "value")
    except wire.WireError:
        raise ValueError("an integer is expected") from None


def _size(value: Any) -> int:
    """Read a number of bytes: 1073741824 or "1GiB"."""
    if isinstance(value, str) and (found := re.fullmatch(r"([0-9]+) ?([KMGT]iB)", value)):
        return _count(found[1]) * _UNITS[found[2]]
    try:
        return _count(value)
    except ValueError:
        raise ValueError('bytes are expected, such as 1073741824 or "1GiB"') from None


def _seconds(value: Any) -> float:
    """Read seconds: 600 or 0.5; nothing fancier."""
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,6})?", value):
        return float(value)
    raise ValueError("seconds are expected, such as 600 or 0.5")


def _path(value: Any) -> Path:
    """Read a path: an empty one, perhaps an unset variable, would be the present folder."""
    if isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("a path is expected")


def _device(value: Any) -> Any:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError("auto, cpu or cuda:N is expected")
    return value


Count = Annotated[int, BeforeValidator(_count)]
Size = Annotated[int, BeforeValidator(_size)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
File = Annotated[Path, BeforeValidator(_path)]
Device = Annotated[str, BeforeValidator(_device)]


class Settings(BaseModel):
    """Everything an operator can choose. None: the default depends on the device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: Count = Field(
        default=8321, ge=0, le=65535, description="port to listen on; 0 takes a free one"
    )
    uds: File | None = Field(
        default=None,
        description="Unix socket to listen on (mode 0600); TCP only if host or port is set",
    )
    grpc_port: Count | None = Field(
        default=None, ge=0, le=65535, description="port of the gRPC door; 0 takes a free one"
    )
    device: Device = Field(default="auto", description="auto, cpu or cuda:N")
    placement: Literal["auto", "device", "host", "disk"] = Field(
        default="auto", description="where the tables live: auto, device, host or disk"
    )
    doctor_report: File | None = Field(
        default=None,
        description="what `engram doctor --out` wrote on this machine; placement auto goes by it",
    )
    max_tokens: Count = Field(
        default=8192, ge=1, le=16_384, description="tokens of one request and of one batch"
    )
    max_sessions: Count = Field(default=4096, ge=1, le=1 << 20, description="open sessions")
    max_held_tokens: Count = Field(
        default=64 << 20, ge=1, le=1 << 36, description="token ids held by all sessions together"
    )
    session_ttl_s: Seconds = Field(
        default=600.0, gt=0, description="idle seconds until a session expires"
    )
    kv_store_bytes: Size | None = Field(
        default=None,
        ge=0,
        description="kv store (8GiB; 2GiB on integrated GPUs; 256MiB on the CPU)",
    )
    ahead_tokens: Count | None = Field(
        default=None, ge=0, description="largest push worked ahead (8192 on CUDA, 64 on the CPU)"
    )
    in_flight_bytes: Size | None = Field(
        default=None, ge=MIB, description="bodies and answers (1GiB; 512MiB on integrated GPUs)"
    )
    memory_reserve_bytes: Size | None = Field(
        default=None,
        ge=0,
        description="memory left to others (16GiB on integrated GPUs, else 1GiB)",
    )
    shared_memory_bytes: Size = Field(
        default=0, ge=0, description="shared memory for clients of the Unix socket; 0 = off"
    )
    graphs: Literal["auto", "off"] = Field(
        default="auto", description="CUDA graphs of small batches, where faster (off: launches)"
    )
    wkv_copy: Literal["on", "off"] = Field(
        default="on", description="keep wkv as bfloat16 on a GPU beside its stored form"
    )
    keys_file: File | None = Field(
        default=None, description="API keys: `name scope sha256(key)` a line"
    )
    tls_cert: File | None = Field(default=None, description="certificate chain, PEM")
    tls_key: File | None = Field(default=None, description="private key, PEM")
    shutdown_timeout_s: Seconds = Field(
        default=30.0, ge=0, description="longest drain after SIGTERM"
    )
    log_format: Literal["auto", "text", "json"] = Field(
        default="auto", description="text, json, or auto: text on a terminal, else json"
    )

    @property
    def has_tcp(self) -> bool:
        """Whether a TCP port is served."""
        return self.uds is None or bool(self.model_fields_set & {"host", "port"})

    @property
    def is_beyond_loopback(self) -> bool:
        """Whether others than this machine can reach the service."""
        return self.has_tcp and not is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Effective:
    """The settings and where each came from: "flag", "ENGRAM_...", the file, or "default"."""

    settings: Settings
    sources: Mapping[str, str]


def load_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None = None
) -> Effective:
    """Build the settings from flags, environment, file and defaults, in this order.

    Raises SettingsError: a setting that is unknown, malformed or at odds with another.
    """
    given: dict[str, Any] = {}
    sources = dict.fromkeys(Settings.model_fields, "default")
    for source, values in (
        _from_file(config) if config else ("", {}),
        ("", _from_environment(environ)),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ):
        for name, value in values.items():
            if name not in Settings.model_fields:
                raise SettingsError(f"{source}: {_unknown(name, name)}")
            given[name] = value
            sources[name] = source or PREFIX + name.upper()
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        raise _malformed(error, given, sources) from None
    _check_together(settings)
    return Effective(settings, sources)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for variable, value in environ.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in Settings.model_fields or variable != PREFIX + name.upper():
            raise SettingsError(_unknown(variable, name, PREFIX, f" (value {value[:80]!r})"))
        values[name] = value
    return values


def _from_file(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        return str(path), tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"{path}: not TOML: {error}") from None


def _unknown(shown: str, name: str, prefix: str = "", note: str = "") -> str:
    known = list(Settings.model_fields)
    close = nearest(name, known)
    if close is None:
        return f"unknown setting {shown}{note}; known: {', '.join(known)}"
    spelled = prefix + close.upper() if prefix else close
    return f"unknown setting {shown}{note}; did you mean {spelled}?"


def _malformed(
    error: ValidationError, given: Mapping[str, Any], sources: Mapping[str, str]
) -> SettingsError:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    source = sources.get(name, "default")
    where = f"{name} in {source}"
    if source == "flag":
        where = f"--{name.replace('_', '-')}"
    elif source.startswith(PREFIX):
        where = source
    allowed = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return SettingsError(f"setting {where}: {str(given.get(name))[:80]!r} is refused: {allowed}")


def _check_together(settings: Settings) -> None:
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise SettingsError("tls_cert and tls_key belong together: give both or neither")
    if settings.is_beyond_loopback and settings.keys_file is None:
        raise SettingsError(
            f"host {settings.host} is reachable from other machines and no keys_file is set: "
            "make a key with `engram keys add NAME --keys-file FILE`, or listen on 127.0.0.1"
        )
