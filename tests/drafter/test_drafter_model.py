"""The network against an independent reading of its maths, its two entrances against each other, and canaries (pitfalls
R2, A1, W1)."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from common.drafter import geometry as g
from common.drafter.cache import ContextCache
from common.drafter.config import FULL, SLIDING, DrafterConfig, shape_for
from common.drafter.model import Drafter, init_scales

MODES = ("causal", "bidi", "mixed")
H, B, W = 32, 4, 6


def shape(attention: str, **overrides) -> DrafterConfig:
    small = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=48, block_size=B, rope_theta=100.0,
                 max_position_embeddings=128, layer_types=(SLIDING, FULL, SLIDING), num_hidden_layers=3, sliding_window=W)
    return shape_for(H, 64, 8, (1, 4), 2, attention, **small | overrides)


def fresh(config: DrafterConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Drafter:
    """Weights far from the initial ones, norms too: every one of them matters to the output."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(config, generator)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    return drafter.to(dtype)


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def cached(drafter: Drafter, taps: torch.Tensor, block: torch.Tensor, capacity: int = 2, pieces: int = 3) -> torch.Tensor:
    cache = ContextCache(drafter.config, capacity, "cpu", taps.dtype)
    for start in range(0, len(taps), pieces):
        drafter.extend(cache, taps[start:start + pieces])
    return drafter.draft(cache, block)


# --- an independent implementation: numpy, float64, one position at a time ----------------------------------------------

def rms(x, w, eps):
    return x / np.sqrt((x * x).mean() + eps) * w


