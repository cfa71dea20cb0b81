"""The state after a rollback is a fresh decode's, whatever was rejected (pitfalls S1, S2)."""
from __future__ import annotations

import sys

import pytest
import tiny
import torch
from drafters import prompts
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicSlidingWindowLayer

from common.errors import UserError
from producer.rollback import RULES, StagedLinearLayer, TargetCache, advance

# (block, kept): every kept length of a 16-token block, and short blocks; a quarter of them after each prompt
SCHEDULE = [(16, n) for n in range(1, 17)] + [(1, 1), (2, 1), (2, 2), (5, 3), (1, 1), (5, 5), (1, 1), (3, 1)]


@pytest.fixture(scope="module", params=["hybrid", "dense"])
def target(request):
    return tiny.hybrid() if request.param == "hybrid" else tiny.dense()


@pytest.fixture(scope="module")
def hybrid():
    return tiny.hybrid()


def states(cache) -> dict[str, torch.Tensor]:
    """Every tensor of a cache by name, copied: TargetCache's or the library's own."""
    found = {}
    for i, layer in enumerate(getattr(cache, "_cache", cache).layers):
        if hasattr(layer, "recurrent_states"):
            found |= {f"{i} conv": layer.conv_states[0].clone(), f"{i} recurrent": layer.recurrent_states[0].clone()}
        else:
            found |= {f"{i} keys": layer.keys.clone(), f"{i} values": layer.values.clone()}
    return found


