"""`engram demo`: a small checkpoint, a real server process, a real text, every answer checked.

The text (English, Chinese and code) is streamed through the client as a model runner would: an
uneven prefill, decode, drafts with truncation, a fork, an image span, a second client that
continues from a look-back, outputs residual, kv and rows, and steps over eight ragged sequences.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from engram_client import EngramClient
from engram_core.tools.presets import tokenizer_json
from engram_core.tools.synth import synth
from service.demo_judge import Judge, Verdict
from service.demo_story import Story

ROOT = Path(__file__).resolve().parents[1]
TEXT = Path(__file__).with_name("demo_text.txt")


def run() -> int:
    """Play the demo; print a table; return 0 if every answer was right, else 1."""
    console = Console(width=None if sys.stdout.isatty() else 100)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="engram-demo-") as folder:
        checkpoint = synth(
            Path(folder) / "demo.gguf", preset="demo", fmt="gguf", quant="Q2_K", seed=1
        ).path
        tokenizer = Tokenizer.from_buffer(tokenizer_json("demo", None))
        token_ids: list[int] = tokenizer.encode(TEXT.read_text("utf-8")).ids
        judge = Judge(_oracle().Oracle.open(checkpoint), _oracle())
        with _served(checkpoint) as url:
            console.print(f"{checkpoint.name} is served on {url}; {len(token_ids)} tokens")
            with EngramClient(url) as client, EngramClient(url) as second:
                Story(client, second, judge, token_ids).play()
        console.print("comparing every answer with the oracle ...")
        verdicts = judge.verdicts()
    console.print(_table(verdicts))
    wrong = [verdict.stage for verdict in verdicts if not verdict.is_right]
    console.print(f"WRONG: {', '.join(wrong)}" if wrong else "every answer is right")
    return 1 if wrong else 0


def _oracle() -> ModuleType:
    """Import the oracle. It is no part of the product: the checkout has it, a wheel does not."""
    if not (ROOT / "tests" / "oracle.py").is_file():
        raise SystemExit(
            "engram demo compares every answer with tests/oracle.py, which only a checkout of the "
            "repository has: run `make demo` there"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return importlib.import_module("tests.oracle")


@contextmanager
def _served(checkpoint: Path) -> Iterator[str]:
    """Serve a checkpoint in a process of its own; yields its URL."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ENGRAM_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "service", "serve", str(checkpoint), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready "):
                yield line.split()[1]
                return
        raise SystemExit(f"the server ended before it was ready (status {process.wait()})")
    finally:
        process.terminate()
        process.communicate()


def _table(verdicts: list[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage")
    table.add_column("output")
    for name in ("tokens", "ms", "worst difference", "promised"):
        table.add_column(name, justify="right")
    for verdict in verdicts:
        table.add_row(
            verdict.stage,
            verdict.output,
            str(verdict.tokens),
            f"{verdict.seconds * 1e3:.1f}",
            f"{verdict.worst:.3g}" + ("" if verdict.is_right else "  WRONG"),
            verdict.promise,
        )
    return table
