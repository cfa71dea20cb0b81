"""gradients.row_losses as one Triton launch, for GPUs: a piece's logits are read twice and written once, and nothing else of
width V is made.  Cross entropy and forward KL, which most arms train; the other losses stay plain, on a GPU, too.

In CI it runs in Triton's interpreter, held equal to the plain one, and is compiled for a 16 GB NVIDIA card and a Strix Halo.
On a GPU it was never run, and its speed is not measured."""
from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from trainer import gradients
from trainer.gradients import RowLosses
from trainer.head import RowLossesOf

log = logging.getLogger("hstrain")
LOSSES = ("ce", "kl")
BLOCK, WARPS = 4096, 8       # logits of one row at a time
NEAR = 1e-4                  # of losses of about 10


def row_losses(logits: Tensor, teacher: Tensor | None, labels: Tensor, loss: str, *, block: int = BLOCK) -> RowLosses:
    """As gradients.row_losses, logits overwritten; teacher is left as it is.  ValueError for arrays that are not fp32, or whose
    rows do not lie in like order."""
    if loss not in LOSSES:
        return gradients.row_losses(logits, teacher, labels, loss)
    from trainer.fused_kernels import rows
    for array in (logits, *([teacher] if loss == "kl" else [])):
        if array.dtype != torch.float32 or array.stride() != (logits.stride(0), 1) or array.shape != logits.shape:
            raise ValueError(f"logits {array.dtype} {tuple(array.shape)} with strides {array.stride()}")
    value, cross = logits.new_empty(len(logits)), logits.new_empty(len(logits))
    hits = torch.empty(len(logits), dtype=torch.int8, device=logits.device)
    if len(logits):
        rows[(len(logits),)](logits, teacher if loss == "kl" else logits, labels, value, cross, hits, logits.shape[1], logits.stride(0),
                             KL=loss == "kl", BLOCK=block, num_warps=WARPS)
    return RowLosses(value, cross, hits.bool(), logits)


@functools.cache
def chosen(device: torch.device) -> RowLossesOf:
    """What computes the losses of a step on this device: the kernel on a GPU, once it has shown there that it agrees with the plain
    form.  Where it cannot be used that is said, and the plain form takes its place."""
    if device.type != "cuda":
        return gradients.row_losses
    if importlib.util.find_spec("triton") is None:
        wrong = "triton is not installed"
    else:
        wrong = next((f"the fused {loss} differs from the plain one by {apart:.1g}" for loss in LOSSES if not (apart := difference(device, loss)) < NEAR), "")
    if wrong:
        log.warning("%s: losses run as several passes of torch, with more memory", wrong)
    return gradients.row_losses if wrong else row_losses


def difference(device: torch.device, loss: str) -> float:
    """Largest difference between the fused and the plain form on a few random rows, in losses and slopes."""
    rng = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(4, 3 * BLOCK // 2 + 1, generator=rng).to(device) for _ in range(2))
    labels = torch.tensor([0, BLOCK, BLOCK + 1, logits.shape[1] - 1], device=device)
    ours, plain = row_losses(logits.clone(), teacher, labels, loss), gradients.row_losses(logits, teacher.clone(), labels, loss)
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(ours, plain, strict=True))
