"""The decode loop: draft a block, verify it in one forward, keep the agreeing prefix and the target's own next token.

    x_a, MASK ... MASK  --drafter-->  d_1 .. d_{v-1}         anchor a: the last token so far, its state not yet computed
    x_a, d_1 .. d_{v-1}  --target-->  o_1 .. o_v             o_i: what the target says after slot i-1
    keep d_1 .. d_n = o_1 .. o_n, then o_{n+1}; the target keeps the state of x_a, d_1 .. d_n, and the drafter their taps

One text at a time; `plain` is the same loop without a drafter, and what every figure is compared with.  Greedy, the text is
plain decoding's; at a temperature its distribution is (sampling.verdict), though one seed's text depends on the drafter.
Both run on Target.forward.  One wait for the device a block: the count of standing drafts and the tokens come together."""
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.drafter import vocab
from common.drafter.acceptance import block_slots, committed
from common.drafter.cache import ContextCache
from common.drafter.model import Drafter
from producer.rollback import TargetCache
from producer.sampling import GREEDY, Sampler, Sampling
from producer.target import Target

OnTokens = Callable[[list[int]], None]          # told of new tokens as they stand, the first ones right after the prefill
PARTS = ("draft", "verify", "judge", "loop", "rollback", "context")
# one cycle, in order: the drafter's block; the target's forward; which drafts stand, and what follows them; tokens to the host, and
# on_tokens; the target's cache cut to them; their taps into the drafter's context


@dataclass(frozen=True)
class Limit:
    """Where a text ends: at max_new_tokens, or after the first of eos_ids, which is kept."""

    max_new_tokens: int
    eos_ids: frozenset[int] | tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, at least 1")

    def remaining(self, tokens: list[int]) -> int:
        """How many tokens may still follow."""
        return 0 if tokens and tokens[-1] in self.eos_ids else self.max_new_tokens - len(tokens)

    def cut(self, new: list[int]) -> list[int]:
        """new tokens up to the first end token, which stays."""
        return new[:next((i + 1 for i, token in enumerate(new) if token in self.eos_ids), len(new))]


@dataclass(frozen=True)
class Decoded:
    """tokens: the new ones.  Per block: accepted draft tokens, and how many were offered (none in plain decoding).

    accepted leaves the target's own token out, and the first token comes from the prefill, so sum(accepted + 1) ==
    len(tokens) - 1: a block that the text's end cuts counts what it added, less one.
    seconds of each part: prefill; then those of PARTS, or step.  Parts follow each other without a gap, so they add up to the
    whole.  On a GPU they are spans of the device's own time, idle time of a busy host included, read without waiting for it."""

    tokens: list[int]
    accepted: list[int] = field(default_factory=list)
    offered: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def decode_seconds(self) -> float:
        """Everything after the first token."""
        return sum(value for part, value in self.seconds.items() if part != "prefill")


class Proposer(Protocol):
    """What the loop asks of a drafter.  Its own context grows with extend and is not changed by propose."""

    def extend(self, taps: Tensor) -> None:
        """taps [K, 1, n, H] of the next n committed tokens."""

    def propose(self, last: Tensor, slots: int, keep: int) -> tuple[Tensor, Tensor | None]:
        """The first drafts of a block of `slots` slots, whose known token `last` [1] int64 follows the context.

        -> n < keep tokens [n] int64, and the distributions [n, V] float64 that they were drawn from; None: picked, not drawn.
        Distributions that are not true change the text's own.  1 <= keep <= slots; a block is drafted at its full length
        however little of it is wanted, for that is what the drafter was trained on."""


