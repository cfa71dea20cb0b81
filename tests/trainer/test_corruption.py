"""What is masked, revealed and supervised; and that arms of one seed see the same anchors."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.drafter import geometry
from tests.trainer.small import HIDDEN, MASK, captures, config
from tests.trainer.test_batch import numbered
from trainer import corruption
from trainer.arms import ARMS
from trainer.batch import make_batch
from trainer.run import draws
from trainer.step import rows_of

BLOCK = 4


def batch_of(arm: str, made=None, *, seed: int = 0, anchors: int = 50):
    made = made or [numbered(22, 4), numbered(7, 2)]
    return make_batch(made, config(), ARMS[arm], anchors=anchors, max_tokens=100, generators=[draws(seed, i) for i in range(len(made))])


@pytest.mark.parametrize("seed", [0, 1])
def test_arms_of_one_seed_share_their_anchors(seed):
    """Common random numbers: few of many anchors, so that an arm that drew its masks first would draw others."""
    drawn = [batch_of(arm, captures(6), seed=seed, anchors=3).anchors for arm in ARMS]
    assert all(torch.equal(drawn[0], other) for other in drawn)
    assert not torch.equal(drawn[0], batch_of("ce_causal", captures(6), seed=seed + 2, anchors=3).anchors)


@pytest.mark.parametrize("arm", ARMS)
def test_masked_slots_are_supervised_and_revealed_ones_hold_the_texts_own_token(arm):
    batch = batch_of(arm)
    for b, length in enumerate((22, 7)):
        for n, anchor in enumerate(batch.anchors[b].tolist()):
            if anchor == geometry.PADDING:
                assert not batch.supervised[b, n].any() and (batch.inputs[b, n] == MASK).all()
                continue
            assert batch.inputs[b, n, 0] == anchor and not batch.supervised[b, n, 0], "slot 0 is known, and nobody's to learn"
            for j in range(1, BLOCK):
                inside, masked = anchor + j < length, batch.inputs[b, n, j] == MASK
                assert batch.supervised[b, n, j] == (inside and masked)
                assert masked or batch.inputs[b, n, j] == anchor + j, "ids are their own rows here: a shift by one shows"
                assert inside or masked, "past the text there is nothing to reveal"


def test_full_masks_all_but_slot_0_and_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    masked, origin = corruption.draw("full", 5, 8, generator)
    assert masked.tolist() == [[False] + [True] * 7] * 5 and origin.tolist() == [1] * 5
    assert torch.equal(generator.get_state(), torch.Generator().manual_seed(0).get_state())
    with pytest.raises(ValueError, match="half"):
        corruption.draw("half", 1, 8, generator)


@settings(max_examples=30)
@given(st.sampled_from(["uniform", "prefix"]), st.integers(2, 17), st.integers(0, 99))
def test_every_block_has_a_masked_slot_and_slot_0_never_is(kind, block_size, seed):
    masked, origin = corruption.draw(kind, 200, block_size, torch.Generator().manual_seed(seed))
    assert masked.shape == (200, block_size) and not masked[:, 0].any() and masked.any(1).all()
    if kind == "prefix":
        assert min(2, block_size - 1) <= origin.min() and origin.max() <= block_size - 1
        assert torch.equal(masked.long().argmax(1), origin), "l is the first masked slot"
        assert all(row[l:].all() and not row[:l].any() for row, l in zip(masked, origin))
    else:
        assert (origin == 1).all()


def test_shares_of_uniform_blocks_are_uniform():
    """Of 7 slots, with the share drawn from (0, 1], each number masked from 0 to 7 is as likely as another: 1/8; 0 becomes 1."""
    masked, _ = corruption.draw("uniform", 80_000, 8, torch.Generator().manual_seed(0))
    shares = np.bincount(masked.sum(1).numpy(), minlength=8) / 80_000
    assert shares[0] == 0 and np.abs(shares[1:] - np.array([2, 1, 1, 1, 1, 1, 1]) / 8).max() < 0.006
    assert np.abs(masked[:, 1:].float().mean(0).numpy() - masked[:, 1:].float().mean().item()).max() < 0.006, "no slot is preferred"


def test_prefix_lengths_fall_by_a_tenth():
    lengths = corruption.prefix_lengths(100_000, 16, torch.Generator().manual_seed(0))
    expected = 0.9 ** np.arange(14)
    assert np.abs(np.bincount(lengths.numpy(), minlength=16)[2:] / 1e5 - expected / expected.sum()).max() < 0.005


def test_weights_of_a_variable_prefix_begin_at_its_first_masked_slot():
    arm = ARMS["vp_mixed"]
    batch = batch_of("vp_mixed")
    rows = rows_of(batch, arm)
    first = {}
    for block, slot, weight in zip(rows.blocks.tolist(), rows.slots.tolist(), rows.weights.tolist()):
        origin = first.setdefault(block, slot)
        assert slot >= 2 and weight == pytest.approx(np.exp(-(slot - origin) / 2.0)), "gamma is 2 for blocks of 4"
    assert len(set(first.values())) == 2, "both 2 and 3 were drawn"


def test_a_teachers_row_is_the_one_before_the_slots_own():
    """Final states hold their row's number: slot j of the block at a learns from row a+j-1, whose label is a+j.  Any shift shows."""
    batch = batch_of("kl_mixed_uniform")
    rows = rows_of(batch, ARMS["kl_mixed_uniform"])
    assert rows.finals.shape == (len(rows.labels), HIDDEN) and rows.finals.dtype == torch.bfloat16
    assert torch.equal(rows.finals[:, 0].long() + 1, rows.labels) and len(rows.labels) > 20
    at = batch.supervised.nonzero()
    assert torch.equal(rows.finals[:, 3].long(), batch.anchors[at[:, 0], at[:, 1]] + rows.slots - 1)


