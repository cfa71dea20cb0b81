"""The training loop: which samples, one step, what is said of it, when a checkpoint is due.

Runs on the main thread; the link's thread receives meanwhile.  A run that gets ahead of the stream waits, counted."""
from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from common import files, service
from common.status import Board, Rate
from trainer.arms import Arm
from trainer.batch import Samples, make_batch
from trainer.config import Recipe
from trainer.evals import Evals
from trainer.offline import Offline
from trainer.optim import share_at
from trainer.order import reached, sample_at
from trainer.ranks import ALONE, Ranks
from trainer.run import Run
from trainer.step import train_step

log = logging.getLogger("hstrain")
ROW_EVERY = 10               # steps between rows of metrics.jsonl
SAY_EVERY_S = 10.0
FULL_S = 5.0                 # between attempts to save on a full disk
ENOUGH = "enough"            # rank 0's word to the others that no step follows
STATE = "state"              # that it writes down what all hold


@dataclass(frozen=True, kw_only=True)
class Plan(Recipe):
    """Numbers of one run: the recipe of the target's size, changed by the command line, and how the stream is read.  sequences is
    of all ranks together."""

    replay: int
    eval_every: int


@dataclass(kw_only=True)
class Loop:
    arm: Arm
    plan: Plan
    run: Run
    samples: Samples
    embedding: Tensor                        # (V, H), on the drafter's device
    head: Tensor
    evals: Evals
    offline: Offline
    tick: Callable[[], str]                  # the daemon's: news of the link; returns a line about the stream
    ended: Callable[[], bool]                # the stream is complete and all of it is in the store
    stop: service.Stop
    board: Board
    ranks: Ranks = ALONE
    counters: Callable[[], dict] = dict      # what the link counted
    waited: float = 0.0                      # seconds without a sample to train on
    cut: int = 0                             # rows left out of sequences longer than max_tokens
    numbers: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._network = self.run.drafter if self.run.sharded else self.ranks.wrap(self.run.drafter)
        self._rates = Rate(), Rate()

    def follow(self) -> None:
        """What a rank that is not the first does: its share of the steps that rank 0 decides on.  Nothing is written, and a stop
        is rank 0's to notice."""
        while (wanted := self.ranks.agree(None)) != ENOUGH:
            if wanted == STATE:
                self.run.state()
            elif wanted is not None:
                self._step(wanted)

    def go(self) -> None:
        """Train to the plan's last step, then wait for acceptance while there is a producer to wait for; a stop saves and returns."""
        self._began, self._from, self._said, self._stream = time.monotonic(), self.run.step, 0.0, ""
        while self.run.step < self.plan.steps and not self.stop:
            stream = self.tick()
            wanted = self.ranks.agree(self._wanted())
            if wanted is None:
                self.waited += 0.2
                self._say("waiting for samples", stream)
                self.stop.wait(0.2)
                continue
            try:
                self._step(wanted)
            except service.Stopped:                                  # a damaged sample was awaited: of this step nothing is done
                if self.ranks.world > 1:                     # by this rank; the others are in the middle of it
                    raise
                break
            self._say("training", stream)
            if self.run.step % self.plan.eval_every == 0 or self.run.step == self.plan.steps:
                self._checkpoint()
        if self.stop:
            state = self._state()
            self._written(lambda: self.run.save(state))
        self.ranks.agree(ENOUGH)
        while self.evals.waiting and not self.evals.hopeless and not self.stop:
            stream = self.tick()
            self.evals.offer()
            self._say("waiting for the last checkpoint's acceptance", stream)
            self.stop.wait(0.2)
        self._say("stopped" if self.stop else "done", self.tick(), ended=True)

    def _checkpoint(self) -> None:
        """Before the state: a kill in between makes the same checkpoint, and measures it, again."""
        state = self._state()
        self._written(lambda: self.run.checkpoint(state))
        position = self.run.step * self.plan.sequences
        self.offline.measure(reached(position, replay=self.plan.replay, closed=self.run.closed),
                             lambda: self._say("measuring simulated acceptance", self._stream))
        self._written(lambda: self.run.save(state))
        self.evals.offer()

    def _written(self, write: Callable[[], object]) -> None:
        """As often as it takes while the disk is full, unless it is to stop: a run that waits has lost nothing."""
        while True:
            try:
                write()
                return
            except Exception as error:
                if self.stop or not files.no_room(error):
                    raise
                log.warning("%s; the run waits, and tries again", error)
            end = time.monotonic() + FULL_S
            while time.monotonic() < end and not self.stop:
                self._say("waiting for room on the disk", self.tick())
                self.stop.wait(0.2)

    def _state(self) -> dict[str, Tensor]:
        if self.run.sharded:
            self.ranks.agree(STATE)
        return self.run.state()

    def _wanted(self) -> list[int] | None:
        """Indices of the next step's samples, None while one of them has not come yet."""
        start = self.run.step * self.plan.sequences
        def visits() -> list[int]:
            return [sample_at(p, replay=self.plan.replay, closed=self.run.closed) for p in range(start, start + self.plan.sequences)]
        wanted = visits()
        if max(wanted) >= len(self.samples) and self.run.closed is None and self.ended():
            self.run.close_stream(len(self.samples))
            log.info("the stream has ended at %d samples; from here on they are read again", len(self.samples))
            wanted = visits()
        return wanted if max(wanted) < len(self.samples) else None

    def _step(self, wanted: list[int]) -> None:
        """wanted: the whole step's samples, of which this rank takes its share."""
        start, ranks = self.run.step * self.plan.sequences, self.ranks
        positions = ranks.share(range(start, start + self.plan.sequences))
        batch = make_batch([self.samples[i] for i in ranks.share(wanted)], self.run.config, self.arm, anchors=self.plan.anchors,
                           max_tokens=self.plan.max_tokens, generators=self.run.generators(positions)).to(self.embedding.device)
        share = share_at(self.run.step, self.plan.steps)
        self.numbers = train_step(self.run.drafter, self.run.optimizer, self.embedding, self.head, batch, self.arm, share,
                                  ranks=ranks, network=self._network)
        tokens, cut = ranks.total(torch.tensor([batch.tokens, batch.cut], device=self.embedding.device)).tolist()
        self.run.step += 1
        self.run.tokens += tokens
        self.cut += cut
        if ranks.first and (self.run.step % ROW_EVERY == 0 or self.run.step == self.plan.steps):
            self.run.metrics.write("step", self.run.step, tokens=self.run.tokens, waited_s=round(self.waited, 1), rows_cut=self.cut,
                                   samples=len(self.samples), **self.numbers)

    def _say(self, doing: str, stream: str, *, ended: bool = False) -> None:
        """To the status at most once a second, to the log every SAY_EVERY_S.  ended: the last word, said at once."""
        now, self._stream = time.monotonic(), stream
        rate = (self.run.step - self._from) / max(1e-9, now - self._began - self.waited)
        line = f"{doing}: step {self.run.step}/{self.plan.steps}, {self.run.tokens:,} tokens"
        if self.numbers:
            line += f", loss {self.numbers['loss']:.3f}, accuracy {self.numbers['accuracy']:.0%}, {rate:.1f} steps/s"
        if self.waited >= 1:
            line += f", waited {self.waited:.0f} s for samples"
        if ended or self.board.due(time.time()):                 # what is shown is read off the run's folder, too
            self.board.show({"doing": doing, "line": line, "stream": stream, "acceptance": self.evals.line(), "offline": self.offline.line(),
                             "run": str(self.run.folder), "run_name": self.run.folder.name, "arm": self.arm.name,
                             "numbers": self._measured(now), "counters": self.counters() | self._counted(), "ended": ended}, time.time(), force=ended)
            service.notify(STATUS=line)
        service.beat()
        if ended or now - self._said > SAY_EVERY_S:
            self._said = now
            log.info("%s", line)

    def _counted(self) -> dict:
        """As seen.COUNTED names them."""
        after = len(self.samples) - self.run.closed if self.run.closed is not None else 0
        return {"rows_cut": self.cut, "checkpoints_skipped": self.evals.skipped, "alarms": self.evals.alarms,
                "repeated_prompts": self.offline.repeated, "samples_after_end": max(0, after)}

    def _measured(self, now: float) -> dict:
        """As seen.NUMBERS names them."""
        steps, tokens = self._rates
        last = self.evals.last or {}
        return {"step": self.run.step, "steps": self.plan.steps, "tokens": self.run.tokens, "waited_seconds": self.waited,
                "steps_per_second": steps(self.run.step, now), "tokens_per_second": tokens(self.run.tokens, now)} | {
                name: self.numbers[name] for name in ("loss", "accuracy") if name in self.numbers} | {
                name: last[key] for name, key in (("tau", "tau"), ("eta", "eta"), ("tau_step", "step")) if key in last}
