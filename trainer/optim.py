"""Optimisers of a run, warm-up and cosine, and their state as plain tensors (no pickle).

    adamw   the DFlash paper's: betas .9/.95, no decay
    muon    torch's own Muon on matrices, AdamW on norms: leaves the early plateau much sooner on small targets (LOG.md)

Masters are fp32 and are saved as such (pitfall C1): the drafter's own parameters stay fp32, autocast does the rest."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.config import Kind
from trainer.sharded import as_held

BETAS = (0.9, 0.95)
VECTORS = 0.15           # with muon: AdamW's learning rate of norms, as a share of the matrices'
WARMUP = 0.04            # share of all steps
FLOOR = 0.1              # of the peak learning rate, reached at the last step
CLIP = 1.0               # gradient norm
MASTER = "master."       # before a weight's name, in a run's state
STATE = {torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"), torch.optim.Muon: ("momentum_buffer",)}


class Optimizer:
    """One or two torch optimisers behind one step.  peak: learning rate of matrices at its highest."""

    def __init__(self, drafter: nn.Module, kind: Kind, peak: float) -> None:
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        vectors = [p for p in drafter.parameters() if p.ndim != 2]
        if kind == "adamw":
            self.parts = [(torch.optim.AdamW(matrices + vectors, lr=peak, betas=BETAS, weight_decay=0.0), peak)]
        elif kind == "muon":
            self.parts = [(torch.optim.Muon(matrices, lr=peak, weight_decay=0.0), peak),
                          (torch.optim.AdamW(vectors, lr=VECTORS * peak, betas=BETAS, weight_decay=0.0), VECTORS * peak)]
        else:
            raise ValueError(kind)

    def step(self, share: float) -> None:
        """One step at `share` of the peak learning rates; gradients are dropped after it."""
        for optimizer, peak in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_of(self, parameter: nn.Parameter) -> tuple[dict, tuple[str, ...]]:
        """The torch state that holds this parameter's, and the keys it has once a step was taken."""
        for optimizer, _ in self.parts:
            if any(parameter is p for group in optimizer.param_groups for p in group["params"]):
                return optimizer.state, STATE[type(optimizer)]
        raise KeyError("a parameter that no optimiser holds")


def share_at(step: int, total: int) -> float:
    """Share of the peak learning rate at step `step` (0-based) of `total`: linear warm-up, then cosine from 1 to FLOOR."""
    warm = max(1, round(total * WARMUP))
    if step < warm:
        return (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - 1 - warm))
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done))


def state_tensors(drafter: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """{'master.NAME', 'exp_avg.NAME', ...}: all that a bitwise resume needs."""
    out = {}
    for name, parameter in drafter.named_parameters():
        out[f"{MASTER}{name}"] = parameter.detach()
        state, _ = optimizer.state_of(parameter)
        out |= {f"{key}.{name}": value for key, value in state[parameter].items()}
    return out


def load_state_tensors(drafter: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """The reverse, strict: a tensor that is missing or left over is a KeyError with its name."""
    left = dict(tensors)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(as_held(left.pop(f"{MASTER}{name}"), parameter))
            state, keys = optimizer.state_of(parameter)
            if any(f"{key}.{name}" in left for key in keys):
                values = {key: left.pop(f"{key}.{name}") for key in keys}
                state[parameter] = {k: v if k == "step" else as_held(v, parameter) for k, v in values.items()}
    if left:
        raise KeyError(f"unknown tensor {next(iter(left))}")
