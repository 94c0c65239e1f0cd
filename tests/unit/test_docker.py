"""docker/: locks agree with constraints.txt, the files lint, the probe and the scripts behave.

hadolint, shellcheck, docker-compose and promtool are used where they are on PATH (docker/check.sh
brings the first three, Debian's package prometheus the last).
"""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from service.metrics import Metrics
from service.settings import Settings, load_settings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
LOCKS = sorted((DOCKER / "locks").glob("*.txt"))
RUNTIME = [path for path in LOCKS if path.name.startswith(("cpu-", "cuda-"))]
PROFILES = ("cpu", "gb10", "x86")

PIN = re.compile(r"^([a-z0-9-]+)==(\S+) \\$", re.MULTILINE)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: Path) -> dict[str, str]:
    return dict(PIN.findall(lock.read_text()))


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return {normal(name): version for name, _, version in (line.partition("==") for line in lines)}


def run(*command: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command from the root; variables are added to PATH and HOME, nothing else."""
    base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, env=base | environ, capture_output=True, text=True
    )


def need(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not on PATH")


# Locks


@pytest.mark.parametrize("lock", RUNTIME, ids=lambda path: path.stem)
def test_lock_has_the_versions_of_constraints(lock: Path) -> None:
    locked = {name: version.removesuffix("+cpu") for name, version in pins(lock).items()}
    known = constraints()
    assert {name: known[name] for name in locked if name in known} == {
        name: version for name, version in locked.items() if name in known
    }
    unknown = {name for name in locked if name not in known}
    assert not {
        name
        for name in unknown
        if not name.startswith(("nvidia-", "cuda-")) and name not in ("triton", "setuptools")
    }


@pytest.mark.parametrize("lock", RUNTIME, ids=lambda path: path.stem)
def test_lock_covers_every_dependency(lock: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {normal(re.split(r"[><=!~\[; ]", line)[0]) for line in project["dependencies"]}
    assert wanted <= set(pins(lock)), "run docker/lock.sh"


def test_both_architectures_have_every_lock() -> None:
    kinds = {kind: {p.stem.removeprefix(f"{kind}-") for p in LOCKS if p.stem.startswith(kind)}
             for kind in ("cpu", "cuda", "build", "nvcc")}  # fmt: skip
    assert all(machines == {"x86_64", "aarch64"} for machines in kinds.values()), kinds


def test_cpu_lock_of_x86_64_has_no_cuda() -> None:
    locked = pins(DOCKER / "locks/cpu-x86_64.txt")
    assert locked["torch"].endswith("+cpu")
    assert not [name for name in locked if name.startswith(("nvidia", "cuda", "triton"))]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_locked_package_has_a_hash(lock: Path) -> None:
    text = lock.read_text()
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(lock)) > 0
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)


def test_nothing_names_a_registry() -> None:
    for path in [*DOCKER.rglob("*")]:
        if path.is_file() and path.suffix not in (".whl", ".pyc"):
            text = path.read_text()
            assert not re.search(r"https?://|index-url|/work/|docker\.io|ghcr|nvcr", text), path


# Dockerfile and scripts


def test_hadolint_accepts_the_dockerfile() -> None:
    need("hadolint")
    found = run("hadolint", "--failure-threshold", "style", "docker/Dockerfile")
    assert found.returncode == 0, found.stdout


def test_shellcheck_accepts_the_scripts() -> None:
    need("shellcheck")
    found = run("shellcheck", *sorted(DOCKER.glob("*.sh")))
    assert found.returncode == 0, found.stdout


def test_the_base_has_no_default() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    assert "ARG BASE" in lines
    outside = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert set(outside) <= {"${BASE}", "source", "runtime"}


def test_runtime_stage_runs_nothing_as_root() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    runtime = text[text.index("AS runtime") :]
    assert "USER 10001:10001" in runtime
    assert "\nRUN" not in runtime
    for line in ("STOPSIGNAL SIGTERM", "HEALTHCHECK", "ENTRYPOINT", "LABEL org.opencontainers"):
        assert line in runtime


def test_build_context_has_what_build_sh_copies() -> None:
    allowed = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    copied = re.search(r"for part in (.*); do", (DOCKER / "build.sh").read_text())
    assert copied
    assert {f"!{part}" for part in copied[1].split()} <= set(allowed)


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((), {}, "expected one argument"),
        (("tpu",), {}, "expected cpu or cuda, got 'tpu'"),
        (("cpu",), {"BASE": "python:3.11-slim"}, "expected BASE=IMAGE@sha256:DIGEST"),
        (("cpu",), {"BASE": ""}, "expected BASE=IMAGE@sha256:DIGEST"),
        (("cpu",), {"PREFIX": "/"}, "/ is there already"),
    ],
)
def test_build_refuses(
    arguments: tuple[str, ...], environ: dict[str, str], message: str, tmp_path: Path
) -> None:
    found = run(DOCKER / "build.sh", *arguments, **{"PREFIX": str(tmp_path / "p"), **environ})
    assert found.returncode == 1
    assert message in found.stderr
    assert not (tmp_path / "p").exists()


def stub(tmp_path: Path, body: str) -> str:
    """Return a prefix whose `engram` is a script."""
    command = tmp_path / "bin" / "engram"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\n{body}\n")
    command.chmod(0o755)
    return str(tmp_path)


def test_entrypoint_passes_arguments_and_status_on(tmp_path: Path) -> None:
    prefix = stub(tmp_path, 'printf "%s\\n" "$@"; umask; ulimit -c; exit 70')
    found = run(DOCKER / "entrypoint.sh", "serve", "/a b.gguf", PREFIX=prefix)
    assert found.stdout.split("\n") == ["serve", "/a b.gguf", "0077", "0", ""]
    assert found.returncode == 70


def test_entrypoint_becomes_the_command(tmp_path: Path) -> None:
    prefix = stub(tmp_path, 'echo "$$"')
    with subprocess.Popen(
        [DOCKER / "entrypoint.sh", "serve"],
        env={"PREFIX": prefix, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.communicate()[0].strip() == str(child.pid)


def test_entrypoint_refuses_no_command() -> None:
    found = run(DOCKER / "entrypoint.sh")
    assert found.returncode == 2
    assert "serve /checkpoint" in found.stderr


# The probe


@pytest.fixture(scope="module")
def probe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("healthcheck", DOCKER / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Answers(http.server.BaseHTTPRequestHandler):
    """Alive, not ready."""

    def do_GET(self) -> None:
        body = b"loading 12 %"
        self.send_response(200 if self.path == "/livez" else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "peer"

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_probe_tells_alive_from_ready(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server, serving(server):
        monkeypatch.setenv("ENGRAM_HOST", "0.0.0.0")
        monkeypatch.setenv("ENGRAM_PORT", str(server.server_port))
        assert probe.main([]) == 0
        assert probe.main(["ready"]) == 1
    assert "503 loading 12 %" in capsys.readouterr().err


def test_probe_asks_the_unix_socket(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    with socketserver.UnixStreamServer(path, Answers) as server, serving(server):
        monkeypatch.setenv("ENGRAM_UDS", path)
        assert probe.main([]) == 0
    assert probe.main([]) == 1


def test_probe_fails_where_nobody_listens(
    probe: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ENGRAM_UDS", str(tmp_path / "none"))
    assert probe.main([]) == 1
    assert probe.main(["now"]) == 2


def test_probe_and_service_have_the_same_defaults(probe: ModuleType) -> None:
    asked = probe.connection({})
    assert (asked.host, asked.port) == (
        Settings.model_fields["host"].default,
        Settings.model_fields["port"].default,
    )


# Compose and systemd


def services() -> dict[str, Any]:
    """The compose file, with anchors and merges resolved."""
    document = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return dict(document["services"])


@pytest.mark.parametrize("profile", PROFILES)
def test_docker_compose_accepts_the_profile(profile: str, tmp_path: Path) -> None:
    need("docker-compose")
    found = run(
        *("docker-compose", "--file", "docker/compose.yaml", "--profile", profile),
        *("config", "--format", "json"),
        HOME=str(tmp_path),
        BASE="image@sha256:0",
    )
    assert found.returncode == 0, found.stderr
    assert list(json.loads(found.stdout)["services"]) == [profile]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_service_has_no_more_than_it_needs(profile: str) -> None:
    service = services()[profile]
    assert service["profiles"] == [profile]
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(volume["read_only"] for volume in service["volumes"])
    assert "privileged" not in service
    assert service["ports"] == ["127.0.0.1:8321:8321"]
    assert service["deploy"]["restart_policy"] == {"condition": "on-failure", "delay": "15s"}


def test_compose_says_when_host_networking_is_worth_it() -> None:
    text = (DOCKER / "compose.yaml").read_text()
    assert "`network_mode: host` instead of `ports`" in " ".join(text.replace("#", "").split())


def test_dockerfile_leaves_the_work_to_the_scripts() -> None:
    """Few lines, and each RUN is the compiler's installation or build.sh."""
    text = (DOCKER / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) < 40
    runs = [line for line in lines if line.startswith("RUN")]
    assert [("g++" in line, "docker/build.sh c" in line) for line in runs] == [
        (True, False), (False, True), (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES)
def test_the_grace_period_outlasts_the_drain(profile: str) -> None:
    grace_s = float(services()[profile]["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings.model_fields["shutdown_timeout_s"].default


@pytest.mark.parametrize("profile", PROFILES)
def test_the_settings_of_a_profile_are_accepted(profile: str) -> None:
    load_settings({}, services()[profile]["environment"])


@pytest.mark.parametrize("profile", ["gb10", "x86"])
def test_gpu_profiles_reserve_a_gpu(profile: str) -> None:
    service = services()[profile]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}


def unit_values(name: str) -> list[str]:
    lines = (DOCKER / "engram.service").read_text().splitlines()
    return [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]


def test_unit_stops_after_the_drain_and_restarts_later() -> None:
    assert float(unit_values("TimeoutStopSec")[0]) > 30
    assert unit_values("Restart") == ["on-failure"]
    assert float(unit_values("RestartSec")[0]) >= 10
    assert unit_values("Type") == ["notify"]


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    need("systemd-analyze")
    text = (DOCKER / "engram.service").read_text()
    copy = tmp_path / "engram.service"
    copy.write_text(text.replace("/opt/engram/bin/engram", sys.executable))
    found = run("systemd-analyze", "verify", "--man=no", copy)
    mentioned = [line for line in found.stderr.splitlines() if "engram.service" in line]
    assert mentioned == []


# Alerts


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    need("promtool")
    for command in (("check", "rules", "alerts.yaml"), ("test", "rules", "alerts.test.yaml")):
        found = run("promtool", *command[:-1], DOCKER / command[-1])
        assert found.returncode == 0, found.stdout + found.stderr


def test_promtool_accepts_the_metrics() -> None:
    need("promtool")
    metrics = Metrics()
    metrics.requests.labels("step", "ok").inc()
    metrics.watch(lambda: {"sessions": 1, "tokens": 2})
    found = subprocess.run(
        ["promtool", "check", "metrics"], input=metrics.exposition(), capture_output=True
    )
    assert (found.returncode, found.stderr) == (0, b"")


def test_alerts_name_metrics_that_exist() -> None:
    metrics = Metrics()
    families = {family.name: family.type for family in metrics.registry.collect()}
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
    known = {
        name + ending for name, kind in families.items() for ending in endings.get(kind, ("_info",))
    }
    text = (DOCKER / "alerts.yaml").read_text()
    rules = yaml.safe_load(text)["groups"][0]["rules"]
    used = set(re.findall(r"\bengram_\w+", " ".join(rule["expr"] for rule in rules)))
    assert used <= known, used - known


def test_every_alert_is_tested() -> None:
    rules = yaml.safe_load((DOCKER / "alerts.yaml").read_text())["groups"][0]["rules"]
    tests = yaml.safe_load((DOCKER / "alerts.test.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    for rule in rules:
        named = [case for case in cases if case["alertname"] == rule["alert"]]
        assert any(case.get("exp_alerts") for case in named), rule["alert"]
        assert not all(case.get("exp_alerts") for case in named), rule["alert"]
