"""`hstrain run`: joins settings, inbox, run, evaluations and the training loop (loop.py)."""
from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from common import device as devices, exporter, files, service
from common.capture import from_bf16
from common.contract import ExtractionContract
from common.drafter.config import DrafterConfig, shape_for
from common.drafter.model import init_scales
from common.errors import UserError
from common.status import Board
from common.version import versions
from protocol.events import LinkDown, LinkUp, ReportArrived
from trainer import arms, beginning, config, following, objectives, order, ranks as ranks_of, seen, sharded, shortlist
from trainer.arms import Arm
from trainer.batch import Samples, load_weights
from trainer.evals import Evals
from trainer.inbox import Inbox
from trainer.loop import Loop, Plan
from trainer.offline import Offline
from trainer.replay import Stored
from trainer.run import Run

log = logging.getLogger("hstrain")
FIT_SAMPLES = 4              # first samples that a fresh drafter's scales, and --tokens, are fitted to
LOCK_PATIENCE_S = 20.0       # a run that was just told to stop is saving


@dataclass(frozen=True)
class Ready:
    """A run that can begin, or go on."""

    run: Run
    plan: Plan
    samples: Samples
    embedding: Tensor
    head: Tensor                 # the rows that are drafted with
    work: following.Work


def run(settings: config.Run, stop: service.Stop) -> None:
    stop.begin()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    arm = arms.overridden(settings.arm, settings)
    folder = settings.run_dir or settings.state_dir / "runs" / f"{arm.name}-s{settings.seed}"
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,31}", folder.name):
        raise UserError(f"--run-dir {folder}: its last part names the run on the wire; use up to 32 letters, digits and . _ : -")
    if settings.init:
        beginning.there(settings.init, folder)
    files.usable(settings.state_dir, "--state-dir")
    ranks, device = ranks_of.begin(devices.named(settings.device))
    if ranks.first:
        lead(settings, arm, folder, ranks, device, stop)
    else:
        following.follow(folder, arm, settings.seed, ranks, device, keep_bytes=settings.cache << 20)
    ranks.close()


def lead(settings: config.Run, arm: Arm, folder: Path, ranks: ranks_of.Ranks, device: torch.device, stop: service.Stop) -> None:
    """The one process of a run, or the first of its ranks: receives, decides, writes, is watched."""
    board = Board(settings.state_dir / "status" / f"{folder.name}.json")
    exporter.serve(settings.metrics_port, board, seen.SEEN)
    service.notify(READY="1")
    with files.held(folder, "--run-dir", LOCK_PATIENCE_S), source(settings, folder.name, stop) as inbox:
        board.numbers = inbox.numbers
        def say(doing: str, ended: bool = False) -> None:
            service.beat()
            if board.show({"doing": doing, "stream": inbox.line(), "run": str(folder), "run_name": folder.name, "arm": arm.name,
                           "counters": inbox.counters(), "ended": ended}, time.time(), force=board.values.get("doing") != doing):
                service.notify(STATUS=f"{doing}; {inbox.line()}")
        stop.turn = lambda: say("waiting for a damaged sample to come again")         # the one wait below all that follows (Inbox.mend)
        try:
            ready = prepare(settings, arm, folder, device, inbox, ranks.world, stop, say)
        except service.Stopped:
            ready = None
        except UserError:
            ranks.agree(None)                            # so that the others go, too, and say nothing
            ranks.close()
            raise
        ranks.agree(ready and ready.work)
        if ready is None:
            say("stopped", ended=True)
            return
        made, plan = ready.run, ready.plan
        if ready.work.shard:
            made.shard(ranks.world, device)
        log.info("run %s: arm %s, seed %d, %s at step %d of %d%s", folder, arm.name, settings.seed, "resumed" if made.resumed else "begun",
                 made.step, plan.steps, f", {ranks.world} ranks" if ranks.world > 1 else "")
        evals = Evals(made, inbox, dtype=ready.work.contract.dtype, every=settings.eval_all)
        offline = Offline(made, ready.samples, ready.embedding, ready.head, max_tokens=plan.max_tokens)
        loop = Loop(arm=arm, plan=plan, run=made, samples=ready.samples, embedding=ready.embedding, head=ready.head, evals=evals, offline=offline,
                    tick=lambda: tick(inbox, evals), ended=inbox.complete, counters=inbox.counters, stop=stop, board=board, ranks=ranks)
        try:
            loop.go()
        except service.Stopped:
            if ranks.world > 1:                          # the others are in the middle of a step
                raise
            say("stopped", ended=True)                   # a checkpoint was being measured: the state saved last makes it again
    log.info("stopped" if stop else "done")
    if not stop and (left := evals.queue):
        log.warning("real acceptance of %s was not measured: no producer %s; the same command with --producer ADDRESS has it measured",
                    ", ".join(path.name for path in left), "answered" if settings.producer else "was named")


