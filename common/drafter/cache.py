"""The drafter's memory of a text while it decodes: keys and values of committed tokens, per layer, written once.

Only context is kept (dflash-facts 1.4): a block's own keys and values pass through scratch rows behind it, so that a
draft leaves no trace and nothing is ever cropped.  Masks are cut from tables that are made once per shape."""
from __future__ import annotations

import torch
from torch import Tensor

from common.drafter import geometry
from common.drafter.config import DrafterConfig
from common.drafter.layers import Rope, rope_tables


class ContextCache:
    """length: context rows held; the next block's anchor.  Grows by doubling; rows past length are scratch."""

    def __init__(self, config: DrafterConfig, capacity: int, device: torch.device | str, dtype: torch.dtype) -> None:
        self.config = config
        self.length = 0
        self._capacity = 0
        self._rows = torch.empty(config.num_hidden_layers, 2, 1, config.num_key_value_heads, config.block_size, config.head_dim,
                                 device=device, dtype=dtype)
        self.reserve(max(1, capacity))

    def reserve(self, rows: int) -> None:
        """Make room for `rows` context rows and one block.  ValueError past max_position_embeddings."""
        if rows <= self._capacity:
            return
        if rows > (limit := self.config.max_position_embeddings):
            raise ValueError(f"context of {rows} tokens: this drafter knows {limit} positions")
        self._capacity = min(limit, max(rows, 2 * self._capacity))
        old, shape = self._rows, list(self._rows.shape)
        shape[-2] = self._capacity + self.config.block_size
        self._rows = old.new_empty(shape)
        self._rows[..., :self.length, :] = old[..., :self.length, :]
        self._rope = rope_tables(torch.arange(shape[-2], device=old.device), self.config.head_dim, self.config.rope_theta)
        self._masks: dict[tuple, tuple[Tensor, int, int]] = {}

    def rope(self, rows: int) -> Rope:
        """Tables for `rows` rows from length on."""
        return self._rope[0][self.length:self.length + rows], self._rope[1][self.length:self.length + rows]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """k, v (1, kv_heads, n, d) of rows length..length+n-1; they count once the caller has advanced length."""
        stop = self.length + k.shape[2]
        self._rows[layer, 0, :, :, self.length:stop] = k
        self._rows[layer, 1, :, :, self.length:stop] = v

    def joined(self, layer: int, first: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Context rows from `first` on, then the block's own: views, valid until the next write."""
        self.write(layer, k, v)
        rows = self._rows[layer, :, :, :, first:self.length + k.shape[2]]
        return rows[0], rows[1]

    def view(self, causal: bool, window: int | None, slots: int) -> tuple[int, Tensor | None]:
        """What a block of `slots` at anchor length reads under a layer's rule: first row, additive mask (slots, rows) or None.

        geometry.visible depends on distances from the anchor only, so one table that ends with the block serves every
        length: `reach` of its last columns are seen by any slot, `open` of them by all."""
        key = causal, window, slots
        if key not in self._masks:
            self._masks[key] = self._table(causal, window, slots)
        table, reach, open_ = self._masks[key]
        rows = min(self.length + slots, reach)
        return self.length + slots - rows, None if rows <= open_ else table[:, table.shape[1] - rows:]

    def _table(self, causal: bool, window: int | None, slots: int) -> tuple[Tensor, int, int]:
        anchor = torch.tensor([self._capacity])
        seen = geometry.visible(*geometry.layout(anchor, slots, self._capacity), causal, window)
        reach = _trailing(seen.any(0))
        bias = torch.zeros(slots, reach).masked_fill(~seen[:, seen.shape[1] - reach:], float("-inf"))
        return bias.to(self._rows.device, self._rows.dtype), reach, _trailing(seen.all(0))


def _trailing(flags: Tensor) -> int:
    """How many of the last entries are all true."""
    return int(flags.flip(0).int().cumprod(0).sum())
