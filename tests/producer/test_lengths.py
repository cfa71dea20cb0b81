"""Verify lengths: the choice is the best one, censored blocks do not deceive, probes notice better times, and no text changes."""
from __future__ import annotations

import json
import math
import random

import pytest
import tiny
from drafters import BLOCK, TAPS, Random, Scheduled, prompts, trained
from hypothesis import given, strategies as st

from common.errors import UserError
from producer import lengths, lengths_bench, writing
from producer.config import Generate
from producer.lengths import Acceptance, Auto, Costs, Fixed, best, between, costs_from, expected_tau, grid, lost, monotone
from producer.sampling import Sampling
from producer.speculate import Limit, decode, plain, speculate

FLAT = Costs((1.0,) * 8, (0.0,) + (0.1,) * 7, 0.05)
STEEP = Costs(tuple(float(v) for v in range(1, 9)), (0.0,) + (0.1,) * 7, 0.05)
KNEE = Costs((1.0, 1.1, 1.2, 1.3, 2.5, 2.6, 2.7, 2.8), (0.0,) + (0.2,) * 7, 0.05)


# The choice

def test_tau_counts_the_known_token():
    assert expected_tau([]) == [1.0]
    assert expected_tau([0.5, 0.5, 1.0]) == [1.0, 1.5, 1.75, 2.0]       # tau(v) holds v-1 drafts
    assert expected_tau([1.0] * 7) == [float(v) for v in range(1, 9)]
    assert expected_tau([0.0] * 3) == [1.0] * 4


@given(st.lists(st.floats(0, 1), max_size=5))
def test_tau_is_the_mean_over_every_outcome(rates):
    """Against brute force: each outcome of a block of v slots is a number of drafts that stood before the first that fell."""
    for v, tau in enumerate(expected_tau(rates), 1):
        mean = sum((n + 1) * math.prod(rates[:n]) * (1 - rates[n] if n < v - 1 else 1) for n in range(v))
        assert tau == pytest.approx(mean)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 9)), min_size=1, max_size=16), st.data())
def test_the_choice_is_the_best(slots, data):
    tau, seconds = expected_tau([rate for rate, _ in slots[1:]]), [s for _, s in slots]
    n = data.draw(st.integers(1, len(slots)))
    v = best(tau, seconds, n)
    assert 1 <= v <= n and all(tau[v - 1] / seconds[v - 1] >= tau[u] / seconds[u] for u in range(n))
    assert all(tau[v - 1] / seconds[v - 1] > tau[u] / seconds[u] for u in range(v, n))


def test_ties_go_to_the_longer_and_more_slots_than_are_known_are_refused():
    assert best([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], 3) == 3 and best([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], 2) == 2
    for slots in (0, 4):
        with pytest.raises(ValueError):
            best([1.0, 2.0, 4.0], [1.0, 2.0, 4.0], slots)


def test_steep_and_flat_verifies():
    tau = expected_tau([0.8] * 7)
    assert best(tau, STEEP.cycle(), 8) == 1 and best(tau, FLAT.cycle(), 8) == 8 and best(tau, KNEE.cycle(), 8) == 4
    assert best(expected_tau([0.05] * 7), FLAT.cycle(), 8) == 1       # the draft alone costs more than it brings
    assert best(tau, Costs(KNEE.verify, KNEE.draft, 50.0).cycle(), 8) == 8        # a fixed cost wants longer blocks


# The seconds

def test_the_grid():
    assert grid(16) == [1, 2, 3, 4, 6, 8, 12, 16] and grid(8) == [1, 2, 3, 4, 6, 8] and grid(7) == [1, 2, 3, 4, 6, 7]
    assert grid(1) == [1] and grid(2) == [1, 2] and grid(3) == [1, 2, 3]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_monotone_is_the_nearest_that_never_falls(values):
    got = monotone(values)
    assert len(got) == len(values) and all(a <= b + 1e-9 for a, b in zip(got, got[1:]))
    n, want = len(values), []                                       # min-max formula of isotonic regression
    for i in range(n):
        want.append(max(min(sum(values[a:b + 1]) / (b + 1 - a) for b in range(i, n)) for a in range(i + 1)))
    assert got == pytest.approx(want, abs=1e-9)


