"""`hsprod serve`: joins settings, target, store, link and the two things the target does: samples and evaluations.

One thread runs the target (this one), encoders and the link's socket have theirs.  Evaluations go first: a trainer
waits for them, and they take seconds."""
from __future__ import annotations

import logging
import queue
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from common import exporter, files, service
from common.capture import parse_taps
from common.contract import ExtractionContract
from common.drafter import checkpoint
from common.drafter.config import DrafterConfig
from common.errors import CorruptError, UserError
from common.status import Board, Rate
from producer import assets, evaluate, experts, packed, prompt_sets, prompts as prompt_files, seen, selftest
from producer.config import Serve
from producer.production import Production
from producer.prompts import SALT, SHIPPED
from producer.schedule import Progress
from producer.speculate import Limit
from producer.target import Target, layer_count, load
from protocol.frames import MAX_DOCUMENT
from protocol.keys import ProducerKeys
from protocol.offers import CheckpointReady
from protocol.producer_link import ProducerLink
from protocol.store import DiskFull, SampleStore, should_pause
from protocol.wire import check_address

log = logging.getLogger("hsprod")
READING_S = 3600.0           # seconds that systemd waits for a target to be read: 70 GB at 20 MB/s
CHECKING_S = 900.0           # and for what follows: experts timed, self-test, assets written


def serve(settings: Serve, stop: service.Stop) -> None:
    if settings.threads:
        torch.set_num_threads(settings.threads)
    files.usable(settings.state_dir, "--state-dir")
    keys = ProducerKeys(settings.keys) if settings.keys else None
    check_address(settings.bind, keys, insecure=settings.insecure)
    taps = parse_taps(settings.layers, layer_count(settings.target))
    split = read_prompts(settings)
    board = Board(settings.state_dir / "status.json")
    exporter.serve(settings.metrics_port, board, seen.SEEN)
    starting(board, f"reading the target {settings.target}", READING_S)
    target = load(settings.target, dtype=settings.dtype, device=settings.device, mask_token=settings.mask_token,
                  experts=None if settings.experts == "auto" else settings.experts)
    starting(board, "checking the target", CHECKING_S)
    contract = target.contract(taps, prompt_files.thinking_mode(target.tokenizer, settings.thinking))
    if settings.experts == "auto":
        contract = choose_experts(target, contract, settings.state_dir / "streams")
    health = selftest.check(target, taps)
    health.require(target.name)
    log.info("%s", health.line())
    log.info("target %s: %s, taps %s, contract %s", target.name, target.dtype, ",".join(map(str, taps)), contract.hash[:12])
    folder = settings.state_dir / "streams" / contract.hash[:16]
    offered = assets.write(target, settings.state_dir / "assets" / contract.hash[:16])
    stop.begin()
    with SampleStore(folder / "samples", contract=contract.to_dict()) as store:
        files.check_room(store.folder, store.bytes_used, int(settings.disk_budget * 1e9))
        evaluator = Evaluator(target, contract, split.held_out, settings, stop)
        link = ProducerLink(settings.bind, store, contract.to_dict(), offered, cursors=folder / "subscribers.json",
                            inbox_dir=folder / "checkpoints", evaluation={"prompts": evaluator.prompts_hash},
                            keys=keys, insecure=settings.insecure)
        production = Production(target, contract, split.train, settings, store,
                                Progress(folder / "progress.json", prompt_files.prompts_hash(split.train), store.next), stop)
        with link:
            log.info("listening on %s; stream %s holds %d samples", settings.bind, store.stream[:8], store.next - store.first)
            service.notify(READY="1")
            Loop(settings, stop, store, link, production, evaluator, board).run()
        production.close()
    log.info("stopped")


def starting(board: Board, doing: str, seconds: float) -> None:
    """Said to whoever watches: systemd, which is to wait so long at most, the log, and `hsprod status`."""
    service.starting(doing, seconds)
    board.show({"doing": f"starting: {doing}"}, time.time(), force=True)


def choose_experts(target: Target, contract: ExtractionContract, streams: Path) -> ExtractionContract:
    """--experts auto: as the stream of this contract began, so that it goes on; a stop-watch decides for a new stream only.

    The choice is in the contract, so another one at the next start would end a long stream.  Returns the contract as it is now."""
    if experts.found(target.model):
        if kept := experts.begun(streams, contract):
            experts.use(target.model, kept, f"the stream in {streams} began with --experts {kept}")
            log.info("experts: %s, as the stream in %s began; not timed again", kept, streams)
        else:
            experts.auto(target.model, target.tokenizer, say=log.info)
    return target.contract(contract.taps, contract.thinking)


