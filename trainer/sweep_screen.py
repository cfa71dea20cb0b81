"""What a person sees of a sweep: one table on a terminal, a line now and then elsewhere, and what is to be said at its end."""
from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

from common import files, service
from trainer import config
from trainer.sweep import Member, Sweep, folder_of, open_sweep

SAY_EVERY_S = 10.0           # between lines where no terminal is
COLUMNS = ("step", "loss", "simulated tau", "real tau", "time left")
COLORS = {"running": "bold", "done": "green", "failed": "bold red", "stopped": "yellow"}


def show(settings: config.Sweep, each: config.Run, options: list[str], stop: service.Stop) -> int:
    """Run the sweep, shown; returns the exit code.  stop: set by a signal."""
    stop.begin()
    console = Console()
    with files.held(folder_of(settings, each), "--sweep-dir"):
        sweep = open_sweep(settings, each, options)
        console.print(f"sweep of {len(sweep.members)} runs in {sweep.folder}, {sweep.jobs} at once", soft_wrap=True, highlight=False)
        with Screen(console) as screen:
            code = sweep.go(stop, screen)
    for line in last_words(sweep, bool(stop)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return code


class Screen:
    """Called with the members at every look."""

    def __init__(self, console: Console) -> None:
        self._console, self._live = console, Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._states: dict[str, str] = {}
        self._said = 0.0

    def __enter__(self) -> Screen:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, members: list[Member]) -> None:
        now = time.monotonic()
        if self._live:
            self._live.update(table(members, now))
            return
        due = now - self._said >= SAY_EVERY_S
        for member in members:
            if self._states.get(member.name) != member.state or (due and member.state == "running"):
                self._console.print(line(member, now), soft_wrap=True, highlight=False, markup=False)
                self._states[member.name] = member.state
                self._said = now


def cells(member: Member, now: float) -> tuple[str, ...]:
    """One for each of COLUMNS; "" for what is not known.  The taus are the last measured."""
    told = member.told
    def number(name: str, form: str) -> str:
        return "" if told.get(name) is None else format(told[name], form)
    step = f"{told['step']}/{told['steps']}" if told.get("step") is not None else ""
    alarms = f" ({told['alarms']} alarm{'s' if told['alarms'] > 1 else ''})" if told.get("alarms") else ""
    return step, number("loss", ".3f"), number("offline", ".2f"), number("real", ".2f") + alarms, left(member, now)


def line(member: Member, now: float) -> str:
    return ", ".join([f"{member.name}: {member.state}", *(f"{name} {cell}" for name, cell in zip(COLUMNS, cells(member, now), strict=True) if cell)])


def left(member: Member, now: float) -> str:
    """Time to the last step at the rate since the run's start."""
    begun, first = member.since
    if member.state != "running" or not member.told.get("steps") or (done := (member.told["step"] or 0) - first) <= 0:
        return ""
    seconds = round((member.told["steps"] - member.told["step"]) * (now - begun) / done)
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def table(members: list[Member], now: float) -> Table:
    out = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("run", "", *COLUMNS):
        out.add_column(name, justify="left" if name in ("run", "") else "right")
    for member in members:
        out.add_row(member.name, member.state, *cells(member, now), style=COLORS.get(member.state, "dim"))
    return out


def last_words(sweep: Sweep, stopped: bool) -> list[str]:
    """What failed and why, what waits for a producer, and how to go on."""
    words = []
    for member in sweep.members:
        if member.state == "failed":
            said = member.log.read_text(errors="replace").strip().splitlines()
            words.append(f"{member.name} failed (exit code {member.process.returncode}): {said[-1] if said else 'it said nothing'} [{member.log}]")
    if waiting := sum(map(sweep.unmeasured, sweep.members)):
        words.append(f"{waiting} checkpoint{'s' if waiting > 1 else ''} without real acceptance: the same line with --producer ADDRESS has "
                     f"{'them' if waiting > 1 else 'it'} measured")
    if any(member.state != "done" for member in sweep.members):
        words.append(("stopped; " if stopped else "") + "the same line goes on with what is not done")
    return [*words, f"hstrain report {sweep.folder}"]
