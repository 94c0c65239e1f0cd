"""What the documents say is there, runs, and is what the code says."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import typer

from engram_core.tools.synth import synth
from service import cli
from service.metrics import ENGINE, Metrics
from service.problems import PROBLEMS
from service.settings import Settings
from tests.integration.server import Server

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in DOCUMENTS}

EXECUTED = {"synth", "inspect", "hash", "verify", "config", "keys add"}
"""Commands of the documents that are run; the others serve, measure or take minutes."""

PLACES = {
    "CKPT": "tiny.gguf",
    "/srv/models/model.gguf": "tiny.gguf",
    "/tmp/demo.gguf": "demo.gguf",
    "keys.txt": "keys",
    "keys/keys": "keys",
    "/etc/engram/keys": "keys",
    "cuda:0": "cpu",
}
"""What stands for a document's example while its command is run."""

PRELUDES = {
    ("docs/client.md", 1): "sessions = [client.open_session() for _ in range(3)]\n"
    "ids = [0, 671, 6102]\n",
    ("docs/client.md", 2): "geometry = client.info()['geometry']\n"
    "residual = torch.zeros((3, geometry['hc_mult'], geometry['dim']))\n",
}
"""(document, index of its Python block) -> what a runner would have by then."""


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def lines(text: str) -> Iterator[str]:
    """Commands of the shell blocks, one a line: continued ones joined, here-documents dropped."""
    for block in blocks(text, "sh"):
        block = re.sub(r"<<'EOF'\n.*?^EOF$", "", block, flags=re.MULTILINE | re.DOTALL)
        for line in block.replace("\\\n", " ").splitlines():
            yield from re.split(r" && ", re.sub(r"(^|\s)#.*$", "", line))


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


# ---- links, paths, names


@pytest.mark.parametrize("document", TEXTS)
def test_every_link_leads_somewhere(document: str) -> None:
    folder = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[document]):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = folder / path if path else ROOT / document
        assert found.exists(), target
        assert found.resolve().is_relative_to(ROOT), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", found.read_text("utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target


@pytest.mark.parametrize("document", TEXTS)
def test_every_path_in_code_is_there(document: str) -> None:
    top = "engram_core|engram_client|service|tests|csrc|docker|benchmarks|docs|examples|openapi"
    for path in re.findall(rf"`((?:{top})/[\w./*-]+)`", TEXTS[document]):
        assert path in ("docker/wheels/", "docker/wheels") or list(ROOT.glob(path)), path


@pytest.mark.parametrize("document", TEXTS)
def test_every_make_verb_is_there(document: str) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    commands = " ".join([*lines(TEXTS[document]), *re.findall(r"`([^`\n]+)`", TEXTS[document])])
    assert {*re.findall(r"\bmake ([a-z][a-z-]*)", commands)} <= {*phony[1].split()}


def test_documents_name_metrics_that_exist() -> None:
    made = {metric.name for metric in Metrics().registry.collect()}
    made |= {told.name for told in ENGINE.values()}
    for document in ("docs/tuning.md", "docs/operating.md", "docs/gb10.md"):
        for name in re.findall(r"`(engram_[a-z_]+)[`{]", TEXTS[document]):
            if name not in ("engram_core", "engram_client"):
                assert re.sub(r"_(total|info)$", "", name) in made, name


# ---- commands


def command_of(words: list[str]) -> tuple[str, click.Command, list[str]]:
    """Name, command and arguments of `engram ...`; fails for one that does not exist."""
    group: Any = typer.main.get_command(cli.app)
    name: list[str] = []
    while hasattr(group, "commands"):
        assert words, "engram without a command"
        assert words[0] in group.commands, words
        name.append(words[0])
        group, words = group.commands[words[0]], words[1:]
    return " ".join(name), group, words


def engram_lines() -> list[Any]:
    """(document, words) of every `engram ...` in the shell blocks."""
    found = {}
    for document, text in TEXTS.items():
        for line in lines(text):
            words = shlex.split(re.sub(r"^\w+=\S+ ", "", line.strip()))
            if words and re.fullmatch(r"(.*/)?(engram|entrypoint\.sh)", words[0]):
                found[line.strip()] = pytest.param(words[1:], id=f"{document}: {line.strip()}")
    return list(found.values())


@pytest.mark.parametrize("words", engram_lines())
def test_command_of_a_document_exists(words: list[str]) -> None:
    name, command, arguments = command_of(words)
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= known, name


