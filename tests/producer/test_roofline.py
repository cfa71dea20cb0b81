"""Bytes counted by hand, and floors from them."""
from __future__ import annotations

import pytest
import tiny
import torch
from drafters import TAPS, prompts
from transformers import Qwen3_5MoeTextConfig

from common.drafter.config import shape_for
from common.drafter.model import Drafter
from producer import roofline, stopwatch, woken
from producer.speculate import Limit

H, V = 64, 320
MOE = 8 * H + 3 * 32 * H + H + 2 * H                                            # router, shared expert and its gate, two norms
ATTENTION = (2 * 4 + 2 * 2 + 4) * 32 * H + 2 * 32                               # queries with their gates, keys, values, out; two norms
LINEAR = (256 + 128 + 4 + 4 + 128) * H + 256 * 4 + 4 + 4 + 32                   # qkv, z, a, b, out; convolution, A_log, dt_bias, norm
EXPERT = 3 * 32 * H


def drafter_for(target, **shape):
    config = shape_for(target.hidden_size, target.vocab_size, target.n_layers, TAPS, target.mask_token_id, "mixed", **shape)
    return Drafter(config, torch.Generator().manual_seed(0)).eval().requires_grad_(False)


def test_a_hybrids_weights_by_hand():
    target = tiny.hybrid()
    shape = roofline.weights(*roofline.named_shapes(target.model))
    dense = 8 * MOE + 2 * ATTENTION + 6 * LINEAR + H
    assert (shape.dense_numbers, shape.head_numbers, shape.expert_numbers) == (dense, target.vocab_size * H, 8 * EXPERT)
    assert (shape.dense, shape.head, shape.expert) == (4 * dense, 4 * target.vocab_size * H, 4 * 8 * EXPERT)
    half = roofline.weights(*roofline.named_shapes(tiny.hybrid(dtype=torch.bfloat16).model))
    assert (half.dense, half.head, half.expert) == (2 * dense, 2 * target.vocab_size * H, 2 * 8 * EXPERT)


def test_a_tied_head_is_counted_once_and_the_embedding_never():
    target = tiny.dense()
    shape = roofline.weights(*roofline.named_shapes(target.model))
    assert shape.head_numbers == target.vocab_size * H and shape.expert == 0
    assert shape.dense_numbers == 4 * (4 * H * H - 2 * H * 32 + 3 * H * 128 + 2 * H) + H
    untied = {"e": ((10, 4), 2), "h": ((10, 4), 2), "layers.0.w": ((4, 4), 4)}
    assert roofline.weights(untied, "e", "h") == roofline.Weights(64, 80, 0, 16, 40, 0)
    with pytest.raises(ValueError, match="experts of shape"):
        roofline.weights(untied | {"layers.0.mlp.experts.0.w": ((4, 4), 4)}, "e", "h")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_caches_bytes_by_config_are_those_of_a_real_one(dtype):
    item = dtype.itemsize
    for target in (tiny.hybrid(dtype=dtype), tiny.dense(dtype=dtype)):
        assert roofline.memory(target) == roofline.memory_by_config(target.model.config, item)
    assert roofline.memory(tiny.hybrid(dtype=dtype)) == roofline.Memory(2 * 2 * 2 * 32 * item, 6 * (256 * 4 * item + 4 * 32 * 32 * 4))


def test_what_a_forward_reads():
    shape, cache = roofline.Weights(1000, 100, 10, 500, 50, 5), roofline.Memory(7, 3)
    step = roofline.forward_bytes(shape, cache, 2, 11, writes_states=True)
    assert step == {"dense": 1000, "experts": 20, "head": 100, "cache": 77, "states": 6}
    assert roofline.forward_bytes(shape, cache, 4.5, 11, writes_states=False) == step | {"experts": 45, "states": 3}
    assert roofline.forward_flops(shape, 6, 2) == 2 * 6 * (500 + 50 + 2 * 5)


def test_what_a_draft_reads():
    config = drafter_for(tiny.dense(layers=8), sliding_window=24).config        # a sliding layer and a full one
    row = 2 * config.num_key_value_heads * config.head_dim * 2
    for context, rows in ((23, 46), (24, 48), (25, 49), (100, 124)):
        assert roofline.draft_bytes(config, 10, 2, 5, context) == {"dense": 20, "experts": 0, "head": 5, "states": 0, "cache": rows * row}
    fc = 3 * H * H
    assert roofline.draft_flops(config, fc + 10, 6) == 2 * (8 * 10 + fc + 7 * 6)


