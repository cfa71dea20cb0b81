"""One layer of the drafter, in plain torch, parameters named as released (dflash-facts 1.2, 1.3).

Context and block share the key and value projections; the context feature does not pass the layer's input norm."""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.drafter.config import DrafterConfig

Rope = tuple[Tensor, Tensor]        # cos, sin: (..., L, head_dim / 2) fp32, for rows at L positions
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]         # q, and the block's own k and v -> as q


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> Rope:
    """positions (..., L) -> cos, sin (..., L, head_dim / 2), fp32 whatever the model's dtype (bf16 loses far positions)."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim)
    angle = positions[..., None].float() * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x (..., L, heads, head_dim): channel i turns with channel i + head_dim / 2 (rotate-half), over all of head_dim."""
    cos, sin = rope[0].unsqueeze(-2), rope[1].unsqueeze(-2)
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """q (b, heads, Q, d), k and v (b, kv_heads, K, d), mask bool or additive, broadcast over (b, 1, Q, K) -> (b, heads, Q, d)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=q.shape[1] != k.shape[1])


class RMSNorm(nn.Module):
    """x / rms(x) * weight in fp32, returned in x's dtype.  weight as is, not 1 + weight (the target's own norms)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """x (b, L, H): context features, or a block's normed states -> k (normed, turned) and v, each (b, kv_heads, L, d)."""
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), rope)
        return k.transpose(1, 2), self.v_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def of_context(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """keys_values of context features.  Called from outside, by a name of its own: where weights are held in shares (FSDP), a call
        gathers them before it and lets them go after it, and forward is one such call already."""
        return self.keys_values(x, rope)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        k, v = self.keys_values(x, rope)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), rope)
        return self.o_proj(attend(q.transpose(1, 2), k, v).transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        """x (b, Q, H) block states; attend knows this layer's context and its visibility."""
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
