"""The target's head and the loss in pieces: of all the logits, R x V numbers, one piece is in memory at a time.

The head is frozen, so a piece's gradient with respect to its rows can be formed at once, in the forward pass; nothing of
width V outlives its piece (pitfall M1: at V = 248320 the logits of 512 blocks of 16 alone are 7.1 GiB in fp32).  The teacher's
logits are made per piece, too, by the same head.  Pieces are cut between blocks, because D-PACE weighs a slot by the losses of
its whole block.  `dense` is the plain twin; a test holds them equal for every loss and every kind of weights.

Memory above inputs and outputs: gradients.MOST_COPIES x PIECE_BYTES, and half as much again where the head is bf16 (operands
of its products); on a CPU, where a loss works in tiles, no more than two of these copies, one without a teacher.  A block of
more than PIECE_BYTES is a piece of its own."""
from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer import gradients, objectives
from trainer.objectives import NEEDS_LABEL, NEEDS_TEACHER, OUTSIDE

PIECE_BYTES = 256 << 20      # of one piece's fp32 logits (r, V)
TILE_BYTES = 1 << 20         # of the logits that a CPU works on at a time: about a core's own cache

RowLossesOf = Callable[[Tensor, Tensor | None, Tensor, str], gradients.RowLosses]        # as gradients.row_losses


@dataclass(frozen=True, eq=False)
class Rows:
    """The R supervised slots of a batch: block after block, slots ascending."""

    labels: Tensor                   # (R,) int64: places in the head; OUTSIDE where the head has none for the token
    weights: Tensor                  # (R,) float32: objectives.slot_weights
    blocks: Tensor                   # (R,) int64: equal within a block, ascending from block to block
    slots: Tensor                    # (R,) int64: 1..B-1
    block_size: int
    finals: Tensor | None = None     # (R, H): final states of rows a+j-1; for losses with a teacher
    sources: Tensor | None = None    # (R,) int64: the token whose final state it is; equal where `finals` are.  None: each its own
    alpha: float | None = None       # D-PACE's, which then multiplies weights; None: they stand as they are

    def cut(self, first: int, last: int) -> Rows:
        return dataclasses.replace(self, **{k: v[first:last] for k, v in vars(self).items() if isinstance(v, Tensor)})


class Sums(NamedTuple):
    """Two sums, to be divided once those of all ranks are added up; and what each row came to."""

    numerator: Tensor        # () float32: sum(w m loss); carries the gradient
    denominator: Tensor      # () float32: sum(w m), detached
    hits: Tensor             # (R,) bool: the head's first choice is the label
    ce: Tensor               # (R,) float32: -log q[label], whatever the loss; inf where the label is OUTSIDE


def weighted_sums(hidden: Tensor, head: Tensor, rows: Rows, loss: str, *, piece_bytes: int = PIECE_BYTES,
                  row_losses: RowLossesOf = gradients.row_losses) -> Sums:
    """hidden (R, H) any float; head (V, H) without gradient, whose dtype is that of the products; loss of objectives.LOSSES.

    row_losses is all the arithmetic of width V between the head's two products; a kernel may stand in its place.
    All sums are 0 where R is 0."""
    pieces = list(cuts(rows.blocks, max(1, piece_bytes // (4 * len(head)))))
    return Sums(*_Pieces.apply(hidden, head, _with_teacher(rows, loss), loss, pieces, row_losses))


def dense(hidden: Tensor, head: Tensor, rows: Rows, loss: str) -> Sums:
    """The same with all logits at once, objectives' own losses and torch's own backward."""
    rows = _with_teacher(rows, loss)
    logits = hidden.to(head.dtype) @ head.T
    teacher = None if rows.finals is None else rows.finals.to(head.dtype) @ head.T
    ce = torch.where(rows.labels == OUTSIDE, torch.inf, objectives.ce(logits.detach(), None, rows.labels))
    weights = row_weights(rows, ce, loss)
    value = objectives.LOSSES[loss](logits, teacher, rows.labels)
    return Sums((weights * value).sum(), weights.sum(), logits.argmax(-1) == rows.labels, ce)


def row_weights(rows: Rows, ce: Tensor, loss: str) -> Tensor:
    """w m of whole blocks' rows, (r,) float32, detached; ce (r,) as in Sums."""
    weights = rows.weights
    if loss in NEEDS_LABEL:
        weights = weights * (rows.labels != OUTSIDE)
    if rows.alpha is None:
        return weights
    place = torch.unique_consecutive(rows.blocks, return_inverse=True)[1], rows.slots
    losses = ce.new_zeros(len(ce), rows.block_size).index_put_(place, ce)                # a block a line; there are at most r
    supervised = torch.zeros(losses.shape, dtype=torch.bool, device=ce.device).index_put_(place, torch.ones_like(ce, dtype=torch.bool))
    return weights * objectives.dpace(losses, supervised, rows.alpha)[place]


def cuts(blocks: Tensor, most: int) -> Iterator[tuple[int, int]]:
    """blocks (R,) -> (first, last) of each piece: whole blocks, together at most `most` rows, or one block that is longer."""
    first = last = 0
    for count in torch.unique_consecutive(blocks, return_counts=True)[1].tolist():
        if last > first and last + count - first > most:
            yield first, last
            first = last
        last += count
    if last > first:
        yield first, last


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, rows: Rows, loss: str, pieces: list[tuple[int, int]], row_losses: RowLossesOf):
        gradient = torch.zeros_like(hidden)
        hits, ce = torch.zeros_like(rows.labels, dtype=torch.bool), torch.zeros(len(hidden), device=hidden.device)
        numerator, denominator = torch.zeros((), device=hidden.device), torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):              # dtypes are the head's and fp32, as written
            for first, last in pieces:
                piece = slice(first, last)
                gradient[piece], hits[piece], ce[piece], sums = _piece(hidden[piece], head, rows.cut(first, last), loss, row_losses)
                numerator += sums[0]
                denominator += sums[1]
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(denominator, hits, ce)
        return numerator, denominator, hits, ce

    @staticmethod
    def backward(ctx, upstream: Tensor, *_others: Tensor) -> tuple[Tensor | None, ...]:
        gradient, = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), *itertools.repeat(None, 5)


