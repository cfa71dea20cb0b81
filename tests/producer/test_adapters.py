"""The drafter behind transformers' own DFlash generation: plain decoding's text, in the very blocks that our loop meets."""
from __future__ import annotations

import pytest
import tiny
import torch
from drafters import BLOCK, prompts, trained

from benchmarks.adapters import Assistant
from producer.speculate import Limit, plain, speculate

LIMIT = Limit(40)
PROMPTS = prompts((40, 7, 3))                      # the first is longer than the drafter's window


class Blocks(list):
    """A streamer: how many tokens came at a time: the prompt, the first token, then block by block."""

    def put(self, value: torch.Tensor) -> None:
        self.append(value.numel())

    def end(self) -> None:
        """Nothing is left to do."""


@pytest.fixture(scope="module")
def target():
    return tiny.dense(layers=8)


@pytest.fixture(scope="module")
def drafter(target):
    return trained(target, PROMPTS, 40, 90)


@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_same_text_and_same_blocks(target, drafter, ids):
    blocks = Blocks()
    out = target.model.generate(torch.tensor([ids]), assistant_model=Assistant(drafter), speculation_type="dflash", do_sample=False,
                                max_new_tokens=LIMIT.max_new_tokens, eos_token_id=None, streamer=blocks)
    ours = speculate(target, drafter, ids, LIMIT)
    assert out[0, len(ids):].tolist() == plain(target, ids, LIMIT).tokens == ours.tokens
    whole = ours.offered.count(BLOCK - 1)          # theirs drafts whole blocks up to the end, ours only what the text still takes
    assert blocks[:2] == [len(ids), 1] and [n - 1 for n in blocks[2:]][:whole] == ours.accepted[:whole]
    assert len(set(ours.accepted[:whole])) > 2     # some drafts right and some wrong, or nothing was compared
