"""A stored stream as data for two trainers: the same captures, in the same order, some set aside to judge both.

Which are set aside is decided by the prompt's hash; the order is `hstrain run`'s own rule (trainer.order).  Left out: what
is trained on it (recipes.py)."""
from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common import service
from common.capture import Capture
from common.contract import ExtractionContract
from common.errors import UserError
from protocol.store import SampleStore
from trainer.batch import check_probes
from trainer.order import visit

PROMPTS = Path(__file__).parents[1] / "producer" / "data" / "demo-prompts.jsonl"
ASIDE = 8                # one capture in so many judges and is never trained on
SERVE = ("--batch", "64", "--max-new-tokens", "160")


@dataclass(frozen=True, eq=False)
class Recording:
    contract: ExtractionContract
    train: list[Capture]
    aside: list[Capture]
    embedding: Tensor            # (V, H) fp32
    head: Tensor                 # (V, H) fp32


def is_aside(prompt: str, one_in: int = ASIDE) -> bool:
    """By the prompt's id alone, so that no prompt is on both sides and a longer recording moves none."""
    return int.from_bytes(hashlib.sha256(f"aside:{prompt}".encode()).digest()[:8], "big") % one_in == 0


def read(folder: Path) -> Recording:
    """folder: --state-dir of an `hstrain run`.  Read only; UserError where it has no samples or no assets."""
    with SampleStore(folder / "store", readonly=True) as store:
        names = folder / "assets" / f"{store.contract_hash}.json"
        if not store.stream or store.first == store.next or not names.exists():
            raise UserError(f"{folder}: no stored stream (store/ and assets/ of an hstrain run --state-dir); leave --store out to record one")
        contract = ExtractionContract.from_dict(store.contract)
        captures = [store.sample(seq).capture for seq in range(store.first, store.next)]
    assets = {name: load_file(folder / "assets" / sha256)["weight"].float() for name, sha256 in json.loads(names.read_text()).items()
              if name in ("embedding", "lm_head")}
    head = assets.get("lm_head", assets["embedding"])
    for capture in captures:
        check_probes(capture, head)
    sides = [[c for c in captures if is_aside(c.prompt) == side] for side in (False, True)]
    if not all(sides):
        raise UserError(f"{folder}: {len(captures)} samples are too few to set some aside")
    return Recording(contract, *sides, assets["embedding"], head)


def record(folder: Path, target: str) -> None:
    """Let `hsprod serve` answer the demo's prompts and store what it streams, to the stream's end (embedded: about five minutes)."""
    from tools.demo import free_port
    from trainer import config
    from trainer.inbox import Inbox
    address = f"tcp://127.0.0.1:{free_port()}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "hsprod.log").open("ab") as log:
        producer = subprocess.Popen([Path(sys.executable).parent / "hsprod", "serve", "--target", target, "--prompts", PROMPTS, "--bind", address,
                                     "--state-dir", folder / "hsprod", "--threads", "1", *SERVE], stdout=log, stderr=subprocess.STDOUT)
    try:
        stop = service.Stop()
        with Inbox(config.Run(producer=address, state_dir=folder), "recipes", stop) as inbox:
            inbox.wait(stop, lambda _doing: _alive(producer, folder))
            while not inbox.complete():
                _alive(producer, folder)
                inbox.news()
                print(f"\r{inbox.line()}", end="", file=sys.stderr, flush=True)
                time.sleep(0.5)
            print(file=sys.stderr)
    finally:
        producer.terminate()
        producer.wait(timeout=30)


def _alive(producer: subprocess.Popen, folder: Path) -> None:
    if producer.poll() is not None:
        raise UserError(f"hsprod serve has ended; see {folder / 'hsprod.log'}")


def order(lengths: list[int], *, tokens: int, sequences: int, replay: int) -> list[list[int]]:
    """Samples (indices) of each step, as a run reads a finished stream of these lengths, until `tokens` are reached."""
    steps, read_, place = [], 0, 0
    while read_ < tokens:
        steps.append([visit(p, replay=replay, closed=len(lengths)) for p in range(place, place + sequences)])
        read_ += sum(lengths[i] for i in steps[-1])
        place += sequences
    return steps


def dump(recording: Recording, path: Path) -> None:
    """The captures to train on as one safetensors file: I.ids, I.mask, I.taps, I.final, embedding, head."""
    tensors = {"embedding": recording.embedding, "head": recording.head.clone()}
    for i, capture in enumerate(recording.train):
        arrays = {"ids": capture.ids, "mask": capture.loss_mask, "taps": capture.taps, "final": capture.final}
        tensors |= {f"{i}.{name}": torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
