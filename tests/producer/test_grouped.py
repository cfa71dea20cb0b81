"""Our experts kernels equal their plain twin and transformers' own loop, whatever the routing; in Triton's interpreter, or on a GPU.

The interpreter's bf16 product is wrong (grouped_kernels), so bf16 runs on a GPU only; there the interpreter does not run."""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from producer import grouped

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: pip install --no-deps triton==3.7.1")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="bf16 needs a GPU: Triton's interpreter multiplies it wrongly")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest difference as a share of the largest value.  fp32: another order of the sums.  Else: sums are rounded once, to the dtype,
# where the others round the gate, its activation and each weighted part
CLOSE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def experts(count: int, size: int, width: int, dtype: torch.dtype, seed: int = 0, act: str = "silu") -> Qwen3_5MoeExperts:
    config = Qwen3_5MoeTextConfig(num_experts=count, hidden_size=size, moe_intermediate_size=width, hidden_act=act)
    config._experts_implementation = "eager"
    made, generator = Qwen3_5MoeExperts(config), torch.Generator().manual_seed(seed)
    for weight in made.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
    return made.requires_grad_(False).to(DEVICE, dtype)


def inputs(tokens: int, size: int, dtype: torch.dtype, top_k: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, share = torch.randn(tokens, size, generator=generator), torch.rand(tokens, top_k, generator=generator) + 0.1
    return hidden.to(DEVICE, dtype), (share / share.sum(-1, keepdim=True)).to(DEVICE, dtype)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def agree(made: Qwen3_5MoeExperts, hidden: torch.Tensor, index: torch.Tensor, share: torch.Tensor) -> None:
    index = index.to(hidden.device)
    ours = grouped.forward(made, hidden, index, share)
    assert ours.shape == hidden.shape and ours.dtype == hidden.dtype and ours.isfinite().all()
    for other in (grouped.plain(made, hidden, index, share), made(hidden, index, share)):
        assert apart(ours, other) <= CLOSE[hidden.dtype]


def drawn(tokens: int, count: int, top_k: int, seed: int = 2) -> torch.Tensor:
    return torch.rand(tokens, count, generator=torch.Generator().manual_seed(seed)).topk(top_k, -1).indices


@st.composite
def routings(draw):
    """Tokens, experts awake (any subset, so that others stay empty) and distinct choices among them."""
    top_k = draw(st.integers(1, 8))
    count = draw(st.integers(top_k, 12))
    awake = draw(st.lists(st.integers(0, count - 1), min_size=top_k, max_size=count, unique=True))
    rows = draw(st.lists(st.permutations(awake), min_size=1, max_size=12))
    return count, torch.tensor([row[:top_k] for row in rows])


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@given(routings(), st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=8)
def test_any_routing_and_any_size(dtype, routing, size, width):
    count, index = routing
    hidden, share = inputs(len(index), size, dtype, index.shape[1])
    agree(experts(count, size, width, dtype), hidden, index, share)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_gpu)])
@pytest.mark.parametrize("tokens, count, top_k, size, width", [
    (1, 16, 8, 72, 40),          # one token of eight choices: nothing is sorted
    (1, 1, 1, 16, 16), (2, 40, 2, 24, 8), (6, 10, 4, 136, 70),       # sizes beyond a tile, and no multiples of it
    (17, 3, 1, 40, 40), (50, 4, 2, 136, 72), (130, 8, 8, 24, 16)])  # prefill's tiles; more rows than the sort takes in one go
def test_shapes(dtype, tokens, count, top_k, size, width):
    hidden, share = inputs(tokens, size, dtype, top_k)
    agree(experts(count, size, width, dtype), hidden, drawn(tokens, count, top_k), share)


@needs_triton
@pytest.mark.parametrize("tokens", [1, 16, 17, 130])
@pytest.mark.parametrize("to", [0, 3])
def test_all_tokens_to_one_expert(tokens, to):
    hidden, share = inputs(tokens, 24, torch.float32, 1)
    agree(experts(4, 24, 16, torch.float32), hidden, torch.full((tokens, 1), to), share)


