"""Simulated acceptance on samples held aside: runs at every checkpoint, on this box alone, beside the producer's real one.

A drafter is judged on texts that it never trained on (order.py), walked as the decode loop walks them (common.drafter.acceptance).
The text's own tokens stand for the target's choices.  At temperature 0 they are its argmax, and this is what the loop would accept;
a stream sampled at a temperature holds less likely tokens too, so there the figure is lower than greedy decoding's and says how
well the drafter follows such texts.  Prompts differ from the producer's held-out ones, so the two figures are compared by `parted`.
Left out: speed, which only the real loop has."""
from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import metrics
from common.capture import Capture
from common.drafter import acceptance
from common.drafter.model import Drafter
from trainer import order
from trainer.batch import Samples, concat_taps
from trainer.run import Run

log = logging.getLogger("offline")
TEXTS = 16                   # the first so many that are held aside
GAP = 0.2                    # of offline tau: real acceptance lower by more than this, and by more than chance, is an alarm


def span(loss_mask: np.ndarray) -> tuple[int, int]:
    """loss_mask (T,) bool -> (start, end): the first answer is tokens start..end-1.  (T, T) where nothing is supervised.

    start is the loop's first anchor: the prefill gives that token.  Later turns of a conversation are left out."""
    start = int(np.argmax(loss_mask)) if loss_mask.any() else len(loss_mask)
    rest = loss_mask[start:]
    return start, start + (len(rest) if rest.all() else int(np.argmin(rest)))


def prompt_hash(ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """Of the tokens before the first answer: two samples of one prompt have the same."""
    return hashlib.sha256(np.asarray(ids[:span(loss_mask)[0]], "<i4").tobytes()).hexdigest()


def walk(drafter: Drafter, embedding: Tensor, head: Tensor, capture: Capture, most: int) -> list[int]:
    """accepted of each block that the loop would meet on the capture's answer; [] where it has fewer than two tokens.

    embedding (V, H); head (V, H), or the rows of the drafter's shortlist.  most: rows that are read, as in training.  Every block
    has all its slots, as in a text that its stop token ended, which is how texts end; one that its limit ended had fewer slots
    in its last blocks, and a sample does not say which it was."""
    start, end = span(capture.loss_mask[:most])
    if start < 1 or end - start < 2:
        return []
    device = embedding.device
    ids, taps = torch.from_numpy(capture.ids[:end]).long().to(device), concat_taps(capture.taps[:, :end]).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        accepted_at = acceptance.simulate(drafter, lambda tokens: F.embedding(tokens, embedding), lambda y: F.linear(y, head), ids, taps,
                                          start, limit=end + drafter.config.block_size)
    return acceptance.chain_walk(accepted_at, start, end)


def summary(walks: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], block_size: int) -> dict:
    """Of the walks of several texts: tau, tau_prompt, tau_interval (95 %, over texts), verifies, tokens_decoded,
    acceptance_by_slot (slots that no block reached are left out at the end), accepted (a list a text).  ValueError without a block."""
    blocks = [n for accepted in walks for n in accepted]
    room = [r for accepted, (start, end) in zip(walks, spans, strict=True) for r in acceptance.rooms(accepted, start, end, block_size)]
    tau = acceptance.tau_pooled(walks)
    return {"tau": tau, "tau_prompt": acceptance.tau_prompt(walks),
            "tau_interval": list(acceptance.bootstrap_interval(walks, acceptance.tau_pooled, np.random.default_rng(0))),
            "verifies": len(blocks), "tokens_decoded": sum(blocks) + len(blocks),
            "acceptance_by_slot": acceptance.slot_rates(blocks, room, block_size)[1][:max(room)], "accepted": [list(w) for w in walks]}