def _piece(hidden: Tensor, head: Tensor, rows: Rows, loss: str, row_losses: RowLossesOf) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """gradient (r, H) of sum(w m loss), hits (r,), ce (r,), (sum(w m loss), sum(w m)).  All of width V is gone on return."""
    teacher, place = (None, None) if rows.finals is None else _teacher(rows, head)
    made = in_tiles(_logits(hidden, head), teacher, place, rows.labels, loss, row_losses)
    weights = row_weights(rows, made.ce, loss)
    gradient = (made.slope.to(head.dtype) @ head).float() * weights[:, None]
    return gradient.to(hidden.dtype), made.hits, made.ce, ((weights * made.loss).sum(), weights.sum())


def in_tiles(logits: Tensor, teacher: Tensor | None, place: Tensor | None, labels: Tensor, loss: str, row_losses: RowLossesOf) -> gradients.RowLosses:
    """row_losses of logits (r, V) and teacher[place] (r, V); the slope stands in logits.

    On a CPU a few rows at a time: they stay in the core's cache through all passes over them, and what a loss needs beside its
    arrays is as small.  (At V = 49152 the passes took 0.66 s of a step on whole pieces, most of it page faults.)  On a GPU at once."""
    tile = max(1, TILE_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else max(1, len(logits))
    made = []
    for first in range(0, max(1, len(logits)), tile):
        here = slice(first, first + tile)
        got = row_losses(logits[here], None if teacher is None else teacher[place[here]], labels[here], loss)
        if got.slope.data_ptr() != logits[here].data_ptr():
            logits[here] = got.slope
        made.append(got[:3])
    return gradients.RowLosses(*map(torch.cat, zip(*made)), slope=logits)


def _teacher(rows: Rows, head: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (u, V) of the final states, made once a token, and each row's place among them (r,): blocks overlap, so at 512
    anchors of 16 in 3072 tokens half of a piece's rows, and more, are repeats."""
    if rows.sources is None:
        return _logits(rows.finals, head), torch.arange(len(rows.finals), device=rows.finals.device)
    distinct, place = rows.sources.unique(return_inverse=True)
    some = torch.empty_like(distinct).scatter_(0, place, torch.arange(len(place), device=place.device))    # any row of each token
    return _logits(rows.finals[some], head), place


def _logits(states: Tensor, head: Tensor) -> Tensor:
    return (states.to(head.dtype) @ head.T).float()


def _with_teacher(rows: Rows, loss: str) -> Rows:
    """Without final states that the loss does not read.  ValueError where it reads some and there are none."""
    if loss not in NEEDS_TEACHER:
        return dataclasses.replace(rows, finals=None)
    if rows.finals is None:
        raise ValueError(f"loss {loss!r} needs the teacher's final states")
    return rows
