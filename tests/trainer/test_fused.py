"""The fused losses against the plain ones, in Triton's interpreter; and compiled for cards that are not there."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from common.drafter.vocab import OUTSIDE
from trainer import gradients
from trainer.head import Rows, dense, weighted_sums

pytest.importorskip("triton", reason="triton is not installed: nothing to interpret")
from trainer import fused  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")       # the interpreter's numpy, at -inf
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def arrays(rows: int, vocab: int, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(rows * 10_000 + vocab)
    logits, teacher = (scale * torch.randn(rows, vocab, generator=rng) for _ in range(2))
    labels = torch.randint(vocab, (rows,), generator=rng)
    labels[::3] = logits.argmax(-1)[::3]
    labels[1::4] = OUTSIDE
    return logits.to(HERE), teacher.to(HERE), labels.to(HERE)


def both(logits, teacher, labels, loss: str, block: int = 64):
    plain = gradients.row_losses(logits.clone(), teacher.clone(), labels, loss)
    return plain, fused.row_losses(logits.clone(), teacher, labels, loss, block=block)


def assert_equal(plain, ours, tolerance: float = 1e-6) -> None:
    assert torch.equal(plain.hits, ours.hits)
    known = plain.ce.isfinite()
    assert torch.equal(known, ours.ce.isfinite()) and torch.allclose(plain.ce[known], ours.ce[known], rtol=1e-5, atol=1e-5)
    assert torch.allclose(plain.loss, ours.loss, rtol=1e-5, atol=1e-5)
    assert (plain.slope - ours.slope)[known].abs().amax() <= tolerance if known.any() else True      # without a label it means nothing


@pytest.mark.parametrize("loss", fused.LOSSES)
@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 1000])
@pytest.mark.parametrize("rows", [1, 5])
def test_fused_equals_plain(rows, vocab, loss):
    assert_equal(*both(*arrays(rows, vocab), loss))


@pytest.mark.parametrize("loss", fused.LOSSES)
def test_of_equal_logits_the_first_is_the_choice_within_a_tile_and_across(loss):
    logits, teacher, _ = arrays(3, 200, 0.0)
    logits[0, [150, 30, 31]] = 5.0
    logits[1, [63, 64]] = 5.0
    labels = torch.tensor([30, 63, 0], device=HERE)
    plain, ours = both(logits, teacher, labels, loss)
    assert ours.hits.all() and plain.hits.all()


@pytest.mark.parametrize("loss", fused.LOSSES)
def test_large_logits_neither_overflow_nor_lose_the_rest(loss):
    logits, teacher, labels = arrays(4, 130, 1e4)
    assert_equal(*both(logits, teacher, labels, loss))


def test_a_token_that_the_teacher_never_says_costs_nothing():
    logits, teacher, labels = arrays(2, 130)
    teacher[:, 100:] = -torch.inf
    teacher[0, :64] = -torch.inf                                            # a whole tile
    ours = fused.row_losses(logits.clone(), teacher, labels, "kl", block=32)
    keep = teacher[0].isfinite()
    expected = gradients.row_losses(logits[:1].clone(), teacher[:1].clamp(min=-1e9), labels[:1], "kl")
    assert ours.loss.isfinite().all() and torch.allclose(ours.loss[:1], expected.loss, rtol=1e-5)
    assert torch.allclose(ours.slope[0, ~keep], logits.softmax(-1)[0, ~keep], atol=1e-7)


def test_other_losses_stay_plain_and_no_rows_are_no_launch():
    logits, teacher, labels = arrays(3, 40)
    plain, ours = both(logits, teacher.clone(), labels, "tv")
    assert torch.equal(plain.slope, ours.slope)
    assert fused.row_losses(logits[:0], None, labels[:0], "ce").loss.shape == (0,)
    with pytest.raises(ValueError, match="float64"):
        fused.row_losses(logits.double(), None, labels, "ce")
    assert fused.chosen(torch.device("cpu")) is gradients.row_losses


@pytest.mark.parametrize("dtype, apart", [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize("loss", fused.LOSSES)
def test_through_the_head_it_equals_dense(loss, dtype, apart):
    """fp16: the head's products alone are; the kernel's arithmetic is fp32 whatever the head's."""
    rng = torch.Generator().manual_seed(5)
    blocks = torch.arange(6).repeat_interleave(3)
    rows = Rows(labels=torch.randint(90, (18,), generator=rng), weights=torch.rand(18, generator=rng), blocks=blocks,
                slots=torch.arange(1, 4).repeat(6), block_size=4, finals=torch.randn(18, 16, generator=rng), alpha=0.5)
    hidden, head = torch.randn(18, 16, generator=rng), torch.randn(90, 16, generator=rng).to(dtype)
    one, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    expected, got = dense(one, head, rows, loss), weighted_sums(other, head, rows, loss, piece_bytes=7 * 90 * 4, row_losses=fused.row_losses)
    for a, b in zip(expected, got, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=apart)
    expected.numerator.backward()
    got.numerator.backward()
    assert torch.allclose(one.grad, other.grad, atol=apart)


def test_it_compiles_for_a_strix_halo_and_a_16_gb_card():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.trainer.compiled"], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [[arch, loss] for arch in ("gfx1151", "86") for loss in ("ce", "kl")]


def test_a_kernel_that_disagrees_is_not_used(monkeypatch, caplog):
    """On a GPU it must agree first; here the question alone is asked, of the interpreter."""
    assert all(fused.difference(HERE, loss) < fused.NEAR for loss in fused.LOSSES)
    for found, expected in ((1e-3, gradients.row_losses), (float("nan"), gradients.row_losses), (1e-7, fused.row_losses)):
        fused.chosen.cache_clear()
        monkeypatch.setattr(fused, "difference", lambda _device, _loss, found=found: found)
        assert fused.chosen(torch.device("cuda")) is expected
    assert len(caplog.records) == 2 and "differs from the plain one by 0.001" in caplog.text
    fused.chosen.cache_clear()