def prepare(settings: config.Run, arm: Arm, folder: Path, device: torch.device, inbox: Inbox | Stored, world: int, stop: service.Stop,
            say: Callable[[str], None]) -> Ready | None:
    """Wait for what a run needs to begin; None where the daemon is to stop first."""
    arrived = inbox.wait(stop, say)
    if arrived is None:
        return None
    contract, assets = arrived
    say("preparing: the target's embedding and head are read")
    start = beginning.read(settings.init, folder, contract.n_layers) if settings.init else None
    embedding, head = load_weights(assets, device)
    samples = Samples(inbox, head, contract=contract.hash, mask_token_id=contract.mask_token_id, most=inbox.ends_at,
                      keep_bytes=settings.cache << 20)
    first = shortlist.First(samples) if arm.draft_vocab else None
    enough = [lambda: len(samples) >= FIT_SAMPLES, *([first.enough] if first else [])]
    if not wait_for_samples(lambda: all(holds() for holds in enough), samples, inbox, stop, say):
        return None
    shape, plan = shape_of(settings, arm, contract, start), plan_of(settings, contract, samples, world)
    if settings.shard:
        sharded.check(world, plan.optimizer)
    said = beginning.check(start, shape, contract, force=settings.init_force) if start else []
    what = identity(settings, arm, contract, shape, plan, inbox.store.stream) | ({"init": start.about} if start else {})
    made = Run(folder, what, shape, seed=settings.seed, optimizer=plan.optimizer, lr=plan.lr,
               device=torch.device("cpu") if settings.shard else device)           # whole it need not fit on a card
    made.drafter.way = None if settings.attend == "auto" else settings.attend
    settle_end(made, inbox, settings)
    if not made.resumed:
        weigh(made, samples, start, said)
    if first:
        shortlist.settle(made, arm.draft_vocab, first)
    listed = made.drafter.shortlist
    work = following.Work(store=inbox.store.folder, assets=assets, contract=contract, shape=shape, plan=plan, identity=what, way=made.drafter.way,
                          shortlist=None if listed is None else listed.cpu(), shard=settings.shard)
    return Ready(made, plan, samples, embedding, shortlist.head_of(head, listed), work)


def source(settings: config.Run, run_name: str, stop: service.Stop) -> Inbox | Stored:
    if settings.samples and not settings.stored:
        raise UserError("--samples goes with --from: a live stream ends where its producer ends it")
    return Stored(settings, run_name) if settings.stored else Inbox(settings, run_name, stop)


def settle_end(run: Run, inbox: Inbox | Stored, settings: config.Run) -> None:
    """A replayed stream ends where the store does now, or where the run once wrote down that it did.  UserError where it cannot."""
    if inbox.ends_at is None:
        return
    if run.closed is None:
        run.close_stream(inbox.ends_at)
    if run.closed > inbox.ends_at or settings.samples not in (None, run.closed):
        raise UserError(f"{run.folder} holds another run (samples: {run.closed} -> {inbox.ends_at}); give another --run-dir, or the --from and "
                        "--samples it was made with")


def tick(inbox: Inbox | Stored, evals: Evals) -> str:
    """The link's news, passed on; a line about the stream."""
    for item in inbox.news():
        match item:
            case LinkUp():
                evals.offer()
            case LinkDown():
                evals.link_lost()
            case ReportArrived():
                evals.arrived(item.step, item.result, item.error)
    return inbox.line()