def test_lines_between_what_was_measured():
    assert between({1: 1.0, 2: 2.0, 4: 6.0}, 4) == (1.0, 2.0, 4.0, 6.0)
    assert between({1: 5.0}, 1) == (5.0,)
    with pytest.raises(ValueError):
        between({1: 1.0, 4: 6.0}, 8)
    cycle = dict(draft=1.0, verify=2.0, rest=0.5)
    seen = {1: [cycle | {"draft": 0.01}] * 3, 2: [cycle | {"verify": v} for v in (3.0, 90.0, 2.5)], 4: [cycle | {"verify": 5.0}] * 3}
    assert costs_from(seen, 4) == Costs((2.0, 3.0, 4.0, 5.0), (0.0, 1.0, 1.0, 1.0), 0.5)
    assert Costs((2.0, 3.0), (0.0, 1.0), 0.5).cycle(dearer=2.0) == [2.5, 5.5]


# The acceptance

def test_what_a_block_says_of_each_slot():
    known = Acceptance.unknown(5)
    assert known.after(1, 0) == known                               # nothing was drafted: nothing is said, nothing is forgotten
    assert known.after(5, 2, math.inf) == Acceptance((1, 1, 1, 0), (1, 1, 0, 0))           # two stood, the third fell
    assert known.after(3, 2, math.inf) == Acceptance((1, 1, 0, 0), (1, 1, 0, 0))           # censored: the third was not verified
    assert known.after(5, 4, math.inf) == Acceptance((1, 1, 1, 1), (1, 1, 1, 1))
    assert known.after(5, 0, math.inf) == Acceptance((1, 0, 0, 0), (0, 0, 0, 0))
    old = Acceptance((4.0,) * 4, (4.0,) * 4).after(5, 1, half_life=1)
    assert old == Acceptance((3.0, 3.0, 4.0, 4.0), (3.0, 2.0, 4.0, 4.0))                   # half, and one more; later slots keep
    for verified, accepted in ((3, 3), (6, 2), (2, -1)):
        with pytest.raises(ValueError):
            known.after(verified, accepted)


def test_before_anything_was_seen_and_slots_that_nobody_got_to():
    assert Acceptance.unknown(4).rates() == [0.5, 0.5, 0.5]
    often = Acceptance.unknown(4)
    for _ in range(200):
        often = often.after(2, 1)
    assert often.rates()[0] > 0.98 and 0.9 < often.rates()[2] < 1   # thought like the others
    assert Acceptance.unknown(4).after(4, 0).rates()[0] == pytest.approx(0.4 * 4 / 5)      # one failure alone is not wild


RATES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)


def block(rng: random.Random, rates, verified: int) -> int:
    """Accepted drafts of a block of which `verified` slots are verified."""
    return next((j for j in range(verified - 1) if rng.random() >= rates[j]), verified - 1)


def test_blocks_verified_short_do_not_deceive():
    """Blocks of every length; the naive histogram (share of all blocks whose first j stood) is far below the truth.

    20,000 blocks without forgetting: slot 7 is judged about 360 times, so 0.08 is three standard errors there and more elsewhere."""
    rng, known, naive = random.Random(3), Acceptance.unknown(8), [0] * 8
    for _ in range(20_000):
        verified = rng.choice([1, 2, 3, 5, 8])
        accepted = block(rng, RATES, verified)
        known = known.after(verified, accepted, math.inf)
        for j in range(accepted + 1):
            naive[j] += 1
    assert known.rates() == pytest.approx(RATES, abs=0.08) and known.rates()[:3] == pytest.approx(RATES[:3], abs=0.02)
    truth, estimate, deceived = expected_tau(RATES)[-1], expected_tau(known.rates())[-1], sum(naive) / naive[0]
    assert estimate == pytest.approx(truth, abs=0.05) and deceived < truth - 1