def error(one: dict, other: dict) -> float:
    """Largest difference, relative to its tensor's largest value."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in one)


def block_of(text, at: int, size: int, kept: int, seed: int):
    """text's own tokens as far as they are kept, then others: none is the text's."""
    shift = torch.randint(1, 300, (1, size - kept), generator=torch.Generator().manual_seed(seed))
    wrong = (text[:, at + kept:at + size] + shift) % 320
    return torch.cat([text[:, at:at + kept], wrong], 1)


@pytest.mark.parametrize("length, piece", [(3, 3), (37, 20), (64, 64), (77, 20)])
def test_the_state_is_a_fresh_decodes_after_every_cycle(target, length, piece):
    schedule = SCHEDULE[[3, 37, 64, 77].index(length)::4]
    [ids] = prompts((length + sum(n for _, n in schedule),), seed=length)
    text, vocab = torch.tensor([ids]), 320
    caches, fresh = {rule: TargetCache(target, rule) for rule in RULES}, target.new_cache()
    target.forward(text[:, :length], cache=fresh)
    for cache in caches.values():
        for part in text[:, :length].split(piece, 1):
            cache.prefill(part)
    at = length
    for size, kept in schedule:
        block = block_of(torch.cat([text, torch.full((1, 16), 5)], 1), at, size, kept, seed=at) % vocab
        for cache in caches.values():
            cache.verify(block)
            cache.commit(kept)
        before = states(fresh)
        for t in range(at, at + kept):
            before = states(fresh)
            target.forward(text[:, t:t + 1], cache=fresh)
        at += kept
        for rule, cache in caches.items():
            assert cache.length == at
            assert error(states(cache), states(fresh)) < 1e-4, (rule, size, kept)
        linear = {name: value for name, value in before.items() if "recurrent" in name or "conv" in name}
        if linear:                                                   # a state one token behind is told apart
            assert error({name: states(caches["fold"])[name] for name in linear}, linear) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 3, 16])
def test_fold_is_replay(n, dtype):
    """A block kept whole is projected by replay in the same shape, so only the delta rule can differ, in bf16 too."""
    target, [ids] = tiny.hybrid(dtype=dtype), prompts((60,))
    caches = [TargetCache(target, rule) for rule in RULES]
    for cache in caches:
        cache.prefill(torch.tensor([ids[:20]]))
        for start in (20, 20 + n):
            cache.verify(torch.tensor([ids[start:start + n]]))
            cache.commit(n)
    fold, replay = map(states, caches)
    assert error({k: v for k, v in fold.items() if k < "1"}, {k: v for k, v in replay.items() if k < "1"}) < 1e-6
    assert error(fold, replay) < (2e-6 if dtype == torch.float32 else 3e-2)      # deeper layers of the 2nd block see rounded states


@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("keys", ["spread", "alike"])
@pytest.mark.parametrize("decay", [0.0, 1.0, 60.0])
def test_advance_is_the_librarys_recurrent_rule(hybrid, n, keys, decay):
    rule = sys.modules[type(hybrid.text).__module__].torch_recurrent_gated_delta_rule
    g_ = torch.Generator().manual_seed(n)
    heads, dk, dv = 6, 32, 24
    k = torch.randn(1, n, heads, dk, generator=g_) + (20 if keys == "alike" else 0)
    v, beta = torch.randn(1, n, heads, dv, generator=g_), torch.rand(1, n, heads, generator=g_)
    g, state = -decay * torch.rand(1, n, heads, generator=g_) ** 4, torch.randn(1, heads, dk, dv, generator=g_)
    want = rule(k, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)[1][0]
    got = state[0].clone()
    normed = (k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6))[0].transpose(0, 1)                  # [heads, n, dk]
    advance(got, normed, v[0].transpose(0, 1), g[0].T, beta[0].T)
    assert float((got - want).abs().max() / want.abs().max()) < 1e-6
    if n > 1:                                                        # the order of tokens matters, so a shift would show
        advance(other := state[0].clone(), normed.flip(1), v[0].transpose(0, 1), g[0].T, beta[0].T)
        assert float((other - want).abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_rejected_leaves_no_bit(dtype, rule):
    """Experts one by one (batched_mm): in grouped kernels the other tokens change a group's size, and so its rounding."""
    target = tiny.hybrid(dtype=dtype)
    target.model.set_experts_implementation("batched_mm")
    [ids] = prompts((60,), seed=3)
    text = torch.tensor([ids])
    for kept in (1, 4, 15):
        results = []
        for seed in (0, 1):
            cache = TargetCache(target, rule)
            cache.prefill(text[:, :30])
            logits = cache.verify(block_of(text, 30, 16, kept, seed)).logits[:, :kept]
            cache.commit(kept)
            results.append(states(cache) | {"logits": logits, "next": cache.verify(text[:, 46:50]).logits})
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0]), kept


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("rule", RULES)
def test_a_verify_alone_leaves_no_trace(hybrid, size, rule):
    text = torch.tensor(prompts((40,)))
    cache, fresh = TargetCache(hybrid, rule), hybrid.new_cache()
    cache.prefill(text[:, :20])
    hybrid.forward(text[:, :20], cache=fresh)
    before = states(cache)
    cache.verify(text[:, 20:20 + size])
    for name, value in states(cache).items():
        assert torch.equal(value[..., :20, :] if "keys" in name or "values" in name else value, before[name]), name
    cache.commit(1)
    hybrid.forward(text[:, 20:21], cache=fresh)
    assert error(states(cache), states(fresh)) < 1e-5


def test_a_prefill_may_follow_a_block(hybrid):
    """The states lie together in one tensor then; the library's own writes must reach it, and a tensor put in their place too."""
    text = torch.tensor(prompts((60,)))
    cache, fresh = TargetCache(hybrid), hybrid.new_cache()
    cache.prefill(text[:, :10])
    for at, step in ((10, "block"), (15, "prefill"), (30, "block"), (35, "prefill one"), (36, "block")):
        if step == "block":
            cache.verify(text[:, at:at + 8])
            cache.commit(5)
        else:
            cache.prefill(text[:, at:at + (15 if step == "prefill" else 1)])
            for kept in (cache._cache.layers[0].recurrent_states, cache._cache.layers[1].conv_states):
                kept[0] = kept[0].clone()
    hybrid.forward(text[:, :41], cache=fresh)
    assert cache.length == 41 and error(states(cache), states(fresh)) < 1e-4


