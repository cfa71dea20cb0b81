"""Each loss and weight against the formula written the slow way, number by number, in Python's doubles."""
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from common.drafter.vocab import OUTSIDE
from trainer import objectives
from trainer.objectives import LOSSES, dpace, gamma_for, slot_weights
from trainer.optim import share_at


def softmax(row: list[float]) -> list[float]:
    top = max(row)
    shares = [math.exp(v - top) for v in row]
    return [s / sum(shares) for s in shares]


def slow(loss: str, logits: list[float], teacher: list[float], label: int) -> float:
    q, p = softmax(logits), softmax(teacher)
    tokens = range(len(q))
    kl = sum(p[i] * math.log(p[i] / q[i]) for i in tokens)
    tv = 0.5 * sum(abs(p[i] - q[i]) for i in tokens)                 # another way to say 1 - sum min(p, q)
    share = math.exp(-3 * (1 - tv))
    return {"ce": lambda: -math.log(q[label]), "ce_argmax": lambda: -math.log(q[max(tokens, key=lambda i: p[i])]), "kl": lambda: kl,
            "rkl": lambda: sum(q[i] * math.log(q[i] / p[i]) for i in tokens), "tv": lambda: tv,
            "lk_hybrid": lambda: share * kl + (1 - share) * tv}[loss]()


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_its_formula(loss):
    rng = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(20, 11, generator=rng) for _ in range(2))
    labels = torch.randint(11, (20,), generator=rng)
    got = LOSSES[loss](logits, teacher, labels)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([slow(loss, *row) for row in zip(logits.tolist(), teacher.tolist(), labels.tolist())], rel=2e-5, abs=1e-6)


@pytest.mark.parametrize("loss", sorted(objectives.NEEDS_TEACHER - {"ce_argmax"}))
def test_a_drafter_that_is_its_teacher_loses_nothing_and_has_no_slope(loss):
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).requires_grad_()
    value = LOSSES[loss](logits, logits.detach().clone(), torch.zeros(4, dtype=torch.long))
    value.sum().backward()
    assert value.abs().max() < 1e-6 and logits.grad.abs().max() < 1e-6


def test_a_label_outside_the_list_costs_nothing():
    logits = torch.randn(2, 5)
    got = objectives.ce(logits, None, torch.tensor([OUTSIDE, 3]))
    assert got[0] == 0 and got[1] > 0


def test_weights_of_slots():
    """exp(-(j - l) / gamma), l the first masked slot: 1 at it, and never above."""
    slots, origin = torch.tensor([1, 2, 7, 3, 5, 15]), torch.tensor([1, 1, 1, 3, 3, 3])
    got = slot_weights("exp", slots, origin, 7.0)
    assert got.tolist() == pytest.approx([1.0, math.exp(-1 / 7), math.exp(-6 / 7), 1.0, math.exp(-2 / 7), math.exp(-12 / 7)])
    for kind in ("uniform", "dpace"):
        assert slot_weights(kind, slots, origin, 7.0).tolist() == [1.0] * 6
    with pytest.raises(ValueError, match="linear"):
        slot_weights("linear", slots, origin, 7.0)


def test_gamma_is_the_papers_at_its_three_block_sizes():
    assert [gamma_for(b) for b in (16, 10, 8)] == [7, 5, 4]


def slow_dpace(ce: list[float], supervised: list[bool], alpha: float) -> list[float]:
    reached, product = [], 1.0
    for value, here in zip(ce, supervised):
        product *= (1 - alpha) * math.exp(-value) + alpha if here else 1.0
        reached.append(product)
    return [sum(reached[i] for i in range(j, len(ce)) if supervised[i]) if supervised[j] else 0.0 for j in range(len(ce))]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 30) | st.just(math.inf), st.booleans()), min_size=1, max_size=16), st.floats(0, 1))
def test_dpace_is_its_formula(block, alpha):
    ce, supervised = ([b[i] for b in block] for i in (0, 1))
    got = dpace(torch.tensor([ce]), torch.tensor([supervised]), alpha)
    assert got[0].tolist() == pytest.approx(slow_dpace(ce, supervised, alpha), rel=1e-4, abs=1e-6)


def test_dpace_by_hand_and_a_slot_that_is_not_supervised_changes_nothing():
    """alpha 0.5, q = 1, 1/2, then: s = 1, 3/4; w = P1 + P2, P2.  Slots off by one, or the mask forgotten, give other numbers."""
    ce = torch.tensor([9.0, 0.0, math.log(2)])
    assert dpace(ce, torch.tensor([False, True, True]), 0.5).tolist() == pytest.approx([0, 1.75, 0.75])
    assert dpace(torch.tensor([9.0, 0.0, 9.0, math.log(2)]), torch.tensor([False, True, False, True]), 0.5).tolist() == pytest.approx([0, 1.75, 0, 0.75])


def test_learning_rate_warms_up_then_falls_to_a_tenth():
    rates = [share_at(s, 100) for s in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and max(rates) == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(0.1)
