import math

import pytest
import torch

from trainer import objectives
from trainer.arms import ARMS, named
from common.errors import UserError
from trainer.optim import share_at


def test_weights_and_loss_equal_the_slow_way():
    """exp(-(j-1)/gamma) with gamma 7 at block 16 (DFlash), slot 0 never, sum(w m loss) / sum(w m)."""
    arm, torch_rng = ARMS["ce_causal"], torch.Generator().manual_seed(0)
    logits, labels = torch.randn(20, 11, generator=torch_rng), torch.randint(11, (20,), generator=torch_rng)
    slots = torch.randint(1, 16, (20,), generator=torch_rng)
    top = bottom = 0.0
    for row, label, slot in zip(logits, labels.tolist(), slots.tolist()):
        w = math.exp(-(slot - 1) / 7)
        top += w * (math.log(sum(math.exp(v) for v in row.tolist())) - row[label].item())
        bottom += w
    got = objectives.weighted_mean(objectives.ce(logits, labels), objectives.slot_weights(arm, 16)[slots])
    assert got.item() == pytest.approx(top / bottom, rel=1e-5)
    assert objectives.slot_weights(arm, 16)[0] == 0 and objectives.slot_weights(arm, 16)[1] == 1


def test_gamma_is_the_papers_at_its_three_block_sizes():
    assert [objectives.gamma_for(b) for b in (16, 10, 8)] == [7, 5, 4]


def test_no_supervised_row_gives_zero_and_a_gradient_of_zero():
    losses = torch.zeros(0, requires_grad=True)
    loss = objectives.weighted_mean(losses, torch.zeros(0))
    loss.backward()
    assert loss.item() == 0


def test_learning_rate_warms_up_then_falls_to_a_tenth():
    rates = [share_at(s, 100) for s in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and max(rates) == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_an_unknown_arm_is_refused_with_the_list():
    with pytest.raises(UserError, match="ce_bidi, ce_causal|ce_causal, ce_bidi"):
        named("ce_casual")