def read_prompts(settings: Serve) -> prompt_files.Split:
    path = settings.prompts or SHIPPED
    found = prompt_sets.read(path)
    log.info("%s", found.line())
    split = prompt_files.split(found.prompts, settings.held_out, SALT)
    if settings.mode == "prefill" and (bare := [p for p in split.train if p.answer is None]):
        raise UserError(f"{path}: {len(bare)} prompts have no answer, which --mode prefill needs; use --mode generate")
    log.info("%d prompts, %d held out, %d duplicates left out", len(split.train), len(split.held_out), split.duplicates)
    return split


class Evaluator:
    """Checkpoints in, acceptance reports out.  Plain texts are decoded once and kept for all checkpoints."""

    def __init__(self, target: Target, contract: ExtractionContract, held_out: list[prompt_files.Prompt], settings: Serve,
                 stop: service.Stop) -> None:
        self._target, self._contract, self._stop = target, contract, stop
        chosen = prompt_files.judges(held_out, settings.eval_prompts)
        self._prompts = [(p.id, prompt_files.render(target.tokenizer, p, contract.thinking)) for p in chosen]
        self._positions = max((len(ids) for _, ids in self._prompts), default=0) + settings.eval_new_tokens
        self.prompts_hash = prompt_files.prompts_hash(chosen)
        self._plain = evaluate.PlainTexts(target, Limit(settings.eval_new_tokens, target.eos_ids), contract.taps, between=stop.check)

    def report(self, ready: CheckpointReady) -> dict:
        """Raises CorruptError for a checkpoint that cannot be used, Stopped."""
        drafter, config, record = checkpoint.load(ready.folder, device=self._target.device, dtype=self._target.dtype)
        check_fits(config, record, self._contract, self._positions)
        packed.pack(drafter)
        began = time.monotonic()
        result = evaluate.evaluate(self._target, drafter, self._prompts, self._plain, seed=0, progress=lambda _done, _of: self._stop.check(),
                                   between=self._stop.check)
        result |= {"checkpoint": checkpoint.checkpoint_hash(ready.folder), "prompts_hash": self.prompts_hash, "seconds": time.monotonic() - began}
        sent = evaluate.fitted(result, MAX_DOCUMENT)
        if sent is not result:
            log.warning("%s step %d: the report is too large for one message; its accepted lists are left out (%d prompts), so that arms "
                        "are compared without pairing: fewer --eval-prompts or --eval-new-tokens make it fit", ready.run, ready.step, len(result["texts"]))
        return sent


def check_fits(config: DrafterConfig, record: dict, contract: ExtractionContract, positions: int) -> None:
    """CorruptError where this target cannot decode `positions` tokens with a checkpoint that says so of itself."""
    for name, ours, theirs in (("contract", contract.hash, record.get("contract")), ("taps", contract.taps, config.taps),
                               ("hidden size", contract.hidden_size, config.hidden_size), ("vocabulary", contract.vocab_size, config.vocab_size),
                               ("mask token", contract.mask_token_id, config.mask_token_id)):
        if ours != theirs:
            raise CorruptError(f"checkpoint's {name} is {theirs}, the target's {ours}")
    if config.max_position_embeddings < positions:
        raise CorruptError(f"checkpoint knows {config.max_position_embeddings} positions; prompts and new tokens here need {positions}")