def test_a_build_that_runs_the_layers_otherwise_is_refused(monkeypatch):
    target = tiny.hybrid()
    layer = target.text.layers[1].linear_attn
    cache = TargetCache(target)
    cache.prefill(torch.tensor(prompts((9,))))
    with monkeypatch.context() as patch:                             # a fused kernel that computes the rate by itself
        original = type(layer).forward

        def fused(hidden_states, **kwargs):
            module = layer._modules["in_proj_a"]
            layer._modules["in_proj_a"] = torch.nn.Linear(module.in_features, module.out_features, bias=False)
            try:
                return original(layer, hidden_states, **kwargs)
            finally:
                layer._modules["in_proj_a"] = module
        patch.setattr(layer, "forward", fused)
        with pytest.raises(UserError, match="layer 1 did not run linear_attn.in_proj_a"):
            cache.verify(torch.tensor([[5, 6, 7]]))
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **kwargs: hidden_states)    # a kernel with its own cache
    for rule in RULES:
        cache = TargetCache(target, rule)
        with pytest.raises(UserError, match="layer 1 (gave no convolution inputs|did not run)"):
            cache.prefill(torch.tensor(prompts((9,))))
            cache._linear[1].conv_states[0] = torch.zeros(1, 1, 4)
            cache.verify(torch.tensor([[5, 6, 7]]))
    assert not any(layer.staged for layer in cache._linear.values())


def test_a_cache_that_cannot_be_rolled_back_is_refused(monkeypatch):
    target = tiny.dense()
    cache = target.new_cache()
    cache.layers[2] = DynamicSlidingWindowLayer(sliding_window=8)
    monkeypatch.setattr(target, "new_cache", lambda: cache)
    with pytest.raises(UserError, match="layer 2 keeps its past in a DynamicSlidingWindowLayer"):
        TargetCache(target)


def test_order_of_calls(hybrid):
    cache, block = TargetCache(hybrid), torch.tensor([[5, 6, 7]])
    with pytest.raises(RuntimeError, match="after a prefill"):
        cache.verify(block)
    cache.prefill(block)
    with pytest.raises(RuntimeError, match="without a verified block"):
        cache.commit(1)
    cache.verify(block)
    for call in (cache.verify, cache.prefill):
        with pytest.raises(RuntimeError, match="not committed"):
            call(block)
    for n in (0, 4):
        with pytest.raises(ValueError, match="of a block of 3"):
            cache.commit(n)
    cache.commit(3)
    assert cache.length == 6
    with pytest.raises(ValueError, match="fold, replay"):
        TargetCache(hybrid, "crop")


def test_the_layer_is_the_librarys_but_for_staging(hybrid):
    layer = StagedLinearLayer()
    assert layer.record_past is False
    layer.staged = True
    assert layer.record_past is True
    layer.staged = False
    layer.activate_past_recording()
    assert layer.record_past is True


class Shapes(TorchDispatchMode):
    """Widths of the triangular systems that the chunk rule solves: what it padded the block to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "solve_triangular" in str(func):
            self.seen.add(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def test_a_block_is_not_padded_to_a_chunk_and_says_the_same(hybrid):
    [ids] = prompts((45,))
    text, cache = torch.tensor([ids]), TargetCache(hybrid)
    cache.prefill(text[:, :37])
    whole = hybrid.forward(text, logits_to_keep=8).logits
    with Shapes() as shapes:
        block = cache.verify(text[:, 37:]).logits
    assert shapes.seen == {8}
    assert float((block - whole).abs().max() / whole.abs().max()) < 1e-4
    with Shapes() as shapes:
        hybrid.forward(text)
    assert shapes.seen == {64}                                       # a capture is the library's own computation, untouched
