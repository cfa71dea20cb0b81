"""How many slots of a block to verify.  A block is drafted whole, as the drafter was trained, but need not be verified whole:
a mixture of experts pays for every position more, and late drafts seldom stand.

    tokens/s (v) = tau(v) / (T_t(v) + T_d(v) + rest)        v slots verified, the known token included
    tau(v)       = 1 + sum over j < v of P(drafts 1..j stand)

The seconds are measured once at start (`calibrate`); while decoding only the draft's price beside the verify's is followed, for
a box that becomes slower by a factor changes no choice.  The acceptance is a running estimate of each slot's rate given that
all before it stood: a block verified at v says nothing about later slots, and is not counted there (Kaplan and Meier's rule).
Slots beyond the chosen v would never be seen again, so now and then a block is verified whole, a probe; `Auto` says at what cost.

Greedy, the text is the target's at any length.  At a temperature its distribution is, but one seed's text depends on where
blocks end, so under `Auto` on timings.  Left out: T_t(v) changing its shape as the context grows (it is scaled as a whole)."""
from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from common.drafter.model import Drafter
from common.errors import UserError
from producer.rollback import TargetCache
from producer.sampling import GREEDY, Sampler
from producer.speculate import Laps, Length, Network
from producer.target import Target

HALF_LIFE = 32              # times that a slot was judged, after which an outcome counts half
PRIOR = 4                   # blocks that a slot's prior is worth: the rate of all slots together, itself begun at one half
FIRST = 4                   # blocks verified whole at the start of a run
SHARE = 0.02                # of the decoding time that probes may lose
GAP = 16                    # blocks between two probes at least, unless the last one gained time
WINDOW = 32                 # blocks over which the draft's price is followed, by their median
ROUNDS = range(3, 16)       # of a calibration, the first that warms up not counted: 3 at least, and more while
BUDGET = 1.0                # seconds have not gone by
TEXT = 64                   # tokens of the prompt that a calibration runs on

FULL, AUTO = "full", "auto"
Wanted = Literal["full", "auto"] | int


# The choice

def expected_tau(rates: Sequence[float]) -> list[float]:
    """rates (B-1,): P(draft j stands, given all before it) for j = 1..B-1 -> tau(v) for v = 1..B.  tau(1) is 1: nothing is drafted."""
    tau, standing = [1.0], 1.0
    for rate in rates:
        standing *= rate
        tau.append(tau[-1] + standing)
    return tau


def best(tau: Sequence[float], seconds: Sequence[float], slots: int) -> int:
    """v in 1..slots of the most tokens a second, the longer of equals.  tau, seconds (of a whole cycle): for v = 1, 2, ..."""
    if not 1 <= slots <= min(len(tau), len(seconds)):
        raise ValueError(f"{slots} slots; tau and seconds are known for 1..{min(len(tau), len(seconds))}")
    return max(range(1, slots + 1), key=lambda v: (tau[v - 1] / seconds[v - 1], v))


def lost(tokens: float, seconds: float, tokens_per_s: float) -> float:
    """Seconds that a block took beyond what its tokens take at a rate; negative: it gained."""
    return seconds - tokens / tokens_per_s


# The seconds

@dataclass(frozen=True)
class Costs:
    """Seconds of a cycle's parts.  verify, draft: for v = 1..B, draft 0 at v = 1; rest: judging, rollback, the drafter's context."""

    verify: tuple[float, ...]
    draft: tuple[float, ...]
    rest: float = 0.0

    def cycle(self, dearer: float = 1.0) -> list[float]:
        """Seconds of a whole cycle for v = 1..B, drafts costing `dearer` times as much as they did beside a verify."""
        return [verify + dearer * draft + self.rest for verify, draft in zip(self.verify, self.draft, strict=True)]

    def dearer(self, verified: int, draft_seconds: float, verify_seconds: float) -> float:
        """What a block of 2 slots or more says of the draft's price beside the verify's: 1 where it is as calibrated."""
        return draft_seconds / self.draft[verified - 1] * self.verify[verified - 1] / verify_seconds


def grid(block_size: int) -> list[int]:
    """The lengths that are measured: 1, 2, 3, 4, 6, 8, 12, 16, 24, ... and B."""
    steps = [1] + [n << k for k in range(block_size.bit_length()) for n in (2, 3)]
    return sorted({v for v in steps if v < block_size} | {block_size})


