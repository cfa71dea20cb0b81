import math
import weakref

import pytest
import torch

from trainer import objectives
from trainer.arms import ARMS, named
from common.errors import UserError
from trainer.head import dense, weighted_loss
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
    weights = objectives.slot_weights(arm, 16)[slots]
    got, hits = weighted_loss(logits, torch.eye(11), labels, weights, objectives.ce)
    assert got.item() == pytest.approx(top / bottom, rel=1e-5)
    assert torch.equal(hits, logits.argmax(-1) == labels)
    assert objectives.slot_weights(arm, 16)[0] == 0 and objectives.slot_weights(arm, 16)[1] == 1


def test_gamma_is_the_papers_at_its_three_block_sizes():
    assert [objectives.gamma_for(b) for b in (16, 10, 8)] == [7, 5, 4]


def test_no_supervised_row_gives_zero_and_a_gradient_of_zero():
    hidden = torch.zeros(0, 8, requires_grad=True)
    loss, hits = weighted_loss(hidden, torch.randn(5, 8), torch.zeros(0, dtype=torch.int64), torch.zeros(0), objectives.ce)
    loss.backward()
    assert loss.item() == 0 and hits.shape == (0,) and hidden.grad.shape == (0, 8)


@pytest.mark.parametrize("rows_a_piece", [1, 7, 50, 1000])
def test_loss_in_pieces_equals_the_dense_one_in_value_gradient_and_hits(rows_a_piece):
    rng = torch.Generator().manual_seed(1)
    head, labels = torch.randn(300, 16, generator=rng), torch.randint(300, (50,), generator=rng)
    weights = torch.rand(50, generator=rng)
    results = []
    for way in (lambda h: dense(h, head, labels, weights, objectives.ce),
                lambda h: weighted_loss(h, head, labels, weights, objectives.ce, piece_bytes=rows_a_piece * 300 * 4)):
        hidden = torch.randn(50, 16, generator=torch.Generator().manual_seed(2)).requires_grad_()
        loss, hits = way(hidden)
        (3 * loss).backward()
        results.append((loss.detach(), hidden.grad, hits))
    (a, grad_a, hits_a), (b, grad_b, hits_b) = results
    assert torch.allclose(a, b, rtol=1e-6) and torch.equal(hits_a, hits_b)
    assert torch.allclose(grad_a, grad_b, rtol=1e-5, atol=1e-7)


def test_no_more_than_one_piece_of_logits_is_alive():
    """Pitfall M1, exactly: each piece has at most its rows, and is gone before the next is made and after the last."""
    alive, widths = [], []
    def watched(logits, labels):
        assert not any(ref() is not None for ref in alive), "an earlier piece is still in memory"
        alive.append(weakref.ref(logits))
        widths.append(len(logits))
        return objectives.ce(logits, labels)
    hidden = torch.randn(50, 16).requires_grad_()
    loss, _ = weighted_loss(hidden, torch.randn(300, 16), torch.zeros(50, dtype=torch.int64), torch.ones(50), watched, piece_bytes=8 * 300 * 4)
    assert widths == [8] * 6 + [2] and not any(ref() is not None for ref in alive)
    loss.backward()
    assert hidden.grad.abs().sum() > 0


def test_learning_rate_warms_up_then_falls_to_a_tenth():
    rates = [share_at(s, 100) for s in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0] and max(rates) == 1.0
    assert rates[4:] == sorted(rates[4:], reverse=True) and rates[-1] == pytest.approx(0.1)


def test_an_unknown_arm_is_refused_with_the_list():
    with pytest.raises(UserError, match="ce_bidi, ce_causal|ce_causal, ce_bidi"):
        named("ce_casual")
