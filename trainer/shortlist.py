"""`--draft-vocab K`: the tokens that a run's drafter may draft, chosen once from the stream's own text when the run begins.

The K commonest among the supervised tokens of the first samples, so that every arm of one store has the same list; how much
of other samples' text it covers is said at once, for a token outside it is never drafted.  The list lies in the run's folder
and beside every checkpoint; a resumed run reads it back.  Left out: which tokens a count makes a list (common.drafter.vocab),
and lists that change while training."""
from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from common import files
from common.drafter import vocab
from common.errors import UserError
from trainer import order
from trainer.run import Run

log = logging.getLogger("hstrain")
FILE = "shortlist.json"
TOKENS = 80_000              # supervised, of the first samples that hold so many together; all there are where a stream ends sooner.
                             # Fewer make poor lists: of SmolLM2's, K = 6144 covered 93.3 % by 6k tokens, 96.9 % by 25k, 98.6 % by 79k
JUDGED = 5                   # of these samples one in so many, the last ones, are judged on and not counted; so is every one held aside

Text = tuple[np.ndarray, np.ndarray]         # ids (T,), loss_mask (T,) bool


class Texts(Protocol):
    """A store's texts in the stream's order, as batch.Samples has them."""

    def __len__(self) -> int: ...
    def text(self, index: int) -> Text: ...


class First:
    """The first texts of a store that may still grow: as many as hold TOKENS supervised tokens, whenever one looks."""

    def __init__(self, samples: Texts) -> None:
        self.texts: list[Text] = []
        self._samples, self._tokens = samples, 0

    def enough(self) -> bool:
        """Takes up what has come."""
        while self._tokens < TOKENS and len(self.texts) < len(self._samples):
            self.texts.append(self._samples.text(len(self.texts)))
            self._tokens += int(self.texts[-1][1].sum())
        return self._tokens >= TOKENS


def settle(run: Run, size: int, first: First) -> None:
    """Give run.drafter its shortlist of `size` tokens: the one in the run's folder, else one chosen now and written there first.

    first: once it has enough, or the stream has ended.  What is known of the list goes into the record of every
    checkpoint.  UserError where the folder's list is gone or of another size, and where K is none of the vocabulary's."""
    path, device = run.folder / FILE, run.drafter.fc.weight.device
    if path.exists():
        made = json.loads(path.read_text())
    elif run.resumed:
        raise UserError(f"{path} is gone: this run cannot go on without the list of tokens that it drafts; begin another --run-dir")
    else:
        made = choose(first.texts, run.config.vocab_size, size)
        files.write_whole(path, json.dumps(made).encode())
    if len(made["ids"]) != size:
        raise UserError(f"{path} holds {len(made['ids'])} tokens, the run's --draft-vocab is {size}")
    run.drafter.shortlist = torch.tensor(made["ids"], device=device)
    facts = {name: value for name, value in made.items() if name != "ids"}
    run.identity = run.identity | {"shortlist_chosen": facts}
    run.metrics.write("shortlist", 0, **facts)
    log.info("%s", line(facts))


def choose(texts: Sequence[Text], vocab_size: int, size: int) -> dict:
    """texts: the first of the store.  -> ids [K] ascending; size; seen: of them that stand in the counted texts; counted_samples,
    counted_tokens; judged_samples, judged_tokens; coverage: of the judged texts' supervised tokens, None where there are none."""
    if not size < vocab_size:
        raise UserError(f"--draft-vocab {size}: the target has {vocab_size} tokens; leave it out to draft all of them")
    last, aside = len(texts) - len(texts) // JUDGED, {order.aside_index(n) for n in range(order.aside(len(texts)))}
    judge = [i >= last or i in aside for i in range(len(texts))]
    counts, judged = (vocab.count((ids[mask] for (ids, mask), judges in zip(texts, judge) if judges == which), vocab_size)
                      for which in (False, True))
    if not counts.any():
        raise UserError(f"--draft-vocab {size}: no token of the first {len(texts)} samples is supervised, so there is nothing to count")
    ids = vocab.shortlist(counts, size)
    return {"ids": ids.tolist(), "size": size, "seen": int((counts[ids] > 0).sum()), "counted_samples": len(texts) - sum(judge),
            "counted_tokens": int(counts.sum()), "judged_samples": sum(judge), "judged_tokens": int(judged.sum()),
            "coverage": vocab.coverage(judged, ids) if judged.any() else None}


def line(facts: dict) -> str:
    """What is said of a list, its coverage above all."""
    covers = "no other sample to judge it on"
    if facts["coverage"] is not None:
        covers = (f"covers {facts['coverage']:.2%} of {facts['judged_tokens']:,} tokens in {facts['judged_samples']} samples that were "
                  "not counted")
    return (f"draft vocabulary: {facts['size']:,} tokens, the commonest among {facts['counted_tokens']:,} of {facts['counted_samples']} "
            f"first samples ({facts['seen']:,} stand there at all); {covers}")


def head_of(head: Tensor, shortlist: Tensor | None) -> Tensor:
    """head (V, H) -> the rows that are drafted with: a copy of the list's (K, H), or all of them."""
    return head if shortlist is None else head[shortlist]
