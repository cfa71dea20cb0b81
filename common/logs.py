"""Log lines for people: rich on a terminal, plain lines elsewhere; in the journal each with its priority (sd-daemon(3)), and
without the time and colour that the journal has of its own.  Also keeps the last trouble, for `status`."""
from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections import Counter
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.logging import RichHandler

MOST_SHOWN = 500             # characters of a trouble's text in `status`
PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.NOTSET, 7))   # syslog(3)


def setup(level: str = "INFO") -> None:
    if sys.stderr.isatty():
        handler: logging.Handler = RichHandler(console=Console(stderr=True), show_path=False, markup=False)
        form = logging.Formatter("%(message)s", datefmt="%H:%M:%S")
    else:
        handler = logging.StreamHandler(sys.stderr)
        form = ForJournal() if in_journal() else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(form)
    logging.basicConfig(level=level, handlers=[handler, trouble], force=True)
    logging.getLogger("transformers").setLevel(logging.ERROR)   # it warns of torch kernels; the contract records which run
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    if in_journal():
        sys.excepthook = _uncaught


def replacing(stream: TextIO) -> str:
    """Have a stream that is not UTF write ? for what it cannot hold, in place of ending the program; its encoding, "" where it holds all."""
    if not isinstance(stream, io.TextIOWrapper) or stream.encoding.lower().replace("-", "").startswith("utf"):
        return ""
    stream.reconfigure(errors="replace")
    return stream.encoding


def in_journal() -> bool:
    """Whether standard error is the journal's own stream, not a file of somebody who inherited the variable."""
    try:
        here = os.fstat(2)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{here.st_dev}:{here.st_ino}"


def priority(level: int) -> int:
    return next(number for least, number in PRIORITIES if level >= least)


def prefix(level: int) -> str:
    """'<3>' before a line of that level in the journal, nothing elsewhere."""
    return f"<{priority(level)}>" if in_journal() else ""


class ForJournal(logging.Formatter):
    """<priority>name: message; every line of a traceback too, for the journal takes each as an entry of its own."""

    def __init__(self) -> None:
        super().__init__("%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(f"<{priority(record.levelno)}>{line}" for line in super().format(record).splitlines())


class Trouble(logging.Handler):
    """last: {level: {"at": wall seconds, "text"}} of the latest "warning" and the latest "error"; counts: {level: n} since the start."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last: dict[str, dict] = {}
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        level = "error" if record.levelno >= logging.ERROR else "warning"
        self.counts[level] += 1
        self.last[level] = {"at": record.created, "text": f"{record.name}: {record.getMessage()}"[:MOST_SHOWN]}


trouble = Trouble()


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for line in "".join(traceback.format_exception(kind, error, trace)).splitlines():
        print(f"<{priority(logging.CRITICAL)}>{line}", file=sys.stderr)