def test_a_floor_is_the_slower_of_memory_and_arithmetic():
    read = {"dense": 60, "cache": 40}
    assert roofline.floor(read, 30, 50.0, 10.0) == {"parts": read, "bytes": 100, "flops": 30, "by_memory": 2.0, "by_arithmetic": 3.0, "floor": 3.0}
    assert roofline.floor(read, 30, 10.0, 10.0)["floor"] == 10.0
    assert roofline.floor(read, 30, 50.0, None) | {"floor": 0} == {"parts": read, "bytes": 100, "flops": 30, "by_memory": 2.0,
                                                                  "by_arithmetic": None, "floor": 0}


def test_experts_are_those_of_blocks_of_that_length():
    heard = {"by_rows": [{"rows": 1, "mean": 2.0}, {"rows": 2, "mean": 3.5}]}
    assert [roofline.woken_by(heard, rows) for rows in (1, 2)] == [2.0, 3.5] and roofline.woken_by({}, 9) == 0
    with pytest.raises(ValueError, match="no block of 3 rows was heard, the longest had 2"):
        roofline.woken_by(heard, 3)


def test_rates_count_bytes_both_ways_and_two_operations_a_product(monkeypatch):
    monkeypatch.setattr(stopwatch, "medians", lambda calls, device, rounds: {name: 0.5 for name, call in calls.items() if call() is not None})
    assert roofline.copy_rate(torch.device("cpu"), 4096) == 2 * 4096 / 0.5
    assert roofline.flop_rate(torch.device("cpu"), torch.float32) == 2 * 1024 ** 3 / 0.5


def test_the_table_of_a_real_target(monkeypatch):
    monkeypatch.setattr(roofline, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(roofline, "flop_rate", lambda device, dtype: 2e9)
    target = tiny.hybrid()
    drafter = drafter_for(target)
    heard = woken.measure(target, drafter, [("a", prompts((9,))[0])], Limit(20))
    got = roofline.measure(target, drafter, 0.02, 0.03, 0.01, heard, 50, 8, {"step": 0.015})
    step, verify, draft = (got["forwards"][name] for name in ("step", "verify", "draft"))
    assert step["parts"]["experts"] == 2 * 4 * 8 * EXPERT and step["parts"]["cache"] == 50 * roofline.memory(target).token
    assert verify["parts"]["experts"] == pytest.approx(heard["by_rows"][7]["mean"] * 4 * 8 * EXPERT)
    assert verify["flops"] == 8 * step["flops"] and step["parts"]["states"] == 2 * verify["parts"]["states"]
    assert draft["parts"]["dense"] == 4 * sum(weight.numel() for weight in drafter.parameters())
    assert step["by_memory"] == step["bytes"] / 1e9 and verify["by_arithmetic"] == verify["flops"] / 2e9
    assert (step["measured"], step["reached"], step["inside"], verify["inside"]) == (0.02, step["floor"] / 0.02, 0.015, None)
    assert roofline.show(got).row_count == 6 + 4 + 2
    arithmetic = roofline.expected(target.model.config, drafter.config, copy_rate=1e9, context_tokens=50, dtype=torch.float32)
    for name in ("step", "draft"):
        assert arithmetic["forwards"][name]["parts"] == got["forwards"][name]["parts"]
    assert arithmetic["woken"]["verify"] == woken.uniform(8, 2, 8) and roofline.show(arithmetic).row_count == 6 + 1


def test_the_users_target_by_arithmetic():
    """docs/strix-halo.md: 34.66 billion weights, about 6 GB a step, 28 ms at 215 GB/s; the drafter 771.8 MB (dflash-facts 1.2)."""
    config = Qwen3_5MoeTextConfig()
    drafter = shape_for(2048, config.vocab_size, 40, (1, 6, 11, 16, 22, 27, 32, 37), 248077, "mixed")
    got = roofline.expected(config, drafter, copy_rate=215e9, context_tokens=1024)
    shape, forwards = got["weights"], got["forwards"]
    assert shape["dense_numbers"] + 2 * shape["head_numbers"] + 256 * shape["expert_numbers"] == 34_660_610_688
    assert forwards["draft"]["parts"]["dense"] == 2 * 385_906_176
    assert forwards["step"]["parts"]["cache"] == 1024 * 20 * 1024
    assert [round(forwards[name]["floor"] * 1e3, 1) for name in ("step", "verify", "draft")] == [28.1, 137.8, 8.4]
