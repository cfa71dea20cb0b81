"""Stand-ins for a drafter in the decode loop, good and bad on purpose, and a real one trained for a second."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from common.drafter import geometry
from common.drafter.config import shape_for
from common.drafter.model import Drafter, init_scales
from producer.speculate import Limit, plain
from producer.target import Target

TAPS = (1, 3, 5)
BLOCK = 6


class Scheduled:
    """Knows the text: block i has sizes[i] slots and its first kept[i] drafts right, the next one wrong, the rest right.

    Both lists are repeated.  Checks that the loop's last token stands where its context ends (not where a text may differ
    from the known one: strict=False), and keeps all taps."""

    def __init__(self, text: list[int], kept: list[int], sizes: list[int] = (16,), *, wrong: int = 7, strict: bool = True) -> None:
        self.text, self.kept, self.sizes, self.wrong, self.strict = text, kept, sizes, wrong, strict
        self.blocks, self.taps = 0, []

    def extend(self, taps) -> None:
        self.taps.append(taps)

    def propose(self, last, slots, keep=None):
        anchor = sum(taps.shape[2] for taps in self.taps)
        assert not self.strict or self.text[anchor] == int(last)
        right, size = self.kept[self.blocks % len(self.kept)], self.sizes[self.blocks % len(self.sizes)]
        self.blocks += 1
        draft = (self.text + [self.wrong] * slots)[anchor + 1:anchor + min(keep or slots, size)]
        if right < len(draft):
            draft[right] = self.wrong if draft[right] != self.wrong else self.wrong + 1
        return torch.tensor(draft, dtype=torch.long), None


class Random:
    """Drafts at random, and as many as it likes."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.generator = vocab, torch.Generator().manual_seed(seed)

    def extend(self, taps) -> None:
        pass

    def propose(self, last, slots, keep=None):
        slots = keep or slots
        count = int(torch.randint(0, slots, (), generator=self.generator)) if slots > 1 else 0
        return torch.randint(0, self.vocab, (count,), generator=self.generator), None


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]


def trained(target: Target, texts: list[list[int]], new_tokens: int, steps: int) -> Drafter:
    """A drafter that has learned the target's answers to these prompts, more or less: some blocks right, some not."""
    config = shape_for(target.hidden_size, target.vocab_size, target.n_layers, TAPS, target.mask_token_id, "mixed",
                       block_size=BLOCK, sliding_window=24)
    drafter = Drafter(config, torch.Generator().manual_seed(1))
    data = []
    for ids in texts:
        text = torch.tensor(ids + plain(target, ids, Limit(new_tokens)).tokens)
        taps = target.forward(text[None], taps=TAPS).taps[:, 0].transpose(0, 1).flatten(1)
        anchors = torch.arange(len(ids), len(text) - BLOCK + 1, 2)
        data.append((text.clone(), taps.clone(), anchors))
    init_scales(drafter, torch.stack([taps.unflatten(1, (3, -1)).pow(2).mean((0, 2)).sqrt() for _, taps, _ in data]).mean(0),
                torch.ones(target.hidden_size))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3)
    for step in range(steps):
        text, taps, anchors = data[step % len(data)]
        block = F.embedding(geometry.block_inputs(text, anchors, BLOCK, target.mask_token_id), target.embedding).flatten(0, 1)
        y = drafter(block[None], anchors[None], taps[None]).unflatten(1, (-1, BLOCK))[0, :, 1:]
        labels = geometry.block_labels(text, torch.ones_like(text, dtype=torch.bool), anchors, BLOCK)[0][:, 1:]
        loss = F.cross_entropy(F.linear(y, target.head).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval().requires_grad_(False)
