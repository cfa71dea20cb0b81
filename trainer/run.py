"""A run: one arm, one seed, one store, in a folder that says so.  Opening the folder again resumes it bit for bit.

    run.json       what the run is (arm, seed, contract, code); a folder of another run is refused by field
    closed.json    number of samples in the stream once it ended, written before it is used (see order.py)
    metrics.jsonl  rows of measured values
    resume/        fp32 masters, optimizer state, position; replaced whole
    checkpoints/   drafters in the released format, one folder a step

Randomness comes from (seed, position) alone, so there is no generator state to save.
"""
from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common import files
from common.drafter import checkpoint
from common.drafter.config import DrafterConfig
from common.drafter.model import Drafter
from common.metrics import Metrics
from trainer import optim, sharded
from trainer.claim import claim
from trainer.optim import MASTER


class Run:
    """drafter (fp32, on device), optimizer, step (done so far), tokens (trained on so far, re-reads included)."""

    def __init__(self, folder: Path, identity: dict, config: DrafterConfig, *, seed: int, optimizer: optim.Kind, lr: float,
                 device: torch.device) -> None:
        """identity: what makes this run this run; compared field by field with an existing folder (UserError)."""
        self.folder, self.identity, self.config, self.seed = folder, identity, config, seed
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder / "run.json", identity, what="run", option="--run-dir")
        self.drafter = Drafter(config, generator=torch.Generator().manual_seed(seed)).to(device)
        self._optimizer = optimizer, lr
        self.optimizer = optim.Optimizer(self.drafter, *self._optimizer)
        self.sharded = False
        self.step = self.tokens = 0
        self.closed: int | None = _read(folder / "closed.json").get("samples")
        self.resumed = self._load()
        self.metrics = Metrics(folder / "metrics.jsonl")

    def shard(self, world: int, device: torch.device) -> None:
        """Rank 0's weights and everybody's state in shares on the device from here on.  Every rank calls it, and `state`."""
        state = optim.state_tensors(self.drafter, self.optimizer)
        sharded.shard(self.drafter, world, device)
        self.optimizer, self.sharded = optim.Optimizer(self.drafter, *self._optimizer), True
        optim.load_state_tensors(self.drafter, self.optimizer, state)

    def generators(self, positions: Iterable[int]) -> list[torch.Generator]:
        """For the sequences that are read at these positions of the run (order.py)."""
        return [draws(self.seed, position) for position in positions]

    def close_stream(self, samples: int) -> None:
        files.write_whole(self.folder / "closed.json", json.dumps({"samples": samples}).encode())
        self.closed = samples

    def state(self) -> dict[str, Tensor]:
        """All that a bitwise resume needs, on the CPU.  Where it is held in shares, every rank calls this at the same time."""
        return {name: sharded.whole(value).contiguous().cpu() for name, value in optim.state_tensors(self.drafter, self.optimizer).items()}

    def checkpoint(self, state: dict[str, Tensor] | None = None) -> Path:
        """A drafter folder in the released format, its record beside it; durable on return.  state: as given to `save`."""
        folder = self.folder / "checkpoints" / f"step-{self.step:08d}"
        folder.parent.mkdir(exist_ok=True)
        weights = {name.removeprefix(MASTER): value for name, value in (state or {}).items() if name.startswith(MASTER)}
        checkpoint.save(folder, self.drafter, self.identity | {"step": self.step, "tokens": self.tokens}, weights=weights or None)
        return folder

    def judged(self) -> Drafter:
        """The drafter whose acceptance is measured: this one or, where it is held in shares, its last checkpoint, on the same device."""
        if not self.sharded:
            return self.drafter
        device = self.drafter.fc.weight.device
        drafter, _, _ = checkpoint.load(self.checkpoints()[-1], device, torch.float32 if device.type == "cpu" else torch.bfloat16)
        drafter.way = self.drafter.way
        return drafter

    def save(self, state: dict[str, Tensor]) -> None:
        """`state`, to resume from; durable on return."""
        temporary = self.folder / ".resume.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        save_file(state, temporary / "state.safetensors", metadata={"step": str(self.step), "tokens": str(self.tokens)})
        files.publish_folder(temporary, self.folder / "resume")

    def _load(self) -> bool:
        for folder in (self.folder / "resume", self.folder / ".resume.old"):           # the second: a kill while it was replaced
            path = folder / "state.safetensors"
            if path.exists():
                with safe_open(path, "pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}
                    self.step, self.tokens = (int(file.metadata()[k]) for k in ("step", "tokens"))
                optim.load_state_tensors(self.drafter, self.optimizer, tensors)
                return True
        return False

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*"))


def draws(seed: int, position: int) -> torch.Generator:
    """Anchors and masks of the sequence at one position of a run: equal for every arm with this seed, others for another seed.

    Hashed, because torch's CPU generator looks at the low 32 bits of its seed alone: seed << 32 would be none."""
    digest = hashlib.blake2b(f"{seed},{position}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def _read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}
