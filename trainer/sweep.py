"""`hstrain sweep`: several arms, several seeds, one stream: each run on the same samples in the same order, at the same anchors.

Each run is a process of its own, `hstrain run` as a person would start it: what is equal between runs is order.py's and Run's doing.
Here is only which runs, when, and what became of them.  The folder says what the sweep is, and can be given to the same line again:

    sweep.json   arms, seeds, options, stream, code; another sweep is refused by field
    runs/        a folder each, ARM-sSEED             logs/    what each process said

Left out: the screen (sweep_screen.py), and any judgement of the runs (hstrain report)."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import safe_open

from common import metrics, service
from common.errors import UserError
from common.version import versions
from protocol.store import SampleStore
from trainer import arms, config
from trainer.claim import claim
from trainer.replay import store_folder

OWN = ("arm", "seed", "run_dir")     # options of a run that the sweep alone gives
FREE = {*OWN, "samples", "producer", "stored", "state_dir", "name", "eval_every", "eval_all", "device", "threads", "disk_budget", "credit",
        "keys", "metrics_port", "log_level"}         # and those that may be others when the line is given again; all else makes another sweep
MOST_PORT = 65535
LOOK_EVERY_S = 0.5
WAIT_S = 60.0                        # for a run that was told to stop, to save


@dataclass
class Member:
    """One run of the sweep.  state: waiting, running, done, failed, stopped."""

    arm: str                         # as --arm takes it
    seed: int
    folder: Path
    log: Path
    state: str = "waiting"
    slot: int = 0                    # which of the --jobs places it runs in
    process: subprocess.Popen | None = None
    since: tuple[float, int] = (0.0, 0)          # monotonic seconds and step at its start
    told: dict = field(default_factory=dict)     # progress(), as last read

    @property
    def name(self) -> str:
        return self.folder.name


@dataclass
class Sweep:
    """members: the runs, in the order in which they are started.  options: the words that each is given; each: the same, parsed."""

    folder: Path
    members: list[Member]
    options: list[str]
    each: config.Run
    samples: int | None              # of a stored stream: where it ends, for all runs
    jobs: int

    def go(self, stop: service.Stop, show: Callable[[list[Member]], None]) -> int:
        """Run what is not finished, until all is or `stop`; returns the exit code, 1 where a run failed."""
        for member in self.members:
            member.told = progress(member.folder)
            member.state = "done" if self._finished(member) else "waiting"
        try:
            while not stop and any(m.state in ("waiting", "running") for m in self.members):
                self._turn()
                show(self.members)
                stop.wait(LOOK_EVERY_S)
        finally:
            self._end()
            show(self.members)
        return int(any(m.state == "failed" or (m.state == "stopped" and not stop) for m in self.members))

    def command(self, member: Member) -> list[str]:
        """hstrain run with the options that all have, then its own: of one given twice the last counts."""
        own = ["--arm", member.arm, "--seed", str(member.seed), "--run-dir", str(member.folder), "--threads", str(self._threads())]
        if self.each.metrics_port:                       # of those that run at once none may have another's; a place keeps its own
            own += ["--metrics-port", str(self.each.metrics_port + member.slot)]
        if self.samples is not None:
            own += ["--state-dir", str(self.folder), "--samples", str(self.samples)]
        return [sys.executable, "-m", "trainer", "run", *self.options, *own]

    def unmeasured(self, member: Member) -> int:
        """Checkpoints that a producer is, or would be, asked for, and whose real acceptance is not known."""
        steps = [int(path.name.removeprefix("step-")) for path in sorted((member.folder / "checkpoints").glob("step-*"))]
        known = {row["step"] for row in metrics.read(member.folder / "metrics.jsonl", "eval")}
        return len(set(steps if self.each.eval_all else steps[-1:]) - known)

    def _finished(self, member: Member) -> bool:
        asks = self.each.producer is not None or self.each.stored is None
        return trained(member.folder) and not (asks and self.unmeasured(member))

    def _threads(self) -> int:
        return self.each.threads or max(1, (os.cpu_count() or 1) // self.jobs)

    def _turn(self) -> None:
        for member in self.members:
            if member.state == "running":
                self._look(member)
        free = sorted(set(range(self.jobs)) - {m.slot for m in self.members if m.state == "running"})
        for member, slot in zip([m for m in self.members if m.state == "waiting"], free, strict=False):
            member.slot = slot
            self._start(member)

    def _start(self, member: Member) -> None:
        """In a session of its own, so that Ctrl-C reaches it once, through the sweep, and not twice, which would end it unsaved."""
        environment = os.environ | {"OMP_NUM_THREADS": str(self._threads())}
        with member.log.open("ab") as log:
            member.process = subprocess.Popen(self.command(member), stdout=log, stderr=subprocess.STDOUT, env=environment,
                                              start_new_session=True, preexec_fn=_end_with_parent)
        member.state, member.since = "running", (time.monotonic(), member.told["step"] or 0)

    def _look(self, member: Member) -> None:
        """Exit code 0 without the last step: somebody else told it to stop."""
        code = member.process.poll()                     # before the files are read: they are complete where it has ended
        member.told = progress(member.folder)
        if code is not None:
            member.state = "failed" if code else "done" if trained(member.folder) else "stopped"

    def _end(self) -> None:
        """SIGTERM to what still runs, which saves its state."""
        running = [m for m in self.members if m.state == "running"]
        for member in running:
            member.process.terminate()
        end = time.monotonic() + WAIT_S
        for member in running:
            try:
                member.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:            # its exit code says so: it counts as failed
                member.process.kill()
                member.process.wait()
            self._look(member)


def open_sweep(settings: config.Sweep, each: config.Run, options: list[str]) -> Sweep:
    """The sweep that the command line means, its folder claimed.  UserError where it means none, or the folder holds another."""
    names, seeds = parsed(settings)
    if each.metrics_port + settings.jobs - 1 > MOST_PORT:
        raise UserError(f"--metrics-port {each.metrics_port}: {settings.jobs} runs at once take that port and the next, up to {MOST_PORT} at most")
    folder = folder_of(settings, each)
    called = {name: arms.overridden(name, each).name for name in names}
    if len(set(called.values())) != len(called):
        raise UserError(f"with these options the arms {', '.join(names)} are not all different; leave out what they share")
    (folder / "logs").mkdir(exist_ok=True)
    made = about(names, seeds, each, folder / "sweep.json")
    claim(folder / "sweep.json", made, what="sweep", option="--sweep-dir")
    members = [Member(name, seed, folder / "runs" / f"{called[name]}-s{seed}", folder / "logs" / f"{called[name]}-s{seed}.log")
               for seed in seeds for name in names]      # seed by seed: what is done first can be compared across arms
    return Sweep(folder, members, options, each, made.get("samples"), settings.jobs)


def folder_of(settings: config.Sweep, each: config.Run) -> Path:
    return settings.sweep_dir or each.state_dir / "sweep"


def parsed(settings: config.Sweep) -> tuple[list[str], list[int]]:
    """Arms and seeds in the command line's order.  UserError for an unknown arm, what is no number, none, and a repetition."""
    names = [name.strip() for name in settings.arms.split(",") if name.strip()]
    for name in names:
        arms.named(name)
    try:
        seeds = [int(seed) for seed in settings.seeds.split(",") if seed.strip()]
    except ValueError:
        raise UserError(f"--seeds {settings.seeds}: write whole numbers, as in 0,1,2") from None
    for option, given in (("--arms", names), ("--seeds", seeds)):
        if not given or len(set(given)) != len(given):
            raise UserError(f"{option} {','.join(map(str, given))}: name at least one, and each once")
    return names, seeds


