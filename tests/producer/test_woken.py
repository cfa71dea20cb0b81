"""Experts woken: counted as sets are, of the right rows of the right blocks."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny
import torch
from drafters import TAPS, prompts

from common.drafter.config import shape_for
from common.drafter.model import Drafter
from producer import woken
from producer.speculate import Limit, speculate

EXPERTS, BLOCK, NEW = 8, 6, 17


@pytest.fixture(scope="module")
def target():
    return tiny.hybrid(experts=EXPERTS)


@pytest.fixture(scope="module")
def untrained(target):
    config = shape_for(target.hidden_size, target.vocab_size, target.n_layers, TAPS, target.mask_token_id, "mixed", block_size=BLOCK)
    return Drafter(config, torch.Generator().manual_seed(0)).eval().requires_grad_(False)


@pytest.fixture
def forced(target):
    """Row t of every forward asks for experts t and t + 1: n rows wake n + 1, up to all."""
    def choose(_module, _args, out):
        row = torch.arange(len(out[2]))[:, None]
        return out[0], out[1], (row + torch.arange(2)) % EXPERTS
    hooks = [gate.register_forward_hook(choose) for gate in woken.routers(target).values()]
    yield
    for hook in hooks:
        hook.remove()


def test_distinct_is_a_sets_length():
    chosen = torch.randint(0, 9, (3, 7, 2), generator=torch.Generator().manual_seed(0))
    for rows in range(1, 8):
        wanted = [len({expert for row in layer[:rows] for expert in row}) for layer in chosen.tolist()]
        assert woken.distinct(chosen, rows).tolist() == wanted
    for rows in (0, 8):
        with pytest.raises(ValueError, match="rows of a block of 7"):
            woken.distinct(chosen, rows)


def test_uniform_is_the_mean_over_all_choices():
    pairs = list(itertools.combinations(range(4), 2))
    for rows in (1, 2, 3):
        counted = [len(set().union(*chosen)) for chosen in itertools.product(pairs, repeat=rows)]
        assert woken.uniform(4, 2, rows) == pytest.approx(np.mean(counted), abs=1e-12)
    assert woken.uniform(256, 8, 16) == pytest.approx(101.96, abs=0.01)


def test_known_experts_are_counted_for_the_rows_that_gave_tokens():
    rows, kept = torch.arange(BLOCK)[:, None], [0, 3, 5, 1]
    blocks = [((rows + torch.arange(2)) % EXPERTS).expand(3, BLOCK, 2)[:, :slots] for slots in (6, 6, 6, 3)]
    counted = woken.summarise([0, 2, 5], EXPERTS, blocks, [1 + n for n in kept], [])
    assert counted["accepted"]["mean"] == np.mean([2, 5, 7, 3]) and counted["accepted"]["rows"] == np.mean([1, 4, 6, 2])
    assert counted["verified"]["mean"] == np.mean([7, 7, 7, 4]) and counted["verified"]["min"] == 4 and counted["plain"] is None
    assert [row["mean"] for row in counted["by_rows"]] == [2, 3, 4, 5, 6, 7]
    assert [row["blocks"] for row in counted["by_rows"]] == [4, 4, 4, 3, 3, 3]
    assert [row["layer"] for row in counted["per_layer"]] == [0, 2, 5]
    assert all(row["accepted"]["mean"] == pytest.approx(counted["accepted"]["mean"]) for row in counted["per_layer"])


def test_layers_are_not_mixed_up():
    """Layer 1 wakes one expert more than layer 0, whichever the block."""
    blocks = [torch.tensor([[[0, 1], [0, 1]], [[0, 1], [0, 2]]])] * 3
    counted = woken.summarise([4, 9], EXPERTS, blocks, [1, 2, 2], blocks[:1])
    assert [row["verified"]["mean"] for row in counted["per_layer"]] == [2, 3]
    assert [row["accepted"]["min"] for row in counted["per_layer"]] == [2, 2] and counted["per_layer"][1]["accepted"]["max"] == 3


def test_measure_counts_the_loops_own_blocks(target, untrained, forced):
    asked, limit = [(str(i), ids) for i, ids in enumerate(prompts((5, 8)))], Limit(9)
    specs = [speculate(target, untrained, ids, limit) for _, ids in asked]
    offered, accepted = ([n for spec in specs for n in getattr(spec, name)] for name in ("offered", "accepted"))
    got = woken.measure(target, untrained, asked, limit)
    assert got["blocks"] == len(offered) and got["steps"] == 2 * 8
    assert got["verified"]["mean"] == pytest.approx(np.mean([n + 2 for n in offered]))
    assert got["accepted"]["mean"] == pytest.approx(np.mean([n + 2 for n in accepted]))
    assert got["verified"]["uniform"] == pytest.approx(np.mean([woken.uniform(EXPERTS, 2, n + 1) for n in offered]))
    assert got["plain"] == {"mean": 2, "std": 0, "min": 2, "p5": 2, "p95": 2, "max": 2}
    assert [len(gate._forward_hooks) for gate in woken.routers(target).values()] == [1] * 8      # the forced ones only
    first, second = woken.show(got)
    assert first.row_count == 3 + 3 and second.row_count == 8        # first 2, 4 and 6 rows


def test_real_routers_wake_top_k_in_a_step_and_no_fewer_in_a_block(target, untrained):
    got = woken.measure(target, untrained, [("a", prompts((9,))[0])], Limit(NEW))
    assert (got["plain"]["min"], got["plain"]["max"]) == (2, 2)
    means = [row["mean"] for row in got["by_rows"]]
    assert means[0] == 2 < means[1] < means[-1] <= EXPERTS and got["accepted"]["mean"] < got["verified"]["mean"]


def test_a_block_is_never_taken_for_another():
    heard = [[torch.zeros(n, 2, dtype=torch.long) for n in (9, 6, 4)]] * 2
    assert [block.shape for block in woken.forwards(heard, [6, 4])] == [(2, 6, 2), (2, 4, 2)]
    for rows in ([4, 6], [6], [6, 4, 1]):
        with pytest.raises(ValueError, match="the routers heard"):
            woken.forwards(heard, rows)


def test_a_dense_target_has_no_experts(untrained):
    dense = tiny.dense(layers=8)
    assert woken.measure(dense, untrained, [("a", [5, 6])], Limit(3)) == {} and woken.show({}) == []