def monotone(values: Sequence[float]) -> list[float]:
    """The nearest sequence (least squares) that never falls: neighbours that fall share their mean."""
    pools: list[tuple[float, int]] = []
    for value in values:
        count = 1
        while pools and pools[-1][0] > value:
            mean, n = pools.pop()
            value, count = (mean * n + value * count) / (n + count), n + count
        pools.append((value, count))
    return [mean for mean, n in pools for _ in range(n)]


def between(known: dict[int, float], block_size: int) -> tuple[float, ...]:
    """Values for v = 1..B from those at some v, 1 and B among them: straight lines between neighbours."""
    at = sorted(known)
    if at[0] != 1 or at[-1] != block_size:
        raise ValueError(f"known at {at}: 1 and {block_size} must be among them")
    values = [known[1]]
    for low, high in zip(at, at[1:]):
        slope = (known[high] - known[low]) / (high - low)
        values += [known[low] + slope * (v - low) for v in range(low + 1, high)] + [known[high]]
    return tuple(values)


def costs_from(seen: dict[int, list[dict[str, float]]], block_size: int) -> Costs:
    """Cycles' seconds (draft, verify, rest) by their length -> medians, never falling with v, lines between."""
    lengths = sorted(seen)
    verify, draft = (monotone([statistics.median(cycle[part] for cycle in seen[v]) for v in lengths]) for part in ("verify", "draft"))
    draft[0] = 0.0
    rest = statistics.median(cycle["rest"] for cycles in seen.values() for cycle in cycles)
    return Costs(between(dict(zip(lengths, verify)), block_size), between(dict(zip(lengths, draft)), block_size), rest)


@torch.inference_mode()
def calibrate(target: Target, drafter: Drafter, ids: list[int], block_size: int) -> Costs:
    """Run the loop's own cycle at each length of the grid in turn, on a text that begins with ids (TEXT tokens of them).

    One round to warm up, then as many as ROUNDS and BUDGET say.  UserError for a drafter of too few positions."""
    taps, lengths, ids = drafter.config.taps, grid(block_size), ids[:TEXT]
    room = drafter.config.max_position_embeddings
    if len(ids) + (1 + ROUNDS.start) * sum(lengths) > room:
        raise UserError(f"lengths cannot be calibrated on a drafter that knows {room} positions; use --verify-len full or a number")
    network = Network(drafter, target, len(ids) + ROUNDS.stop * sum(lengths))
    cache, sampler = TargetCache(target), Sampler(GREEDY)
    out = cache.prefill(torch.tensor([ids], device=target.device), taps)
    network.extend(out.taps)
    last, _ = sampler.choose(out.logits[:, -1])
    seen: dict[int, list[dict[str, float]]] = {v: [] for v in lengths}
    spent = 0.0
    for number in range(ROUNDS.stop):
        if number > ROUNDS.start and (spent > BUDGET or cache.length + sum(lengths) > room):
            break
        for v in lengths:
            laps = Laps(target.device)
            draft, q = network.propose(last, block_size, v)
            laps.lap("draft")
            out = cache.verify(torch.cat([last, draft])[None], taps)
            laps.lap("verify")
            said = sampler.judge(out.logits[0], draft, q)
            agreed = said.tolist()[0]
            cache.commit(agreed + 1)
            network.extend(out.taps[:, :, :agreed + 1])
            last = said[1 + agreed:2 + agreed]
            laps.lap("rest")
            cycle = laps.seconds("draft", "verify", "rest")
            if number:
                seen[v].append(cycle)
                spent += sum(cycle.values())
    return costs_from(seen, block_size)


# The acceptance