@needs_triton
@given(st.integers(2, 60), st.integers(1, 9), st.sampled_from([16, 64]), st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_the_sort_and_the_table_of_tiles(tokens, count, rows, random):
    """Every row stands once in the order, and in just one tile, of its own expert; no slot of the table is left as it was."""
    from producer import grouped_kernels
    ids = torch.tensor([random.choice([random.randrange(count), 0]) for _ in range(tokens)], device=DEVICE)
    order, table = ids.new_full((tokens,), -7, dtype=torch.int32), ids.new_full((3, tokens // rows + count), -7, dtype=torch.int32)
    grouped_kernels.route[(count,)](ids, order, table, tokens, E=count, M=rows, BLOCK=32)
    assert order.tolist() == ids.argsort(stable=True).tolist()
    covered = []
    for expert, first, end in table.T.tolist():
        assert -1 <= expert < count and first >= 0
        if expert >= 0:
            mine = order[first:min(first + rows, end)].tolist()
            assert mine and all(ids[row] == expert for row in mine)
            covered += mine
    assert covered == order.tolist()


@needs_triton
def test_a_row_does_not_feel_the_others():
    """Bit for bit, while the tile stays the same: alone, among others, in another place, beside other tokens (suffix invariance)."""
    made, (hidden, share) = experts(8, 72, 40, torch.float32), inputs(12, 72, torch.float32, 3)
    index = drawn(12, 8, 3).to(DEVICE)
    assert len({grouped.tiles(n, 3, 8, torch.float32, amd=False) for n in (1, 2, 12)}) == 1
    whole = grouped.forward(made, hidden, index, share)
    assert torch.equal(grouped.forward(made, hidden, index, share), whole)
    other, other_index = hidden.clone(), index.clone()
    other[5:], other_index[5:] = -other[5:], drawn(7, 8, 3, seed=9).to(DEVICE)
    assert torch.equal(grouped.forward(made, other, other_index, share)[:5], whole[:5])
    assert torch.equal(grouped.forward(made, hidden.flip(0), index.flip(0), share.flip(0)).flip(0), whole)
    assert all(torch.equal(grouped.forward(made, hidden[i:i + 1], index[i:i + 1], share[i:i + 1])[0], whole[i]) for i in range(12))


@pytest.mark.parametrize("amd", [False, True])
@pytest.mark.parametrize("dtype", grouped.DTYPES)
def test_tiles(amd, dtype):
    """One token, a block and a long block share a tile on the user's target; what a program holds fits every card."""
    few, many = (grouped.tiles(tokens, 8, 256, dtype, amd=amd) for tokens in (1, 4096))
    assert all(grouped.tiles(tokens, 8, 256, dtype, amd=amd) == few for tokens in (2, 16, 256)) and few.rows == 16 < many.rows
    assert grouped.tiles(257, 8, 256, dtype, amd=amd) == many
    for shape in (few, many):
        assert min(shape.rows, shape.columns // 2, shape.depth) >= 16 and all(n & (n - 1) == 0 for n in shape[:3])
        tile = (shape.rows + shape.columns) * shape.depth * dtype.itemsize
        assert tile * max(1, shape.stages) <= (64 if amd else 99) << 10


@needs_triton
def test_the_kernels_compile_for_both_makers():
    """The interpreter takes what a compiler refuses.  No GPU is needed to compile; a process of its own, for this one interprets."""
    code = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import compiled; compiled.report()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(" ok") == 2 * 2 * 2 and done.stdout.count("spills 0 ") == 4, done.stdout


@pytest.mark.parametrize("change, says", [
    (dict(act="gelu"), "activation"), (dict(has_bias=True), "has_bias=True"), (dict(is_transposed=True), "is_transposed"),
    (dict(_is_expert_parallel=True), "_is_expert_parallel"), (dict(dtype=torch.float64), "float64"), (dict(gate_up_proj=None), "gate_up_proj")])
def test_experts_of_another_kind_are_refused(change, says):
    made = experts(4, 16, 8, change.get("dtype", torch.float32), act=change.get("act", "silu"))
    assert grouped.unfit(experts(4, 16, 8, torch.bfloat16)) == ""
    for name, value in change.items():
        if name not in ("act", "dtype"):
            setattr(made, name, value)
    assert says in grouped.unfit(made)


def test_experts_of_another_layout_are_refused():
    swapped = SimpleNamespace(gate_up_proj=torch.zeros(4, 16, 16), down_proj=torch.zeros(4, 8, 16))
    assert "not as [E, 2I, H]" in grouped.unfit(swapped)
