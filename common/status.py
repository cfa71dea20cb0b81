"""What a daemon last said of itself, in a file that `status` shows.  Written at most once a second, replaced whole;
not durable: it is a view, not a record, so a full disk costs the view and never the daemon.

    "numbers"   what can be counted or measured, by the names that the package's seen.py explains (status and Prometheus alike)
    the rest    lines for people, and whatever else the daemon says
"""
from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common import jsons, logs
from common.errors import UserError, one_line

log = logging.getLogger("status")
RATE_OVER = 60.0             # seconds that a rate is taken over
AGAIN = 60.0                 # seconds until a failure to write is said again
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, IndexError)     # what values of a wrong shape give
Rows = Callable[[dict, float], list[tuple[str, str]]]         # one daemon's values, wall seconds -> (what, says), for people


class Board:
    """Gathers values and writes them out.  `now` is wall time in seconds, passed in.

    numbers: measured elsewhere in the daemon, asked for at each writing and put into "numbers".
    values: as last shown.  failures: writes that failed, each a second of an old view; said, and shown once one succeeds."""

    def __init__(self, path: Path, numbers: Callable[[], dict] = dict) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self.numbers = path, numbers
        self._last, self._said = 0.0, -AGAIN
        self._started = _started(os.getpid())
        self.values: dict = {}
        self.failures = 0

    def due(self, now: float) -> bool:
        return not 0 <= now - self._last < 1.0               # a clock that was set back is no reason for silence

    def show(self, values: dict, now: float, *, force: bool = False) -> None:
        if not force and not self.due(now):
            return
        self._last = now
        self.values = values | {"numbers": self.numbers() | values.get("numbers", {}), "last_trouble": logs.trouble.last, "troubles": dict(logs.trouble.counts),
                                "unwritten_status": self.failures, "written_at": now, "pid": os.getpid(), "started": self._started}
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self.values, default=str))
            temporary.replace(self._path)
        except OSError as error:
            self._failed(temporary, error, now)

    def _failed(self, temporary: Path, error: OSError, now: float) -> None:
        self.failures += 1
        if not 0 <= now - self._said < AGAIN:
            self._said = now
            log.warning("%s: %s; `status` shows what was before (%d times so far)", self._path, error.strerror, self.failures)
        try:
            temporary.unlink(missing_ok=True)
        except OSError:                                      # a disk that cannot be written at all: said above
            pass


class Rate:
    """Per second, over the last RATE_OVER seconds, of a total that grows.  `now` is monotonic seconds, passed in."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def __call__(self, total: float, now: float) -> float:
        if not self._seen or now - self._seen[-1][0] >= 1.0:
            self._seen.append((now, total))
        while len(self._seen) > 1 and now - self._seen[1][0] >= RATE_OVER:
            self._seen.popleft()
        then, before = self._seen[0]
        return (total - before) / (now - then) if now > then else 0.0


def read(path: Path, now: float) -> dict:
    """What stands in the file, with "state": running or not, by its process and its age.

    UserError where that is nothing of ours: it is not durable, so a power cut can leave an empty or half a file."""
    try:
        values = jsons.loads(path.read_text("utf-8"))
        age, pid = max(0.0, now - values["written_at"]), values["pid"]
        running = type(pid) is int and values["started"] != "" and _started(pid) == values["started"]
        return {"running": running, "state": f"{'running' if running else 'not running'}, last word {ago(age)} ago"} | values
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is damaged, or of another version ({type(error).__name__}: {one_line(error)[:80]}); a daemon that runs writes it anew "
                     "within a second")


def _started(pid: int) -> str:
    """When that process began (clock ticks after boot), "" where there is none: a number alone may be another's by now."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def show(paths: Callable[[], list[Path]], command: str, rows: Rows, *, as_json: bool, watch: bool) -> None:
    """Print the last status of each; UserError where none was ever written.  watch: again and again, until Ctrl-C."""
    if not paths():
        raise UserError(f"no status here: {command} has not run with this --state-dir")
    if as_json:
        print(json.dumps([read(path, time.time()) for path in paths()], indent=1))
        return
    console = Console(file=sys.stdout)
    if not watch:
        console.print(screen(paths(), command, rows, time.time()))
        return
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            live.update(screen(paths(), command, rows, time.time()), refresh=True)
            time.sleep(1.0)


def screen(paths: list[Path], command: str, rows: Rows, now: float) -> Group:
    tables = []
    for path in paths:
        values = read(path, now)
        table = Table(title=f"{command}: {values['state']}", title_style="bold" if values["running"] else "bold red", show_header=False,
                      title_justify="left", min_width=72)
        try:
            lines = [(what, Text(says)) for what, says in [*rows(values, now), *troubles(values, now)]]
        except UNREADABLE as error:
            raise damaged(path, error) from None
        for what, says in lines:
            table.add_row(what, says)
        tables.append(table)
    return Group(*tables)


def troubles(values: dict, now: float) -> list[tuple[str, str]]:
    """The last warning or error, and how many there were: the same for both daemons."""
    found = []
    if last := values.get("last_trouble"):
        counts = ", ".join(f"{count} {name}s" for name, count in sorted(values["troubles"].items()))
        found.append((f"last {last['level']}", f"{ago(now - last['at'])} ago, of {counts} since the start: {last['text']}"))
    if values.get("unwritten_status"):
        found.append(("this view", f"could not be written {values['unwritten_status']} times"))
    return found


def ago(seconds: float) -> str:
    """5 s, 12 min, 7.5 h, 3 d."""
    for size, unit, places in ((86400, "d", 1), (3600, "h", 1), (60, "min", 0)):
        if seconds >= size:
            return f"{seconds / size:.{places}f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def size(count: float) -> str:
    """Bytes as people read them, decimal: 3.2 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
