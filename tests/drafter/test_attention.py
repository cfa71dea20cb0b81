"""Many blocks at once: every way sees what geometry.visible says, and none sees more (pitfalls R2, W1-W3)."""
from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from common.drafter import attention, geometry, model
from common.drafter.config import shape_for
from common.drafter.model import Drafter

CONTEXT, SLOTS, HEADS, KV, WIDE = 40, 4, 4, 2, 8
PADDING = geometry.PADDING
RULES = [(causal, window) for causal in (True, False) for window in (None, 1, 5, 12)]
ANCHORS = {"spread": [[3, 9, 17, 30, 38], [1, 2, 3, 4, 5]], "one apart, to the last row": [[35, 36, 37, 38, 39]],
           "padded": [[4, 20, PADDING, PADDING, PADDING], [PADDING] * 5], "past all rows": [[10, 40, 55, 60, 61]]}


def inputs(anchors: torch.Tensor, gradients: bool = False):
    rng = torch.Generator().manual_seed(0)
    b, n = anchors.shape
    make = lambda heads, length: torch.randn(b, heads, length, WIDE, generator=rng).requires_grad_(gradients)
    return (make(KV, CONTEXT), make(KV, CONTEXT)), make(HEADS, n * SLOTS), make(KV, n * SLOTS), make(KV, n * SLOTS)


def out_and_gradients(way: str, anchors: torch.Tensor, rule: tuple):
    rows, q, k, v = inputs(anchors, gradients=True)
    out = attention.ways(way, anchors, SLOTS, CONTEXT, [rule])[rule](rows, q, k, v)
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
    return out.detach(), [x.grad for x in (*rows, q, k, v)]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("group", [4, 8, 12, 256])
