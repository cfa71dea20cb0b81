"""Which arm beats which, by how much, and how sure that is: pure numpy on counts per seed and prompt.

Two things vary besides the arm: the prompts that tau is measured on and the seed that a drafter began with.  Arms share both
(same held-out prompts; one seed has the same data order and anchors in every arm), so differences are taken within a prompt and
a seed, where what both arms share cancels.  Method, for any figure x (an arm's tau, or a difference of two):

    prompts   drawn with replacement, the same draw for all arms and seeds; tau is pooled over the draw's blocks, then averaged over
              seeds.  Deviations are widened by sqrt(P / chi2(P-1)): their variance is unbiased and few prompts count as few.
    seeds     two or three values cannot be drawn from (with two, a plain hierarchical bootstrap finds a difference in nearly half of
              all cases where there is none), so their mean's error is a normal draw whose variance is drawn, too: what their spread
              says of it, times (S-1) / chi2(S-1).  That is a t draw of S-1 degrees of freedom.
    cells     what varies by prompt AND seed is in both of the above; its variance is taken out of each draw of the seeds' (two-way
              clustering: rows + columns - cells).  Out of the draw, not of the estimate: an estimate that happens to be small is no
              proof that seeds do not matter.

95 % intervals are percentiles of the sum; p is two-sided, Holm-corrected over all pairs.  With one seed nothing is known about
seeds: the interval is over prompts alone and the verdict says so.  Where tau per prompt is unknown (rows of older versions) the
prompts' part is a normal draw for each arm apart, from its rows' own intervals: wider, and "not paired".
Left out: blocks as the unit (blocks of one prompt depend on each other), and choosing among arms by more than pairs."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
Z = 1.959964                 # half a 95 % interval in standard errors


@dataclass(frozen=True)
class Arm:
    """What was measured of one arm at one number of training tokens.

    seeds      S different ones, ascending
    committed  (S, P) tokens committed, by seed and prompt; a prompt is the same column in every arm.  None: not known
    blocks     (S, P) verifies, at least 1 each; None with committed
    taus       (S,) pooled over blocks
    errors     (S,) standard error of each tau over prompts; used where committed is None alone
    """

    name: str
    seeds: tuple[int, ...]
    taus: np.ndarray
    errors: np.ndarray
    committed: np.ndarray | None = None
    blocks: np.ndarray | None = None

    @classmethod
    def of_cells(cls, name: str, seeds: Sequence[int], committed: np.ndarray, blocks: np.ndarray) -> Arm:
        """ValueError for a prompt without a block, seeds twice, or shapes that do not fit."""
        committed, blocks = np.asarray(committed, float), np.asarray(blocks, float)
        if committed.shape != blocks.shape or committed.ndim != 2 or committed.shape[0] != len(set(seeds)) or not committed.shape[1]:
            raise ValueError(f"{name}: committed {committed.shape} and blocks {blocks.shape} of {len(set(seeds))} seeds")
        if (blocks < 1).any():
            raise ValueError(f"{name}: a prompt without a block")
        return cls(name, tuple(seeds), committed.sum(1) / blocks.sum(1), np.full(len(seeds), np.nan), committed, blocks)


@dataclass(frozen=True)
class Figure:
    """One estimated number, in tokens per verify.

    interval: over prompts and seeds; None with one seed or one prompt.  over_prompts: these very drafters on other prompts; None
    with one prompt."""

    estimate: float
    interval: tuple[float, float] | None
    over_prompts: tuple[float, float] | None


@dataclass(frozen=True)
class Pair:
    """a beside b, a the one with the higher tau; difference = tau of a - tau of b.

    superiority  share of draws in which a is above b; p two-sided; p_holm corrected over all pairs.  All None where there is no
                 interval, and over prompts alone where there is none over seeds (over_seeds False).
    seeds_paired  both arms have the same seeds.  paired: per prompt."""

    a: str
    b: str
    difference: Figure
    superiority: float | None
    p: float | None
    p_holm: float | None
    over_seeds: bool
    seeds_paired: bool
    paired: bool

    @property
    def separated(self) -> bool:
        """Whether the arms, not only these drafters, differ."""
        return self.over_seeds and self.p_holm is not None and self.p_holm < 1 - LEVEL

    @property
    def outcome(self) -> str:
        """The verdict in a few words, for a table that has names and numbers."""
        if self.separated:
            return "separated"
        if self.p_holm is not None and self.p_holm < 1 - LEVEL:
            return "drafters differ"                               # these two; with one seed nothing is known of the arms
        if self.p is None:
            return "one prompt"
        return "not separated" + (" (alone it would be)" if self.over_seeds and self.p < 1 - LEVEL else "")

    @property
    def verdict(self) -> str:
        x = self.difference
        if self.separated:
            return f"{self.a} beats {self.b} by {x.estimate:.2f} ({_span(x.interval)})"
        if x.over_prompts is None:
            return f"one prompt: {self.a} is {x.estimate:.2f} above {self.b} on it, which says nothing of others"
        if not self.over_seeds:
            if self.p_holm < 1 - LEVEL:
                return (f"this drafter of {self.a} beats this one of {self.b} by {x.estimate:.2f} ({_span(x.over_prompts)} over prompts); "
                        "one seed: nothing is known of the arms")
            return f"not separated ({_span(x.over_prompts)} over prompts; one seed)"
        return f"not separated ({_span(x.interval)}{'; were it the only pair, it would be' if self.p < 1 - LEVEL else ''})"


@dataclass(frozen=True)
class Evidence:
    """arms in the order given; pairs by falling difference."""

    arms: dict[str, Figure]
    pairs: tuple[Pair, ...]
    paired: bool
    prompts: int | None


def compare(arms: Sequence[Arm], rng: np.random.Generator, resamples: int = RESAMPLES) -> Evidence:
    """ValueError where arms were measured on different numbers of prompts, or two have one name."""
    if len({arm.name for arm in arms}) != len(arms):
        raise ValueError("two arms of one name")
    counts = {arm.committed.shape[1] for arm in arms if arm.committed is not None}
    paired = all(arm.committed is not None for arm in arms)
    if paired and len(counts) != 1:
        raise ValueError(f"arms on {sorted(counts)} prompts")
    prompts = counts.pop() if paired else None
    moved = prompts_moved(arms, rng, resamples)
    figures = {arm.name: _figure(float(arm.taus.mean()), moved[arm.name], seed_draws([arm], rng, resamples)) for arm in arms}
    pairs = [_pair(*_higher_first(a, b), moved, rng, paired) for a, b in combinations(arms, 2)]
    known = [pair.p for pair in pairs if pair.p is not None]
    corrected = iter(holm(known))
    pairs = [Pair(**{**vars(pair), "p_holm": next(corrected)}) if pair.p is not None else pair for pair in pairs]
    return Evidence(figures, tuple(sorted(pairs, key=lambda pair: -pair.difference.estimate)), paired, prompts)


def prompts_moved(arms: Sequence[Arm], rng: np.random.Generator, resamples: int) -> dict[str, np.ndarray | None]:
    """By arm: how far its tau (mean over seeds) lies from its estimate in each of `resamples` draws of prompts, (resamples,).

    One draw serves all arms.  None for a single prompt."""
    if not all(arm.committed is not None for arm in arms):
        return {arm.name: rng.standard_normal(resamples) * float(arm.errors.mean()) for arm in arms}
    count = arms[0].committed.shape[1]
    if count < 2:
        return {arm.name: None for arm in arms}
    drawn = rng.multinomial(count, np.full(count, 1 / count), size=resamples).astype(float)       # (resamples, P) times each prompt
    wider = np.sqrt(count / rng.chisquare(count - 1, resamples))
    return {arm.name: wider * ((drawn @ arm.committed.T) / (drawn @ arm.blocks.T) - arm.taus).mean(1) for arm in arms}


def seed_draws(arms: Sequence[Arm], rng: np.random.Generator, resamples: int) -> np.ndarray | None:
    """Error, over seeds, of one arm's tau or of the difference of two: (resamples,); None where that takes seeds that are not there.

    Two arms of the same seeds are taken seed by seed.  Else each arm has its own error."""
    if any(len(arm.seeds) < 2 for arm in arms):
        return None
    if len(arms) == 2 and arms[0].seeds == arms[1].seeds:
        a, b = arms
        one, other = _cells(a), _cells(b)
        return _error(a.taus - b.taus, None if one is None or other is None else one - other, rng, resamples)
    return sum(_error(arm.taus, _cells(arm), rng, resamples) for arm in arms)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order given: each p times the number of hypotheses not yet rejected, never falling."""
    order, out, highest = np.argsort(ps, kind="stable"), [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        out[i] = highest
    return out


def _cells(arm: Arm) -> np.ndarray | None:
    """(S, P): what each prompt contributes to its run's tau, linearised; rows average to 0."""
    if arm.committed is None:
        return None
    return (arm.committed - arm.taus[:, None] * arm.blocks) / arm.blocks.mean(1, keepdims=True)


def _error(values: np.ndarray, cells: np.ndarray | None, rng: np.random.Generator, resamples: int) -> np.ndarray:
    """Draws (resamples,) of the error of the mean of values (S,) over seeds, without what the prompts' draw counts of the cells (S, P)."""
    freedom = len(values) - 1
    variance = float(values.var(ddof=1)) / len(values) * freedom / rng.chisquare(freedom, resamples)
    if cells is not None and cells.shape[1] > 1:
        seeds, prompts = cells.shape
        rest = cells - cells.mean(0)                                # rows average to 0 already
        variance = np.maximum(0.0, variance - float((rest ** 2).sum()) / ((seeds - 1) * (prompts - 1)) / (seeds * prompts))
    return np.sqrt(variance) * rng.standard_normal(resamples)


def _figure(estimate: float, moved: np.ndarray | None, seeds: np.ndarray | None) -> Figure:
    return Figure(estimate, None if moved is None or seeds is None else _interval(estimate + moved + seeds),
                  None if moved is None else _interval(estimate + moved))


def _pair(a: Arm, b: Arm, moved: dict, rng: np.random.Generator, paired: bool) -> Pair:
    difference = float(a.taus.mean() - b.taus.mean())
    prompts = None if moved[a.name] is None else moved[a.name] - moved[b.name]
    seeds = None if prompts is None else seed_draws([a, b], rng, len(prompts))
    figure, over_seeds = _figure(difference, prompts, seeds), seeds is not None
    if prompts is None:
        return Pair(a.name, b.name, figure, None, None, None, over_seeds, a.seeds == b.seeds, paired)
    draws = difference + prompts + (0.0 if seeds is None else seeds)
    tail = min((draws <= 0).sum(), (draws >= 0).sum())
    superiority, p = float((draws > 0).mean() + (draws == 0).mean() / 2), float(min(1.0, 2 * (tail + 1) / (len(draws) + 1)))
    return Pair(a.name, b.name, figure, superiority, p, None, over_seeds, a.seeds == b.seeds, paired)


def _higher_first(a: Arm, b: Arm) -> tuple[Arm, Arm]:
    return (a, b) if a.taus.mean() >= b.taus.mean() else (b, a)


def _interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _span(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}"
