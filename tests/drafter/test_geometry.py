"""Each convention exactly; a shift by one of any of them fails here (pitfalls R1, R2, W1, W2, W3)."""
from __future__ import annotations

import itertools

import pytest
import torch

from common.drafter import geometry as g
from common.drafter.config import FULL, SLIDING, shape_for

T, B = 20, 4
IDS = torch.arange(T)                 # token = position: a label says where it was taken from
ALL = torch.ones(T, dtype=torch.bool)


def test_valid_anchors():
    mask = torch.tensor([1, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    assert g.valid_anchors(mask).nonzero()[:, 0].tolist() == [1, 6]    # not 0: no context; not 2, 4: nothing to draft; not 7: the end
    assert torch.equal(g.valid_anchors(torch.stack([mask, ALL[:8]])), torch.stack([g.valid_anchors(mask), g.valid_anchors(ALL[:8])]))
    assert g.valid_anchors(ALL[:2]).sum() == 0 and g.valid_anchors(ALL[:1]).sum() == 0


def test_drawn_anchors_are_sorted_distinct_valid_and_the_generators_alone():
    valid = g.valid_anchors(torch.rand(200, generator=torch.Generator().manual_seed(0)) > 0.5)
    draw = g.draw_anchors(valid, 20, torch.Generator().manual_seed(1))
    assert len(draw) == 20 and valid[draw].all() and (draw[1:] > draw[:-1]).all()
    torch.manual_seed(99)
    assert torch.equal(draw, g.draw_anchors(valid, 20, torch.Generator().manual_seed(1)))
    assert torch.equal(g.draw_anchors(valid, 10**6, torch.Generator()), valid.nonzero()[:, 0])


def test_every_valid_anchor_is_drawn_equally_often():
    valid, generator = g.valid_anchors(ALL), torch.Generator().manual_seed(0)
    counts = torch.zeros(T)
    for _ in range(1000):
        counts[g.draw_anchors(valid, 6, generator)] += 1
    assert counts[0] == counts[-1] == 0 and (counts[1:-1] - 6000 / 18).abs().max() < 80       # 5 standard deviations


def test_positions_inputs_labels_and_teachers():
    anchors = torch.tensor([[3, 4, 18, g.PADDING]])
    labels, supervised = g.block_labels(IDS[None], ALL[None], anchors, B)
    assert g.block_positions(anchors, B)[0, :3].tolist() == [[3, 4, 5, 6], [4, 5, 6, 7], [18, 19, 20, 21]]
    assert labels[0, :2].tolist() == [[3, 4, 5, 6], [4, 5, 6, 7]]
    assert supervised.int().tolist() == [[[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]]
    assert labels[0, 2, 1] == 19
    assert torch.equal(labels[supervised], g.block_positions(anchors, B)[supervised])
    assert torch.equal(g.teacher_rows(anchors, B)[supervised], labels[supervised] - 1)
    assert g.block_inputs(IDS[None], anchors, B, 99).tolist() == [[[3, 99, 99, 99], [4, 99, 99, 99], [18, 99, 99, 99], [99] * 4]]


def test_loss_mask_decides_supervision_slot_by_slot():
    mask = ALL.clone()
    mask[5] = False
    assert g.block_labels(IDS, mask, torch.tensor([3]), B)[1].int().tolist() == [[0, 1, 0, 1]]


def test_slot_zero_is_never_supervised():
    """A4: the anchor's token is known; no mask makes it a label."""
    assert not g.block_labels(IDS, ALL, torch.arange(1, T), B)[1][:, 0].any()


def seen_slowly(q_slot, anchor, key, in_block, causal, window):
    """Written from DESIGN convention 3 alone, one pair at a time: key is a row, or a slot of the same block."""
    query = anchor + q_slot
    position = anchor + key if in_block else key
    if in_block:
        if causal and key > q_slot:
            return False
    elif position >= anchor:
        return False
    if window is None:
        return True
    return -window < position - query < window


@pytest.mark.parametrize("attention", ["causal", "bidi", "mixed"])
@pytest.mark.parametrize("kind", [SLIDING, FULL])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8])
def test_mask_table(attention, kind, window):
    """Every mode x layer kind x slot x slot, and every context row, against the slow loop; no row without a key."""
    config = shape_for(128, 64, 8, (1,), 2, attention, layer_types=(SLIDING, FULL), sliding_window=window)
    causal, reach = g.layer_rule(config, 0 if kind == SLIDING else 1)
    assert causal == {"causal": True, "bidi": False, "mixed": kind == SLIDING}[attention]
    assert reach == (window if kind == SLIDING else None)
    anchors = [1, 6, 7, 14, g.PADDING, g.PADDING]
    seen = g.visible(*g.layout(torch.tensor(anchors), B, T), causal, reach)
    for (n, slot), key in itertools.product(itertools.product(range(6), range(B)), range(T + 6 * B)):
        if key < T:
            want = anchors[n] >= 0 and seen_slowly(slot, anchors[n], key, False, causal, reach)
        else:
            block, other = divmod(key - T, B)
            want = block == n and seen_slowly(slot, anchors[n], other, True, causal, reach)
        assert bool(seen[n * B + slot, key]) == want, (n, slot, key)
    assert seen.any(1).all()


def test_a_row_without_any_anchor_sees_its_own_blocks_only():
    seen = g.visible(*g.layout(torch.full((1, 2), g.PADDING), B, T), False, None)[0]
    assert not seen[:, :T].any() and torch.equal(seen[:, T:], torch.block_diag(*[torch.ones(B, B)] * 2).bool())


@pytest.mark.parametrize("shift", [-1, 1])
def test_shifting_positions_or_anchor_changes_the_table(shift):
    qp, qb, kp, kb = g.layout(torch.tensor([6, 9]), B, T)
    right = g.visible(qp, qb, kp, kb, True, 3)
    assert not torch.equal(right, g.visible(qp + shift, qb, kp, kb, True, 3))
    assert not torch.equal(right, g.visible(qp, qb + shift, kp, kb + shift * (kb != g.CONTEXT), True, 3))
    assert not torch.equal(right, g.visible(qp, qb, kp, kb, True, 3 + shift))


def test_a_batch_is_its_rows():
    rows = [torch.tensor([2, 5, 9]), torch.tensor([4])]
    stacked = g.stack_anchors(rows)
    assert stacked.tolist() == [[2, 5, 9], [4, g.PADDING, g.PADDING]]
    seen = g.visible(*g.layout(stacked, B, T), False, 3)
    for row, anchors in enumerate(stacked):
        assert torch.equal(seen[row], g.visible(*g.layout(anchors, B, T), False, 3))