@dataclass(frozen=True)
class Acceptance:
    """What was seen of draft slots 1..B-1, the latest outcomes weighing most: how often each was judged while all before it
    stood, and how often it stood then.  A slot that no block got to, or none was verified at, keeps what is known of it."""

    judged: tuple[float, ...]
    stood: tuple[float, ...]

    @classmethod
    def unknown(cls, block_size: int) -> Acceptance:
        return cls((0.0,) * (block_size - 1), (0.0,) * (block_size - 1))

    def after(self, verified: int, accepted: int, half_life: float = HALF_LIFE) -> Acceptance:
        """One block more: accepted of its verified - 1 drafts stood.  The one that follows them fell, if it was verified."""
        if not 0 <= accepted <= verified - 1 <= len(self.judged):
            raise ValueError(f"{accepted} drafts stood of a block verified at {verified} of {len(self.judged) + 1} slots")
        told, keep = min(accepted + 1, verified - 1), 0.5 ** (1 / half_life)
        judged = tuple(keep * n + 1 for n in self.judged[:told]) + self.judged[told:]
        stood = tuple(keep * n + (j < accepted) for j, n in enumerate(self.stood[:told])) + self.stood[told:]
        return Acceptance(judged, stood)

    def rates(self) -> list[float]:
        """P(draft j stands, given all before it) for j = 1..B-1."""
        common = (sum(self.stood) + PRIOR / 2) / (sum(self.judged) + PRIOR)
        return [(stood + PRIOR * common) / (judged + PRIOR) for judged, stood in zip(self.judged, self.stood)]


class Fixed:
    """Always n slots, or as many as there are."""

    def __init__(self, n: int) -> None:
        self._n = n

    def choose(self, slots: int) -> int:
        return min(self._n, slots)

    def saw(self, verified: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        pass


class Auto:
    """The best length by what is known so far, anew for each block; one for all texts of a run.

    Probes have an allowance: SHARE of the time spent decoding.  A probe pays out of it what it lost against the chosen
    length, by the tokens that it really gave, and what GAP blocks bring at least; after one that gained the next follows
    at once.  So where drafting does not pay (v = 1) a bad phase costs SHARE at most, and a better one is noticed.  Times here
    are calibrated ones: the box's speed cancels.  Counted: blocks, slots (verified, summed) and probes (those of the first
    FIRST blocks that would have been shorter included)."""

    def __init__(self, costs: Costs) -> None:
        self.blocks = self.slots = self.probes = 0
        self._costs, self._seconds = costs, costs.cycle()
        self._acceptance = Acceptance.unknown(len(self._seconds))
        self._dearer: deque[float] = deque(maxlen=WINDOW)
        self._allowance = self._price = self._least = 0.0            # seconds: at hand, what a probe asks for, what it pays at least
        self._rate, self._probing = 0.0, False       # tokens/s of the chosen length; is this block a probe instead

    def choose(self, slots: int) -> int:
        tau, seconds = expected_tau(self._acceptance.rates()), self._seconds
        v = best(tau, seconds, slots)
        self._rate, self._least = tau[v - 1] / seconds[v - 1], GAP * SHARE * seconds[v - 1]
        self._price = max(lost(tau[-1], seconds[-1], self._rate), self._least)
        self._probing = v < slots == len(seconds) and (self.blocks < FIRST or self._allowance >= self._price)
        return slots if self._probing else v

    def saw(self, verified: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        took = self._seconds[verified - 1]
        self._allowance += SHARE * took
        self.probes += self._probing
        if self._probing and self.blocks >= FIRST:
            paid = lost(accepted + 1, took, self._rate)
            self._allowance -= paid if paid < 0 else max(paid, self._least)
        self._allowance = min(self._allowance, self._price)
        self.blocks, self.slots = self.blocks + 1, self.slots + verified
        self._acceptance = self._acceptance.after(verified, accepted)
        if verified > 1 and draft_seconds > 0 < verify_seconds:
            self._dearer.append(self._costs.dearer(verified, draft_seconds, verify_seconds))
            self._seconds = self._costs.cycle(statistics.median(self._dearer))


# The settings

def parse(text: str, block_size: int) -> Wanted:
    """--verify-len's value: full, auto, or a number of slots, 1..block_size.  Raises UserError."""
    if text in (FULL, AUTO):
        return text
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= block_size):
        raise UserError(f"--verify-len {text}: full, auto, or a number of slots, 1 to {block_size} (1: nothing is drafted)")
    return int(text)


def make(wanted: Wanted, target: Target, drafter: Drafter, ids: list[int], block_size: int) -> Length | None:
    """What the loop takes.  Auto is calibrated here, on the beginning of ids."""
    if wanted == AUTO:
        return Auto(calibrate(target, drafter, ids, block_size))
    return None if wanted == FULL else Fixed(wanted)
