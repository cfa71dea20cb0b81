"""Samples, made a batch at a time: the target answers prompts (or reads given answers), each text is captured alone,
captures are encoded beside the target's work, and the store takes them in order.

Owns no thread of its own but the encoders'; the daemon calls it between evaluations.  Nothing is dropped without a
count: captures that cannot be right (`refused`), sequences that are too long (`too_long`).
"""
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.capture import Capture
from common.contract import ExtractionContract
from common.errors import CaptureError
from common.service import Stop
from producer import generate, prompts as prompt_files
from producer.config import Serve
from producer.prompts import Prompt
from producer.sampling import Sampling
from producer.schedule import Progress, order
from producer.target import Target
from protocol import codec
from protocol.store import SampleStore

log = logging.getLogger("production")
ENCODERS = 2                 # threads; one keeps up with the target, two hide a long sample


@dataclass
class Production:
    """counters: samples, tokens, raw_bytes, bytes, refused, too_long, made_again."""

    target: Target
    contract: ExtractionContract
    prompts: list[Prompt]                # the training side alone
    settings: Serve
    store: SampleStore
    progress: Progress
    stop: Stop

    def __post_init__(self) -> None:
        self.counters: Counter[str] = Counter()
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self._made: list[tuple[int, bytes]] = []              # encoded, waiting for the disk
        self._begin: tuple[int, list[int], int] | None = None   # Progress.begin's words for them, until it is durable
        self._mended: tuple[int, bytes] | None = None         # as _made, of mend
        self._orders: dict[int, list[Prompt]] = {}

    @property
    def ended(self) -> bool:
        return self.progress.item >= len(self.prompts) * self.settings.passes and not self._made

    def step(self) -> int:
        """One batch of samples into the store; returns how many.  Raises DiskFull (call again later), Stopped."""
        if not self._made and self._begin is None:
            self._make()
        if self._begin is not None:
            self.progress.begin(*self._begin)
            self._begin = None
        count = 0
        while self._made:
            self.store.append(*self._made[0])
            self._made.pop(0)
            count += 1
        return count

    def mend(self, seq: int) -> bool:
        """Make a sample that was found damaged here again, from its own prompt; False, and said, where that cannot be.

        An answer that was decoded in a batch may come out otherwise alone.  Raises DiskFull (call again later), Stopped.
        """
        if self._mended is None or self._mended[0] != seq:
            item = self.progress.item_of(seq)
            made = [] if item is None else [capture for _, capture in self._captures(range(item, item + 1))]
            if not made:
                log.error("sample %d cannot be made again: %s", seq, "which prompt it was made of is not known any more" if item is None
                          else "its prompt gives none now")
                return False
            self._mended = seq, codec.encode(made[0], stream=self.store.stream, seq=seq, contract=self.contract.hash)
        self.store.restore(*self._mended)
        self._mended = None
        self.counters["made_again"] += 1
        log.warning("sample %d was damaged here and is made again", seq)
        return True

    def _make(self) -> None:
        items = range(self.progress.item, min(self.progress.item + self.settings.batch, len(self.prompts) * self.settings.passes))
        kept, jobs = [], []
        for item, capture in self._captures(items):
            seq = self.store.next + len(kept)
            kept.append(item)
            jobs.append((seq, self._encoders.submit(codec.encode, capture, stream=self.store.stream, seq=seq, contract=self.contract.hash)))
            self.counters["tokens"] += capture.tokens
            self.counters["raw_bytes"] += capture.taps.nbytes + capture.final.nbytes
        made = [(seq, job.result()) for seq, job in jobs]
        self._begin = self.store.next, kept, items[-1] + 1
        self.counters["samples"] += len(made)
        self.counters["bytes"] += sum(len(data) for _, data in made)
        self._made = made

    def _captures(self, items: range) -> Iterator[tuple[int, Capture]]:
        """Those of the items that give one."""
        chosen = [self._prompt(item) for item in items]
        for item, prompt, (ids, mask) in zip(items, chosen, self._texts(items, chosen)):
            self.stop.check()
            if len(ids) > self.settings.max_tokens:
                self.counters["too_long"] += 1
                log.warning("prompt %s: %d tokens, the limit is %d (--max-tokens): left out", prompt.id[:12], len(ids), self.settings.max_tokens)
                continue
            try:
                capture = self.target.capture(ids, mask, self.contract.taps, prompt.id)
            except CaptureError as error:
                self.counters["refused"] += 1
                log.error("prompt %s: capture refused: %s", prompt.id[:12], error)
            else:
                yield item, capture

    def _prompt(self, item: int) -> Prompt:
        number, place = divmod(item, len(self.prompts))
        if number not in self._orders:
            self._orders = {number: order(self.prompts, number)}
        return self._orders[number][place]

    def _texts(self, items: range, chosen: list[Prompt]) -> list[tuple[list[int], list[bool]]]:
        """ids and loss mask of each, in order."""
        tokenizer, thinking = self.target.tokenizer, self.contract.thinking
        if self.settings.mode == "prefill":
            return [prompt_files.render_conversation(tokenizer, [*p.messages, {"role": "assistant", "content": p.answer}], thinking,
                                                     self.target.eos_ids) for p in chosen]
        asked = [prompt_files.render(tokenizer, prompt, thinking) for prompt in chosen]
        s = self.settings
        answers = generate.answer(
            self.target, asked, s.max_new_tokens, Sampling(temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, seed=s.seed),
            [f"{prompt.id}/{item // len(self.prompts)}" for item, prompt in zip(items, chosen)], between=self.stop.check)
        return [(q + a, [False] * len(q) + [True] * len(a)) for q, a in zip(asked, answers)]

    def close(self) -> None:
        self._encoders.shutdown(cancel_futures=True)
