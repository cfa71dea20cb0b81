"""The losses of objectives.py with their gradients written out, worked in place on the two arrays of width V.

Autograd would keep some eight copies of a piece's logits; here a loss needs its two arrays and one more (MOST_COPIES).  A test
holds each form equal to objectives' own in value and gradient.  For q = softmax(z), a loss with slopes s_i = dL/dq_i has
dL/dz_i = q_i (s_i - sum_k q_k s_k), from which each line below follows.  Weights are not in it: a row's gradient is scaled
after the head's product, where it is H wide.

This is the seam for a kernel: anything with row_losses' signature may stand in its place (head.weighted_sums takes it)."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.objectives import LK_SLOPE, OUTSIDE

MOST_COPIES = 4              # float32 arrays (r, V) alive at once, the logits and the teacher's included


class RowLosses(NamedTuple):
    loss: Tensor             # (r,) float32
    ce: Tensor               # (r,) float32: -log q[label], whatever the loss; inf where the label is OUTSIDE
    hits: Tensor             # (r,) bool: the first choice is the label
    slope: Tensor            # (r, V) float32: d loss / d logits, each row alone, without weights


Form = Callable[[Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor]]
# log q (r, V), log p (r, V) or None, labels (r,) -> loss (r,), slope (r, V); both arrays are used up


def row_losses(logits: Tensor, teacher: Tensor | None, labels: Tensor, loss: str) -> RowLosses:
    """logits, teacher (r, V) float32, both overwritten; labels (r,) int64, OUTSIDE where there is none; loss of objectives.LOSSES."""
    hits = logits.argmax(-1) == labels
    log_q = logits.sub_(logits.logsumexp(-1, keepdim=True))
    log_p = None if teacher is None else teacher.sub_(teacher.logsumexp(-1, keepdim=True))
    cross = torch.where(labels == OUTSIDE, torch.inf, -_at(log_q, labels.clamp(min=0)))
    value, slope = FORMS[loss](log_q, log_p, labels)
    return RowLosses(value, cross, hits, slope)


def _ce(log_q: Tensor, _log_p: Tensor | None, labels: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dz = q - onehot(label).  A row without a label: loss 0, and a slope that means nothing (head.row_weights gives it 0)."""
    value, slope = _towards(log_q, labels.clamp(min=0))
    return torch.where(labels == OUTSIDE, 0.0, value), slope


def _ce_argmax(log_q: Tensor, log_p: Tensor, _labels: Tensor) -> tuple[Tensor, Tensor]:
    return _towards(log_q, log_p.argmax(-1))


def _kl(log_q: Tensor, log_p: Tensor, _labels: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dz = q - p."""
    p = log_p.exp()
    value = _dot(p, log_p) - _dot(p, log_q)
    return value, log_q.exp_().sub_(p)


def _rkl(log_q: Tensor, log_p: Tensor, _labels: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dz = q (log q - log p - L)."""
    q, ratio = log_q.exp(), log_q.sub_(log_p)
    value = _dot(q, ratio)
    return value, ratio.sub_(value[:, None]).mul_(q)


def _tv(log_q: Tensor, log_p: Tensor, _labels: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dz = q A - q [q < p], A = sum q [q < p]."""
    q, p = log_q.exp_(), log_p.exp_()
    value, short, total = _overlap(q, p, torch.empty_like(q))
    return value, q.mul_(total[:, None]).sub_(short)


def _lk_hybrid(log_q: Tensor, log_p: Tensor, _labels: Tensor) -> tuple[Tensor, Tensor]:
    """dL/dz = lam (q - p) + (1 - lam) (q A - q [q < p])."""
    p = log_p.exp()
    divergence = _dot(p, log_p) - _dot(p, log_q)
    q = log_q.exp_()
    variation, short, total = _overlap(q, p, log_p)
    share = torch.exp(-LK_SLOPE * (1 - variation))
    rest = 1 - share
    slope = q.mul_((share + rest * total)[:, None]).sub_(p.mul_(share[:, None])).sub_(short.mul_(rest[:, None]))
    return share * divergence + rest * variation, slope


FORMS: dict[str, Form] = {"ce": _ce, "ce_argmax": _ce_argmax, "kl": _kl, "rkl": _rkl, "tv": _tv, "lk_hybrid": _lk_hybrid}


def _towards(log_q: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    value = -_at(log_q, wanted)
    slope = log_q.exp_()
    return value, slope.scatter_add_(1, wanted[:, None], slope.new_full((len(slope), 1), -1.0))


def _overlap(q: Tensor, p: Tensor, room: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> 1 - sum min(p, q), (r,);  q where q < p, else 0, (r, V), in `room`;  its sum, (r,)."""
    variation = 1 - torch.minimum(p, q, out=room).sum(-1)
    short = room.copy_(q).masked_fill_(q >= p, 0.0)
    return variation, short, short.sum(-1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """sum over the last axis of a b, without an array for the product."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def _at(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(1, places[:, None])[:, 0]
