"""The settings as command-line options: one flag a setting, with its help and default."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from service.settings import PREFIX, Effective, Settings, load_settings

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="settings as a TOML file")
]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command every setting's flag; it receives them built, as `effective`."""

    @functools.wraps(command)
    def wrapper(config: Path | None = None, **given: Any) -> None:
        flags = {name: given.pop(name) for name in Settings.model_fields}
        command(effective=load_settings(flags, os.environ, config), **given)

    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "effective"
    ]
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter("config", keyword, default=None, annotation=ConfigFile)]
    added += [
        inspect.Parameter(name, keyword, default=None, annotation=_option(name))
        for name in Settings.model_fields
    ]
    parameters = [parameter.replace(kind=keyword) for parameter in own] + added
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return wrapper


def _option(name: str) -> Any:
    field = Settings.model_fields[name]
    default = "" if field.default is None else f" [{field.default}]"
    option = typer.Option(
        f"--{name.replace('_', '-')}",
        metavar="VALUE",
        help=f"{field.description}{default}",
        rich_help_panel=f"Settings (also {PREFIX}NAME, or a key of --config)",
    )
    return Annotated[str | None, option]


def as_toml(effective: Effective) -> list[str]:
    """Return the settings as lines of TOML, each with its source."""
    lines = []
    for name, source in effective.sources.items():
        value = getattr(effective.settings, name)
        text = _toml(value)
        line = f"# {name} is not set" if value is None else f"{name} = {text}"
        lines.append(f"{line:<44}  # {source}" if value is not None else line)
    return lines


def _toml(value: object) -> str:
    if isinstance(value, int | float):
        return str(value)
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
