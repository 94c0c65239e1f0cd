"""The command `engram`. Errors are one line on stderr; exit status 1, or 2 for wrong usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from engram_client import wire
from engram_core.errors import EngramError
from service.console import progress_bars
from service.flags import as_toml, with_settings
from service.listeners import ListenError
from service.settings import Effective, SettingsError

app = typer.Typer(
    name="engram",
    help="DeepSeek-V4.1 Engram as a service: hash, gather, wkv and gate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="API keys.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


def _named(text: str) -> Path:
    """A path that is named: an empty one, perhaps an unset variable, would be this folder."""
    if not text:
        raise typer.BadParameter("expected a path, got an empty one; is a variable not set?")
    return Path(text)


Checkpoint = Annotated[
    Path,
    typer.Argument(
        metavar="CKPT", parser=_named, help="a GGUF file, or a folder with a checkpoint"
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def main() -> None:
    """Run the command line."""
    try:
        status = app(standalone_mode=False)
    except typer.TyperException as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        if not text:
            sys.exit(2)  # a command without arguments: its help has been printed
        _refuse(text, 2)
    except SettingsError as error:
        _refuse(str(error), 2)
    except EngramError as error:
        _refuse(error.message, 1)
    except OSError as error:
        named = error.filename is not None and error.strerror
        _refuse(f"{error.filename}: {error.strerror}" if named else str(error), 1)
    except ListenError as error:
        _refuse(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        _refuse("interrupted", 130)
    sys.exit(status if isinstance(status, int) else 0)


def _refuse(text: str, status: int) -> None:
    """Say why on one line, and end."""
    print(f"engram: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(status)


@app.command()
@with_settings
def serve(checkpoint: Checkpoint, *, effective: Effective) -> None:
    """Serve a checkpoint."""
    from service.lifecycle import StartError, serve
    from service.logs import configure_logs

    configure_logs(effective.settings.log_format)
    try:
        status = serve(checkpoint, effective.settings, say=_say, bars=progress_bars)
    except StartError as error:
        _refuse(str(error), 1)
    raise typer.Exit(status)


def _say(line: str) -> None:
    print(line, flush=True)


@app.command()
def demo() -> None:
    """Make a small checkpoint, serve it, stream a text through a client, check every answer."""
    from service.demo import run

    raise typer.Exit(run())


@app.command()
@with_settings
def inspect(checkpoint: Checkpoint, as_json: AsJson = False, *, effective: Effective) -> None:
    """Say what a checkpoint is and what serving it with these settings takes; loads nothing."""
    from engram_core.tools.inspect import inspect as inspect_checkpoint
    from service.loading import ledger_of

    found = inspect_checkpoint(checkpoint, ledger_of(effective.settings))
    if as_json:
        _print_json(found.as_json())
        return
    document = found.as_json()
    for name in ("path", "format", "layout", "identity", "image_token_id"):
        print(f"{name:<16} {document[name]}")
    for name, value in document["geometry"].items():
        print(f"{name:<16} {value}")
    table = Table("layer", "tensor", "type", "shape", "bytes", "files")
    for line in found.tensors:
        table.add_row(
            str(line.layer_id),
            line.role,
            line.type,
            " x ".join(map(str, line.shape)),
            f"{line.num_bytes:,}",
            ", ".join(line.files),
        )
    _console().print(table)
    for placement, ledger in found.ledgers.items():
        lines = [ledger] if isinstance(ledger, str) else ledger.table()
        print(f"\nplacement {placement}:", *lines, sep="\n  ")
    for warning in found.warnings:
        print(f"warning: {warning}")


@app.command(name="hash", context_settings={"ignore_unknown_options": True})
def hash_tokens(
    checkpoint: Checkpoint,
    token_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="a sequence's ids")],
    as_json: AsJson = False,
) -> None:
    """Print the row ids that a sequence of token ids hashes to."""
    import numpy as np

    from engram_core.checkpoint import open_checkpoint
    from engram_core.hashing import EngramHasher

    ids = np.array([_token_id(text) for text in token_ids], np.int64)
    opened = open_checkpoint(checkpoint)
    hash_ids = EngramHasher(opened.hash_tables, len(ids)).hash(ids, 0)
    layers = {
        str(layer): hash_ids[:, index].tolist()
        for index, layer in enumerate(opened.geometry.layer_ids)
    }
    if as_json:
        _print_json({"token_ids": ids.tolist(), "hash_ids": layers})
        return
    for layer, rows in layers.items():
        print(f"layer {layer}")
        for token_id, row in zip(ids.tolist(), rows, strict=True):
            print(f"  {token_id:>7}  {' '.join(map(str, row))}")


@app.command()
def verify(
    checkpoint: Checkpoint,
    as_json: AsJson = False,
    device: Annotated[str, typer.Option(help="cpu or cuda:N")] = "cpu",
    placement: Annotated[str, typer.Option(help="auto, device, host or disk")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="of what is sampled")] = 0,
) -> None:
    """Compare sampled rows, hashes, kv and residuals with the plain way; exit 1 if they differ.

    A file that `engram extract` wrote is hashed whole and compared with its manifest.
    """
    from engram_core.tools.verify import verify as verify_checkpoint

    with progress_bars() as report:
        found = verify_checkpoint(
            checkpoint, device=device, placement=placement, seed=seed, progress=report
        )
    if as_json:
        _print_json(found.as_json())
    else:
        table = Table("layer", "what", "values", "worst difference", "beyond the promise")
        for check in found.checks:
            table.add_row(
                str(check.layer_id),
                check.name,
                f"{check.count:,}",
                f"{check.worst:.3g}",
                str(check.outside),
            )
        _console().print(table)
        if found.manifest is not None:
            bad = ", ".join(map(str, found.manifest.bad)) or "none"
            print(f"manifest: {found.manifest.num_pieces} pieces hashed; that differ: {bad}")
        print(f"{'ok' if found.ok else 'NOT OK'}: {found.backend}, table {found.identity}")
    raise typer.Exit(0 if found.ok else 1)


@app.command()
def extract(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="any checkpoint")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="a GGUF file; must not be there")],
    quant: Annotated[
        str | None, typer.Option(help="type of the tables: FP8, BF16, Q8_0, Q2_K, Q3_K, Q4_K")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write tables, wkv, q, k and the hash's constants into one self-contained GGUF file."""
    from engram_core.tools.extract import extract as extract_checkpoint

    with progress_bars() as report:
        made = extract_checkpoint(source, out, quant=quant, progress=report)
    if as_json:
        _print_json(made.as_json())
        return
    rate = made.source_bytes / max(made.seconds, 1e-9) / 1e9
    print(f"{made.path}: {made.num_bytes:,} bytes, table {made.identity}")
    print(f"{made.source_bytes:,} bytes read in {made.seconds:.1f} s, {rate:.2f} GB/s")
    for error in made.errors:
        print(
            f"layer {error.layer_id}: {error.source} -> {error.target}, RMS error {error.rms:.4g} "
            f"({error.relative:.3%} of the values' RMS)"
        )


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="a checkpoint")],
    b: Annotated[Path, typer.Argument(metavar="B", help="another one of the same model")],
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="UTF-8 text to look at")],
    png: Annotated[Path | None, typer.Option("--png", metavar="OUT", help="plot into OUT")] = None,
    as_json: AsJson = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.json [beside A or B, or installed]")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="of the text", min=1)] = 1024,
) -> None:
    """Say how far B is from A on a text: rows, kv, gate and residual update, by n-gram order."""
    from engram_core.tools.compare import compare as compare_checkpoints
    from engram_core.tools.compare import order_name
    from engram_core.tools.plot import plot, require_plot

    if png is not None:
        require_plot()
        _require_folder("--png", png)
    content = _utf8(text)
    with progress_bars() as report:
        found = compare_checkpoints(
            a, b, content, tokenizer=tokenizer, max_tokens=max_tokens, progress=report
        )
    if png is not None:
        plot(found, png)
    if as_json:
        _print_json(found.as_json())
        return
    print(f"B ({found.b}) against A ({found.a}), {found.num_tokens:,} tokens")
    table = Table("layer", "rows of B", "rows", "kv", "gate (RMS difference)", "residual update")
    for distance in found.distances:
        figures = (distance.rows, distance.kv, distance.gate, distance.update)
        values = (f"{figure:.4g}" for figure in figures)
        table.add_row(str(distance.layer_id), order_name(distance.order), *values)
    _console().print(table)


