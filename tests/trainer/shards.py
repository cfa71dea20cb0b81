"""Run under torchrun by test_ranks: a run in shares stops and goes on, bit for bit."""
import sys
from pathlib import Path

import torch

from common.drafter.config import shape_for
from trainer.ranks import begin
from trainer.run import Run

CPU = torch.device("cpu")
SHAPE = shape_for(32, 64, 4, (1, 2), 63, "causal", num_hidden_layers=1, block_size=4)


def opened(folder: Path, world: int) -> Run:
    made = Run(folder, {"arm": "a"}, SHAPE, seed=0, optimizer="adamw", lr=1e-2, device=CPU)
    made.shard(world, CPU)
    return made


def step(made: Run, seed: int, rank: int) -> None:
    """Each rank's own input, so that shares that were not exchanged would show."""
    given = torch.Generator().manual_seed(100 * seed + rank)
    block, taps = torch.randn(1, 4, 32, generator=given), torch.randn(1, 10, 64, generator=given)
    made.drafter(block, torch.tensor([[6]]), taps).square().sum().backward()
    made.optimizer.step(1.0)


def main(folder: Path) -> None:
    ranks, _ = begin(CPU)
    own = folder / str(ranks.rank)                                   # one folder a rank: the same is written in each
    straight = opened(own / "straight", ranks.world)
    fresh = straight.state()
    step(straight, 1, ranks.rank)
    middle = straight.state()
    straight.save(middle)
    again = opened(own / "straight", ranks.world)
    assert again.resumed and not straight.resumed and any(not torch.equal(fresh[name], middle[name]) for name in fresh)
    for made in (straight, again):
        step(made, 2, ranks.rank)
    ours, theirs = straight.state(), again.state()
    assert ours.keys() == theirs.keys() and len(ours) == 4 * len(list(again.drafter.parameters()))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    for name, parameter in again.drafter.named_parameters():
        assert parameter.to_local().numel() < parameter.numel() or parameter.numel() < ranks.world, name
    sys.stdout.write(f"rank {ranks.rank} equal\n")           # in one piece: both write to the same pipe
    sys.stdout.flush()
    ranks.close()


main(Path(sys.argv[1]))
