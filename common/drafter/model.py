"""The drafter network and its two entrances, which are one computation.

    training   forward(block, anchors, taps): many blocks of one text at once, context keys and values computed once
    decoding   extend(cache, taps), draft(cache, block): one block at the end of a growing text

A test holds them equal in every attention mode.  Embedding and head are the target's and stay outside."""
from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.drafter import attention, geometry
from common.drafter.cache import ContextCache
from common.drafter.config import DrafterConfig
from common.drafter.layers import Layer, RMSNorm, attend, rope_tables

INIT_STD = 0.02
SAVED = 54                     # bytes that one layer keeps for the backward, for each number of its block states (bf16 autocast)
MOST_SAVED = 2 << 30           # bytes; layers that would keep more together are run again in the backward
Context = list[tuple[Tensor, Tensor]]          # per layer: keys and values of the context rows, (b, kv_heads, S, d)


class Drafter(nn.Module):
    """Without a generator the parameters are on the meta device, without values, until `reset` or a checkpoint fills
    them: a drafter that was never initialised cannot run.

    shortlist: (K,) int64 ascending, the only tokens it is trained to draft, so that it goes with those rows of the head;
    None: all of them.  No weight: it travels beside them (checkpoint.SHORTLIST).
    way: how many blocks attend at once (attention.Way); None: by the device."""

    shortlist: Tensor | None
    way: attention.Way | None = None

    def __init__(self, config: DrafterConfig, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("shortlist", None, persistent=False)
        self.rules = [geometry.layer_rule(config, layer) for layer in range(config.num_hidden_layers)]
        if generator is not None:
            self.reset(generator)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Fresh weights on the generator's device, from it alone: norms 1, matrices normal, those that write to the
        residual stream smaller by sqrt(2 layers).  The same seed gives the same bits."""
        self.to_empty(device=generator.device)
        for name, weight in self.named_parameters():
            if weight.ndim == 1:
                weight.fill_(1.0)
            else:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0.0, INIT_STD / (2 * len(self.layers)) ** 0.5 if writes else INIT_STD, generator=generator)

    def forward(self, block: Tensor, anchors: Tensor, taps: Tensor) -> Tensor:
        """block (b, N*B, H) embedded slots, anchors (b, N) int64 (geometry.PADDING allowed), taps (b, S, K*H) in the order
        of config.taps -> (b, N*B, H): what the target's head turns into the draft's logits."""
        return self.blocks(block, anchors, self.context(taps))

    def context(self, taps: Tensor) -> Context:
        """taps (b, S, K*H), token t in row t -> keys and values of rows 0..S-1 for every layer."""
        if taps.shape[-2] > self.config.max_position_embeddings:
            raise ValueError(f"text of {taps.shape[-2]} tokens: this drafter knows {self.config.max_position_embeddings} positions")
        return self._keys_values(taps, self._rope(torch.arange(taps.shape[-2], device=taps.device)))

    def blocks(self, block: Tensor, anchors: Tensor, context: Context) -> Tensor:
        """As forward, on context keys and values that are at hand (their first rows suffice up to the last anchor)."""
        slots, remainder = divmod(block.shape[1], anchors.shape[1])
        if remainder or not 1 <= slots <= self.config.block_size:
            raise ValueError(f"{block.shape[1]} slots for {anchors.shape[1]} blocks of at most {self.config.block_size}")
        ways = attention.ways(self.way or attention.way_for(block.device), anchors, slots, context[0][0].shape[2], self.rules)
        rope = self._rope(geometry.block_positions(anchors, slots).flatten(-2))
        x = block.to(self.norm.weight.dtype)                     # the residual stream: fp32 under autocast
        again = torch.is_grad_enabled() and len(self.layers) * x.numel() * SAVED > MOST_SAVED
        for layer, rule, rows in zip(self.layers, self.rules, context, strict=True):
            seen = partial(ways[rule], rows)
            x = checkpoint(layer, x, rope, seen, use_reentrant=False) if again else layer(x, rope, seen)
        return self.norm(x)

    @torch.no_grad()
    def extend(self, cache: ContextCache, taps: Tensor) -> None:
        """Append taps (n, K*H) of the next n committed tokens, positions cache.length on."""
        cache.reserve(cache.length + len(taps))
        for layer, (k, v) in enumerate(self._keys_values(taps[None], cache.rope(len(taps)))):
            cache.write(layer, k, v)
        cache.length += len(taps)

    @torch.no_grad()
    def draft(self, cache: ContextCache, block: Tensor) -> Tensor:
        """block (v, H) embedded, 1 <= v <= B, its anchor at cache.length -> (v, H).  The cache's context is unchanged."""
        slots = len(block)
        if not 1 <= slots <= self.config.block_size:
            raise ValueError(f"a block of {slots} slots; this drafter's are 1 to {self.config.block_size}")
        views = {rule: cache.view(*rule, slots) for rule in set(self.rules)}
        rope = cache.rope(slots)
        x = block[None].to(self.norm.weight.dtype)
        for index, (layer, rule) in enumerate(zip(self.layers, self.rules, strict=True)):
            x = layer(x, rope, partial(_attend_cached, cache, index, *views[rule]))
        return self.norm(x)[0]

    def _keys_values(self, taps: Tensor, rope: tuple[Tensor, Tensor]) -> Context:
        if not torch.is_autocast_enabled(taps.device.type):      # autocast casts in the product, without a wide copy
            taps = taps.to(self.fc.weight.dtype)
        feature = self.hidden_norm(self.fc(taps))
        return [layer.self_attn.of_context(feature, rope) for layer in self.layers]

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta)


def _attend_cached(cache: ContextCache, layer: int, first: int, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attend(q, *cache.joined(layer, first, k, v), mask)


@torch.no_grad()
def init_scales(drafter: Drafter, tap_rms: Tensor, final_channel_rms: Tensor) -> None:
    """Fit a fresh drafter to its target: tap_rms (K,) of each tap, final_channel_rms (H,) of the final state's channels.

    Taps differ in size by orders of magnitude, so fc's columns are divided by their tap's RMS, and the last norm starts
    at half the final state's channel RMS, which is what the head expects (embedded-target-facts.md).  All of it folds
    into weights: the file format is unchanged.  ValueError on a size that is not positive and finite."""
    for name, rms, size in (("tap_rms", tap_rms, len(drafter.config.taps)),
                            ("final_channel_rms", final_channel_rms, drafter.config.hidden_size)):
        if rms.shape != (size,) or not bool((rms.isfinite() & (rms > 0)).all()):
            raise ValueError(f"{name}: {size} positive finite numbers expected, got {tuple(rms.shape)}")
    columns = drafter.fc.weight.unflatten(1, (len(tap_rms), -1))
    columns /= tap_rms.to(columns)[None, :, None]
    drafter.norm.weight.copy_(0.5 * final_channel_rms)