def test_final_states_travel_only_where_the_loss_reads_them():
    assert {name: batch_of(name).finals is not None for name in ARMS} == {name: arm.loss != "ce" for name, arm in ARMS.items()}


def test_a_canary_behind_the_anchor_reaches_no_block():
    """Pitfall R2: taps at or after a block's anchor, and tokens after a full block's slot 0, have no influence on it at all."""
    from common.drafter.model import Drafter
    drafter = Drafter(config(), torch.Generator().manual_seed(0))
    made = captures(1, seed=3)[0]
    batch = make_batch([made], config(), ARMS["ce_causal"], anchors=50, max_tokens=100, generators=[draws(0, i) for i in range(1)])
    embedding = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(1))

    def out(taps):
        with torch.no_grad():
            return drafter(embedding[batch.inputs].flatten(1, 2), batch.anchors, taps).unflatten(1, (-1, BLOCK))[0]
    before = out(batch.taps)
    for n, anchor in enumerate(batch.anchors[0].tolist()):
        taps = batch.taps.clone()
        taps[0, anchor:] += 100
        assert torch.equal(out(taps)[n], before[n])
        taps = batch.taps.clone()
        taps[0, anchor - 1] += 100
        assert not torch.equal(out(taps)[n], before[n])


def test_runs_count_to_the_first_wrong_slot_of_each_block():
    from trainer.head import Rows
    from trainer.step import runs
    blocks, slots = torch.tensor([0, 0, 0, 5, 5, 6]), torch.tensor([1, 2, 3, 2, 3, 1])
    rows = Rows(labels=blocks, weights=blocks.float(), blocks=blocks, slots=slots, block_size=4)
    assert runs(torch.tensor([True, True, False, True, True, False]), rows).tolist() == [2, 2, 0]
    assert runs(torch.tensor([False, True, True, True, False, True]), rows).tolist() == [0, 1, 1]
    assert runs(torch.zeros(0, dtype=torch.bool), SimpleNamespace(blocks=blocks[:0], block_size=4)).tolist() == []
