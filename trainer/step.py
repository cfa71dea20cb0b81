"""One optimisation step, and nothing around it: batch in, measured numbers out."""
from __future__ import annotations

import torch
from torch import Tensor

from common.drafter.model import Drafter
from trainer import objectives
from trainer.arms import Arm
from trainer.batch import Batch
from trainer.head import weighted_loss
from trainer.optim import CLIP, Optimizer


def loss_and_hits(drafter: Drafter, embedding: Tensor, head: Tensor, batch: Batch, arm: Arm) -> tuple[Tensor, Tensor, Tensor]:
    """loss (), hits (R,) bool and slots (R,) int64 of the R supervised slots.

    embedding, head  (V, H), frozen.  The head is applied to supervised rows alone.
    """
    b, n, size = batch.inputs.shape
    block = embedding[batch.inputs].to(drafter.fc.weight.dtype).flatten(1, 2)
    hidden = drafter(block, batch.anchors, batch.taps).unflatten(1, (n, size))
    labels, slots = batch.labels[batch.supervised], batch.supervised.nonzero()[:, 2]
    weights = objectives.slot_weights(arm, size).to(hidden.device)[slots]
    loss, hits = weighted_loss(hidden[batch.supervised], head, labels, weights, objectives.LOSSES[arm.loss])
    return loss, hits, slots


def train_step(drafter: Drafter, optimizer: Optimizer, embedding: Tensor, head: Tensor, batch: Batch, arm: Arm,
               share: float) -> dict[str, float]:
    """share of the peak learning rate.  Returns loss, accuracy (of supervised slots), first (the same of slot 1), grad_norm,
    lr_share, slots (count)."""
    device = drafter.fc.weight.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
        loss, hits, slots = loss_and_hits(drafter, embedding, head, batch, arm)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), CLIP)
    if not torch.isfinite(norm):
        raise FloatingPointError(f"gradient norm is {norm.item()} (loss {loss.item()})")
    optimizer.step(share)
    first = hits[slots == 1]
    return {"loss": loss.item(), "accuracy": hits.float().mean().item() if len(hits) else 0.0,
            "first": first.float().mean().item() if len(first) else 0.0, "grad_norm": norm.item(), "lr_share": share, "slots": len(hits)}
