"""A drafter that has learned a few texts of SmolLM2 by heart, in seconds: right often, and wrong often enough to compare."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.drafter import geometry
from common.drafter.config import FULL, SLIDING, shape_for
from common.drafter.model import Drafter, init_scales
from trainer.optim import Optimizer, share_at

TAPS, BLOCK, WINDOW = (8, 24), 8, 24
NEGATIVES = 512                 # rows of the head beside the texts' own that training scores: a tenth of the time of all


def shape(target, attention: str):
    return shape_for(target.hidden_size, target.vocab_size, target.n_layers, TAPS, target.mask_token_id, attention, block_size=BLOCK,
                     sliding_window=WINDOW, layer_types=(SLIDING, FULL), num_attention_heads=3, num_key_value_heads=1, intermediate_size=256)


def taps_of(target, ids: list[int]) -> Tensor:
    """(T, K*H)."""
    return target.forward(torch.tensor([ids]), taps=TAPS).taps[:, 0].transpose(0, 1).flatten(1).clone()


def learn(target, texts: list[tuple[list[int], Tensor, int]], attention: str, steps: int, each: int = 12) -> Drafter:
    """texts: ids, their taps, the first anchor.  each: anchors drawn from every text in a step."""
    finals = target.forward(torch.tensor([texts[0][0]])).final[0].square().mean(0).sqrt()
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(shape(target, attention), generator)
    taps = torch.stack([t.unflatten(1, (len(TAPS), -1)).square().mean((0, 2)).sqrt() for _, t, _ in texts]).mean(0)
    init_scales(drafter, taps, finals)
    words = torch.tensor(sorted({i for ids, _, _ in texts for i in ids}))
    others = torch.randperm(target.vocab_size, generator=generator)[:NEGATIVES]
    rows = torch.cat([words, others[~torch.isin(others, words)]])
    head, place = target.head[rows].float(), torch.full((target.vocab_size,), -1)
    place[rows] = torch.arange(len(rows))
    optimizer = Optimizer(drafter, "muon", 0.02)
    for step in range(steps):
        loss = torch.zeros(())
        for ids, seen, first in texts:
            text = torch.tensor(ids)
            anchors = (first + torch.randperm(len(ids) - 1 - first, generator=generator)[:each]).sort().values
            labels, inside = geometry.block_labels(text, torch.ones_like(text, dtype=torch.bool), anchors, BLOCK)
            block = F.embedding(geometry.block_inputs(text, anchors, BLOCK, target.mask_token_id), target.embedding).float().flatten(0, 1)
            y = drafter(block[None], anchors[None], seen[None].float())[0]
            loss = loss + F.cross_entropy(F.linear(y, head), torch.where(inside, place[labels], -100).flatten())
        (loss / len(texts)).backward()
        optimizer.step(share_at(step, steps))
    return drafter.eval().requires_grad_(False)