@pytest.mark.parametrize("document", TEXTS)
def test_command_in_a_sentence_exists(document: str) -> None:
    for words in re.findall(r"`(?:\S*/)?engram ([a-z][^`]*)`", TEXTS[document]):
        command_of([re.sub(r"\W+$", "", word) for word in words.split()])


@pytest.mark.parametrize(
    "words", [p for p in engram_lines() if command_of(p.values[0])[0] in EXECUTED]
)
def test_command_of_a_document_runs(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    synth(tmp_path / "tiny.gguf", preset="tiny", fmt="gguf", quant="Q2_K", seed=1)
    words = [PLACES.get(word, word) for word in words]
    assert not any(word.startswith("/") for word in words), "say in PLACES what stands for it"
    monkeypatch.setattr(sys, "argv", ["engram", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code


# ---- Python


@pytest.mark.parametrize("document", [d for d in TEXTS if blocks(TEXTS[d], "python")])
def test_python_of_a_document_runs(document: str, demo_server: Server) -> None:
    known: dict[str, Any] = {"torch": torch}
    try:
        for index, block in enumerate(blocks(TEXTS[document], "python")):
            code = PRELUDES.get((document, index), "") + block
            exec(code.replace("http://127.0.0.1:8321", demo_server.url), known)
    finally:
        known["client"].close()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_commands_of_the_client_page_are_answered(demo_server: Server, tmp_path: Path) -> None:
    (block,) = [block for block in blocks(TEXTS["docs/client.md"], "sh") if "curl" in block]
    script = block.replace("http://127.0.0.1:8321", demo_server.url).replace("curl -s", "curl -fsS")
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith('{"closed":1}')
    assert (tmp_path / "kv.bf16").stat().st_size == 4 * 5 * 1024 * 2
    assert (tmp_path / "updated.f32").stat().st_size == 4 * 4 * 1024 * 4


def test_the_example_runner_gates_as_the_service_does(
    demo_server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(ROOT / "examples" / "runner.py"))["main"](demo_server.url)
    assert capsys.readouterr().out == "31 tokens through layers [1, 14]\n"


# ---- tables


def table(document: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading ("": under the title), its head left out."""
    parts = re.split(r"^##? (.*)\n", TEXTS[document], flags=re.MULTILINE)[1:]
    section = dict(zip(parts[::2], parts[1::2], strict=True))[heading or parts[0]]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_errors_by_code_are_those_of_the_service() -> None:
    told = {}
    for codes, statuses, advice in table("docs/troubleshooting.md", "Errors by code"):
        status = [int(text) for text in statuses.split(",")]
        assert advice
        status *= len(names(codes)) if len(status) == 1 else 1
        told |= dict(zip(names(codes), status, strict=True))
    known = {
        "internal" if kind.status == 500 else error.code: kind.status
        for error, kind in PROBLEMS.items()
    }
    assert told == known


def test_reasons_not_to_start_are_the_words_of_the_code() -> None:
    product = ("service", "engram_core")
    code = " ".join(
        path.read_text("utf-8") for folder in product for path in (ROOT / folder).rglob("*.py")
    )
    code = re.sub(r'"\s*f?"', "", re.sub(r"\s+", " ", code))
    rows = table("docs/troubleshooting.md", "It does not start")
    assert len(rows) > 10
    for said, advice in rows:
        assert advice
        for words in re.findall(r"`([^`]+)`", said):
            assert words in code, words


def test_settings_are_those_of_the_service() -> None:
    told = {}
    for cell, default, _ in table("docs/operating.md", "Settings"):
        for name in names(cell):
            told[name] = default if len(names(cell)) == 1 else None
    assert set(told) == set(Settings.model_fields)
    for name, default in told.items():
        value = Settings.model_fields[name].default
        if default is not None and value is not None:
            assert default == (f"{value:g}" if isinstance(value, float) else str(value)), name


def test_every_threat_names_a_test_that_exists() -> None:
    rows = table("docs/threat-model.md", "")
    assert len(rows) > 20
    for threat, _, test in rows:
        found = re.fullmatch(r"\[(\w+)\]\(\.\./(tests/[\w/]+\.py)\)", test)
        assert found, threat
        tree = ast.parse((ROOT / found[2]).read_text("utf-8"))
        assert found[1] in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, test
