"""What a daemon last said of itself, in a file that `status` shows.  Written at most once a second, replaced whole;
not durable: it is a view, not a record."""
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.errors import UserError



class Board:
    """Gathers values and writes them out.  `now` is wall time in seconds, passed in."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._last = 0.0

    def show(self, values: dict, now: float, *, force: bool = False) -> None:
        if not force and now - self._last < 1.0:
            return
        self._last = now
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(values | {"written_at": now, "pid": os.getpid(), "started": _started(os.getpid())}, default=str))
        temporary.replace(self._path)


def read(path: Path) -> dict:
    """What stands in the file, with "state": running or not, by its process and its age."""
    values = json.loads(path.read_text())
    age = time.time() - values["written_at"]
    running = _started(values["pid"]) == values["started"]
    return {"state": f"{'running' if running else 'not running'}, last word {age:.0f} s ago"} | values


def _started(pid: int) -> str:
    """When that process began (clock ticks after boot), "" where there is none: a number alone may be another's by now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def show(paths: list[Path], command: str, *, as_json: bool) -> None:
    """Print the last status of each; UserError where none was ever written."""
    if not paths or not all(path.exists() for path in paths):
        raise UserError(f"no status here: {command} has not run with this --state-dir")
    found = [read(path) for path in paths]
    if as_json:
        print(json.dumps(found, indent=1))
        return
    for values in found:
        table = Table(title=f"{command}: {values.pop('state')}", show_header=False)
        for name, value in values.items():
            if name not in ("written_at", "pid", "started"):
                table.add_row(name, _text(value))
        Console(file=sys.stdout).print(table)


def _text(value: object, within: bool = False) -> str:
    if not isinstance(value, dict):
        return str(value)
    return (", " if within else "\n").join(f"{k}: {_text(v, True)}" for k, v in value.items())
