"""Simulated acceptance is the loop's (pitfall A2), and the counting is exact."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.drafter import acceptance as acc
from common.drafter.cache import ContextCache
from common.drafter.config import shape_for
from common.drafter.model import Drafter

H, B, VOCAB = 32, 4, 16


def loop_on_a_table(agree: list[int], start: int, limit: int, stop_at: int | None, block: int) -> list[int]:
    """dflash-facts 3.1 step by step on a greedy text: agree[a] is how many tokens a draft at a has right in a row.
    Returns tokens committed per block; a stop token at stop_at ends the text."""
    produced_all = []
    while start + 1 < limit and (stop_at is None or start < stop_at):
        v = min(block, limit - start)
        accepted = min(agree[start], v - 1)
        produced = min(accepted + 1, limit - start - 1)
        if stop_at is not None and start + produced >= stop_at:
            produced = stop_at - start
        start += produced
        produced_all.append(produced)
    return produced_all


@given(st.data())
def test_the_walk_is_the_loop(data):
    block = data.draw(st.integers(2, 6))
    limit = data.draw(st.integers(2, 40))
    start = data.draw(st.integers(1, limit - 1))
    agree = data.draw(st.lists(st.integers(0, block + 2), min_size=limit, max_size=limit))
    stop_at = data.draw(st.none() | st.integers(start, limit - 1))
    tokens = limit if stop_at is None else stop_at + 1
    accepted_at = [min(a, acc.block_slots(block, limit - 1 - n) - 1, tokens - 1 - n) for n, a in enumerate(agree)][:tokens]
    walked = acc.chain_walk(accepted_at, start, tokens)
    assert [a + 1 for a in walked] == loop_on_a_table(agree, start, limit, stop_at, block)
    assert sum(a + 1 for a in walked) == tokens - 1 - start
    room = acc.rooms(walked, start, tokens, block)
    assert all(0 <= a <= r <= block - 1 for a, r in zip(walked, room, strict=True))
    assert all(r == block - 1 for r in room[:-block])


def test_the_walk_by_hand():
    #                        0  1  2  3  4  5  6  7
    assert acc.chain_walk([-1, 2, -1, -1, 0, 2, -1, -1], start=1, end=8) == [2, 0, 1]       # 1 -> 4 -> 5 -> text full at 7
    assert acc.rooms([2, 0, 1], 1, 8, 4) == [3, 2, 1]
    assert acc.chain_walk([-1, 0], start=1, end=2) == []
    with pytest.raises(ValueError, match="anchor 4"):
        acc.chain_walk([-1, 2, 0, 0, -1, 0], start=1, end=6)


def test_accepted_prefix():
    t = torch.tensor
    assert acc.accepted_prefix(t([5, 6, 7]), t([5, 6, 7, 8])) == 3
    assert acc.accepted_prefix(t([5, 9, 7]), t([5, 6, 7, 8])) == 1       # an agreement behind an error counts for nothing
    assert acc.accepted_prefix(t([6, 7, 8]), t([5, 6, 7, 8])) == 0       # one row off
    assert acc.accepted_prefix(t([], dtype=torch.long), t([5])) == 0
    with pytest.raises(ValueError, match="rows of argmax"):
        acc.accepted_prefix(t([5, 6]), t([5, 6]))


def toy(attention: str):
    config = shape_for(H, VOCAB, 8, (1, 4), 0, attention, block_size=B, sliding_window=6)
    generator = torch.Generator().manual_seed(5)
    drafter = Drafter(config, generator)
    with torch.no_grad():                                               # far from its start: the context decides the drafts
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    return drafter, torch.randn(VOCAB, H, generator=generator), torch.randn(VOCAB, H, generator=generator), generator


def real_loop(drafter, table, head, ids, taps, start, limit) -> list[int]:
    """Draft from the cache, judge by the text, hop; what producer's loop does, the target's argmax being the text."""
    cache = ContextCache(drafter.config, 4, "cpu", torch.float32)
    counts = []
    while start + 1 < len(ids):
        drafter.extend(cache, taps[cache.length:start])
        v = acc.block_slots(B, limit - 1 - start)
        block = table[torch.tensor([int(ids[start])] + [0] * (v - 1))]
        argmax = torch.cat([ids[start + 1:start + v], torch.full((max(0, start + v - len(ids)),), -1), torch.tensor([-1])])
        draft = (drafter.draft(cache, block) @ head.T).argmax(-1)[1:]
        hop = acc.committed(int(acc.accepted_prefix(draft, argmax)), len(ids) - 1 - start)
        counts.append(hop - 1)
        start += hop
    return counts


@pytest.mark.parametrize("attention", ["causal", "bidi", "mixed"])
@pytest.mark.parametrize("past", [0, 2, 50])
def test_simulated_equals_real(attention, past):
    """The text is written by the drafter's own drafts, with errors, so that every length of prefix occurs; `past`: the
    text ended that many tokens before its limit, so its last blocks had more slots than it had tokens left."""
    drafter, table, head, generator = toy(attention)
    taps = torch.randn(60, 2 * H, generator=generator)
    ids = torch.randint(1, VOCAB, (60,), generator=generator)
    start = 7
    for anchor in range(start, 59, B):
        cache = ContextCache(drafter.config, 60, "cpu", torch.float32)
        drafter.extend(cache, taps[:anchor])
        draft = (drafter.draft(cache, table[torch.tensor([int(ids[anchor])] + [0] * (B - 1))]) @ head.T).argmax(-1)[1:]
        keep = int(torch.randint(0, B, (), generator=generator))
        ids[anchor + 1:anchor + 1 + keep] = draft[:keep][:59 - anchor]
    real = real_loop(drafter, table, head, ids, taps, start, 60 + past)
    for chunk in (1, 5, 64):
        accepted_at = acc.simulate(drafter, table.__getitem__, lambda y: y @ head.T, ids, taps, start, limit=60 + past, chunk=chunk)
        assert acc.chain_walk(accepted_at, start, 60) == real
    assert len(set(real)) >= 3
    assert accepted_at[:start] == [acc.UNKNOWN] * start and accepted_at[59] == acc.UNKNOWN and min(accepted_at[start:59]) >= 0


def test_simulation_refuses_an_anchor_without_context():
    drafter, table, head, _ = toy("bidi")
    with pytest.raises(ValueError, match="start 0"):
        acc.simulate(drafter, table.__getitem__, lambda y: y @ head.T, torch.ones(9, dtype=torch.long), torch.randn(9, 2 * H), 0)


def test_the_two_taus_differ():
    prompts = [[3, 3, 3], [0], []]
    assert acc.tau_pooled(prompts) == 1 + 9 / 4
    assert acc.tau_prompt(prompts) == 1 + (3 + 0) / 2
    for tau in (acc.tau_pooled, acc.tau_prompt):
        with pytest.raises(ValueError, match="no block"):
            tau([[], []])


def test_slot_rates_by_hand():
    conditional, cumulative = acc.slot_rates([3, 1, 0, 1], [3, 3, 3, 1], block_size=4)
    assert cumulative == [3 / 4, 1 / 3, 1 / 3] and conditional == [3 / 4, 1 / 2, 1.0]
    assert np.isnan(acc.slot_rates([0], [0], 3)).all()


@given(st.lists(st.integers(0, 7), min_size=1, max_size=30))
def test_cumulative_rates_of_whole_blocks_sum_to_tau(accepted):
    cumulative = acc.slot_rates(accepted, [7] * len(accepted), 8)[1]
    assert 1 + sum(cumulative) == pytest.approx(acc.tau_pooled([accepted]))


def test_bootstrap():
    prompts = [[n % 5] * 8 for n in range(50)] + [[]]
    low, high = acc.bootstrap_interval(prompts, acc.tau_pooled, np.random.default_rng(0))
    assert (low, high) == acc.bootstrap_interval(prompts, acc.tau_pooled, np.random.default_rng(0))
    error = np.sqrt(2 / 50)                                             # of 50 prompt means of variance 2, around tau 3
    assert abs(low - (3 - 1.96 * error)) < 0.08 and abs(high - (3 + 1.96 * error)) < 0.08
    assert acc.bootstrap_interval([[2, 2], [2]], acc.tau_prompt, np.random.default_rng(0)) == (3.0, 3.0)
