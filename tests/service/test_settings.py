"""Settings: flag, ENGRAM_ variable, file, default; everything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.flags import as_toml
from service.settings import GIB, Settings, SettingsError, is_loopback, load_settings

NAMES = (
    "host port uds grpc_port device placement doctor_report max_tokens max_sessions "
    "max_held_tokens session_ttl_s kv_store_bytes ahead_tokens in_flight_bytes "
    "memory_reserve_bytes shared_memory_bytes graphs wkv_copy "
    "keys_file tls_cert tls_key shutdown_timeout_s log_format"
)


def refuse(environ: dict[str, str], *words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({}, environ)
    for word in words:
        assert word in str(refused.value)


def test_settings_are_those_of_the_interface_and_no_others() -> None:
    assert list(Settings.model_fields) == NAMES.split()


def test_defaults_are_those_of_the_interface() -> None:
    settings = load_settings({}, {}).settings
    assert (settings.host, settings.port, settings.max_tokens) == ("127.0.0.1", 8321, 8192)
    assert (settings.max_sessions, settings.max_held_tokens) == (4096, 64 << 20)
    assert (settings.session_ttl_s, settings.shutdown_timeout_s) == (600, 30)


def test_flag_comes_before_variable_before_file(tmp_path: Path) -> None:
    file = tmp_path / "engram.toml"
    file.write_text('port = 1\nmax_tokens = 2\nin_flight_bytes = "2GiB"\n')
    environ = {"ENGRAM_PORT": "3", "ENGRAM_MAX_TOKENS": "4"}
    effective = load_settings({"port": "5", "host": None}, environ, file)
    assert effective.settings.port == 5
    assert effective.settings.max_tokens == 4
    assert effective.settings.in_flight_bytes == 2 * GIB
    assert effective.sources["port"] == "flag"
    assert effective.sources["max_tokens"] == "ENGRAM_MAX_TOKENS"
    assert effective.sources["in_flight_bytes"] == str(file)
    assert effective.sources["host"] == "default"


def test_unknown_variable_names_the_nearest() -> None:
    refuse({"ENGRAM_PROT": "7"}, "ENGRAM_PROT", "'7'", "ENGRAM_PORT")


@pytest.mark.parametrize("name", ["ENGRAM_port", "ENGRAM_", "ENGRAM_XYZZY"])
def test_variable_that_is_no_setting_is_refused(name: str) -> None:
    refuse({name: "7"}, name)


def test_variables_of_others_are_not_looked_at() -> None:
    load_settings({}, {"PATH": "x", "ENGRAMS": "y"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "65536"),
        ("PORT", "-1"),
        ("PORT", "80a"),
        ("PORT", "8_0"),
        ("PORT", ""),
        ("MAX_TOKENS", "0"),
        ("MAX_TOKENS", "5.0"),
        ("MAX_TOKENS", "16385"),
        ("DEVICE", "gpu"),
        ("DEVICE", "cuda"),
        ("PLACEMENT", "ram"),
        ("GRAPHS", "on"),
        ("SESSION_TTL_S", "nan"),
        ("SESSION_TTL_S", "0"),
        ("IN_FLIGHT_BYTES", "1GB"),
        ("IN_FLIGHT_BYTES", "1.5GiB"),
        ("KV_STORE_BYTES", "-1"),
        ("LOG_FORMAT", "xml"),
        ("UDS", ""),
        ("KEYS_FILE", ""),
    ],
)
def test_malformed_value_is_refused_with_variable_and_value(name: str, value: str) -> None:
    refuse({f"ENGRAM_{name}": value}, f"ENGRAM_{name}", repr(value))


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("4096", 4096), ("1KiB", 1024), ("3 MiB", 3 << 20), ("1TiB", 1 << 40)]
)
def test_sizes_are_bytes_or_binary_units(text: str, num_bytes: int) -> None:
    assert load_settings({"kv_store_bytes": text}, {}).settings.kv_store_bytes == num_bytes


@pytest.mark.parametrize(
    "text",
    ["prot = 1", "port = ", "port = true", "[host]\nx = 1", "session_ttl_s = inf", 'uds = ""'],
)
def test_file_that_is_not_understood_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engram.toml"
    file.write_text(text)
    with pytest.raises(SettingsError):
        load_settings({}, {}, file)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        load_settings({}, {}, tmp_path / "none.toml")


def test_half_a_certificate_is_refused() -> None:
    refuse({"ENGRAM_TLS_CERT": "c.pem"}, "tls_key")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.org"])
def test_nothing_beyond_loopback_without_keys(host: str) -> None:
    refuse({"ENGRAM_HOST": host}, "keys_file", host)


def test_unix_socket_alone_needs_no_keys_whatever_the_default_host() -> None:
    settings = load_settings({"uds": "/run/engram.sock"}, {}).settings
    assert not settings.has_tcp
    assert load_settings({"uds": "/run/e.sock", "port": "0"}, {}).settings.has_tcp


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True),
        ("LOCALHOST", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("[::1]", True),
        ("::1", True),
        ("127.0.0.1.evil.example", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),
        ("", False),
    ],
)
def test_loopback_names(host: str, *, is_ours: bool) -> None:
    assert is_loopback(host) is is_ours


def test_printed_settings_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "engram.toml"
    effective = load_settings({"uds": '/tmp/a"b', "kv_store_bytes": "1GiB"}, {})
    file.write_text("\n".join(as_toml(effective)))
    assert load_settings({}, {}, file).settings == effective.settings


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1
