"""Which device a person means."""
from __future__ import annotations

import torch

from common.errors import UserError


def named(name: str) -> torch.device:
    """auto (a GPU where there is one), cpu, cuda (CUDA and ROCm alike) or cuda:1.  UserError for what this torch does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: choose auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: this torch sees {torch.cuda.device_count() or 'no'} GPU")
    return device