def test_with_forgetting_the_estimate_has_no_bias():
    """The mean of 300 independent estimates after 300 blocks: within 0.02 of each slot's rate, the prior's pull of 4 blocks of
    about 50 taken off by equal rates.  A single one wanders by about 0.07."""
    rng, sums, runs = random.Random(5), [0.0] * 4, 300
    for _ in range(runs):
        known = Acceptance.unknown(5)
        for i in range(300):
            verified = (2, 3, 5)[i % 3]
            known = known.after(verified, block(rng, [0.7] * 4, verified))
        sums = [a + b for a, b in zip(sums, known.rates())]
    assert [total / runs for total in sums] == pytest.approx([0.7] * 4, abs=0.02)


# Auto

def run(auto: Auto, costs: Costs, rates, blocks: int, seed: int = 0, box=lambda _i: 1.0) -> list[int]:
    """Decode with a drafter of these rates on a box that takes just these seconds, times `box` -> the lengths chosen."""
    rng, chosen = random.Random(seed), []
    for i in range(blocks):
        v = auto.choose(len(costs.verify))
        auto.saw(v, block(rng, rates, v), box(i) * costs.draft[v - 1], box(i) * costs.verify[v - 1])
        chosen.append(v)
    return chosen


@pytest.mark.parametrize("costs, rate, length", [(FLAT, 0.8, 8), (KNEE, 0.8, 4), (STEEP, 0.8, 1), (FLAT, 0.02, 1)])
def test_auto_settles_on_the_best_length(costs, rate, length):
    assert best(expected_tau([rate] * 7), costs.cycle(), 8) == length
    auto = Auto(costs)
    chosen = run(auto, costs, [rate] * 7, 600)
    assert chosen[:lengths.FIRST] == [8] * lengths.FIRST
    assert chosen[100:].count(length) > 0.85 * 500
    assert (auto.blocks, auto.slots) == (600, sum(chosen)) and auto.probes <= chosen.count(8)


def test_one_slot_is_one_slot():
    auto = Auto(FLAT)
    assert [auto.choose(slots) for slots in (1, 2, 8)] == [1, 2, 8]


def test_probes_cost_no_more_than_their_share():
    """Where drafting never pays all that is lost to it is probes: SHARE of the time, the first blocks and one probe aside."""
    auto = Auto(STEEP)
    chosen, cycle = run(auto, STEEP, [0.0] * 7, 4000), STEEP.cycle()
    spent = sum(cycle[v - 1] for v in chosen)
    wasted = spent - 4000 * cycle[0]
    assert 0 < wasted <= lengths.SHARE * spent + (lengths.FIRST + 1) * cycle[-1]
    at = [i for i, v in enumerate(chosen) if v == 8 and i >= lengths.FIRST]
    assert min(b - a for a, b in zip(at, at[1:])) >= lengths.GAP
    assert chosen.count(8) + chosen.count(1) == 4000 and chosen.count(8) == auto.probes > 5


def test_probes_notice_better_times():
    auto = Auto(KNEE)
    assert run(auto, KNEE, [0.02] * 7, 400)[-20:].count(1) >= 19
    chosen = run(auto, KNEE, [0.95] * 7, 400, seed=1)
    assert chosen.index(8) < 150                                    # the next probe, by its allowance
    later = chosen[chosen.index(8):]
    assert 1 not in later[40:] and later[40:].count(4) > 0.8 * len(later[40:])     # a probe that pays is followed by others at once
    assert run(auto, KNEE, [0.02] * 7, 400, seed=2)[-20:].count(1) >= 19


