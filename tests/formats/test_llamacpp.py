"""llama.cpp itself drafts with our GGUF: SmolLM2's own file as the target, out of two wheels.

Its text is that of plain decoding; its drafts are ours, slot by slot; what it accepts is what ours would.  The
drafter has learned llama.cpp's own greedy texts, so both sides judge the same tokens.  The target here is that file's values in
fp32, llama.cpp computes with 8-bit activations: taps differ a little, so drafts are compared by share, and texts exactly."""
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

from common.drafter import geometry
from common.drafter.model import Drafter
from common.errors import UserError
from producer import smollm2
from producer.prompts import Prompt, render
from producer.target import Target, load
from trainer.formats import gguf, target_head, tokenizer_keys

try:
    SMOL = smollm2.gguf_file()
except UserError:
    SMOL = None
pytestmark = [pytest.mark.skipif(SMOL is None, reason=f"not installed: {smollm2.INSTALL}"),
              pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="not installed: pip install --no-deps xllamacpp (make test does)")]

NEW, STEPS, MOST = 64, 52, learned.BLOCK - 1
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
            mine.append(Block(anchor, [drafted[slot] for slot in range(MOST)], accepted, offered))
    return found


@dataclass(frozen=True)
class Trial:
    target: Target
    drafter: Drafter
    prompts: list[list[int]]
    plain: list[list[int]]                                # llama.cpp's own greedy tokens
    folder: Path

    def text(self, i: int) -> list[int]:
        return self.prompts[i] + self.plain[i]

    def export(self, name: str, drafter: Drafter, quant: str = "bf16") -> Path:
        head = None if drafter.shortlist is None else target_head.rows(SMOL, drafter.shortlist, 49152, 576)
        gguf.write(self.folder / name, drafter, {}, quant, keys=tokenizer_keys.keys(SMOL, 49152)[0], head=head)
        return self.folder / name

    def drafts(self, drafter: Drafter, i: int, anchors: list[int]) -> torch.Tensor:
        """Ours at these anchors of text i -> (n, MOST)."""
        ids, at = torch.tensor(self.text(i)), torch.tensor(anchors)
        block = F.embedding(geometry.block_inputs(ids, at, learned.BLOCK, self.target.mask_token_id), self.target.embedding)
        y = drafter(block.flatten(0, 1)[None], at[None], learned.taps_of(self.target, self.text(i))[None])[0].unflatten(0, (len(anchors), -1))
        head = self.target.head if drafter.shortlist is None else self.target.head[drafter.shortlist]
        picked = F.linear(y[:, 1:], head).argmax(-1)
        return picked if drafter.shortlist is None else drafter.shortlist[picked]

    def accepted(self, drafter: Drafter, i: int, found: list[Block]) -> list[int]:
        """Of each block, as many of our drafts as llama.cpp offered of its own: those right in a row in its text."""
        drafts, text = self.drafts(drafter, i, [b.anchor for b in found]), torch.tensor(self.text(i))
        return [int((mine[:b.offered] == text[b.anchor + 1:b.anchor + 1 + b.offered]).long().cumprod(0).sum()) for mine, b in zip(drafts, found)]


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    target = load("smollm2", device="cpu")
    prompts = [render(target.tokenizer, Prompt(({"role": "user", "content": asked},)), None) for asked in ASKED]
    plain, _ = llama(None, prompts)
    texts = [(ids + new, learned.taps_of(target, ids + new), len(ids)) for ids, new in zip(prompts, plain, strict=True)]
    drafter = learned.learn(target, texts, "bidi", STEPS).to(torch.bfloat16).float()             # as it will stand in the file
    yield Trial(target, drafter, prompts, plain, tmp_path_factory.mktemp("gguf"))
    torch.set_num_threads(threads)


def agreement(trial: Trial, drafter: Drafter, found: list[list[Block]]) -> torch.Tensor:
    """(MOST,): share of llama.cpp's first candidates that are ours, by slot."""
    same = [trial.drafts(drafter, i, [b.anchor for b in mine]) == torch.tensor([b.draft for b in mine]) for i, mine in enumerate(found)]
    return torch.cat(same).float().mean(0)


def test_a_bidirectional_drafter_is_run_as_trained(trial):
    """Text, candidates, accepted: past the window (24 tokens) of its sliding layer all the while."""
    tokens, found = llama(trial.export("bidi.gguf", trial.drafter), trial.prompts)
    assert tokens == trial.plain
    assert agreement(trial, trial.drafter, found).min() > 0.85
    theirs = [b.accepted for mine in found for b in mine]
    ours = [n for i, mine in enumerate(found) for n in trial.accepted(trial.drafter, i, mine)]
    assert abs((len(ours) + sum(ours)) / (len(theirs) + sum(theirs)) - 1) < 0.05              # tokens per verify, at its own anchors
    assert len(theirs) > 20 and len(set(theirs)) > 2 and (len(theirs) + sum(theirs)) / len(theirs) > 2        # some right and some wrong


def test_a_causal_drafter_is_run_causal(trial):
    """Under the file's other flag.  Weights so small draft much the same under both masks: the flag itself is test_gguf's to check."""
    causal = Drafter(dataclasses.replace(trial.drafter.config, attention="causal"))
    causal.load_state_dict(trial.drafter.state_dict(), assign=True)
    tokens, found = llama(trial.export("causal.gguf", causal), trial.prompts, 24)
    assert tokens == [new[:24] for new in trial.plain]
    assert agreement(trial, causal, found).mean() > 0.85


def test_a_draft_vocabulary_goes_with_it(trial):
    """Drafts from a list, absolute ids: half of the texts' own tokens are left out of it, and never drafted."""
    listed = Drafter(trial.drafter.config)
    listed.load_state_dict(trial.drafter.state_dict(), assign=True)
    listed.shortlist = torch.tensor(sorted({i for new in trial.plain for i in new})[::2])
    tokens, found = llama(trial.export("listed.gguf", listed, "f16"), trial.prompts, 24)
    assert tokens == [new[:24] for new in trial.plain]
    assert {token for mine in found for b in mine for token in b.draft} <= set(listed.shortlist.tolist())
    assert agreement(trial, listed, found).min() > 0.85
