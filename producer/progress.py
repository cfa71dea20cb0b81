"""What a person sees while a command works: lines; a bar on a terminal, one line a section elsewhere.  All on standard error."""
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console


@contextlib.contextmanager
def section(label: str) -> Iterator[Callable[[int, int], None]]:
    """-> tell(done, of), as often as there is news; a section that never tells shows that it is at work, no more."""
    if not sys.stderr.isatty():
        print(label, file=sys.stderr, flush=True)
        yield lambda done, of: None
        return
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
               progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
