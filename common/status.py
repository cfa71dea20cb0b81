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

FILE = "status.json"
STALE_S = 30.0


class Board:
    """Gathers values and writes them out.  `now` is wall time in seconds, passed in."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._last = 0.0

    def show(self, values: dict, now: float, *, force: bool = False) -> None:
        if not force and now - self._last < 1.0:
            return
        self._last = now
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(values | {"written_at": now, "pid": os.getpid()}, default=str))
        temporary.replace(self._path)


def show(folder: Path, command: str, *, as_json: bool) -> None:
    """Print the last status; UserError where none was ever written."""
    try:
        values = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        raise UserError(f"no {command} has run with --state-dir {folder}") from None
    age = time.time() - values["written_at"]
    running = Path(f"/proc/{values['pid']}").exists() and age < STALE_S
    values["state"] = "running" if running else f"not running (last word {age:.0f} s ago)"
    if as_json:
        print(json.dumps(values, indent=1))
        return
    table = Table(title=f"{command}: {values.pop('state')}", show_header=False)
    for name, value in values.items():
        if name not in ("written_at", "pid"):
            table.add_row(name, "\n".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
    Console(file=sys.stdout).print(table)