def wait_for_samples(enough: Callable[[], bool], samples: Samples, inbox: Inbox | Stored, stop: service.Stop, say: Callable[[str], None]) -> bool:
    """Until the store holds enough, or all there will be; False where the daemon is to stop first."""
    while not stop:
        inbox.news()
        if enough() or (len(samples) and inbox.complete()):
            return True
        say("waiting for the first samples")
        stop.wait(0.2)
    return False


def shape_of(settings: config.Run, arm: Arm, contract: ExtractionContract, start: beginning.Start | None = None) -> DrafterConfig:
    """The default shape for the target's size, or the start's, changed by the command line and the arm."""
    given = {"num_hidden_layers": settings.layers, "block_size": arm.block_size, "sliding_window": settings.window}
    over = {name: value for name, value in given.items() if value is not None}
    if start:
        fields = start.shape_fields()
        if arm.all_sliding or "num_hidden_layers" in over:           # named by the arm, or of another length: as they would be by default
            del fields["layer_types"]
            if fields["sliding_window"] is None:
                del fields["sliding_window"]
        over = fields | over
    return shape_for(contract.hidden_size, contract.vocab_size, contract.n_layers, contract.taps, contract.mask_token_id, arm.attention,
                     all_sliding=arm.all_sliding, **over)


def plan_of(settings: config.Run, contract: ExtractionContract, samples: Samples, world: int) -> Plan:
    """world: ranks, each of which takes --sequences a step."""
    chosen = dataclasses.asdict(config.recipe_for(contract.hidden_size))
    chosen |= {name: value for name in chosen if (value := getattr(settings, name)) is not None}
    chosen["sequences"] *= world
    if settings.tokens is not None:
        lengths = [min(samples[i].tokens, chosen["max_tokens"]) for i in range(min(FIT_SAMPLES, len(samples)))]
        chosen["steps"] = math.ceil(settings.tokens / (chosen["sequences"] * sum(lengths) / len(lengths)))
    return Plan(**chosen, replay=settings.replay, eval_every=settings.eval_every)


def identity(settings: config.Run, arm: Arm, contract: ExtractionContract, shape: DrafterConfig, plan: Plan, stream: str) -> dict:
    """What a run is: resuming under any other is refused by field.  Goes into every checkpoint's record."""
    made = versions("torch") | {"arm": arm.to_dict(), "seed": settings.seed, "contract": contract.hash, "extraction": contract.to_dict(),
                                "target": contract.target, "drafter": shape.to_json(),
                                "stream": stream, "held_aside": order.RULE, "denominator": objectives.DENOMINATOR,
                                "plan": {name: value for name, value in vars(plan).items() if name != "eval_every"}}
    return json.loads(json.dumps(made))                      # as it will be read back: tuples are lists


def weigh(run: Run, samples: Samples, start: beginning.Start | None, said: list[str]) -> None:
    """The weights of a run that has taken no step: the start's, or fresh ones fitted to the first samples.  said: of the start."""
    if start is None:
        fit(run, samples)
        return
    beginning.begin(run.drafter, start)
    log.info("begun with %s (%s)", start.path, start.about["sha256"][:12])
    for line in said:
        log.warning("--init: %s", line)


def fit(run: Run, samples: Samples) -> None:
    """Scales of a fresh drafter from the first samples: each tap's RMS, and the final state's by channel."""
    first = [samples[i] for i in range(min(FIT_SAMPLES, len(samples)))]
    tokens = sum(c.tokens for c in first)
    taps = sum((torch.from_numpy(from_bf16(c.taps)).double().square().sum((1, 2)) for c in first)) / (tokens * run.config.hidden_size)
    final = sum((torch.from_numpy(from_bf16(c.final)).double().square().sum(0) for c in first)) / tokens
    device = run.drafter.fc.weight.device
    init_scales(run.drafter, taps.sqrt().float().to(device), final.sqrt().float().to(device))
