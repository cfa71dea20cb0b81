"""Real acceptance, asked of the producer: which checkpoint is offered, and what comes back.

One is measured at a time, and keeps its turn until its result is there: were it replaced by each newer one, a producer
slower than the checkpoints would measure none.  Then comes the newest; those in between are skipped and counted.  What
waits is read off the run's folder, so a restart asks again."""
from __future__ import annotations

import json
import logging
from pathlib import Path

from common import metrics
from common.drafter import checkpoint
from trainer.inbox import Inbox
from trainer.run import Run

log = logging.getLogger("evals")


class Evals:
    """`offer` hands the newest checkpoint to the producer unless one is there; it is called again after each reconnection.

    skipped: checkpoints passed over since this start."""

    def __init__(self, run: Run, inbox: Inbox) -> None:
        self._run, self._inbox = run, inbox
        self._offered: str | None = None
        self.skipped = 0
        self.last: dict | None = next(iter(metrics.read(run.folder / "metrics.jsonl", "eval")[::-1]), None)

    @property
    def waiting(self) -> Path | None:
        """The newest checkpoint, unless its result is there."""
        folders = self._run.checkpoints()
        if not folders or (self.last and self.last["step"] == step_of(folders[-1])):
            return None
        return folders[-1]

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
        before = self.last["step"] if self.last else 0
        self.skipped += sum(before < step_of(other) < step for other in self._run.checkpoints())
        self.last = {"kind": "eval", "step": step, "tokens": record["tokens"]} | result
        self._run.metrics.write("eval", step, tokens=record["tokens"], **result)
        if self._offered == folder.name:
            self._offered = None
        log.info("step %d: %s", step, self.line())
        self.offer()

    def line(self) -> str:
        if self.last is None:
            return "not measured yet"
        low, high = self.last["tau_interval"]
        return (f"tau {self.last['tau']:.2f} ({low:.2f} to {high:.2f}) at step {self.last['step']}, eta {self.last['eta']:.2f}, "
                f"{self.last['identical']}/{self.last['prompts']} texts identical")


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))