def test_without_probes_better_times_are_never_noticed(monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(lengths, "GAP", math.inf)                    # no allowance is ever enough
    auto = Auto(KNEE)
    run(auto, KNEE, [0.02] * 7, 400)
    assert set(run(auto, KNEE, [0.95] * 7, 400, seed=1)) == {1}


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_a_box_that_becomes_slower_changes_no_choice(rate):
    """Not one of them, also in the blocks right after: drafts and verifies become dearer together, and only their ratio counts."""
    steady = run(Auto(KNEE), KNEE, [rate] * 7, 500)
    assert run(Auto(KNEE), KNEE, [rate] * 7, 500, box=lambda i: 1.0 if i < 250 else 4.0) == steady and len(set(steady)) > 1


def test_drafts_that_become_dearer_than_calibrated_are_noticed():
    dear = Costs(KNEE.verify, (0.0,) + (9.0,) * 7, KNEE.rest)
    assert best(expected_tau([0.6] * 7), KNEE.cycle(), 8) > 1 == best(expected_tau([0.6] * 7), dear.cycle(), 8)
    auto, rng = Auto(KNEE), random.Random(0)
    for _ in range(300):
        v = auto.choose(8)
        auto.saw(v, block(rng, [0.6] * 7, v), dear.draft[v - 1], dear.verify[v - 1])
    assert auto.choose(8) == 1


def test_lost_time():
    assert lost(2, 3.0, 1.0) == 1.0 and lost(5, 3.0, 1.0) == -2.0


# Decoding

NEW = 30


class Chance:
    """Any length at all, and it remembers."""

    def __init__(self, seed: int) -> None:
        self._rng, self.chosen, self.told = random.Random(seed), [], []

    def choose(self, slots: int) -> int:
        self.chosen.append(self._rng.randint(1, slots))
        return self.chosen[-1]

    def saw(self, verified, accepted, draft_seconds, verify_seconds) -> None:
        self.told.append((verified, accepted, draft_seconds, verify_seconds))


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request):
    return tiny.hybrid() if request.param == "hybrid" else tiny.dense(layers=8)


@pytest.fixture(scope="module")
def text(target):
    [ids] = prompts((37,))
    return ids, plain(target, ids, Limit(NEW)).tokens


@pytest.fixture(scope="module")
def drafter(target, text):
    return trained(target, [text[0]], 30, steps=15)


def test_any_length_gives_plain_decodings_text(target, text):
    ids, tokens = text
    for kept in ([0], [0, 99, 3, 1, 7]):
        auto = Auto(Costs((1.0, 1.1, 1.2, 1.3, *[1.5] * 12), (0.0,) + (0.2,) * 15, 0.05))
        for length in (Chance(0), Fixed(1), Fixed(3), auto):
            assert decode(target, Scheduled(ids + tokens, kept), TAPS, ids, Limit(NEW), 16, length=length).tokens == tokens
    assert decode(target, Random(target.vocab_size, 3), TAPS, ids, Limit(NEW), 16, length=Chance(1)).tokens == tokens


def test_the_loop_verifies_what_was_chosen_and_says_what_stood(target, text):
    ids, tokens = text
    chance, always = Chance(2), decode(target, Scheduled(ids + tokens, [2]), TAPS, ids, Limit(NEW), 16)
    got = decode(target, Scheduled(ids + tokens, [2]), TAPS, ids, Limit(NEW), 16, length=chance)
    assert [1 + n for n in got.offered] == chance.chosen == [verified for verified, *_ in chance.told]
    assert [stood for _, stood, *_ in chance.told][:-1] == [min(2, v - 1) for v in chance.chosen][:-1]
    assert all(verify > 0 for *_, verify in chance.told) and sum(got.offered) < sum(always.offered)
    fixed = decode(target, Scheduled(ids + tokens, [99]), TAPS, ids, Limit(NEW), 16, length=Fixed(3))
    assert set(fixed.offered[:-1]) == {2} and set(fixed.accepted[:-1]) == {2}


