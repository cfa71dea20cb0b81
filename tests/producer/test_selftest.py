"""The start-up self-test passes on sound targets and names the right check when something is broken on purpose."""
from __future__ import annotations

import dataclasses
import sys

import pytest
import tiny
import torch
from transformers.cache_utils import DynamicLayer

from common.errors import UserError
from producer import daemon, rollback, selftest
from producer.config import Serve
from producer.target import load

TAPS = (1, 2, 3)
MAKERS = {"hybrid": tiny.hybrid, "dense": tiny.dense,
          "embedded": lambda dtype: load("embedded", device="cpu", dtype=str(dtype).removeprefix("torch."))}
DTYPES = (torch.float32, torch.bfloat16)
SOUND = selftest.Measured(dtype=torch.float32, exact=True, largest=12.0, noise=4e-6, block=4e-6, block_largest=1e-5, disagreed=0, taps=1e-7,
                          held=True, crop=True, suffix=0.0, fold=1e-7, after=4e-6)


def failed(result: selftest.SelfTest) -> list[str]:
    return [check.name for check in result.checks if check.failed]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MAKERS)
def test_sound_targets_pass(name, dtype):
    target = MAKERS[name](dtype=dtype)
    own = target.model.config._experts_implementation
    result = selftest.check(target, TAPS)
    result.require("x")
    m = result.measured
    assert m.exact and m.suffix == 0 and m.noise > 0 and (m.fold is None) == (name == "dense") and m.disagreed == 0
    assert "suffix leaves no trace" in result.line() and ("replay" in result.line()) == target.is_hybrid
    assert target.model.config._experts_implementation == own
    assert not any(module._forward_hooks for module in target.model.modules())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state", ["recurrent", "conv"])
def test_a_state_that_leaks(monkeypatch, dtype, state):
    held_back = getattr(rollback.StagedLinearLayer, f"update_{state}_state")

    def leaking(self, value, *args, **kwargs):
        out = held_back(self, value, *args, **kwargs)
        if self.staged:
            kept = getattr(self, f"{state}_states")[0]
            kept.copy_(out[..., -kept.shape[-1]:])
        return out
    monkeypatch.setattr(rollback.StagedLinearLayer, f"update_{state}_state", leaking)
    result = selftest.check(tiny.hybrid(dtype=dtype), TAPS)
    names = failed(result)
    assert names[0] == "held" and ("suffix" in names) == (state == "recurrent")       # what convolutions saw is kept apart, in `pending`
    with pytest.raises(UserError, match="tiny fails the self-test.*held: a verify changes the state"):
        result.require("tiny")


def test_a_one_token_block_that_leaks(monkeypatch):
    """The known method: both updates held back, but the library changes conv_states in place for T = 1."""
    monkeypatch.setattr(rollback.StagedLinearLayer, "record_past", property(lambda self: False, lambda self, value: None))
    target = tiny.hybrid()
    with pytest.raises(UserError, match="gave no convolution inputs"):
        selftest.check(target, TAPS)
    monkeypatch.setattr(rollback.TargetCache, "_check", lambda self: None)
    assert not selftest.held(target, selftest.tokens(target), 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_fold_that_is_off_by_one(monkeypatch, dtype, off):
    original = rollback._Group.fold
    monkeypatch.setattr(rollback._Group, "fold", lambda self, records, n: original(self, records, n + off))
    names = failed(selftest.check(tiny.hybrid(dtype=dtype), TAPS))
    assert names[0] == "fold" and ("suffix" in names) == (off == 1) and "block" not in names and "crop" not in names


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [tiny.hybrid, tiny.dense])
def test_a_crop_that_keeps_a_row_too_many(monkeypatch, make, dtype):
    original = DynamicLayer.crop
    monkeypatch.setattr(rollback.TargetCache, "_check", lambda self: None)        # which sees it too, at the next verify
    monkeypatch.setattr(DynamicLayer, "crop", lambda self, n: original(self, n + 1))
    names = failed(selftest.check(make(dtype=dtype), TAPS))
    assert names[0] == "crop" and "fold" not in names and "held" not in names


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_forward_that_forgets_the_cached_state(monkeypatch, dtype):
    """S2: releases whose multi-token forward began from a fresh recurrent state."""
    target = tiny.hybrid(dtype=dtype)
    rule = vars(sys.modules[type(target.text).__module__])
    original = rule["torch_chunk_gated_delta_rule"]
    monkeypatch.setitem(rule, "torch_chunk_gated_delta_rule", lambda *args, **kwargs: original(*args, **kwargs | {"initial_state": None}))
    names = failed(selftest.check(target, TAPS))
    assert names[0] == "block" and "after" in names                  # and fold: replay forgets too


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tap_of_another_layer(monkeypatch, dtype):
    target = tiny.hybrid(dtype=dtype)
    original = rollback.TargetCache.verify
    monkeypatch.setattr(rollback.TargetCache, "verify", lambda self, block, taps=(): original(self, block, tuple(tap + 1 for tap in taps)))
    assert failed(selftest.check(target, TAPS)) == ["taps"]


@pytest.mark.parametrize("change, names", [
    ({}, []), ({"noise": 0.1, "block": 0.1, "after": 0.1}, ["forward"]), ({"block": 1.7e-5}, ["block"]),
    ({"disagreed": 3}, ["block"]), ({"disagreed": 2}, []),
    ({"suffix": 1e-30}, ["suffix"]), ({"suffix": 1e-5, "exact": False}, []), ({"suffix": 2e-3, "exact": False}, ["suffix"]),
    ({"fold": 2e-4}, ["fold"]), ({"fold": None}, []), ({"taps": 2e-3}, ["taps"]), ({"after": 1.0}, ["after"]), ({"held": False}, ["held"]),
    ({"crop": False}, ["crop"]), ({"noise": float("nan")}, ["forward", "block", "after"]),
    ({"suffix": float("inf"), "exact": False}, ["suffix"])])
def test_judgement(change, names):
    assert [check.name for check in selftest.judge(dataclasses.replace(SOUND, **change)) if check.failed] == names


def test_noise_that_happens_to_be_nil_leaves_room_for_rounding():
    calm = dataclasses.replace(SOUND, noise=0.0)
    assert not any(check.failed for check in selftest.judge(calm))
    assert any(check.failed for check in selftest.judge(dataclasses.replace(calm, block=1e-4)))


def test_a_target_that_fails_is_not_served(monkeypatch, tmp_path):
    broken = dataclasses.replace(SOUND, suffix=0.5)
    monkeypatch.setattr(selftest, "measure", lambda target, taps: broken)
    with pytest.raises(UserError, match="embedded fails the self-test, so it is not served: suffix: rejected tokens leave a trace"):
        daemon.serve(Serve(target="embedded", device="cpu", state_dir=tmp_path, bind="tcp://127.0.0.1:0"), None)


@pytest.mark.parametrize("first", [True, False])
def test_a_state_that_is_no_number_is_never_a_small_difference(first):
    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    one, other = {"a": bad if first else good, "b": good if first else bad}, {"a": good, "b": good * 2}
    assert torch.tensor(selftest.worst(one, other)).isnan()
    assert selftest.worst({"a": good}, {"a": good}) == 0.0 and selftest.worst({"a": good}, {"a": good * 2}) == 0.5
