"""Imports point one way, and importing costs and touches nothing (DESIGN.md 3)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import engram_core

ROOT = Path(__file__).parents[2]
PACKAGES = ("engram_core", "engram_client", "service")

# DESIGN.md 3, file by file: a file imports only files of the lines above its own, and files of one
# line do not import each other. A file that is not listed fails the test: this is the map.
LEVELS = {
    "engram_core": [
        "errors machine meminfo progress",
        "host_memory",
        "engine_types",
        "hash_constants token_map quant",
        "geometry",
        "hashing weights tables",
        "checkpoint.layouts checkpoint.files checkpoint.sources",
        "checkpoint.gguf checkpoint.safetensors checkpoint.gguf_header",
        "checkpoint.gguf_split checkpoint.config checkpoint.manifest checkpoint.write",
        "checkpoint.dense",
        "checkpoint.identity",
        "checkpoint.assemble",
        "checkpoint.gguf_constants checkpoint.safetensors_checkpoint",
        "checkpoint.gguf_checkpoint",
        "checkpoint",
        "pages",
        "fence registry kv_store memory",
        "refusals doctor_report",
        "sessions",
        "backends.base backends.native backends.gate backends.projection",
        "backends.cpu backends.device backends.arguments",
        "backends.self_check backends.disk_rows backends.pinned backends.race",
        "backends.stored_wkv",
        "backends.reference backends.engram_v41 backends.staging",
        "backends.cuda_check backends.projections backends.timing",
        "backends.host_gates backends.project_queue backends.read_outs",
        "backends.graphs",
        "backends.cuda_near",
        "backends.choices",
        "backends.cuda_backend",
        "backends.cuda",
        "backends",
        "loader",
        "jobs",
        "queues reads stages",
        "batches",
        "requests lanes near beside",
        "scheduler",
        "dispatch direct",
        "waiting",
        "steps",
        "engine",
        "tools.presets tools.plain tools.sparse_rows tools.synth_values tools.layout_a",
        "tools.encode tools.gate_terms",
        "tools.synth_constants tools.row_stream",
        "tools.extract_plan",
        "tools.synth tools.inspect tools.verify tools.bench tools.extract",
        "tools.probe tools.probe_machine tools.probe_driver",
        "tools.probe_host tools.probe_cuda",
        "tools.doctor",
        "tools.compare",
        "tools.plot",
        "tools",
        "",
    ],
    "engram_client": [
        "wire problems proto proto.engram_pb2",
        "proto.engram_pb2_grpc",
        "far",
        "arrays http1 history retry",
        "shared state",
        "messages",
        "segments exchange assembly",
        "protocol",
        "direct",
        "connection direct_step setup verbs",
        "aio_connection",
        "client aio",
        "remote local",
        "",
    ],
    "service": [
        "",
        "histogram heap",
        "console logs strict problems metrics notify tracing",
        "schemas settings admission versions",
        "operations access flags listeners bodies",
        "shm",
        "state",
        "calls steps info loading verbs turn landing",
        "plain_steps",
        "weights status_page desk reads",
        "exchange",
        "heads",
        "recall step_recall",
        "door fast_path rpc.messages rpc.calls",
        "rpc.plain",
        "rpc.steps",
        "rpc.streams rpc.unary rpc",
        "rpc.server",
        "transport routes",
        "openapi",
        "api_page",
        "app",
        "documents",
        "lifecycle",
        "demo_judge",
        "demo_story",
        "demo",
        "cli",
        "__main__",
    ],
}


def modules(package: str) -> dict[str, Path]:
    """Dotted name without the package ("" for its root) -> file."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module named by an import, function bodies and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = (ROOT / (name.replace(".", "/") + ".py")).exists()
                yield name if is_module else node.module or ""


def level_of(package: str) -> dict[str, int]:
    return {name: i for i, row in enumerate(LEVELS[package]) for name in (row.split() or [""])}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_has_its_place_in_the_order(package: str) -> None:
    unplaced = set(modules(package)) - set(level_of(package))
    assert not unplaced, f"say in LEVELS where these stand: {sorted(unplaced)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_file_imports_only_files_above_it(package: str) -> None:
    level = level_of(package)
    wrong = [
        f"{package}/{name} imports {imported}"
        for name, path in modules(package).items()
        for imported in imports(path)
        if imported.startswith(package + ".")
        and level.get(imported.removeprefix(package + "."), -1) >= level.get(name, 99)
    ]
    assert not wrong


def foreign(package: str) -> set[tuple[str, str]]:
    """(module, imported module) for imports of our other packages."""
    return {
        (name, imported)
        for name, path in modules(package).items()
        for imported in imports(path)
        for other in (*PACKAGES, "tests")
        if other != package and imported.split(".")[0] == other
    }


def test_core_imports_no_other_package_of_ours() -> None:
    assert foreign("engram_core") == set()


def test_client_imports_only_the_root_of_core_and_only_in_local() -> None:
    assert foreign("engram_client") <= {("local", "engram_core")}


def test_service_never_imports_the_tests() -> None:
    assert not {pair for pair in foreign("service") if pair[1].split(".")[0] == "tests"}


def test_core_reads_no_environment_and_prints_nothing() -> None:
    wrong = []
    for name, path in modules("engram_core").items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                wrong.append(f"{name}:{node.lineno} {node.attr}")
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
                wrong.append(f"{name}:{node.lineno} print")
    assert not wrong


def test_wire_needs_neither_torch_nor_anything_of_ours() -> None:
    wire = modules("engram_client")["wire"]
    top = [
        n for n in ast.parse(wire.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)
    ]
    names = {a.name for n in top if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module or "" for n in top if isinstance(n, ast.ImportFrom)}
    assert not {n for n in names if n.split(".")[0] in ("torch", "httpx", *PACKAGES)}


def test_oracle_imports_nothing_of_ours() -> None:
    for name in ("oracle", "oracle_files", "session_model"):
        ours = {i for i in imports(ROOT / "tests" / f"{name}.py") if i.split(".")[0] in PACKAGES}
        assert not ours, name


def test_what_others_import_says_that_it_is_typed() -> None:
    for package in ("engram_client", "engram_core"):
        assert (ROOT / package / "py.typed").is_file(), package


def test_files_are_named_by_content() -> None:
    vague = {"utils", "util", "helpers", "common", "misc"}
    assert not [p for p in ROOT.glob("*/**/*.py") if p.stem in vague and ".venv" not in p.parts]


def run_python(code: str) -> str:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=ROOT
    )
    return done.stdout.strip()


def test_importing_touches_no_gpu() -> None:
    names = [
        ".".join(filter(None, (package, name)))
        for package in PACKAGES
        for name in modules(package)
        if name != "__main__"
    ]
    code = f"import {', '.join(names)}; import torch; print(torch.cuda.is_initialized())"
    assert run_python(code) == "False"


def test_client_imports_without_torch_and_without_core() -> None:
    code = (
        "import engram_client, sys;"
        "names = {m.split('.')[0] for m in sys.modules};"
        "print(sorted(names & {'torch', 'engram_core', 'service', 'fastapi', 'httpx'}))"
    )
    assert run_python(code) == "[]"


def test_the_command_line_starts_without_torch() -> None:
    assert run_python("import service.cli, sys; print('torch' in sys.modules)") == "False"


def test_every_name_of_the_core_is_where_it_says() -> None:
    for name in engram_core.__all__:
        assert getattr(engram_core, name).__name__ == name
    assert set(engram_core.__all__) <= set(dir(engram_core))
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        engram_core.Engin  # noqa: B018  the name is looked up