def test_a_real_drafter_calibrated_and_measured(target, text, drafter, monkeypatch):
    """One Auto for several texts, of other tokens than it was calibrated on; everything reported can travel and be shown."""
    monkeypatch.setattr(lengths, "BUDGET", 0.0)
    costs = lengths.calibrate(target, drafter, text[0], BLOCK)
    assert len(costs.verify) == len(costs.draft) == BLOCK and costs.draft[0] == 0 < min(costs.draft[1:])
    assert list(costs.verify) == sorted(costs.verify) and costs.verify[0] > 0 < costs.rest
    asked = [text[0], *prompts((9,), seed=4)]
    auto = Auto(costs)
    for ids in asked:
        assert speculate(target, drafter, ids, Limit(16), length=auto).tokens == plain(target, ids, Limit(16)).tokens
    measured = lengths_bench.measure(target, drafter, [(str(i), ids) for i, ids in enumerate(asked)], Limit(16), fixed=[1, 3, BLOCK])
    assert json.loads(json.dumps(measured)) == measured and list(measured["runs"]) == ["plain", "full", "1", "3", "auto"]
    assert all(run["identical"] == run["texts"] == 2 for run in measured["runs"].values())
    assert measured["runs"]["1"]["tau"] == measured["runs"]["1"]["verified"] == 1
    assert [row["v"] for row in measured["curve"]] == list(range(1, BLOCK + 1)) and measured["curve"][0]["tau"] == 1
    assert lengths_bench.show(measured).row_count == BLOCK + 2


def test_the_curve_is_that_of_the_whole_blocks():
    """Two slots' rates from four blocks, one of them cut by its text's end; seconds scaled to what the blocks took."""
    blocks = [(3, 2, 0.2, 4.0), (3, 0, 0.2, 4.0), (3, 1, 0.2, 4.0), (2, 1, 0.9, 9.0)]
    rows = lengths_bench.curve(Costs((1.0, 1.5, 2.0), (0.0, 0.1, 0.1)), 0.5, blocks, 3)
    assert [row["tau"] for row in rows] == [1.0, 1.75, 1.75 + 0.75 * 0.5]
    assert [row["verify_seconds"] for row in rows] == [2.0, 3.0, 4.0] and [row["draft_seconds"] for row in rows] == [0.0, 0.2, 0.2]
    assert rows[2]["tokens_per_s"] == pytest.approx(2.125 / 4.7)


# The settings

def test_settings():
    assert [lengths.parse(text, 8) for text in ("full", "auto", "1", "8")] == ["full", "auto", 1, 8]
    assert lengths.make("full", None, None, [1], 8) is None and lengths.make(3, None, None, [1], 8).choose(8) == 3
    for text in ("0", "9", "-1", "", "two", "4.5", "²", "AUTO"):
        with pytest.raises(UserError, match="--verify-len .*full, auto, or a number of slots, 1 to 8"):
            lengths.parse(text, 8)


def test_generate_says_how_it_chose(target, text, drafter, monkeypatch, capsys):
    monkeypatch.setattr(lengths, "BUDGET", 0.0)
    auto = writing.verify_length(Generate(prompt="a", verify_len="auto"), target, drafter, text[0])
    assert "verify lengths calibrated in" in capsys.readouterr().err
    writer = writing.Writer(target, drafter, Limit(NEW), Sampling(), None, None, auto)
    decoded = writer.decode(text[0], "")
    assert decoded.tokens == text[1] and auto.blocks == len(decoded.accepted)
    assert f"slots verified a block ({auto.probes} of {auto.blocks} blocks so far were probes)" in writing.summary(decoded, auto)
    assert "slots verified" not in writing.summary(decoded)
    assert writing.verify_length(Generate(prompt="a"), target, drafter, text[0]) is None         # full is the default
    assert writing.verify_length(Generate(prompt="a", verify_len="2"), target, drafter, text[0]).choose(6) == 2
    with pytest.raises(UserError, match=f"1 to {BLOCK} "):
        writing.verify_length(Generate(prompt="a", verify_len=str(BLOCK + 1)), target, drafter, text[0])
    with pytest.raises(UserError, match="--verify-len .* give --drafter"):
        writing.run(Generate(prompt="a", verify_len="auto"))
