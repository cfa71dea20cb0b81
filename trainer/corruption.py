"""Which slots of a block are masked, and so drafted and supervised, in one training step.

    full      all but slot 0, as a block is met when decoding (the paper; no noise schedule)
    uniform   a random share of slots 1..B-1, fresh for each block and step: the share r ~ U(0, 1], each slot masked with
              probability r, at least one (the absorbing-state noise of masked diffusion language models, LLaDA 2502.09992, without
              its weight 1/r: all losses here are weighted means).  Revealed slots hold the text's own tokens
    prefix    slots below l hold the text's own tokens, the others the mask: Pr(l) ~ 0.9^l over min(2, B-1) .. B-1 (variable
              prefix: D2SD 2606.04446, as NeMo AutoModel trains it)

Revealed slots are inputs, never supervised.  The generator is an argument: batches draw anchors first, so that arms of one seed
share them whatever is masked.  Where a block reaches past its text there is nothing to reveal (geometry.block_inputs)."""
from __future__ import annotations

import torch
from torch import Tensor

PREFIX_DECAY = 0.9


def draw(kind: str, blocks: int, block_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """-> masked (blocks, B) bool, slot 0 false; origin (blocks,) int64: the slot that exp weights decay from.

    origin is l of a variable prefix, 1 otherwise: a revealed slot may lie anywhere in a uniform block, so distance from the
    anchor stays the measure there.  ValueError for a kind that is none."""
    slots, origin = torch.arange(block_size), torch.ones(blocks, dtype=torch.long)
    if kind == "full":
        masked = (slots > 0).expand(blocks, -1)
    elif kind == "uniform":
        masked = _uniform(blocks, block_size, generator)
    elif kind == "prefix":
        origin = prefix_lengths(blocks, block_size, generator)
        masked = slots >= origin[:, None]
    else:
        raise ValueError(f"corruption {kind!r}")
    return masked, origin


def prefix_lengths(blocks: int, block_size: int, generator: torch.Generator) -> Tensor:
    """(blocks,) int64: first masked slot l, Pr(l) ~ 0.9^l over min(2, B-1) .. B-1."""
    lowest = min(2, block_size - 1)
    if not blocks:
        return torch.zeros(0, dtype=torch.long)
    shares = PREFIX_DECAY ** torch.arange(lowest, block_size, dtype=torch.float64)
    return lowest + torch.multinomial(shares, blocks, replacement=True, generator=generator)


def _uniform(blocks: int, block_size: int, generator: torch.Generator) -> Tensor:
    share = 1 - torch.rand(blocks, 1, generator=generator)                       # (0, 1]
    lots = torch.rand(blocks, block_size - 1, generator=generator)
    masked = lots < share
    masked |= ~masked.any(1, keepdim=True) & (lots == lots.amin(1, keepdim=True))     # none came: the slot that was nearest to it
    return torch.cat([torch.zeros(blocks, 1, dtype=torch.bool), masked], 1)