@app.command()
def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="what to make; must not be there")],
    preset: Annotated[str, typer.Option(help="tiny, demo or flash")] = "tiny",
    fmt: Annotated[str, typer.Option("--format", help="gguf or safetensors")] = "gguf",
    quant: Annotated[str | None, typer.Option(help="row format [Q2_K; FP8]")] = None,
    seed: Annotated[int, typer.Option(min=0, help="of the values")] = 0,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, for demo, flash")] = None,
) -> None:
    """Make a checkpoint of seeded values."""
    from engram_core.tools.synth import synth as make

    with progress_bars() as report:
        made = make(
            out,
            preset=preset,
            fmt=fmt,
            quant=quant or ("Q2_K" if fmt == "gguf" else "FP8"),
            seed=seed,
            tokenizer=tokenizer,
            progress=report,
        )
    print(f"{made.path}: {made.num_rows:,} rows written, {made.num_bytes:,} bytes long")


@app.command()
def doctor(
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(help="write the JSON report to this file")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=180, help="about how long [20; 90 with a GPU]")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="on the disk to probe [where temporary files go]")
    ] = None,
) -> None:
    """Probe this machine; the report names no host, path or serial number and can be sent on."""
    from engram_core.tools.doctor import diagnose

    if folder is not None and not folder.is_dir():  # said now, not after ten seconds of probes
        raise EngramError(f"--folder {folder}: expected a folder, got none of that name")
    if out is not None:
        _require_folder("--out", out)
    with progress_bars() as report:
        found = diagnose(seconds=seconds, folder=folder, progress=report)
    document = found.as_json()
    if out is not None:
        out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    if as_json:
        _print_json(document)
        return
    table = Table("what", "measured", "unit", "note")
    for line in found.readings:
        value = "-" if line.value is None else f"{line.value:,.4g}"
        table.add_row(line.name, value, line.unit, line.note)
    _console().print(table)
    print(f"GPU: {found.device['name'] if found.device else found.why_no_device}")
    print(*(f"note: {finding}" for finding in found.findings), sep="\n")