class Length(Protocol):
    """How many slots of each block to verify."""

    def choose(self, slots: int) -> int:
        """1..slots; 1: draft nothing."""

    def saw(self, verified: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        """What became of a block of `verified` slots, accepted of its verified - 1 drafts."""


def draft_head(target: Target, shortlist: Tensor | None) -> Callable[[Tensor], Tensor]:
    """(..., H) -> logits of the list's tokens [K] int64 ascending, by a copy of their rows of the target's head; None: of all."""
    if shortlist is None:
        return target.logits
    vocab.check(shortlist, target.vocab_size)
    return functools.partial(F.linear, weight=target.head[shortlist])


class Network:
    """A trained drafter as the loop sees it: its context cache, the target's embedding and head, and how it picks tokens.

    All slots are drafted at once, so each is drawn from its own distribution without regard to those before it."""

    def __init__(self, drafter: Drafter, target: Target, capacity: int, sampler: Sampler | None = None,
                 shortlist: Tensor | None = None) -> None:
        """capacity: tokens to make room for at once.  sampler: None: greedy drafts, which go with any sampling of the target.
        shortlist: ids [K] int64 ascending, the only tokens drafted; None: those that the drafter was trained to draft, all or a list."""
        weight = drafter.fc.weight
        self._shortlist = drafter.shortlist if shortlist is None else shortlist
        self._head = draft_head(target, self._shortlist)
        self._drafter, self._target, self._sampler = drafter, target, sampler or Sampler(GREEDY)
        self._cache = ContextCache(drafter.config, min(capacity, drafter.config.max_position_embeddings), weight.device, weight.dtype)
        block = torch.full((drafter.config.block_size,), drafter.config.mask_token_id, device=target.device)
        self._block = F.embedding(block, target.embedding)           # slot 0 is written anew for each block

    def extend(self, taps: Tensor) -> None:
        self._drafter.extend(self._cache, taps[:, 0].transpose(0, 1).flatten(1))

    def propose(self, last: Tensor, slots: int, keep: int) -> tuple[Tensor, Tensor | None]:
        if keep == 1:
            return last[:0], None
        torch.index_select(self._target.embedding, 0, last, out=self._block[:1])
        drafted = self._drafter.draft(self._cache, self._block[:slots])[1:keep]
        picked, q = self._sampler.choose(self._head(drafted.to(self._target.dtype)))
        return (picked, q) if self._shortlist is None else vocab.whole(picked, q, self._shortlist, self._target.vocab_size)


def speculate(target: Target, drafter: Drafter, ids: list[int], limit: Limit, *, block_size: int | None = None,
              chunk: int | None = None, sampling: Sampling = GREEDY, key: str = "", length: Length | None = None,
              on_tokens: OnTokens | None = None) -> Decoded:
    """Decode with a drafter, reading the taps it was trained on; drafts are sampled as the target is.

    block_size: slots a block, the drafter's own where None.  key: of the text's randomness; drafts have their own beside it.
    """
    proposer = Network(drafter, target, len(ids) + limit.max_new_tokens, Sampler(sampling, f"{key}:draft"))
    return decode(target, proposer, drafter.config.taps, ids, limit, block_size or drafter.config.block_size,
                  chunk=chunk, sampler=Sampler(sampling, key), length=length, on_tokens=on_tokens)


@torch.inference_mode()
def decode(target: Target, proposer: Proposer, taps: tuple[int, ...], ids: list[int], limit: Limit, block_size: int, *,
           rule: str = "fold", chunk: int | None = None, sampler: Sampler | None = None, length: Length | None = None,
           on_tokens: OnTokens | None = None) -> Decoded:
    """The loop.  ids: the prompt, not empty.  chunk: tokens of the prompt run at a time, None: all.  sampler: None: greedy.
    length: None: all slots of a block are verified."""
    _check(ids, block_size)
    sampler, on_tokens = sampler or Sampler(GREEDY), on_tokens or _nobody
    cache, laps = TargetCache(target, rule), Laps(target.device)
    for piece in torch.tensor([ids], device=target.device).split(chunk or len(ids), 1):
        out = cache.prefill(piece, taps)
        proposer.extend(out.taps)
    last, _ = sampler.choose(out.logits[:, -1])
    tokens, accepted, offered = last.tolist(), [], []
    laps.lap("prefill")
    on_tokens(tokens[:])
    while remaining := limit.remaining(tokens):
        slots = block_slots(block_size, remaining)
        keep = slots if length is None else length.choose(slots)
        draft, q = proposer.propose(last, slots, keep)
        if len(draft) >= keep:
            raise ValueError(f"the drafter gave {len(draft)} tokens, at most {keep - 1} were asked for")
        laps.lap("draft")
        seen = cache.verify(torch.cat([last, draft])[None], taps)
        laps.lap("verify")
        said = sampler.judge(seen.logits[0], draft, q)
        laps.lap("judge")
        agreed, *own = said.tolist()                                 # the one wait
        new = limit.cut(own[:committed(agreed, remaining)])
        tokens += new
        accepted.append(len(new) - 1)
        offered.append(len(draft))
        if length is not None:
            length.saw(1 + len(draft), agreed, laps.last("draft"), laps.last("verify"))
        on_tokens(new)
        laps.lap("loop")
        if limit.remaining(tokens):
            cache.commit(agreed + 1)                                 # the anchor and the drafts that stand
            laps.lap("rollback")
            proposer.extend(seen.taps[:, :, :agreed + 1])
            laps.lap("context")
            last = said[1 + agreed:2 + agreed]
    return Decoded(tokens, accepted, offered, laps.seconds("prefill", *PARTS))


@torch.inference_mode()
def plain(target: Target, ids: list[int], limit: Limit, *, chunk: int | None = None, sampling: Sampling = GREEDY, key: str = "",
          on_tokens: OnTokens | None = None) -> Decoded:
    """One token a forward, on the library's own cache: the text and the time to compare with."""
    _check(ids, 1)
    sampler, on_tokens = Sampler(sampling, key), on_tokens or _nobody
    cache, laps = target.new_cache(), Laps(target.device)
    for piece in torch.tensor([ids], device=target.device).split(chunk or len(ids), 1):
        out = target.forward(piece, cache=cache)
    last, _ = sampler.choose(out.logits[:, -1])
    tokens = last.tolist()
    laps.lap("prefill")
    on_tokens(tokens[:])
    while limit.remaining(tokens):
        last, _ = sampler.choose(target.forward(last[None], cache=cache).logits[:, -1])
        laps.lap("step")
        tokens += last.tolist()
        on_tokens(tokens[-1:])
    return Decoded(tokens, seconds=laps.seconds("prefill", "step"))


def first_divergence(plain_tokens: list[int], spec_tokens: list[int]) -> int | None:
    """The first place (0: the first new token) where two texts differ, or the shorter's end; None: they are equal."""
    if plain_tokens == spec_tokens:
        return None
    pairs = enumerate(zip(plain_tokens, spec_tokens))
    return next((i for i, (a, b) in pairs if a != b), min(len(plain_tokens), len(spec_tokens)))


def margin(target: Target, ids: list[int]) -> float:
    """How much the target prefers its first choice after ids to its second, in logits: what rounding had to overcome."""
    top = target.forward(torch.tensor([ids], device=target.device)).logits[0, -1].float().topk(2).values
    return float(top[0] - top[1])


def _nobody(_new: list[int]) -> None:
    """Nobody is waiting for the tokens."""


def _check(ids: list[int], block_size: int) -> None:
    if not ids or block_size < 1:
        raise ValueError("a prompt of at least one token, and blocks of at least one slot")


class Laps:
    """Seconds spent in named parts, one after the other.  On a GPU events are left in its queue and read at the end, so that
    measuring never makes the host wait."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_device = device, device.type == "cuda"        # ROCm's name too
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []
        self.lap("")

    def lap(self, part: str) -> None:
        """What was done since the last call belongs to `part`."""
        if self._on_device:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(torch.cuda.current_stream(self._device))     # the target's GPU need not be the current one
        else:
            mark = time.perf_counter()
        self._marks.append((part, mark))

    def last(self, part: str) -> float:
        """The latest lap of this name.  On a GPU only of what the host has waited for since."""
        at = next(i for i in range(len(self._marks) - 1, 0, -1) if self._marks[i][0] == part)
        return self._between(at - 1)

    def seconds(self, *parts: str) -> dict[str, float]:
        """Every lap so far, added up by name."""
        if self._on_device:
            self._marks[-1][1].synchronize()
        total = dict.fromkeys(parts, 0.0)
        for i, (part, _) in enumerate(self._marks[1:]):
            total[part] += self._between(i)
        return total

    def _between(self, i: int) -> float:
        (_, begin), (_, end) = self._marks[i:i + 2]
        return begin.elapsed_time(end) / 1e3 if self._on_device else end - begin
