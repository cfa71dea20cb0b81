"""Pearson's chi-square: how likely counts at least so far from a distribution are, if they were drawn from it."""
from __future__ import annotations

import torch
from torch import Tensor


def p_value(ids: Tensor, p: Tensor) -> float:
    """ids (N,) int64, drawn; p (V,) float64, what they should follow.  Cells that expect fewer than 10 are one cell; an id of
    probability 0 makes it 0."""
    counts, expected = torch.bincount(ids, minlength=len(p)).double(), len(ids) * p
    if counts[p == 0].sum() > 0:
        return 0.0
    rare = expected < 10
    counts, expected = ([*x[~rare].tolist(), float(x[rare].sum())] for x in (counts, expected))
    cells = [(n, e) for n, e in zip(counts, expected) if e > 0]
    assert len(cells) > 1, "one cell: nothing to see"
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