def about(names: list[str], seeds: list[int], each: config.Run, before: Path) -> dict:
    """What the sweep is.  samples: where a stored stream ends, for all runs: as in `before`, the file of an earlier start, or as it is now."""
    options = {name: value for name, value in dataclasses.asdict(each).items() if name not in FREE}
    made = versions("torch") | {"arms": names, "seeds": seeds, "options": options}
    if each.stored:
        with SampleStore(store_folder(each.stored), readonly=True) as store:
            known = json.loads(before.read_text()).get("samples") if before.exists() else None
            made |= {"stream": store.stream, "samples": each.samples or known or store.next - store.first}
    return json.loads(json.dumps(made, default=str))


def trained(folder: Path) -> bool:
    """The run's last step is taken and saved."""
    state, steps = folder / "resume" / "state.safetensors", planned(folder)
    if steps is None or not state.exists():
        return False
    with safe_open(state, "np") as file:
        return int(file.metadata()["step"]) >= steps


def planned(folder: Path) -> int | None:
    """Steps that the run in the folder is to take; None where there is none yet, or something else (the run itself will say what)."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return json.loads((folder / "run.json").read_text())["plan"]["steps"]
    return None


def progress(folder: Path) -> dict:
    """{step, steps, loss, offline, real, alarms} of a run, from its files; None for what is not there yet."""
    told: dict = dict.fromkeys(("step", "loss", "offline", "real")) | {"steps": planned(folder)}
    rows = metrics.read(folder / "metrics.jsonl")
    for row in rows:
        if row["kind"] == "step":
            told |= {"step": row["step"], "loss": row["loss"]}
        elif row["kind"] in ("offline", "eval"):
            told["real" if row["kind"] == "eval" else "offline"] = row["tau"]
    return told | {"alarms": sum(row["kind"] == "alarm" for row in rows)}


def _end_with_parent() -> None:
    """In the child: SIGTERM when the sweep is killed, so that no run goes on unseen.  Linux; elsewhere the run's own lock must do."""
    if sys.platform == "linux":
        import ctypes
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)       # PR_SET_PDEATHSIG
