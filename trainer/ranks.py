"""More than one GPU: one process for each, as torchrun starts them, every one on its own share of a step's sequences.

Rank 0 is the trainer: it receives, decides, writes, is watched.  The others follow its decisions and read the store that it
fills, so all run on one box.  A step over n ranks is the step that one would take over all n shares together: losses are
divided by the weights of all shares, and DDP sums the gradients, each rank with a whole drafter: of the released shape that is
386 M parameters.  For larger ones, sharded.py."""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError

PATIENCE = timedelta(days=7)         # of a rank for the others: rank 0 may wait for its producer, or measure; a dead one ends them all

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `world` of its kind.  With one, every method is the identity and no process group is made."""

    rank: int = 0
    world: int = 1
    local: int = 0                   # of this box: which GPU

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's of a step's items, in order.  ValueError where they do not divide evenly: the ranks would drift apart."""
        size, rest = divmod(len(items), self.world)
        if rest:
            raise ValueError(f"{len(items)} items for {self.world} ranks")
        return items[self.rank * size:(self.rank + 1) * size]

    def agree(self, decision: T) -> T:
        """Rank 0's decision, on every rank; what the others pass is not looked at.  Any picklable value: it stays on this box."""
        if self.world == 1:
            return decision
        box = [decision]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks, without gradient."""
        if self.world == 1:
            return value.detach()
        summed = value.detach().clone()
        dist.all_reduce(summed)
        return summed

    def wrap(self, drafter: nn.Module) -> nn.Module:
        """What to call instead of the drafter: the same numbers, and gradients that are averaged over ranks in the backward."""
        return drafter if self.world == 1 else DistributedDataParallel(drafter)

    def close(self) -> None:
        """Together: one that goes while another still listens aborts it.  Not after a fault, when the process ends anyway."""
        if self.world > 1:
            dist.barrier()
            dist.destroy_process_group()


ALONE = Ranks()


def begin(device: torch.device, environment: dict[str, str] | None = None) -> tuple[Ranks, torch.device]:
    """The ranks that torchrun's variables describe, their process group made, and this rank's device.

    nccl on GPUs, each rank its own; gloo on a CPU.  One process without torchrun.  UserError for ranks on several boxes."""
    given = os.environ if environment is None else environment
    world, rank, local = (int(given.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
    if world == 1:
        return ALONE, device
    if int(given.get("LOCAL_WORLD_SIZE", world)) != world:
        raise UserError("torchrun over several boxes: the store is read as files, so all ranks must run on one; use --nnodes 1")
    if device.type == "cuda":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world, timeout=PATIENCE)
    return Ranks(rank, world, local), device
