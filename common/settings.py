"""One frozen dataclass is the settings: its fields become command-line options and environment variables.

A default, its unit and its help text so stand once.  `--disk-budget` of `hsprod serve` is HSPROD_DISK_BUDGET, so that
systemd's EnvironmentFile can set each of them."""
from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def option(default: Any, help: str, *, named: str | None = None, **typer_options: Any) -> Any:
    """A field of a settings class.  help says what it does and its unit; typer_options go to typer.Option.

    named: the option where the field's own name will not do (--from is a word of Python's); the variable follows it."""
    return dataclasses.field(default=default, metadata={"help": help, "named": named, "typer": typer_options})


def argument(help: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "argument": True})


def as_command(settings: type, prefix: str, run: Callable[[Any], None]) -> Callable:
    """A function for `app.command()` whose parameters are the fields of `settings`; it calls run(settings(...))."""
    hints = typing.get_type_hints(settings)
    parameters = []
    for field in dataclasses.fields(settings):
        made = typer.Argument if field.metadata.get("argument") else typer.Option
        named = field.metadata.get("named")
        variable = (named or field.name).removeprefix("--").replace("-", "_").upper()
        info = made(*[named] if named else [], help=field.metadata["help"], envvar=f"{prefix}_{variable}", **field.metadata.get("typer", {}))
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        parameters.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                            annotation=Annotated[hints[field.name], info]))

    def command(**values: Any) -> None:
        run(settings(**values))

    command.__doc__ = inspect.getdoc(run)
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def state_home() -> Path:
    """$STATE_DIRECTORY under systemd, else $XDG_STATE_HOME, else ~/.local/state."""
    if directory := os.environ.get("STATE_DIRECTORY"):
        return Path(directory.split(":")[0])
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
