"""From logits to one token: greedy or at a temperature, each row with randomness of its own.

A row draws one uniform number a token from its own generator, seeded by (seed, key), and reads it off its cumulative
distribution: what sits beside it in the batch, or the device, cannot change its numbers.
"""
from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    temperature: float = 0.0        # 0: greedy, and the rest is not read
    top_k: int = 0                  # the k likeliest tokens; 0: all
    top_p: float = 1.0              # the smallest set of likeliest tokens that holds this probability; 1: all
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise UserError(f"temperature {self.temperature:g} must be >= 0, top-k {self.top_k} >= 0, "
                            f"top-p {self.top_p:g} above 0 and up to 1")

    def generator(self, key: str) -> torch.Generator:
        """A row's own randomness, on the CPU; the same for the same seed and key everywhere."""
        digest = hashlib.sha256(f"{self.seed}:{key}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits [..., V] -> float64 [..., V] that sum to 1; temperature first, then top-k, then top-p on what is left.

    Greedy gives 1 to the first of the largest.  Ties at the k-th place all stay.
    """
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    scaled = logits.double() / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(sampling.top_k, -1).values[..., -1:], float("-inf"))
    p = scaled.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        out = ordered.cumsum(-1) - ordered >= sampling.top_p                        # all before it already hold top_p
        p = p.masked_fill(out.gather(-1, order.argsort(-1)), 0)
        p = p / p.sum(-1, keepdim=True)
    return p


def choose(logits: Tensor, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
    """logits [b, V] -> ids [b] int64.  One uniform number is drawn from each row's generator; none when greedy."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    total = probabilities(logits, sampling).cumsum(-1)
    uniform = torch.stack([torch.rand(1, generator=g) for g in generators]).to(total)
    return torch.searchsorted(total, uniform * total[:, -1:], right=True)[:, 0]     # first id whose sum exceeds it: p > 0
