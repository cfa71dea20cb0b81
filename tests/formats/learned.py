"""Two small drafters of SmolLM2: one that has learned a few texts by heart, and one of strong random weights.

The learned one was taught a wrong token at every seventh position or so: it is right often, wrong often, and sure of itself both
times, so that another engine's rounding changes few drafts.  The random one drafts nothing of use, but another draft for each
window, mask and tap."""
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
WRONG = 0.15                    # share of positions whose label is another word
NARROW, STRONG = 6, 8.0         # the random one's window, and how much larger its weights are than fresh ones

Text = tuple[list[int], Tensor, int]            # ids, their taps (T, K*H), the first anchor


def fresh(target, texts: list[Text], attention: str, generator: torch.Generator, window: int = WINDOW) -> Drafter:
    config = shape_for(target.hidden_size, target.vocab_size, target.n_layers, TAPS, target.mask_token_id, attention, block_size=BLOCK,
                       sliding_window=window, layer_types=(SLIDING, FULL), num_attention_heads=3, num_key_value_heads=1, intermediate_size=256)
    drafter = Drafter(config, generator)
    taps = torch.stack([t.unflatten(1, (len(TAPS), -1)).square().mean((0, 2)).sqrt() for _, t, _ in texts]).mean(0)
    init_scales(drafter, taps, target.forward(torch.tensor([texts[0][0]])).final[0].square().mean(0).sqrt())
    return drafter


def rounded(drafter: Drafter) -> Drafter:
    """As a bf16 file will hold it, in fp32."""
    return drafter.to(torch.bfloat16).float().eval().requires_grad_(False)


def strong(target, texts: list[Text], attention: str) -> Drafter:
    generator = torch.Generator().manual_seed(0)
    drafter = fresh(target, texts, attention, generator, NARROW)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            weight.mul_(STRONG if "proj" in name else STRONG ** 0.5 if "q_norm" in name or "k_norm" in name else 1)
            if weight.ndim == 1:                                        # norms unlike each other: a file that swaps two is another drafter
                weight.mul_(torch.randn(weight.shape, generator=generator).mul(0.25).exp())
    return rounded(drafter)


def learn(target, texts: list[Text], attention: str, steps: int, each: int) -> Drafter:
    """each: anchors drawn from every text in a step."""
    generator = torch.Generator().manual_seed(0)
    drafter = fresh(target, texts, attention, generator)
    words = torch.tensor(sorted({i for ids, _, _ in texts for i in ids}))
    others = torch.randperm(target.vocab_size, generator=generator)[:NEGATIVES]
    rows = torch.cat([words, others[~torch.isin(others, words)]])
    head, place = target.head[rows].float(), torch.full((target.vocab_size,), -1)
    place[rows] = torch.arange(len(rows))
    taught = [torch.where(torch.rand(len(ids), generator=generator) < WRONG,
                          words[torch.randint(len(words), (len(ids),), generator=generator)], torch.tensor(ids)) for ids, _, _ in texts]
    optimizer = Optimizer(drafter, "muon", 0.02)
    for step in range(steps):
        loss = torch.zeros(())
        for (ids, seen, first), labelled in zip(texts, taught, strict=True):
            text = torch.tensor(ids)
            anchors = (first + torch.randperm(len(ids) - 1 - first, generator=generator)[:each]).sort().values
            labels, inside = geometry.block_labels(labelled, torch.ones_like(text, dtype=torch.bool), anchors, BLOCK)
            block = F.embedding(geometry.block_inputs(text, anchors, BLOCK, target.mask_token_id), target.embedding).float().flatten(0, 1)
            y = drafter(block[None], anchors[None], seen[None].float())[0]
            loss = loss + F.cross_entropy(F.linear(y, head), torch.where(inside, place[labels], -100).flatten())
        (loss / len(texts)).backward()
        optimizer.step(share_at(step, steps))
    return rounded(drafter)
