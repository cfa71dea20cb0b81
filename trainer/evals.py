"""Real acceptance, asked of the producer: which checkpoint is offered, and what comes back.

One is measured at a time, and keeps its turn until its result is there: were it replaced by each newer one, a producer
slower than the checkpoints would measure none.  Then comes the newest; those in between are skipped and counted.  With
`every`, none is: the oldest comes next, and the run's end waits for all.  What waits is read off the run's folder, so a
restart asks again.  Each result is held against the offline one of the same checkpoint (offline.parted)."""
from __future__ import annotations

import json
import logging
from pathlib import Path

from common import metrics
from common.drafter import checkpoint
from trainer.inbox import Inbox
from trainer.offline import parted
from trainer.replay import Stored
from trainer.run import Run

log = logging.getLogger("evals")


class Evals:
    """`offer` hands the next checkpoint to the producer unless one is there; it is called again after each reconnection."""

    def __init__(self, run: Run, inbox: Inbox | Stored, *, dtype: str, every: bool = False) -> None:
        """dtype: the target's compute dtype (the contract's).  every: each checkpoint is measured, not the newest alone."""
        self._run, self._inbox, self._dtype, self._every = run, inbox, dtype, every
        self._offered: str | None = None
        path = run.folder / "metrics.jsonl"
        self._measured = {row["step"]: row for row in metrics.read(path, "eval")}
        self._alarms = {row["step"]: row["reasons"] for row in metrics.read(path, "alarm")}

    @property
    def last(self) -> dict | None:
        """The result of the latest checkpoint that was measured."""
        return self._measured[max(self._measured)] if self._measured else None

    @property
    def queue(self) -> list[Path]:
        """Checkpoints to be measured, in the order in which they are offered."""
        unmeasured = self._unmeasured()
        return unmeasured if self._every else [folder for folder in unmeasured[-1:] if folder == self._run.checkpoints()[-1]]

    @property
    def waiting(self) -> Path | None:
        return next(iter(self.queue), None)

    @property
    def skipped(self) -> int:
        """Checkpoints that are older than the latest measured one, and will not be."""
        return 0 if self._every or not self._measured else sum(step_of(folder) < max(self._measured) for folder in self._unmeasured())

    @property
    def alarms(self) -> int:
        """Checkpoints whose real acceptance parts from the simulated."""
        return len(self._alarms)

    @property
    def hopeless(self) -> bool:
        """There is no producer to wait for."""
        return self._inbox.hopeless

    def _unmeasured(self) -> list[Path]:
        return [folder for folder in self._run.checkpoints() if step_of(folder) not in self._measured]

    def offer(self) -> None:
        folder = self.waiting
        if folder is None or self._offered is not None or not self._inbox.up:
            return
        record = json.loads((folder / "record.json").read_text())
        self._inbox.offer(folder, step=step_of(folder), record=record)
        self._offered = folder.name

    def link_lost(self) -> None:
        """An offer does not outlive its connection."""
        self._offered = None

    def arrived(self, step: int, result: dict, error: str | None) -> None:
        folder = self._run.folder / "checkpoints" / f"step-{step:08d}"
        if error is not None:
            raise RuntimeError(f"the producer could not evaluate {folder.name}: {error}")
        record = json.loads((folder / "record.json").read_text())
        if result["checkpoint"] != checkpoint.checkpoint_hash(folder):
            raise RuntimeError(f"the report for {folder.name} is about another checkpoint ({result['checkpoint'][:12]})")
        self._measured[step] = {"kind": "eval", "step": step, "tokens": record["tokens"]} | result
        self._run.metrics.write("eval", step, tokens=record["tokens"], **result)
        if self._offered == folder.name:
            self._offered = None
        log.info("step %d: %s", step, said(self._measured[step]))
        self._compare(step)
        self.offer()

    def _compare(self, step: int) -> None:
        rows = metrics.read(self._run.folder / "metrics.jsonl", "offline")
        offline = next((row for row in rows if row["step"] == step), None)
        if reasons := parted(self._measured[step], offline, self._dtype):
            self._alarms[step] = reasons
            self._run.metrics.write("alarm", step, reasons=reasons)
            log.warning("step %d: training and decoding part: %s", step, "; ".join(reasons))

    def line(self) -> str:
        line = said(self.last) if self.last else "not measured yet"
        if self.last and (reasons := self._alarms.get(self.last["step"])):
            line += f"; ALARM: {'; '.join(reasons)}"
        if waiting := self.queue:
            line += f"; {len(waiting)} {'checkpoint waits' if len(waiting) == 1 else 'checkpoints wait'} for the producer"
        return line


def said(row: dict) -> str:
    low, high = row["tau_interval"]
    return (f"tau {row['tau']:.2f} ({low:.2f} to {high:.2f}) at step {row['step']}, eta {row['eta']:.2f}, "
            f"{row['identical']}/{row['prompts']} texts identical")


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
