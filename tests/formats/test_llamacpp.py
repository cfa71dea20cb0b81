"""llama.cpp itself drafts with our GGUF: SmolLM2's own file as the target, out of two wheels.

Its text is that of plain decoding; its drafts are ours, slot by slot; what it accepts is what ours would.  The target here is
that file's values in fp32, llama.cpp computes with 8-bit activations: where two tokens are nearly tied in our logits it may take
the other one, so each of its drafts must be ours or tied with ours, and texts are compared exactly."""
from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import learned
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.drafter import geometry
from common.drafter.model import Drafter
from common.errors import UserError
from producer import smollm2
from producer.prompts import Prompt, render
from producer.target import Target, load
from trainer import imported
from trainer.formats import gguf, tokenizer_keys

try:
    SMOL = smollm2.gguf_file()
except UserError:
    SMOL = None
pytestmark = [pytest.mark.skipif(SMOL is None, reason=f"not installed: {smollm2.INSTALL}"),
              pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="not installed: pip install --no-deps xllamacpp (make test does)")]

NEW, FEW, STEPS, EACH, MOST = 64, 8, 80, 24, learned.BLOCK - 1
TIED = 0.5                      # logits between two tokens that rounding may swap; the learned drafter's first two are 4 apart, in the median
ASKED = ("Write a Python function that reverses a string.", "What is the capital of France, and why?")
CANDIDATE = re.compile(r"draft candidate   0, pos +(\d+): +(\d+) ")
ACCEPTED = re.compile(r"task (\d+) \| accepted +(\d+)/ *(\d+) draft tokens")


@dataclass(frozen=True)
class Block:
    """anchor: its slot 0's position; draft: MOST tokens; accepted of the `offered` first."""

    anchor: int
    draft: list[int]
    accepted: int
    offered: int


def llama(draft: Path | None, prompts: list[list[int]], new: int = NEW) -> tuple[list[list[int]], list[list[Block]]]:
    """New tokens of each prompt, and the blocks that they came in."""
    asked = {"target": str(SMOL), "draft": draft and str(draft), "most": MOST, "new": new, "prompts": prompts}
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("llama_worker.py"))], input=json.dumps(asked) + "\n", text=True,
                          capture_output=True, errors="replace")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), blocks(done.stderr, prompts)


def blocks(log: str, prompts: list[list[int]]) -> list[list[Block]]:
    found, drafted, tasks = [[] for _ in prompts], {}, []
    for line in log.splitlines():
        if candidate := CANDIDATE.search(line):
            drafted[int(candidate[1])] = int(candidate[2])
        elif judged := ACCEPTED.search(line):
            task, accepted, offered = map(int, judged.groups())
            tasks += [task] if task not in tasks else []
            mine = found[tasks.index(task)]
            anchor = mine[-1].anchor + mine[-1].accepted + 1 if mine else len(prompts[tasks.index(task)])
            mine.append(Block(anchor, [drafted.pop(slot) for slot in range(MOST)], accepted, offered))
    return found


