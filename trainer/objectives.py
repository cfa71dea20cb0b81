"""What a run minimises: a loss per supervised slot and a weight per slot, summed as sum(w m loss) / sum(w m).

Pure functions of tensors.  The denominator is part of the definition (peers differ by 3-15x there, and learning rates
do not carry over); `DENOMINATOR` goes into every run's record."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.arms import Arm

DENOMINATOR = "sum(w m loss) / sum(w m)"


def gamma_for(block_size: int) -> float:
    """The paper's decay by block size: 7 for 16, 5 for 10, 4 for 8 (DFlash, section on training); 1 + 3B/8 meets all three."""
    return float(round(1 + 3 * block_size / 8))


def slot_weights(arm: Arm, block_size: int) -> Tensor:
    """(B,) float32: weight of slot j; slot 0 is the known token and weighs 0.  exp: exp(-(j-1)/gamma)."""
    slots = torch.arange(block_size, dtype=torch.float32)
    if arm.weights == "exp":
        weights = torch.exp(-(slots - 1) / (arm.gamma or gamma_for(block_size)))
    elif arm.weights == "uniform":
        weights = torch.ones_like(slots)
    else:
        raise ValueError(arm.weights)
    weights[0] = 0
    return weights


def ce(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy against the data's own token.  logits (R, V) any float, labels (R,) int64 -> (R,) float32."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


LOSSES = {"ce": ce}
