"""Several ranks are one: the same steps, the same weights, whoever takes which sequence."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common import metrics
from common.errors import UserError
from tests.trainer.small import captures, stored
from trainer import sharded
from trainer.ranks import Ranks, begin

CPU = torch.device("cpu")
LR, NEAR = 1e-3, 5e-5          # six steps move a weight by some 3e-3


def test_shares_are_disjoint_in_order_and_whole():
    items = list(range(12))
    for world in (1, 2, 3, 4, 6, 12):
        parts = [Ranks(rank, world).share(items) for rank in range(world)]
        assert [i for part in parts for i in part] == items and {len(part) for part in parts} == {12 // world}
    with pytest.raises(ValueError, match="12 items for 5 ranks"):
        Ranks(0, 5).share(items)


def test_one_process_makes_no_group_and_changes_nothing():
    ranks, device = begin(CPU, {})
    value, drafter = torch.tensor(3.0, requires_grad=True), torch.nn.Linear(1, 1)
    assert ranks.first and device == CPU and ranks.agree("this") == "this" and ranks.wrap(drafter) is drafter
    assert ranks.total(value).item() == 3 and not ranks.total(value).requires_grad
    assert not torch.distributed.is_initialized()


def test_ranks_on_several_boxes_are_refused():
    with pytest.raises(UserError, match="several boxes"):
        begin(CPU, {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"})


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("box") / "state", captures(40))


def train(box, folder, *options: str, ranks: int = 1) -> None:
    """`hstrain run` as a person starts it, under torchrun where it has several ranks."""
    words = ["-m", "trainer", "run", "--from", str(box), "--state-dir", str(folder / "state"), "--run-dir", str(folder / "run"), "--threads", "1",
             "--device", "cpu", "--steps", "6", "--anchors", "4", "--max-tokens", "64", "--layers", "1", "--block-size", "4", "--eval-every", "3",
             "--optimizer", "adamw", "--lr", str(LR), *options]
    launched(words, ranks)


def launched(words: list[str], ranks: int) -> str:
    head = [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*head, *words], capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


def final(folder) -> dict[str, torch.Tensor]:
    return {name: value for name, value in load_file(folder / "run" / "resume" / "state.safetensors").items() if name.startswith("master.")}


def test_two_ranks_equal_one_with_twice_the_batch(box, tmp_path):
    """A teacher, masks drawn anew, and weights that come from the losses: all that a share could draw or divide by itself."""
    arm = ["--arm", "kl_mixed_uniform", "--weights", "dpace"]
    one, two, shares = tmp_path / "one", tmp_path / "two", tmp_path / "shares"
    train(box, one, *arm, "--sequences", "4")
    train(box, two, *arm, "--sequences", "2", ranks=2)
    train(box, shares, *arm, "--sequences", "2", "--shard", ranks=2)
    for other in (two, shares):
        same_run(one, other)
    train(box, shares, *arm, "--sequences", "4")                    # what a run is does not hold how many took part, nor how they held it


def same_run(one, other) -> None:
    ours, theirs = final(one), final(other)
    assert ours.keys() == theirs.keys()
    apart = {name: float((value - theirs[name]).abs().max()) for name, value in ours.items()}
    assert max(apart.values()) < NEAR, apart                             # sums are formed in another order
    [last], [row] = (metrics.read(folder / "run" / "metrics.jsonl", "step") for folder in (one, other))
    assert [last[k] for k in ("step", "tokens", "rows_cut")] == [row[k] for k in ("step", "tokens", "rows_cut")]
    assert [last[k] for k in ("loss", "denominator", "grad_norm")] == pytest.approx([row[k] for k in ("loss", "denominator", "grad_norm")], rel=1e-3)
    assert last["slots"] > row["slots"] > 0, "each rank had its own sequences"
    names = [folder / "run" / "checkpoints" / "step-00000006" / "model.safetensors" for folder in (one, other)]
    weights, others = (load_file(path) for path in names)
    assert weights.keys() == others.keys() and all(value.shape == others[name].shape for name, value in weights.items())


def test_a_run_in_shares_stops_and_goes_on_bit_for_bit(tmp_path):
    said = launched([str(Path(__file__).with_name("shards.py")), str(tmp_path)], 2)
    assert "rank 0 equal" in said and "rank 1 equal" in said


@pytest.mark.parametrize("world, optimizer, why", [(1, "adamw", "start it as torchrun"), (2, "muon", "use --optimizer adamw")])
def test_what_cannot_be_held_in_shares_is_refused(world, optimizer, why):
    sharded.check(2, "adamw")
    with pytest.raises(UserError, match=why):
        sharded.check(world, optimizer)


def test_a_mistake_of_the_users_is_one_line_from_rank_0(box, tmp_path):
    with pytest.raises(AssertionError, match="use --optimizer adamw") as caught:
        train(box, tmp_path, "--arm", "ce_causal", "--sequences", "2", "--shard", "--optimizer", "muon", ranks=2)
    assert "broadcast" not in str(caught.value)