def parted(real: dict, offline: dict | None, dtype: str) -> list[str]:
    """Why a real measurement is not to be believed without a look, in words; [] where all is well.

    real     tau, tau_interval, tau_simulated: the producer's report of a checkpoint
    offline  tau, tau_interval of the same checkpoint; None where there is none
    dtype    the target's compute dtype
    Offline texts are others than the real ones: only a gap past both intervals and past GAP counts, and only downwards (the way
    that every fault between training and serving goes).  The simulation on the same texts has no such excuse (acceptance.parted)."""
    found = []
    if offline and real["tau"] < (1 - GAP) * offline["tau"] and real["tau_interval"][1] < offline["tau_interval"][0]:
        found.append(f"real tau {real['tau']:.2f} (up to {real['tau_interval'][1]:.2f}) is far below {offline['tau']:.2f} "
                     f"(from {offline['tau_interval'][0]:.2f}) on the texts held aside here")
    if words := acceptance.parted(real["tau"], real["tau_simulated"], dtype):
        found.append(words)
    return found


class Offline:
    """The run's own measurement: which texts, and what came out last."""

    def __init__(self, run: Run, samples: Samples, embedding: Tensor, head: Tensor, *, max_tokens: int) -> None:
        """head, max_tokens: as in walk."""
        self._run, self._samples, self._weights, self._most = run, samples, (embedding, head), max_tokens
        self._trained: set[str] = set()                     # prompts of the samples looked at so far
        self._looked = 0
        self.last: dict | None = next(iter(metrics.read(run.folder / "metrics.jsonl", "offline")[::-1]), None)

    def measure(self, reached: int, progress: Callable[[], object] = lambda: None) -> None:
        """A row "offline" of the run's present drafter, judged on the texts among the store's first `reached` samples.

        progress() is called before each text.  Where there is nothing to measure there is no row, and `line` or the log says so."""
        began, texts = time.monotonic(), min(TEXTS, order.aside(reached))
        walks, spans, cut, drafter = [], [], 0, self._run.judged()
        for number in range(texts):
            progress()
            capture = self._samples[order.aside_index(number)]
            cut += max(0, capture.tokens - self._most)
            walks.append(walk(drafter, *self._weights, capture, self._most))
            spans.append(span(capture.loss_mask[:self._most]))
        if not any(walks):
            if texts:
                log.warning("step %d: none of the %d texts held aside has an answer of two tokens: nothing to measure", self._run.step, texts)
            return
        made = {"tokens": self._run.tokens, "texts": texts, "repeated_prompts": self._repeats(texts, reached), "rows_cut": cut,
                **summary(walks, spans, self._run.config.block_size), "seconds": round(time.monotonic() - began, 3)}
        if made["repeated_prompts"] and (self.last or {}).get("repeated_prompts") != made["repeated_prompts"]:
            log.warning("%d of %d texts held aside answer a prompt that is trained on, too (the producer makes several passes): they flatter",
                        made["repeated_prompts"], texts)
        self._run.metrics.write("offline", self._run.step, **made)
        self.last = {"step": self._run.step} | made
        log.info("step %d: %s", self._run.step, self.line())

    def _repeats(self, texts: int, reached: int) -> int:
        """Of the texts, those whose prompt is also one of the trained-on among the first `reached` samples.  Each is looked at once."""
        trained_on = order.trainable(reached)
        for number in range(self._looked, trained_on):
            self._trained.add(prompt_hash(*self._samples.text(order.index_of(number))))
        self._looked = max(self._looked, trained_on)
        return sum(prompt_hash(*self._samples.text(order.aside_index(number))) in self._trained for number in range(texts))

    @property
    def repeated(self) -> int:
        return self.last["repeated_prompts"] if self.last else 0

    def line(self) -> str:
        if self.last is None:
            return f"not measured: {order.RULE}, but judged on; none of those has been reached at a checkpoint"
        low, high = self.last["tau_interval"]
        return f"tau {self.last['tau']:.2f} ({low:.2f} to {high:.2f}) simulated at step {self.last['step']} on {self.last['texts']} texts held aside"
