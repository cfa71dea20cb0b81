"""AdamW as the DFlash paper uses it, with warm-up and cosine, and its state as plain tensors (no pickle).

Masters are fp32 and are saved as such (pitfall C1): the drafter's own parameters stay fp32, autocast does the rest."""
from __future__ import annotations

import math

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
WARMUP = 0.04            # share of all steps
FLOOR = 0.1              # of the peak learning rate, reached at the last step
CLIP = 1.0               # gradient norm


def adamw(drafter: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(drafter.parameters(), lr=lr, betas=BETAS, weight_decay=0.0)


def lr_at(step: int, total: int, peak: float) -> float:
    """Learning rate of step `step` (0-based) of `total`: linear warm-up, then cosine from peak to FLOOR * peak."""
    warm = max(1, round(total * WARMUP))
    if step < warm:
        return peak * (step + 1) / warm
    done = min(1.0, (step - warm) / max(1, total - 1 - warm))
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def state_tensors(drafter: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{'master.NAME', 'exp_avg.NAME', 'exp_avg_sq.NAME', 'step.NAME'}: all that a bitwise resume needs."""
    out = {}
    for name, parameter in drafter.named_parameters():
        out[f"master.{name}"] = parameter.detach()
        for key, value in optimizer.state[parameter].items():
            out[f"{key}.{name}"] = value
    return out


def load_state_tensors(drafter: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The reverse, strict: a tensor that is missing or left over is a KeyError with its name."""
    left = dict(tensors)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(left.pop(f"master.{name}"))
            keys = ("step", "exp_avg", "exp_avg_sq")
            if any(f"{key}.{name}" in left for key in keys):
                state = {key: left.pop(f"{key}.{name}") for key in keys}
                optimizer.state[parameter] = {k: v if k == "step" else v.to(parameter.device) for k, v in state.items()}
    if left:
        raise KeyError(f"unknown tensor {next(iter(left))}")
