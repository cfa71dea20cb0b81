"""Captures of no target at all, learnable ones, and a loop over them: the trainer without a link."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from common.capture import Capture, to_bf16
from common.contract import ExtractionContract
from common.drafter.config import shape_for
from protocol import codec
from protocol.store import SampleStore
from trainer.arms import ARMS
from trainer.loop import Loop, Plan
from trainer.offline import Offline
from trainer.run import Run

HIDDEN, VOCAB, TAPS, MASK = 32, 24, (1, 3), 23


def captures(count: int, seed: int = 0) -> list[Capture]:
    """Texts whose next token is the last plus their own step; taps that show both."""
    rng = np.random.default_rng(seed)
    basis = rng.standard_normal((len(TAPS) + 1, VOCAB, HIDDEN)).astype(np.float32)
    out = []
    for _ in range(count):
        tokens, stride, start = int(rng.integers(14, 40)), int(rng.integers(1, 4)), int(rng.integers(VOCAB - 1))
        ids = ((start + stride * np.arange(tokens)) % (VOCAB - 1)).astype(np.int32)
        states = to_bf16(basis[:, ids] + 0.3 * stride * basis[:, [stride]] + 0.05 * rng.standard_normal((len(TAPS) + 1, tokens, HIDDEN)).astype(np.float32))
        none = np.zeros(0, np.int32)
        out.append(Capture(ids, np.arange(tokens) >= 4, states[:-1], states[-1], none, none))
    return out


CONTRACT = ExtractionContract(target="toy", weights="a" * 64, tokenizer="b" * 64, chat_template="", thinking=None, taps=TAPS, n_layers=8,
                              hidden_size=HIDDEN, vocab_size=VOCAB, mask_token_id=MASK, dtype="float32", delta_rule="", versions={"numpy": "2"})


def stored(state: Path, given: list[Capture], stream: str = "s" * 32) -> Path:
    """A box's state folder that has received these: store and assets, as trainer/inbox.py lays them out."""
    assets = state / "assets"
    assets.mkdir(parents=True)
    rng, names = torch.Generator().manual_seed(7), {}
    for name in ("embedding", "lm_head"):
        data = safetensors.torch.save({"weight": torch.randn(VOCAB, HIDDEN, generator=rng)})
        names[name] = hashlib.sha256(data).hexdigest()
        (assets / names[name]).write_bytes(data)
    (assets / f"{CONTRACT.hash}.json").write_text(json.dumps(names))
    with SampleStore(state / "store") as store:
        store.begin(stream, CONTRACT.to_dict(), 0)
        append(store, given)
    return state


def append(store: SampleStore, given: list[Capture]) -> None:
    for capture in given:
        store.append(store.next, codec.encode(capture, stream=store.stream, seq=store.next, contract=CONTRACT.hash))


def config(attention: str = "causal"):
    return shape_for(HIDDEN, VOCAB, 8, TAPS, MASK, attention, block_size=4, sliding_window=16)


class Listed(list):
    """Captures with batch.Samples' face."""

    def text(self, index: int):
        return self[index].ids, self[index].loss_mask


class Silent:
    """Stands for evaluations, their link, a board and a stop flag where a test wants none of them."""

    waiting, last, skipped, alarms, hopeless, up = None, None, 0, 0, False, False

    def __bool__(self) -> bool:
        return False

    def wait(self, _seconds: float) -> bool:
        return False

    def offer(self) -> None:
        """No link here."""

    def line(self) -> str:
        return ""

    def due(self, _now: float) -> bool:
        return False

    def show(self, *_values, force: bool = False) -> None:
        """Nobody watches."""


def loop(folder, *, steps: int, samples: list[Capture], arm: str = "ce_causal", seed: int = 0, **over) -> Loop:
    rng = torch.Generator().manual_seed(7)
    plan = Plan(**dict(steps=steps, sequences=2, anchors=4, max_tokens=64, optimizer="adamw", lr=3e-3, replay=1, eval_every=5) | over.pop("plan", {}))
    run = Run(folder, {"arm": ARMS[arm].to_dict(), "seed": seed, "contract": "c"}, config(ARMS[arm].attention), seed=seed,
              optimizer=plan.optimizer, lr=plan.lr, device=torch.device("cpu"))
    samples = samples if isinstance(samples, Listed) else Listed(samples)
    embedding, head = torch.randn(VOCAB, HIDDEN, generator=rng), torch.randn(VOCAB, HIDDEN, generator=rng)
    offline = Offline(run, samples, embedding, head, max_tokens=plan.max_tokens)
    return Loop(arm=ARMS[arm], plan=plan, run=run, samples=samples, embedding=embedding, head=head, evals=Silent(), offline=offline, tick=over.pop("tick", lambda: ""), ended=lambda: True,
                stop=over.pop("stop", Silent()), board=Silent())
