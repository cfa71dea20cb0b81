"""What a daemon last said of itself, in a file that `status` shows.  Written at most once a second, replaced whole;
not durable: it is a view, not a record, so a full disk costs the view and never the daemon.

    "numbers"   what can be counted or measured, by the names that the package's seen.py explains (status and Prometheus alike)
    "counters"  what happened since the start, by kind; seen.py says it in words
    "ended"     true in a daemon's last word: it ends by itself, was told to, or is done.  Without it one that is gone was killed, or failed
    the rest    lines for people, and whatever else the daemon says
"""
from __future__ import annotations

import contextlib
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
SILENT = 120.0               # seconds after which a daemon that runs and says nothing is pointed at: it says something every second or so
OTHERS = 10                  # runs that are over, of which a line is shown each
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

    def show(self, values: dict, now: float, *, force: bool = False) -> bool:
        """False where it was too early, and nothing was done."""
        if not force and not self.due(now):
            return False
        self._last = now
        self.values = values | {"numbers": self.numbers() | values.get("numbers", {}), "last": dict(logs.trouble.last),
                                "troubles": dict(logs.trouble.counts), "unwritten_status": self.failures, "written_at": now,
                                "pid": os.getpid(), "started": self._started}
        temporary = self._path.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(self.values, default=str))
            temporary.replace(self._path)
        except OSError as error:
            self._failed(temporary, error, now)
        return True

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
    """What stands in the file, with "running", by its process, and "state", a line about that.

    UserError where that is nothing of ours: it is not durable, so a power cut can leave an empty or half a file."""
    try:
        values = jsons.loads(path.read_text("utf-8"))
        age, pid = max(0.0, now - values["written_at"]), values["pid"]
        running = type(pid) is int and values["started"] != "" and _started(pid) == values["started"]
        return {"running": running, "state": state(running, bool(values.get("ended")), age)} | values
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UNREADABLE as error:
        raise damaged(path, error) from None


def state(running: bool, ended: bool, age: float) -> str:
    """age: seconds since its last word."""
    if running:
        return f"running, but silent for {ago(age)}: at one long piece of work, or stuck" if age > SILENT else f"running, last word {ago(age)} ago"
    return f"ended {ago(age)} ago" if ended else f"not running: it was killed or failed {ago(age)} ago, see its log"


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
    """Print the last status of each; UserError where none was ever written.  watch: again every second, until Ctrl-C."""
    if not paths():
        raise UserError(f"no status here: {command} has not run with this --state-dir")
    console = Console(file=sys.stdout)
    live = Live(console=console, auto_refresh=False, screen=True) if watch and console.is_terminal and not as_json else contextlib.nullcontext()
    with live, contextlib.suppress(KeyboardInterrupt):
        while True:
            if as_json:
                print(json.dumps([read(path, time.time()) for path in paths()], indent=None if watch else 1), flush=True)
            elif isinstance(live, Live):
                live.update(screen(paths(), command, rows, time.time()), refresh=True)
            else:
                console.print(screen(paths(), command, rows, time.time()))
            if not watch:
                return
            time.sleep(1.0)


def screen(paths: list[Path], command: str, rows: Rows, now: float) -> Group:
    """A table of each that runs, or of the one that ran last; a line for each of the others.  UserError where there is none to show."""
    found, spoilt = [], []
    for path in paths:
        try:
            found.append((path, read(path, now)))
        except UserError as error:
            spoilt.append(error)
    if not found:
        raise spoilt[0]
    found.sort(key=lambda one: (not one[1]["running"], -one[1]["written_at"]))
    full = [one for one in found if one[1]["running"]] or found[:1]
    return Group(*[table(path, values, command, rows, now) for path, values in full], *others(found[len(full):], spoilt))


def table(path: Path, values: dict, command: str, rows: Rows, now: float) -> Table:
    try:
        lines = [(what, Text(says)) for what, says in [doing(values), *rows(values, now), *troubles(values, now)]]
        red = not (values["running"] or values.get("ended")) or now - values["written_at"] > SILENT and values["running"]
    except UNREADABLE as error:
        raise damaged(path, error) from None
    made = Table(title=f"{command}: {values['state']}", title_style="bold red" if red else "bold", show_header=False, title_justify="left",
                 min_width=72)
    for what, says in lines:
        made.add_row(what, says)
    return made


def others(found: list[tuple[Path, dict]], spoilt: list[UserError]) -> list[Text]:
    """What is not running beside what is: newest first, the older ones counted."""
    lines = [Text(f"{path.stem}: {values['state']}; {values.get('doing', '')}") for path, values in found[:OTHERS]]
    lines += [Text(f"and {len(found) - OTHERS} more (--json has them)")] if len(found) > OTHERS else []
    return lines + [Text(str(error), style="red") for error in spoilt]


def budget(numbers: dict) -> str:
    """How full a store is."""
    used, most = numbers["disk_used_bytes"], numbers["disk_budget_bytes"]
    return f"{size(used)} of {size(most)} ({used / most:.0%}), {size(numbers['disk_free_bytes'])} free on the disk"


def behind_by(samples: int) -> str:
    return f"{samples:,} sample{'' if samples == 1 else 's'} behind"


def doing(values: dict) -> tuple[str, str]:
    return "doing" if values["running"] or values.get("ended") else "was doing", values["doing"]


def troubles(values: dict, now: float) -> list[tuple[str, str]]:
    """The last error and the last warning, and how many there were: the same for both daemons."""
    found = []
    for level in ("error", "warning"):
        if last := values.get("last", {}).get(level):
            found.append((f"last {level}", f"{ago(now - last['at'])} ago, of {values['troubles'][level]:,} since the start: {last['text']}"))
    if values.get("unwritten_status"):
        found.append(("this view", f"could not be written {values['unwritten_status']:,} times"))
    return found


def counted(values: dict, words: dict[str, str]) -> list[tuple[str, str]]:
    """What happened, in words, one line each; what has not is left out.  words: kind -> what is said of it."""
    counts = values.get("counters", {})
    said = [f"{counts[kind]:,} {text}" for kind, text in words.items() if counts.get(kind)]
    return [("counted", "\n".join(said))] if said else []


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
