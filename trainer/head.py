"""The target's head and the loss in pieces: of all the logits, R x V numbers, one piece is in memory at a time.

The head is frozen, so a piece's gradient with respect to its rows can be formed at once, in the forward pass; nothing of
width V outlives its piece (pitfall M1: at V = 248320 the logits of 512 blocks of 16 alone are 7.1 GiB in fp32).  `dense` is
the plain twin; a test holds them equal."""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PIECE_BYTES = 256 << 20      # of fp32 logits; a handful of copies of it are alive inside a loss

LossOf = Callable[[Tensor, Tensor], Tensor]          # logits (r, V), labels (r,) -> (r,) float32


def weighted_loss(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, loss_of: LossOf, *,
                  piece_bytes: int = PIECE_BYTES) -> tuple[Tensor, Tensor]:
    """hidden (R, H), head (V, H) without gradient, labels (R,) int64, weights (R,) -> sum(w loss) / sum(w) () and
    hits (R,) bool: the head's first choice is the label.  Both 0 and empty where R is 0."""
    rows = max(1, piece_bytes // (4 * len(head)))
    total, hits = _Pieces.apply(hidden, head, labels, weights, loss_of, rows)
    return total / weights.sum().clamp_min(1e-9), hits


def dense(hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, loss_of: LossOf) -> tuple[Tensor, Tensor]:
    """The same with all logits at once and torch's own backward."""
    logits = hidden @ head.to(hidden.dtype).T
    return (weights * loss_of(logits, labels)).sum() / weights.sum().clamp_min(1e-9), logits.detach().argmax(-1) == labels


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor, loss_of: LossOf, rows: int) -> tuple[Tensor, Tensor]:
        gradient, hits = torch.zeros_like(hidden), torch.zeros_like(labels, dtype=torch.bool)
        total = torch.zeros((), device=hidden.device)
        for first in range(0, len(hidden), rows):
            piece = slice(first, first + rows)
            with torch.enable_grad():
                h = hidden[piece].detach().requires_grad_()
                logits = h @ head.to(h.dtype).T
                loss = (weights[piece] * loss_of(logits, labels[piece])).sum()
                gradient[piece], = torch.autograd.grad(loss, h)
            total += loss.detach()
            hits[piece] = logits.detach().argmax(-1) == labels[piece]
            del h, logits, loss                                  # before the next piece is made, not after
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    def backward(ctx, upstream: Tensor, _hits: Tensor) -> tuple[Tensor | None, ...]:
        gradient, = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None, None
