"""The Triton kernels of grouped.py, which is the only file to import this one, and only when they are to run.

Importing needs triton; nothing here asks which GPU it is.  Four launches make an experts layer: route, gate_up, down,
combine.  Rows are (token, choice) pairs: row s is choice s % k of token s // k.  A tile is a few rows of one expert; what a
tile is stands in a table on the device (`route`), so the host never learns how many rows an expert has, and launches as many
programs as the worst case needs; those without a tile return at once.  No atomics: every number is written by one program.

In Triton's interpreter tl.dot of two bf16 operands is wrong (triton 3.7.1: error 4e10 on random 16x32 by 32x16), so there
these kernels run in fp32 and fp16 only."""
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S"])
def route(ids, order, table, S, E: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr):
    """A stable counting sort by expert and the table of tiles.  One program an expert, none waits for another.

    ids    [S] int64: the expert of each row, 0 <= id < E
    order  [S] int32: rows by expert, in their own order within one
    table  [3, S // M + E] int32: expert of each tile (-1: none), its first and its group's end among the sorted rows

    Expert e with `before` rows of smaller ids takes the tiles from before // M + e on.  It needs at most (rows // M) + 1 of
    them, and the next expert begins no earlier than that, so nobody needs to know how many the others took.
    """
    expert = tl.program_id(0)
    before = tl.zeros([], tl.int32)
    rows = tl.zeros([], tl.int32)
    for at in range(0, S, BLOCK):
        row = at + tl.arange(0, BLOCK)
        id = tl.load(ids + row, mask=row < S, other=E).to(tl.int32)
        before += tl.sum((id < expert).to(tl.int32), 0)
        rows += tl.sum((id == expert).to(tl.int32), 0)
    place = before
    for at in range(0, S, BLOCK):
        row = at + tl.arange(0, BLOCK)
        id = tl.load(ids + row, mask=row < S, other=E).to(tl.int32)
        mine = (id == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, row, mask=mine != 0)
        place += tl.sum(mine, 0)
    tiles = S // M + E
    start = before // M + expert
    for tile in range(start, (before + rows) // M + expert + 1):
        first = before + (tile - start) * M
        tl.store(table + tile, tl.where(first < before + rows, expert, -1))
        tl.store(table + tiles + tile, first)
        tl.store(table + 2 * tiles + tile, before + rows)


@triton.jit
def _tile(ids, order, table, S, tile, E: tl.constexpr, M: tl.constexpr, ROUTED: tl.constexpr):
    """-> expert (-1: none), places among the sorted rows [M], rows [M], which of them are there [M].

    Not ROUTED: one token, whose choices are distinct, so each row is a tile of its own and nothing was sorted."""
    if ROUTED:
        expert = tl.load(table + tile)
        place = tl.load(table + S // M + E + tile) + tl.arange(0, M)
        there = place < tl.load(table + 2 * (S // M + E) + tile)
        row = tl.load(order + place, mask=there & (expert >= 0), other=0)
    else:
        expert = tl.load(ids + tile).to(tl.int32)
        place = tile + tl.arange(0, M)
        there = place == tile
        row = place
    return expert, place.to(tl.int64), row, there


@triton.jit(do_not_specialize=["S"])
def gate_up(x, weight, ids, order, table, out, S, TOP: tl.constexpr, E: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
            M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROUTED: tl.constexpr):
    """out[place] = silu(x gate^T) * (x up^T), fp32 until it is stored.

    x [tokens, H], weight [E, 2 WIDTH, H] (gate above up), out [S, WIDTH] in the sorted order; program: N of WIDTH columns
    """
    columns: tl.constexpr = (WIDTH + N - 1) // N
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * N + tl.arange(0, N)
    expert, place, row, there = _tile(ids, order, table, S, tile, E, M, ROUTED)
    if expert < 0:
        return
    x += (row // TOP).to(tl.int64)[:, None] * H
    weight += expert.to(tl.int64) * (2 * WIDTH * H) + column[None, :] * H
    kept = column < WIDTH
    gate = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    for at in range(0, H, K):
        k = at + tl.arange(0, K)
        inside = k < H
        a = tl.load(x + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight + k[:, None], mask=inside[:, None] & kept[None, :], other=0.0)
        gate = tl.dot(a, b, gate, input_precision="ieee")
        b = tl.load(weight + WIDTH * H + k[:, None], mask=inside[:, None] & kept[None, :], other=0.0)
        up = tl.dot(a, b, up, input_precision="ieee")
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + place[:, None] * WIDTH + column[None, :], value.to(out.dtype.element_ty), mask=there[:, None] & kept[None, :])


@triton.jit(do_not_specialize=["S"])
def down(x, weight, ids, order, table, share, out, S, E: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr,
         M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ROUTED: tl.constexpr):
    """out[row] = share[row] * (x[place] weight^T), fp32 until it is stored.

    x [S, WIDTH] in the sorted order, weight [E, H, WIDTH], share [S], out [S, H] in the rows' own order; program: N of H columns
    """
    columns: tl.constexpr = (H + N - 1) // N
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * N + tl.arange(0, N)
    expert, place, row, there = _tile(ids, order, table, S, tile, E, M, ROUTED)
    if expert < 0:
        return
    x += place[:, None] * WIDTH
    weight += expert.to(tl.int64) * (H * WIDTH) + column[None, :] * WIDTH
    kept = column < H
    total = tl.zeros([M, N], tl.float32)
    for at in range(0, WIDTH, K):
        k = at + tl.arange(0, K)
        inside = k < WIDTH
        a = tl.load(x + k[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight + k[:, None], mask=inside[:, None] & kept[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    total *= tl.load(share + row, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * H + column[None, :], total.to(out.dtype.element_ty), mask=there[:, None] & kept[None, :])


@triton.jit
def combine(x, out, TOP: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = x[token, 0] + x[token, 1] + ..., in this order, in fp32.  x [tokens, TOP, H], out [tokens, H]"""
    columns: tl.constexpr = (H + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // columns).to(tl.int64)
    column = tl.program_id(0) % columns * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP):
        total += tl.load(x + (token * TOP + choice) * H + column, mask=column < H, other=0.0).to(tl.float32)
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=column < H)