@dataclass(frozen=True)
class Trial:
    target: Target
    prompts: list[list[int]]
    plain: list[list[int]]                                # llama.cpp's own greedy tokens
    states: list[Tensor]                                  # of each text after every layer, (n_layers, T, H)
    keys: list                                            # of its tokenizer, for a GGUF
    folder: Path

    def text(self, i: int) -> list[int]:
        return self.prompts[i] + self.plain[i]

    def texts(self) -> list[learned.Text]:
        return [(self.text(i), self.taps(i), len(ids)) for i, ids in enumerate(self.prompts)]

    def taps(self, i: int, by: int = 0) -> Tensor:
        """(T, K*H): the drafter's taps, or those `by` layers on."""
        return torch.cat([self.states[i][tap + by] for tap in learned.TAPS], -1)

    def export(self, name: str, drafter: Drafter, quant: str) -> Path:
        head = None if drafter.shortlist is None else self.target.head[drafter.shortlist]
        gguf.write(self.folder / name, drafter, {}, quant, keys=self.keys, head=head)
        return self.folder / name

    def logits(self, drafter: Drafter, found: list[list[Block]], by: int = 0) -> Tensor:
        """Ours of every block that llama.cpp drafted, slot 1 on -> (n, MOST, V); -inf for tokens that are never drafted."""
        out = []
        for i, mine in enumerate(found):
            ids, anchors = torch.tensor(self.text(i)), torch.tensor([block.anchor for block in mine])
            block = F.embedding(geometry.block_inputs(ids, anchors, learned.BLOCK, self.target.mask_token_id), self.target.embedding)
            y = drafter(block.flatten(0, 1)[None], anchors[None], self.taps(i, by)[None])[0]
            out.append(F.linear(y.unflatten(0, (len(mine), -1))[:, 1:], self.target.head))
        out = torch.cat(out)
        if drafter.shortlist is None:
            return out
        return torch.full_like(out, -torch.inf).index_copy_(-1, drafter.shortlist, out[..., drafter.shortlist])

    def accepted(self, drafts: Tensor, found: list[list[Block]]) -> list[int]:
        """drafts (n, MOST) -> of each block, as many of them as llama.cpp offered of its own: those right in a row in its text."""
        where = [(torch.tensor(self.text(i)), block) for i, mine in enumerate(found) for block in mine]
        return [int((draft[:b.offered] == text[b.anchor + 1:b.anchor + 1 + b.offered]).long().cumprod(0).sum())
                for draft, (text, b) in zip(drafts, where, strict=True)]


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target = load("smollm2", device="cpu")
    prompts = [render(target.tokenizer, Prompt(({"role": "user", "content": asked},)), None) for asked in ASKED]
    plain, _ = llama(None, prompts)
    states = [target.forward(torch.tensor([ids + new]), taps=range(target.n_layers - 1)).taps[:, 0] for ids, new in zip(prompts, plain, strict=True)]
    yield Trial(target, prompts, plain, states, tokenizer_keys.keys(SMOL, target.vocab_size)[0], tmp_path_factory.mktemp("gguf"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def drafter(trial):
    return learned.learn(trial.target, trial.texts(), "bidi", STEPS, EACH)


def theirs(found: list[list[Block]]) -> Tensor:
    """(n, MOST)."""
    return torch.tensor([block.draft for mine in found for block in mine])


def shortfall(logits: Tensor, found: list[list[Block]]) -> Tensor:
    """(n, MOST): by how much our first token leads the one that llama.cpp drafted; 0 where they are the same."""
    return logits.amax(-1) - logits.gather(-1, theirs(found)[..., None])[..., 0]


def test_text_drafts_and_acceptance_are_ours(trial, drafter):
    """Past the window (24 tokens) of its sliding layer all the while."""
    tokens, found = llama(trial.export("bidi.gguf", drafter, "bf16"), trial.prompts)
    assert tokens == trial.plain
    logits = trial.logits(drafter, found)
    behind, same = shortfall(logits, found), logits.argmax(-1) == theirs(found)
    assert behind.max() < TIED and same.float().mean() > 0.95
    ours, judged = trial.accepted(logits.argmax(-1), found), [block.accepted for mine in found for block in mine]
    assert all(a == b for a, b, alike in zip(ours, judged, same.all(-1), strict=True) if alike)
    assert abs((len(ours) + sum(ours)) / (len(judged) + sum(judged)) - 1) < 0.05              # tokens per verify
    assert len(judged) > 20 and len(set(judged)) > 4 and 2 < 1 + sum(judged) / len(judged) < 6       # right often, and wrong often


@pytest.mark.parametrize("attention, quant, other", [("bidi", "f16", "causal"), ("causal", "q8_0", "bidi")])
def test_window_mask_and_taps_are_ours_and_not_the_ones_beside(trial, attention, quant, other):
    """Of a drafter whose every draft hangs on them: what it drafts here by one window more, or one tap, is not what llama.cpp drafts."""
    kept = learned.strong(trial.target, trial.texts(), attention)
    path = trial.export(f"{attention}.gguf", kept, quant)
    tokens, found = llama(path, trial.prompts, FEW)
    assert tokens == [new[:FEW] for new in trial.plain]
    kept = imported.read(path).drafter if quant == "q8_0" else kept       # as the file holds it
    assert shortfall(trial.logits(kept, found), found).mean() < 0.15
    for changes in ({"sliding_window": learned.NARROW - 1}, {"sliding_window": learned.NARROW + 1}, {"attention": other}):
        wrong = Drafter(dataclasses.replace(kept.config, **changes))
        wrong.load_state_dict(kept.state_dict(), assign=True)
        assert shortfall(trial.logits(wrong, found), found).mean() > 0.4, changes
    for by in (-1, 1):
        assert shortfall(trial.logits(kept, found, by), found).mean() > 0.4, by


def test_a_draft_vocabulary_goes_with_it(trial, drafter):
    """Drafts from a list, absolute ids: half of the texts' own tokens are left out of it, and never drafted."""
    listed = Drafter(drafter.config)
    listed.load_state_dict(drafter.state_dict(), assign=True)
    listed.shortlist = torch.tensor(sorted({i for new in trial.plain for i in new})[::2])
    tokens, found = llama(trial.export("listed.gguf", listed, "f16"), trial.prompts, FEW)
    assert tokens == [new[:FEW] for new in trial.plain]
    assert shortfall(trial.logits(listed, found), found).max() < TIED
    assert shortfall(trial.logits(drafter, found), found).max() > TIED                       # a list that was not honoured would draft others