@dataclass
class Loop:
    """tick by tick: evaluate what waits, else produce, else idle."""

    settings: Serve
    stop: service.Stop
    store: SampleStore
    link: ProducerLink
    production: Production
    evaluator: Evaluator
    board: Board

    def run(self) -> None:
        self.began, self.board.numbers = time.monotonic(), self.numbers
        self.paused, self.last_report, self._disk_full, self._evaluated, self._last = False, "", False, 0, {}
        self.doing, self.stop.turn = "starting", self.refresh
        self._rates = {name: Rate() for name in ("tokens", "stored_bytes", "sent_bytes")}
        while not self.stop:
            self.link.raise_if_failed()
            self.link.set_ended(self.production.ended)
            try:
                if not (self.evaluate() or self.mend() or self.produce()):
                    self.say("all prompts are answered; waiting for checkpoints" if self.production.ended else "paused: " + self.why_paused())
                    self.stop.wait(0.1)
            except service.Stopped:
                break
            service.beat()
        service.notify(STOPPING="1")
        self.say("stopped", force=True, ended=True)

    def evaluate(self) -> bool:
        try:
            ready = self.link.inbox.get_nowait()
        except queue.Empty:
            return False
        self.say(f"evaluating {ready.run} step {ready.step}", force=True)
        try:
            result = self.evaluator.report(ready)
        except CorruptError as error:
            log.error("%s step %d from %s: %s", ready.run, ready.step, ready.peer, error)
            self.link.report(ready, error=str(error))
            return True
        self.last_report = (f"{ready.run} step {ready.step}: tau {result['tau']:.2f}, eta {result['eta']:.2f}, "
                            f"{result['identical']}/{result['prompts']} identical")
        log.info("%s (%.1f s)", self.last_report, result["seconds"])
        self._evaluated, self._last = self._evaluated + 1, {name: result[name] for name in ("tau", "eta")}
        self.link.report(ready, result=result)
        return True

    def produce(self) -> bool:
        """One batch, unless the stream has ended or the disk budget is used up."""
        if self.production.ended:
            return False
        self.make_room()
        if self.paused:
            return False
        self.say("answering prompts")
        made = self._stored(self.production.step)
        if made:
            self.link.samples_ready()
        return made is not None

    def mend(self) -> bool:
        """One sample that a trainer needs and that is damaged here, made again."""
        needed = self.link.needed()
        if not needed:
            return False
        self.say(f"making sample {needed[0]} again", force=True)
        made = self._stored(lambda: self.production.mend(needed[0]))
        if made is not None:
            (self.link.made_again if made else self.link.lost)(needed[0])
        return made is not None

    def _stored(self, make: Callable[[], int]) -> int | None:
        """What `make` says; None while the disk is full: what it has made waits."""
        try:
            made = make()
        except DiskFull as error:
            if not self._disk_full:
                log.error("%s; what is made waits, and is tried again", error)
            self._disk_full = True
            return None
        if self._disk_full:
            log.warning("the disk has room again: production goes on")
        self._disk_full = False
        return made

    def make_room(self) -> None:
        """Free what every known trainer has, oldest first, when the budget is nearly used; then decide whether to pause."""
        budget = int(self.settings.disk_budget * 1e9)
        if should_pause(self.store.bytes_used, budget, self.paused):
            self.link.drop_acked()
        paused = should_pause(self.store.bytes_used, budget, self.paused)
        if paused != self.paused:
            log.warning("disk budget: %s at %.3f of %.3f GB", "paused" if paused else "going on", self.store.bytes_used / 1e9, budget / 1e9)
        self.paused = paused

    def why_paused(self) -> str:
        if self._disk_full:
            return "the disk is full"
        slow = [f"{name} (at {peer['acked']})" for name, peer in self.link.snapshot()["peers"].items() if peer["acked"] < self.store.next - 1]
        return f"disk budget used up; waiting for {', '.join(slow) or 'a first trainer'}"

    def refresh(self) -> None:
        """In the middle of a batch or an evaluation, which take minutes: links and rates as they are now."""
        self.say(self.doing)

    def say(self, doing: str, *, force: bool = False, ended: bool = False) -> None:
        """At most once a second, unless it is news.  ended: this is the last word."""
        now, self.doing = time.time(), doing
        if not force and not self.board.due(now):
            return
        c, seconds, snapshot = self.production.counters, max(1e-9, time.monotonic() - self.began), self.link.snapshot()
        stream = (f"{self.store.next:,} samples, {c['tokens']:,} tokens this start ({c['tokens'] / seconds:.0f}/s), "
                  f"{self.store.bytes_used / 1e6:.1f} MB, ratio {self.ratio:.2f}")
        self.board.show({"doing": doing, "stream": stream, "last_evaluation": self.last_report, "address": self.settings.bind,
                         "counters": self.counters(snapshot["counters"]), "trainers": snapshot["peers"], "ended": ended}, now, force=force)
        service.notify(STATUS=f"{doing}; {stream}")

    def counters(self, link: dict) -> dict:
        """As seen.COUNTED names them: the link's, the captures', the store's."""
        made = {f"captures_{name}": self.production.counters[name] for name in ("refused", "too_long", "made_again")}
        return link | made | {"corrupt": self.store.corrupt}

    @property
    def ratio(self) -> float:
        c = self.production.counters
        return c["raw_bytes"] / c["bytes"] if c["bytes"] else 0.0

    def numbers(self) -> dict:
        """As seen.NUMBERS names them."""
        c, now = self.production.counters, time.monotonic()
        totals = {"tokens": c["tokens"], "stored_bytes": c["bytes"], "sent_bytes": self.link.sent_bytes}
        rates = {f"{name}_per_second": self._rates[name](total, now) for name, total in totals.items()}
        return {"first_sample": self.store.first, "next_sample": self.store.next, "tokens": c["tokens"], "ratio": self.ratio,
                "disk_used_bytes": self.store.bytes_used, "disk_budget_bytes": int(self.settings.disk_budget * 1e9),
                "disk_free_bytes": shutil.disk_usage(self.store.folder).free, "paused": int(self.paused or self._disk_full),
                "ended": int(self.production.ended), "evaluations": self._evaluated,
                "evaluations_waiting": self.link.inbox.qsize()} | rates | self._last