def turn(x, position, theta):
    d = len(x)
    out = np.empty(d)
    for i in range(d // 2):
        angle = position / theta ** (2 * i / d)
        out[i] = x[i] * np.cos(angle) - x[i + d // 2] * np.sin(angle)
        out[i + d // 2] = x[i + d // 2] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def reference(c: DrafterConfig, w: dict[str, np.ndarray], block: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """block (v, H) anchored at len(taps)."""
    anchor, d, eps = len(taps), c.head_dim, c.rms_norm_eps
    context = [rms(w["fc.weight"] @ row, w["hidden_norm.weight"], eps) for row in taps]
    x = [row.copy() for row in block]
    for i, kind in enumerate(c.layer_types):
        p = f"layers.{i}."
        causal = {"causal": True, "bidi": False, "mixed": kind == "sliding_attention"}[c.attention]
        normed = [rms(row, w[p + "input_layernorm.weight"], eps) for row in x]
        inputs = context + normed
        k = [(w[p + "self_attn.k_proj.weight"] @ row).reshape(-1, d) for row in inputs]
        k = [[turn(rms(head, w[p + "self_attn.k_norm.weight"], eps), pos, c.rope_theta) for head in row] for pos, row in enumerate(k)]
        v = [(w[p + "self_attn.v_proj.weight"] @ row).reshape(-1, d) for row in inputs]
        for slot, row in enumerate(normed):
            query, out = anchor + slot, []
            q = (w[p + "self_attn.q_proj.weight"] @ row).reshape(-1, d)
            for head in range(c.num_attention_heads):
                mine = head * c.num_key_value_heads // c.num_attention_heads
                turned = turn(rms(q[head], w[p + "self_attn.q_norm.weight"], eps), query, c.rope_theta)
                keys = [pos for pos in range(len(inputs)) if not (causal and pos > query)
                        and not (kind == "sliding_attention" and abs(query - pos) >= c.sliding_window)]
                score = np.exp([turned @ k[pos][mine] / np.sqrt(d) for pos in keys])
                out.append(sum(s * v[pos][mine] for s, pos in zip(score / score.sum(), keys, strict=True)))
            x[slot] = x[slot] + w[p + "self_attn.o_proj.weight"] @ np.concatenate(out)
        for slot in range(len(x)):
            h = rms(x[slot], w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ h
            x[slot] = x[slot] + w[p + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ h))
    return np.stack([rms(row, w["norm.weight"], eps) for row in x])


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("context", [1, 5, 13])
def test_equals_an_independent_implementation(attention, context):
    drafter = fresh(shape(attention))
    taps, block = noise(context, 2 * H), noise(B, H, seed=1)
    weights = {name: value.detach().double().numpy() for name, value in drafter.named_parameters()}
    want = torch.from_numpy(reference(drafter.config, weights, block.double().numpy(), taps.double().numpy())).float()
    torch.testing.assert_close(cached(drafter, taps, block), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drafter(block[None], torch.tensor([[context]]), taps[None])[0].detach(), want, rtol=1e-4, atol=1e-4)


def test_parameter_names_and_shapes_are_the_released_ones():
    config = shape_for(2048, 248320, 40, (1, 6, 11, 16, 22, 27, 32, 37), 248077, "mixed")
    state = {name: tuple(value.shape) for name, value in Drafter(config).state_dict().items()}
    layer = {"input_layernorm": (2048,), "post_attention_layernorm": (2048,), "self_attn.q_proj": (4096, 2048),
             "self_attn.k_proj": (1024, 2048), "self_attn.v_proj": (1024, 2048), "self_attn.o_proj": (2048, 4096),
             "self_attn.q_norm": (128,), "self_attn.k_norm": (128,), "mlp.gate_proj": (6144, 2048), "mlp.up_proj": (6144, 2048),
             "mlp.down_proj": (2048, 6144)}
    want = {f"layers.{i}.{name}.weight": size for i in range(6) for name, size in layer.items()}
    assert state == want | {"fc.weight": (2048, 16384), "hidden_norm.weight": (2048,), "norm.weight": (2048,)}
    assert len(state) == 69 and sum(int(np.prod(size)) for size in state.values()) == 385_906_176


# --- one computation, two entrances -------------------------------------------------------------------------------------

@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("slots", range(1, B + 1))
def test_training_block_equals_cached_block(attention, slots):
    """Every length up to far past the window; neighbours one token apart in the training batch; cache grown on the way."""
    drafter = fresh(shape(attention))
    length = 4 * W
    taps, anchors = noise(length, 2 * H), torch.arange(1, length)
    block = noise(len(anchors) * slots, H, seed=1)
    trained = drafter(block[None], anchors[None], taps[None])[0].detach().unflatten(0, (-1, slots))
    cache = ContextCache(drafter.config, 1, "cpu", torch.float32)
    for n, anchor in enumerate(anchors.tolist()):
        drafter.extend(cache, taps[cache.length:anchor])
        torch.testing.assert_close(drafter.draft(cache, block[n * slots:(n + 1) * slots]), trained[n], rtol=1e-5, atol=2e-5)


def test_a_draft_leaves_no_trace():
    drafter = fresh(shape("bidi"))
    taps, block = noise(20, 2 * H), noise(B, H, seed=1)
    cache = ContextCache(drafter.config, 20, "cpu", torch.float32)
    drafter.extend(cache, taps[:9])
    first = drafter.draft(cache, block)
    drafter.draft(cache, 100 * noise(B, H, seed=2))
    assert torch.equal(drafter.draft(cache, block), first) and cache.length == 9
    drafter.extend(cache, taps[9:])
    again = ContextCache(drafter.config, 20, "cpu", torch.float32)
    drafter.extend(again, taps[:9])
    drafter.extend(again, taps[9:])
    assert torch.equal(drafter.draft(cache, block), drafter.draft(again, block))


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("kind", [SLIDING, FULL])
def test_cached_view_is_the_masked_computation(attention, kind):
    """The slice and the mask that the cache hands out, at every length and v, say exactly what geometry.visible says."""
    for window in (2, 3, B, 7):
        config = shape(attention, sliding_window=window)
        rule = g.layer_rule(config, 0 if kind == SLIDING else 1)
        cache = ContextCache(config, 30, "cpu", torch.float32)
        for slots, length in ((v, n) for v in range(1, B + 1) for n in range(30)):
            cache.length = length
            first, mask = cache.view(*rule, slots)
            seen = torch.zeros(slots, length + slots, dtype=torch.bool)
            seen[:, first:] = True if mask is None else mask == 0
            assert torch.equal(seen, g.visible(*g.layout(torch.tensor([length]), slots, length), *rule)), (window, slots, length)
            if rule[1]:
                assert length - first <= window - 1                      # sliding layers read the window's part only


def test_a_padded_batch_equals_its_rows_alone():
    drafter = fresh(shape("mixed"))
    lengths, anchors = [14, 9, 20], [torch.tensor([2, 5, 6]), torch.tensor([4]), torch.tensor([1, 19])]
    taps = [noise(n, 2 * H, seed=n) for n in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(taps, batch_first=True, padding_value=float(1e3))
    stacked = g.stack_anchors(anchors)
    block = noise(3, 3 * B, H, seed=1)
    y = drafter(block, stacked, padded)
    assert y.isfinite().all()
    for row, own in enumerate(anchors):
        alone = drafter(block[row:row + 1, :len(own) * B], own[None], taps[row][None])
        torch.testing.assert_close(y[row, :len(own) * B], alone[0], rtol=1e-5, atol=2e-5)


# --- canaries: exact zero influence -------------------------------------------------------------------------------------

def test_rows_from_the_anchor_on_have_no_influence():
    """R2, with neighbouring anchors one token apart: each block is bit-identical whatever stands at or after its anchor."""
    for attention in MODES:
        drafter = fresh(shape(attention))
        anchors = torch.tensor([[3, 4, 5, 12]])
        taps, block = noise(1, 20, 2 * H), noise(1, 4 * B, H, seed=1)
        right = drafter(block, anchors, taps)
        for n, anchor in enumerate(anchors[0].tolist()):
            changed = taps.clone()
            changed[:, anchor:] = 50 * noise(20 - anchor, 2 * H, seed=2)
            y = drafter(block, anchors, changed)
            assert torch.equal(y[:, n * B:(n + 1) * B], right[:, n * B:(n + 1) * B])
            changed = taps.clone()
            changed[:, anchor - 1] += 1.0
            assert not torch.equal(drafter(block, anchors, changed)[:, n * B:(n + 1) * B], right[:, n * B:(n + 1) * B])


def test_other_blocks_have_no_influence():
    drafter = fresh(shape("bidi"))
    anchors, taps, block = torch.tensor([[3, 4, 5]]), noise(1, 20, 2 * H), noise(1, 3 * B, H, seed=1)
    changed = block.clone()
    changed[:, :B], changed[:, 2 * B:] = 9.0, -9.0
    assert torch.equal(drafter(block, anchors, taps)[:, B:2 * B], drafter(changed, anchors, taps)[:, B:2 * B])


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("distance, reaches", [(W - 1, True), (W, False), (W + 1, False), (2 * W, False)])
def test_window_canary(attention, distance, reaches):
    """W1: one sliding layer, a changed tap `distance` before the anchor: slot 0 feels it below W only, in both entrances."""
    drafter = fresh(shape(attention, layer_types=(SLIDING,), num_hidden_layers=1))
    anchor = 3 * W
    taps, block = noise(anchor, 2 * H), noise(B, H, seed=1)
    changed = taps.clone()
    changed[anchor - distance] += 10.0
    where = torch.tensor([[anchor]])
    for run in (lambda t: drafter(block[None], where, t[None])[0], lambda t: cached(drafter, t, block)):
        same = (run(taps) == run(changed)).all(-1)
        assert bool(same[0]) != reaches
        assert same[1:].all() if not reaches else bool(same[1])            # slot 1 stands one further: W is out of reach


@pytest.mark.parametrize("attention, heard", [("causal", False), ("mixed", False), ("bidi", True)])
def test_a_later_slot_is_heard_in_a_bidirectional_layer_only(attention, heard):
    drafter = fresh(shape(attention, layer_types=(SLIDING,), num_hidden_layers=1))
    taps, block = noise(5, 2 * H), noise(B, H, seed=1)
    changed = block.clone()
    changed[-1] += 1.0
    assert torch.equal(cached(drafter, taps, block)[:-1], cached(drafter, taps, changed)[:-1]) != heard


# --- weights ------------------------------------------------------------------------------------------------------------

def test_the_same_seed_gives_the_same_bits_and_the_global_generator_has_no_say():
    config = shape("mixed")
    torch.manual_seed(1)
    one = Drafter(config, torch.Generator().manual_seed(7)).state_dict()
    state = torch.get_rng_state()
    two = Drafter(config, torch.Generator().manual_seed(7)).state_dict()
    other = Drafter(config, torch.Generator().manual_seed(8)).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one) and torch.equal(state, torch.get_rng_state())
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_initial_sizes():
    """0.02 everywhere, norms 1, and what is added to the residual stream smaller by sqrt(2 layers)."""
    for name, weight in Drafter(shape("mixed", num_attention_heads=16), torch.Generator().manual_seed(0)).named_parameters():
        want = 0.02 / 6 ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert torch.all(weight == 1) if weight.ndim == 1 else abs(weight.std().item() / want - 1) < 0.15, name


def test_a_drafter_without_weights_cannot_run():
    drafter = Drafter(shape("mixed"))
    assert all(weight.is_meta for weight in drafter.parameters())
    with pytest.raises((RuntimeError, NotImplementedError)):
        drafter(noise(1, B, H), torch.tensor([[3]]), noise(1, 9, 2 * H)).sum().item()


def test_scales_fold_into_the_weights():
    """Taps of any size look alike to the folded drafter, and the last norm starts at half the final state's channel RMS."""
    plain, folded = (Drafter(shape("mixed"), torch.Generator().manual_seed(3)) for _ in range(2))
    scale, channels = torch.tensor([400.0, 0.25]), torch.rand(H, generator=torch.Generator().manual_seed(1)) + 0.5
    init_scales(folded, scale, channels)
    taps, block, anchors = noise(1, 9, 2, H), noise(1, B, H, seed=1), torch.tensor([[5]])
    y = folded(block, anchors, (taps * scale[:, None]).flatten(2))
    torch.testing.assert_close(y, plain(block, anchors, taps.flatten(2)) * 0.5 * channels, rtol=1e-4, atol=1e-5)
    for bad in (torch.tensor([1.0, 0.0]), torch.tensor([1.0, float("nan")]), torch.ones(3)):
        with pytest.raises(ValueError, match="tap_rms"):
            init_scales(folded, bad, channels)


def test_autocast_keeps_the_residual_stream_in_fp32_and_stays_near():
    drafter = fresh(shape("mixed"))
    block, anchors, taps = noise(1, 2 * B, H), torch.tensor([[5, 30]]), noise(1, 40, 2 * H)
    with torch.autocast("cpu", torch.bfloat16):
        y = drafter(block.bfloat16(), anchors, taps.bfloat16())
    assert y.dtype == torch.float32
    y.sum().backward()
    assert all(weight.grad.dtype == torch.float32 and weight.grad.isfinite().all() for weight in drafter.parameters())
    right = drafter(block, anchors, taps)
    assert (y - right).norm() < 0.05 * right.norm()


def test_far_positions_keep_their_angle_in_bf16():
    """RoPE in bf16 would round position 100001 to 100352: neighbours far out would look alike."""
    from common.drafter.layers import rope_tables
    near, far = rope_tables(torch.tensor([100_000, 100_001]), 8, 100.0)[0]
    drafter = fresh(shape("bidi"), dtype=torch.bfloat16)
    assert near.dtype == torch.float32 and (near - far).abs().max() > 0.1
    assert drafter._rope(torch.tensor([1]))[0].dtype == torch.float32
    assert ContextCache(drafter.config, 4, "cpu", torch.bfloat16).rope(2)[0].dtype == torch.float32


def test_limits_are_refused():
    drafter = fresh(shape("bidi", max_position_embeddings=10))
    cache = ContextCache(drafter.config, 2, "cpu", torch.float32)
    with pytest.raises(ValueError, match="10 positions"):
        drafter.extend(cache, noise(11, 2 * H))
    with pytest.raises(ValueError, match="10 positions"):
        drafter(noise(1, B, H), torch.tensor([[3]]), noise(1, 11, 2 * H))
    drafter.extend(cache, noise(10, 2 * H))
    for slots in (0, B + 1):
        with pytest.raises(ValueError, match="slots"):
            drafter.draft(cache, noise(slots, H))
