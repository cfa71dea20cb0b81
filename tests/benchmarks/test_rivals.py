"""What the comparisons with speculators rest on, without speculators: equal order, nothing set aside twice, ratios, answers."""
from __future__ import annotations

import mmap
import sys
from argparse import Namespace

import numpy as np
import pytest

from benchmarks import recipes, recorded, rivals, step
from benchmarks.random_capture import random_capture
from common.drafter.config import DrafterConfig
from trainer.arms import ARMS
from trainer.batch import make_batch
from trainer.order import visit
from trainer.run import draws


def test_order_is_the_runs_own_and_ends_with_the_step_that_reaches_the_tokens():
    lengths = [10, 20, 30]
    order = recorded.order(lengths, tokens=200, sequences=4, replay=1)
    assert [i for row in order for i in row] == [visit(p, replay=1, closed=3) for p in range(4 * len(order))]
    read = np.cumsum([sum(lengths[i] for i in row) for row in order])
    assert read[-1] >= 200 and read[-2] < 200


def test_a_share_is_set_aside_by_the_prompt_alone():
    aside = [recorded.is_aside(f"{i:064x}") for i in range(4000)]
    assert aside == [recorded.is_aside(f"{i:064x}") for i in range(4000)]
    assert abs(sum(aside) / 4000 - 1 / recorded.ASIDE) < 0.02
    assert all(recorded.is_aside(f"{i:064x}", 1) for i in range(9))


def ratio_of(ours: list, theirs: list) -> dict:
    return recipes.tau_ratio(ours, theirs, list(range(len(ours))), np.random.default_rng(0))


def test_ratio_is_of_the_mean_over_seeds_of_pooled_taus():
    made = ratio_of([[[3, 3], [0]], [[1], [2, 0, 1]]], [[[1], [0]], [[0], [1]]])            # tau 3 and 2, 1.5 and 1.5
    assert made["ratio"] == pytest.approx(2.5 / 1.5) and made["prompts"] == 2
    assert made["interval"][0] < made["ratio"] < made["interval"][1]


def test_interval_is_paired_and_around_the_ratio():
    """Prompts differ much, the two sides on each of them by half: only in pairs is that certain.  Swapped, it is the reciprocal."""
    theirs = [[[int(n)] * 10] for n in np.random.default_rng(1).integers(1, 200, 30)]
    theirs = [[p[0] for p in theirs]] * 3
    ours = [[[n + (n + 1) // 2 for n in p] for p in seed] for seed in theirs]
    made, swapped = ratio_of(ours, theirs), ratio_of(theirs, ours)
    assert 1.45 < made["interval"][0] < made["ratio"] < made["interval"][1] < 1.55
    assert swapped["ratio"] == pytest.approx(1 / made["ratio"])
    assert swapped["interval"] == pytest.approx([1 / made["interval"][1], 1 / made["interval"][0]], rel=0.01)


def test_seeds_that_differ_widen_the_interval():
    same, apart = [[[2]] * 8] * 3, [[[1]] * 8, [[2]] * 8, [[3]] * 8]
    assert ratio_of(same, same)["interval"] == pytest.approx([1.0, 1.0])
    low, high = ratio_of(apart, same)["interval"]
    assert low < 0.9 and high > 1.1                                                         # three seeds: t of two degrees of freedom


def test_one_seed_has_an_interval_over_prompts_alone():
    made = ratio_of([[[1, 2], [3]]], [[[0, 1], [1]]])
    assert made["interval"] is None and made["over_prompts"][0] < made["ratio"] < made["over_prompts"][1]
    assert ratio_of([[[1, 2]]], [[[0, 1]]])["over_prompts"] is None


def test_a_text_without_a_block_stays_out_and_unequal_prompts_are_refused():
    assert ratio_of([[[1, 2], [], [3]]], [[[0, 1], [], [1]]])["prompts"] == 2
    with pytest.raises(ValueError, match="against"):
        ratio_of([[[1]]], [[[1], [1]]])


def test_each_of_ours_meets_each_of_theirs():
    row = {"aside": [[[1]]], "real": []}
    assert list(recipes.compare(dict.fromkeys(("a", "b", "speculators", "speculators-lr0.01"), row), [0])) == [
        "a / speculators", "a / speculators-lr0.01", "b / speculators", "b / speculators-lr0.01"]


def test_a_run_is_not_repeated_and_another_of_its_name_is_refused(tmp_path):
    class Kept(recipes.Runs):
        def __init__(self) -> None:
            self.folder = tmp_path
    (tmp_path / "arm-s0").mkdir()
    (tmp_path / "arm-s0" / "result.json").write_text('{"asked": {"tokens": 5}, "aside": [[1]]}')
    assert Kept()("arm", 0, {"tokens": 5}, None)["aside"] == [[1]]
    with pytest.raises(recipes.UserError, match="another run"):
        Kept()("arm", 0, {"tokens": 6}, None)


def test_turns_are_compared_with_their_own():
    out = {"ours": {"seconds": [2.0, 4.0], "optimizer": [1.0, 1.0]}, "theirs": {"seconds": [4.0, 4.0], "optimizer": [1.0, 1.0]}}
    assert step.ratios(out) == [2.0, 1.0]
    assert step.ratios(out, without_optimizer=True) == [3.0, 1.0]


def test_random_capture_is_the_same_bits_each_time_and_holds_no_mask_token():
    shape = step.shape_of(96)
    one, two = random_capture(shape, 40), random_capture(shape, 40)
    assert np.array_equal(one.taps, two.taps) and np.array_equal(one.ids, two.ids) and one.ids.max() < 95
    batch = make_batch([one], DrafterConfig.from_json(shape), ARMS["ce_causal"], anchors=3, max_tokens=40, generators=[draws(0, i) for i in range(1)])
    assert batch.taps.shape == (1, 40, len(step.TAPS) * step.HIDDEN)


def test_a_worker_answers_and_says_why_it_failed():
    with rivals.Worker(sys.executable, "tests.benchmarks.worker") as worker:
        assert worker.ask("twice", value=21) == {"value": 42}
        with pytest.raises(RuntimeError, match="no such luck"):
            worker.ask("fail")


def test_peak_counts_memory_that_was_given_back():
    peak = rivals.Peak()
    with mmap.mmap(-1, 64_000_000) as block:                     # pages of its own, which malloc has not at hand
        block.write(bytes(64_000_000))
    assert peak.bytes() >= 60_000_000


def test_timed_calls_return_what_they_returned():
    optimizer = Namespace(step=lambda share: share + 1)
    seconds = rivals.timed(optimizer)
    assert optimizer.step(1) == 2 and len(seconds) == 1


def test_arm_may_be_changed_by_field():
    arm = recipes.arm_of("ce_causal,gamma=1.5,weights=exp")
    assert (arm.gamma, arm.weights, arm.beside) == (1.5, "exp", "ce_causal") and recipes.arm_of("ce_causal").name == "ce_causal"
    for wrong in ("ce_causal,gamma", "ce_causal,speed=3", "nothing"):
        with pytest.raises(recipes.UserError):
            recipes.arm_of(wrong)
