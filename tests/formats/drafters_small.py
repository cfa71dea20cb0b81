"""Small drafters with weights that all matter, exactly representable in bf16 and f16."""
from __future__ import annotations

import torch

from common.drafter.cache import ContextCache
from common.drafter.config import FULL, SLIDING, DrafterConfig, shape_for
from common.drafter.model import Drafter

H, V, B, W, TAPS, LAYERS = 32, 96, 4, 6, (1, 4), 8
MODES = ("causal", "bidi", "mixed")
LISTED = (0, 2, 3, 7, 8, 20, 50, 51, 90, 95)


def config(attention: str, **overrides) -> DrafterConfig:
    small = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=64, block_size=B, rope_theta=1e4,
                 max_position_embeddings=128, layer_types=(SLIDING, FULL, SLIDING), num_hidden_layers=3, sliding_window=W)
    return shape_for(H, V, LAYERS, TAPS, 2, attention, **small | overrides)


def fresh(attention: str = "bidi", *, listed: bool = False, dtype: torch.dtype = torch.bfloat16, **overrides) -> Drafter:
    generator = torch.Generator().manual_seed(0)
    drafter = Drafter(config(attention, **overrides), generator)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
            weight.copy_((weight * 64).round().clamp(-127, 127) / 64)       # seven bits: the same number in f16 and bf16
    drafter.shortlist = torch.tensor(LISTED) if listed else None
    return drafter.to(dtype).requires_grad_(False)


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def drafted(drafter: Drafter, taps: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """taps (S, K*H), block (B, H) after them -> (B, H), fp32."""
    wide = Drafter(drafter.config)
    wide.load_state_dict({name: value.float() for name, value in drafter.state_dict().items()}, assign=True)
    cache = ContextCache(drafter.config, len(taps), "cpu", torch.float32)
    wide.extend(cache, taps)
    return wide.draft(cache, block)


def same(one: Drafter, two: Drafter) -> None:
    """Weights and list bit for bit, in the same type."""
    for (name, a), (other, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b), name
    assert (one.shortlist is None) == (two.shortlist is None) and (one.shortlist is None or torch.equal(one.shortlist, two.shortlist))
