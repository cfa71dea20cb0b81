"""What a rank that is not the first does under torchrun: it reads what rank 0 has settled, and takes its share of each step.

It receives nothing, writes nothing and shows nothing.  Its weights are rank 0's from the start (DDP sends them), its
optimiser's state is the run folder's, as rank 0's is.  With --shard they hold shares of both (trainer/sharded.py)."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from common import service
from common.contract import ExtractionContract
from common.drafter.attention import Way
from common.drafter.config import DrafterConfig
from protocol.store import SampleStore
from trainer.arms import Arm
from trainer.batch import Samples, load_weights
from trainer.inbox import unmendable
from trainer.loop import Loop, Plan
from trainer.ranks import Ranks
from trainer.run import Run
from trainer.shortlist import head_of


@dataclass(frozen=True)
class Work:
    """What rank 0 tells the others once: all of it picklable, for it stays on this box."""

    store: Path
    assets: dict[str, Path]
    contract: ExtractionContract
    shape: DrafterConfig
    plan: Plan
    identity: dict                   # of run.json, before a shortlist is added
    way: Way | None                  # how blocks attend
    shortlist: Tensor | None
    shard: bool


def follow(folder: Path, arm: Arm, seed: int, ranks: Ranks, device: torch.device, *, keep_bytes: int) -> None:
    """Returns when rank 0 says that it is enough, or that there is nothing to do at all."""
    work: Work | None = ranks.agree(None)
    if work is None:
        return
    embedding, head = load_weights(work.assets, device)
    with SampleStore(work.store, readonly=True) as store:
        samples = Samples(SimpleNamespace(store=store, mend=unmendable), head, contract=work.contract.hash, mask_token_id=work.contract.mask_token_id,
                          keep_bytes=keep_bytes)
        made = Run(folder, work.identity, work.shape, seed=seed, optimizer=work.plan.optimizer, lr=work.plan.lr,
                   device=torch.device("cpu") if work.shard else device)
        made.drafter.way = work.way
        if work.shortlist is not None:
            made.drafter.shortlist = work.shortlist.to(device)
        if work.shard:
            made.shard(ranks.world, device)
        nobody = SimpleNamespace()                                   # rank 0 evaluates, shows and decides
        Loop(arm=arm, plan=work.plan, run=made, samples=samples, embedding=embedding, head=head_of(head, made.drafter.shortlist),
             evals=nobody, offline=nobody, tick=str, ended=bool, stop=service.Stop(), board=nobody, ranks=ranks).follow()