@app.command()
@with_settings
def config(*, effective: Effective) -> None:
    """Print the settings in force and where each comes from, as TOML."""
    print(*as_toml(effective), sep="\n")


@keys_app.command("add")
def add_key(
    name: Annotated[str, typer.Argument(metavar="NAME", help="whose key it is")],
    scope: Annotated[str, typer.Option(help="use or admin")] = "use",
    keys_file: Annotated[Path | None, typer.Option(help="where keys are kept")] = None,
    config_file: Annotated[Path | None, typer.Option("--config", help="settings file")] = None,
) -> None:
    """Make an API key: its hash goes into keys_file, the key itself is printed once."""
    import os

    from service import access
    from service.settings import load_settings

    flags: dict[str, Any] = {"keys_file": keys_file}
    path = load_settings(flags, os.environ, config_file).settings.keys_file
    if path is None:
        raise SettingsError("keys add: no keys_file; give --keys-file, or set ENGRAM_KEYS_FILE")
    print(access.add_key(path, name, scope))
    print(f"{name} ({scope}) is in {path}; the key is not kept anywhere else", file=sys.stderr)


def _require_folder(option: str, out: Path) -> None:
    """Refuse a file that cannot be written before the work whose outcome it would hold is done."""
    if out.is_dir() or not out.parent.is_dir():
        got = "a folder" if out.is_dir() else f"one in {out.parent}, which is no folder"
        raise EngramError(f"{option} {out}: expected a file to write, got {got}")


def _token_id(text: str) -> int:
    try:
        return wire.parse_int(text, "ID")
    except wire.WireError as error:
        raise EngramError(str(error)) from None


def _utf8(path: Path) -> str:
    """Return the text of a file. Raises OSError; EngramError: it is not UTF-8."""
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        at = error.start
        raise EngramError(f"{path}: expected UTF-8 text, got other bytes at {at}") from None


def _print_json(document: object) -> None:
    print(json.dumps(document, indent=1, ensure_ascii=False))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120)


if __name__ == "__main__":
    main()
