"""How the slots of many blocks attend at once: to the rows of their text before their anchor, and to their own block.

    dense     every key under one mask (queries x keys): the plain twin
    grouped   some blocks at a time, against the rows that any of them may see and their own slots.  What is left out is hidden
              from all of them, so the sums are dense's.  A CPU's
    flex      torch's flex_attention, which skips tiles that are hidden as a whole.  A GPU's (CUDA and ROCm); torch has no
              backward of it on a CPU, so there only its forward was ever run, and none of it on a GPU

Each asks geometry.sees and none goes without it; a way that is none raises (pitfall W3).  Decoding's single block reads its
cache instead (cache.py)."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from common.drafter import geometry
from common.drafter.layers import attend

GROUP = 256                 # slots that attend together where grouped: fewer make many small calls, more look at each other in vain
TILE = 128                  # queries and keys of a tile of flex_attention: its own default
STRIP = 4                   # tiles of queries that are looked at together while its mask is made

Way = Literal["dense", "grouped", "flex"]
Rule = tuple[bool, int | None]                                   # geometry.layer_rule's: causal in the block, window
Rows = tuple[Tensor, Tensor]                                     # keys and values (b, kv_heads, S, d) of the text's rows
Attend = Callable[[Rows, Tensor, Tensor, Tensor], Tensor]        # rows; q (b, heads, Q, d), own k and v (b, kv_heads, Q, d) -> as q


def way_for(device: torch.device) -> Way:
    return "flex" if device.type == "cuda" else "grouped"


def ways(way: Way, anchors: Tensor, slots: int, context: int, rules: Iterable[Rule]) -> dict[Rule, Attend]:
    """anchors (b, N), PADDING allowed, of blocks of `slots` slots on texts of `context` rows -> how to attend under each rule."""
    if way not in get_args(Way):
        raise ValueError(f"attention {way!r}: one of {', '.join(get_args(Way))}")
    made = {"dense": _dense, "grouped": _grouped, "flex": _flex}[way]
    layout = geometry.layout(anchors, slots, context)
    return {rule: made(anchors, slots, context, layout, rule) for rule in set(rules)}


def _dense(_anchors: Tensor, _slots: int, _context: int, layout: tuple[Tensor, ...], rule: Rule) -> Attend:
    mask = geometry.visible(*layout, *rule)[:, None]

    def attended(rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, torch.cat([rows[0], k], 2), torch.cat([rows[1], v], 2), mask)
    return attended


def _grouped(anchors: Tensor, slots: int, context: int, layout: tuple[Tensor, ...], rule: Rule) -> Attend:
    """Anchors ascend, so neighbours see much the same rows."""
    blocks, parts = max(1, GROUP // slots), []
    for first in range(0, anchors.shape[1], blocks):
        begin, end = seen_rows(anchors[:, first:first + blocks], context, rule[1])
        own = slice(first * slots, min(first + blocks, anchors.shape[1]) * slots)
        queries = (x[:, own] for x in layout[:2])
        keys = (torch.cat([x[:, begin:end], x[:, context + own.start:context + own.stop]], 1) for x in layout[2:])
        parts.append((slice(begin, end), own, geometry.visible(*queries, *keys, *rule)[:, None]))

    def attended(rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = [attend(q[:, :, own], torch.cat([rows[0][:, :, seen], k[:, :, own]], 2), torch.cat([rows[1][:, :, seen], v[:, :, own]], 2), mask)
               for seen, own, mask in parts]
        return out[0] if len(out) == 1 else torch.cat(out, 2)
    return attended


def seen_rows(anchors: Tensor, context: int, window: int | None) -> tuple[int, int]:
    """anchors (b, n) of some blocks -> begin, end: no other of the `context` rows is seen by any slot of them.  0, 0 where none is.

    A block sees rows before its anchor; its slot 0, at the anchor, sees furthest back: distances below the window."""
    real = anchors[anchors >= 0]
    if not len(real):
        return 0, 0
    end = min(context, int(real.max()))
    return min(end, max(0, int(real.min()) - window + 1)) if window is not None else 0, end


def _flex(anchors: Tensor, _slots: int, _context: int, layout: tuple[Tensor, ...], rule: Rule) -> Attend:
    from torch.nn.attention.flex_attention import BlockMask

    def shown(b: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return geometry.sees(layout[0][b, i], layout[1][b, i], layout[2][b, j], layout[3][b, j], *rule)
    some, whole = tiles(layout, rule)
    mask = BlockMask.from_kv_blocks(*_listed(some & ~whole), *_listed(whole), TILE, shown, (layout[0].shape[1], layout[2].shape[1]))

    def attended(rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.cat(pair, 2).to(q.dtype) for pair in zip(rows, (k, v)))
        return _flex_attention(q.device.type)(q, keys, values, block_mask=mask, scale=q.shape[-1] ** -0.5, enable_gqa=True)
    return attended


def tiles(layout: tuple[Tensor, ...], rule: Rule) -> tuple[Tensor, Tensor]:
    """layout as geometry's, Q queries and K keys -> (b, ceil(Q / TILE), ceil(K / TILE)) bool twice: is some pair of the tile seen, are all.

    As torch's create_block_mask, which looks at all pairs at once (0.9 GiB at 8192 queries and 11264 keys); here STRIP tiles of
    queries at a time.  A tile that goes past the last query or key is not whole."""
    padding = -layout[2].shape[1] % TILE
    made = []
    for queries in zip(*(x.split(STRIP * TILE, 1) for x in layout[:2])):
        seen = geometry.visible(*queries, *layout[2:], *rule)
        seen = torch.nn.functional.pad(seen, (0, padding, 0, -seen.shape[1] % TILE)).unflatten(2, (-1, TILE)).unflatten(1, (-1, TILE))
        made.append((seen.any(4).any(2), seen.all(4).all(2)))
    some, whole = (torch.cat(parts, 1) for parts in zip(*made))
    return some, whole


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """chosen (b, rows, columns) bool -> how many columns of each row are, (b, 1, rows) int32; their numbers first, ascending, then the
    others', (b, 1, rows, columns) int32."""
    order = chosen.int().argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1)[:, None].int(), order[:, None].int()


@functools.cache
def _flex_attention(device: str) -> Callable[..., Tensor]:
    """Compiled where it is fast: uncompiled it forms every score, hidden ones too.  Lengths change from step to step."""
    from torch.nn.attention.flex_attention import flex_attention
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
