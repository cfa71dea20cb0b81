"""One optimisation step, and nothing around it: batch in, measured numbers out."""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from common.drafter import geometry, vocab
from common.drafter.model import Drafter
from trainer import fused, objectives
from trainer.arms import Arm
from trainer.batch import Batch
from trainer.head import Rows, Sums, weighted_sums
from trainer.optim import CLIP, Optimizer
from trainer.ranks import ALONE, Ranks
from trainer.sharded import whole


def rows_of(batch: Batch, arm: Arm, shortlist: Tensor | None = None) -> Rows:
    """The supervised slots, as head and loss take them.  shortlist (K,) int64 ascending: the tokens that the head has rows of."""
    b, n, size = batch.labels.shape
    sequence, block, slots = batch.supervised.nonzero().T
    labels = batch.labels[batch.supervised]
    finals = sources = None
    if batch.finals is not None:
        teachers = geometry.teacher_rows(batch.anchors, size)[batch.supervised]
        finals, sources = batch.finals[sequence, teachers], sequence * batch.finals.shape[1] + teachers
    weights = objectives.slot_weights(arm.weights, slots, batch.origin[sequence, block], arm.gamma or objectives.gamma_for(size))
    return Rows(labels=labels if shortlist is None else vocab.places(labels, shortlist), weights=weights, blocks=sequence * n + block,
                slots=slots, block_size=size, finals=finals, sources=sources, alpha=arm.alpha if arm.weights == "dpace" else None)


def sums(drafter: Drafter, embedding: Tensor, head: Tensor, batch: Batch, arm: Arm, network: nn.Module | None = None) -> tuple[Sums, Rows]:
    """embedding (V, H), frozen; head (V, H) or, where the drafter has a shortlist, its rows (K, H).  network: what is called for
    the drafter where it is wrapped (Ranks.wrap).

    The head is applied to supervised rows alone.  Sums of several batches or ranks may be added before they are divided.
    ValueError for a head that is not the drafter's."""
    if len(head) != (drafted := len(embedding if drafter.shortlist is None else drafter.shortlist)):
        raise ValueError(f"a head of {len(head)} tokens for a drafter of {drafted}")
    size = batch.inputs.shape[2]
    block = embedding[batch.inputs].to(drafter.fc.weight.dtype).flatten(1, 2)
    hidden = (network or drafter)(block, batch.anchors, batch.taps).unflatten(1, (-1, size))
    rows = rows_of(batch, arm, drafter.shortlist)
    return weighted_sums(hidden[batch.supervised], head, rows, arm.loss, row_losses=fused.chosen(head.device)), rows


def train_step(drafter: Drafter, optimizer: Optimizer, embedding: Tensor, head: Tensor, batch: Batch, arm: Arm,
               share: float, *, ranks: Ranks = ALONE, network: nn.Module | None = None) -> dict[str, float]:
    """share of the peak learning rate.  Returns loss, its denominator, grad_norm, lr_share, and what Measured has.

    Over several ranks loss, denominator and norm are of all shares, what Measured has of this rank's."""
    device = drafter.fc.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        made, rows = sums(drafter, embedding, head, batch, arm, network)
    denominator = ranks.total(made.denominator).clamp_min(1e-9)               # the one division: objectives.DENOMINATOR
    (made.numerator * ranks.world / denominator).backward()                   # gradients are averaged over ranks, not summed
    loss = ranks.total(made.numerator) / denominator
    norm = whole(torch.nn.utils.clip_grad_norm_(drafter.parameters(), CLIP))
    if not torch.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm.item()} (loss {loss.item()})")
    optimizer.step(share)
    return {"loss": loss.item(), "denominator": denominator.item(), "grad_norm": norm.item(), "lr_share": share,
            **measured(made, rows)._asdict()}


class Measured(NamedTuple):
    """Of one batch's supervised slots, at anchors drawn evenly: what a text's own walk meets is acceptance.simulate's to say."""

    slots: int               # supervised
    outside: int             # of them, those whose token is not in the list that may be drafted: never right, no cross entropy
    accuracy: float          # share of slots whose first choice is the token
    first: float             # the same of slot 1
    accepted: float          # draft tokens right in a row from a block's first supervised slot on, mean over blocks
    ce: float                # mean -log q[token], whatever the arm's loss is


def measured(made: Sums, rows: Rows) -> Measured:
    """Zeros where no slot is supervised."""
    first, inside = made.hits[rows.slots == 1], made.ce[made.ce.isfinite()]
    return Measured(slots=len(made.hits), outside=int((rows.labels == objectives.OUTSIDE).sum()), accuracy=_mean(made.hits), first=_mean(first),
                    accepted=_mean(runs(made.hits, rows)), ce=_mean(inside))


def runs(hits: Tensor, rows: Rows) -> Tensor:
    """hits (R,) -> (blocks,) int64: how many of a block's supervised slots are right before its first wrong one."""
    _, block, counts = torch.unique_consecutive(rows.blocks, return_inverse=True, return_counts=True)
    place = torch.arange(len(hits), device=hits.device) - (counts.cumsum(0) - counts)[block]       # among the block's supervised slots
    table = torch.zeros(len(counts), rows.block_size, dtype=torch.bool, device=hits.device).index_put_((block, place), hits)
    return table.long().cumprod(1).sum(1)


def _mean(values: Tensor) -> float:
    return values.float().mean().item() if len(values) else 0.0