@pytest.mark.parametrize("anchors", ANCHORS.values(), ids=ANCHORS)
def test_grouped_equals_dense_in_output_and_gradients(monkeypatch, anchors, group, rule):
    monkeypatch.setattr(attention, "GROUP", group)
    anchors = torch.tensor(anchors)
    expected, gradients = out_and_gradients("dense", anchors, rule)
    got, others = out_and_gradients("grouped", anchors, rule)
    assert torch.allclose(got, expected, atol=2e-6)
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(torch.zeros_like(one) if other is None else other, one, atol=5e-6)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("anchors", ANCHORS.values(), ids=ANCHORS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_dense_in_output_and_gradients(monkeypatch, anchors, rule):
    """torch refuses gradients of it on a CPU; its uncompiled form has them, which shows our mask at work there, not the GPU's kernel."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_tensors: None)
    expected, gradients = out_and_gradients("dense", torch.tensor(anchors), rule)
    got, others = out_and_gradients("flex", torch.tensor(anchors), rule)
    assert torch.allclose(got, expected, atol=2e-6)
    assert all(torch.allclose(one, other, atol=5e-6) for one, other in zip(gradients, others, strict=True))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_with_gradients_on_a_cpu_raises():
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        out_and_gradients("flex", torch.tensor([[3]]), (True, None))


@pytest.mark.parametrize("rule", [(causal, window) for causal in (True, False) for window in (None, 1, 100, 300)], ids=str)
@pytest.mark.parametrize("context, count", [(40, 3), (1000, 90), (640, 64)])
def test_tiles_are_those_of_torchs_own_mask(monkeypatch, context, count, rule):
    """And never are more than STRIP of them looked at together."""
    from torch.nn.attention.flex_attention import create_block_mask
    rng = torch.Generator().manual_seed(count)
    anchors = torch.stack([torch.randperm(context, generator=rng)[:count].sort().values for _ in range(2)])
    anchors[1, count // 3:] = PADDING
    layout, looked = geometry.layout(anchors, 16, context), []
    expected = create_block_mask(lambda b, _, i, j: geometry.sees(layout[0][b, i], layout[1][b, i], layout[2][b, j], layout[3][b, j], *rule),
                                 2, None, count * 16, context + count * 16, device="cpu")
    monkeypatch.setattr(geometry, "visible", lambda *words, real=geometry.visible: looked.append(len(words[0][0])) or real(*words))
    some, whole = attention.tiles(layout, rule)
    assert max(looked) <= attention.STRIP * attention.TILE and sum(looked) == count * 16
    for made, numbers, indices in ((some & ~whole, expected.kv_num_blocks, expected.kv_indices), (whole, expected.full_kv_num_blocks, expected.full_kv_indices)):
        assert all(torch.equal(a, b) for a, b in zip(attention._listed(made), (numbers, indices), strict=True))
    if context > 500:                                                           # else all is one tile
        assert not some.all() and whole.any() == (rule[1] not in (1, 100)), "tiles are left out, and seen whole where the window reaches over one"


@settings(max_examples=200)
@given(st.lists(st.integers(-1, 60), min_size=1, max_size=6), st.one_of(st.none(), st.integers(1, 30)), st.booleans())
def test_seen_rows_hold_all_that_can_be_seen(anchors, window, causal):
    where = torch.tensor([sorted(anchors)])
    begin, end = attention.seen_rows(where, 50, window)
    queries, names, keys, blocks = geometry.layout(where, SLOTS, 50)
    seen = geometry.visible(queries, names, keys, blocks, causal, window)[0, :, :50].any(0).nonzero()[:, 0].tolist()
    assert all(begin <= row < end for row in seen)
    if len(anchors) == 1 and anchors[0] > 0 and window != 1:
        assert (begin, end) == ((seen[0], seen[-1] + 1) if seen else (50, 50)), "of one block, no more"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("way", ["dense", "grouped", "flex"])
@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_a_row_at_the_windows_edge(way, distance):
    """W - 1 rows back is seen by slot 0, W is not; nothing at or after the anchor is."""
    window, anchor = 6, 20
    rule, anchors = (True, window), torch.tensor([[anchor]])
    rows, q, k, v = inputs(anchors)
    def out(row: int | None):
        changed = tuple(x.detach().clone() for x in rows)
        if row is not None:
            changed[0][:, :, row] += 3
            changed[1][:, :, row] -= 5
        with torch.no_grad():
            return attention.ways(way, anchors, SLOTS, CONTEXT, [rule])[rule](changed, q, k, v)[:, :, 0]
    assert torch.equal(out(anchor - window + distance), out(None)) == (distance < 1)
    assert torch.equal(out(anchor), out(None)) and torch.equal(out(anchor + 1), out(None))


def test_a_way_that_is_none_raises():
    with pytest.raises(ValueError, match="'sdpa': one of dense, grouped, flex"):
        attention.ways("sdpa", torch.tensor([[3]]), SLOTS, CONTEXT, RULES)
    drafter = Drafter(shape_for(16, 24, 8, (1, 3), 23, "mixed", block_size=4), torch.Generator().manual_seed(0))
    drafter.way = "none"
    with pytest.raises(ValueError, match="'none'"):
        drafter(torch.zeros(1, 4, 16), torch.tensor([[3]]), torch.zeros(1, 9, 32))
    assert attention.way_for(torch.device("cpu")) == "grouped" and attention.way_for(torch.device("cuda")) == "flex"


@pytest.mark.parametrize("mode", ["causal", "bidi", "mixed"])
def test_layers_run_again_in_the_backward_change_no_bit(monkeypatch, mode):
    drafter = Drafter(shape_for(16, 24, 8, (1, 3), 23, mode, block_size=4, sliding_window=6), torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1)
    block, taps, anchors = torch.randn(2, 12, 16, generator=rng), torch.randn(2, 20, 32, generator=rng), torch.tensor([[2, 9, 15], [1, 4, PADDING]])
    def gradients(most: int, way: str) -> list[torch.Tensor]:
        monkeypatch.setattr(model, "MOST_SAVED", most)
        drafter.way = way
        drafter.zero_grad()
        drafter(block, anchors, taps).square().sum().backward()
        return [p.grad.clone() for p in drafter.parameters()]
    calls = []
    monkeypatch.setattr(model, "checkpoint", lambda *words, real=model.checkpoint, **named: calls.append(1) or real(*words, **named))
    for way in ("dense", "grouped"):
        kept = gradients(1 << 40, way)
        assert not calls
        assert all(torch.equal(a, b) for a, b in zip(kept, gradients(0, way), strict=True)) and len(calls) == len(drafter.layers)
        calls.clear()
