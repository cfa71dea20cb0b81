"""Our own experts layer: rows sorted by expert, one Triton launch a projection, no word to the host in between.

A target with 256 experts wakes 8 for one token and about 100 for a block of 16.  The plain loop (`plain`) asks the device
which experts are awake and launches several kernels for each; batched_mm copies every row's expert; grouped_mm is a library's
and not on every device.  Here a step is four launches (grouped_kernels): sort, gate and up with the activation, down with the
routing weight, and the sum over a token's choices, in fp32 and in their order, so that a run repeats bit for bit.

Does a row's result depend on the other rows?  Not by their content: the shape of a tile (`tiles`) follows from the number of
tokens and the dtype alone, every row of a tile is a dot product of its own, and its terms are added in the same order wherever
in a tile the row stands.  By their number: only where it changes the tile; one token and a block share one shape as long as
an expert has FEW rows on average.  So a kept prefix does not feel a rejected suffix, and the self-test need not change the
implementation (selftest.experts_one_by_one).  A compiler could break this, so the self-test measures it.

Left out: training (no gradient), biases, other activations than SiLU, experts spread over devices; `unfit` says so.  The tile
shapes are reasoned, not tuned: no GPU was at hand when they were chosen.  They hold no search, because a search by stop-watch
would give other bits at another start."""
from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 8                  # rows an expert, on average, up to which reading the weights is all that takes time
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Tiles(NamedTuple):
    """What one program makes: rows x columns, depth elements of the sum at a time."""

    rows: int
    columns: int         # rows of the weight that a program reads: gate and up take half of them each
    depth: int
    warps: int
    stages: int          # tiles of weights in flight


def tiles(tokens: int, top_k: int, experts: int, dtype: torch.dtype, *, amd: bool) -> Tiles:
    """Shapes by the average number of rows an expert, the only thing that is known without asking the device.  Pure.

    few   decoding and verifying: bound by memory.  16 rows, the least that matrix units take, and narrow columns, so that 8 experts
          make 128 programs for 132 SMs or 40 CUs.  An NVIDIA card needs megabytes of reads under way, so four tiles deep; at the
          215 GB/s of a Strix Halo one tile a program is enough, and more only spills registers (gfx1151, by the compiler's count).
    many  prefill: a weight is read once for 64 rows.
    fp32 takes half the depth: the same bytes.
    """
    few = tokens * top_k <= FEW * experts
    if amd:
        shape = Tiles(16, 64, 64, 2, 1) if few else Tiles(64, 128, 32, 8, 2)
    else:
        shape = Tiles(16, 64, 128, 4, 4) if few else Tiles(64, 128, 64, 8, 3)
    return shape._replace(depth=shape.depth // 2) if dtype == torch.float32 else shape


def forward(experts: nn.Module, hidden: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """transformers' experts interface.  What runs is what `unfit` finds nothing against.

    hidden [N, H] of one of DTYPES, N >= 1; index [N, k] int64, the choices of a token distinct; share [N, k] float -> [N, H]
    """
    from producer import grouped_kernels as kernels                  # needs triton
    hidden, index, share = hidden.contiguous(), index.contiguous(), share.contiguous()
    (tokens, size), top_k = hidden.shape, index.shape[1]
    count, _, width = experts.down_proj.shape
    rows = tokens * top_k
    shape = tiles(tokens, top_k, count, hidden.dtype, amd=torch.version.hip is not None)
    routed = tokens > 1                                              # one token wakes each expert once: nothing to sort
    slots = rows // shape.rows + count if routed else rows
    how = dict(E=count, H=size, WIDTH=width, M=shape.rows, K=shape.depth, ROUTED=routed, num_warps=shape.warps, num_stages=shape.stages)
    middle, parts, out = hidden.new_empty(rows, width), hidden.new_empty(rows, size), torch.empty_like(hidden)
    order = index.new_empty(rows if routed else 0, dtype=torch.int32)
    table = index.new_empty(3 * slots if routed else 0, dtype=torch.int32)
    with torch.cuda.device_of(hidden):                               # triton launches on the current GPU
        if routed:
            kernels.route[(count,)](index, order, table, rows, E=count, M=shape.rows, BLOCK=1024, num_warps=4)
        kernels.gate_up[(slots * -(-width // (shape.columns // 2)),)](
            hidden, experts.gate_up_proj, index, order, table, middle, rows, TOP=top_k, N=shape.columns // 2, **how)
        kernels.down[(slots * -(-size // shape.columns),)](
            middle, experts.down_proj, index, order, table, share, parts, rows, N=shape.columns, **how)
        kernels.combine[(tokens * -(-size // 1024),)](parts, out, TOP=top_k, H=size, BLOCK=1024, num_warps=4)
    return out


def plain(experts: nn.Module, hidden: Tensor, index: Tensor, share: Tensor) -> Tensor:
    """The twin: expert by expert, in fp32, a token's choices added in their order."""
    parts = hidden.new_zeros(*index.shape, hidden.shape[1], dtype=torch.float32)
    for expert in index.unique().tolist():
        token, choice = (index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden[token].float(), experts.gate_up_proj[expert].float()).chunk(2, -1)
        made = F.linear((F.silu(gate) * up).to(hidden.dtype).float(), experts.down_proj[expert].float())
        parts[token, choice] = (made * share[token, choice, None].float()).to(hidden.dtype).float()
    return sum(parts.unbind(1)).to(hidden.dtype)


def unfit(experts: nn.Module) -> str:
    """Why these experts cannot be computed here; "" where they can.  Looks at shapes and flags, and tries the activation."""
    gate_up, down = getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None)
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor) and gate_up.ndim == down.ndim == 3):
        return "its experts are not gate_up_proj and down_proj"
    count, size, width = down.shape
    if gate_up.shape != (count, 2 * width, size) or not (gate_up.is_contiguous() and down.is_contiguous()):
        return f"its experts' weights lie as {tuple(gate_up.shape)} and {tuple(down.shape)}, not as [E, 2I, H] and [E, H, I]"
    if gate_up.dtype not in DTYPES:
        return f"its experts are {gate_up.dtype}"
    unlike = {"is_transposed": False, "has_bias": False, "has_gate": True, "is_concatenated": True, "has_post_expert_norm": False,
              "_is_expert_parallel": False}
    if flags := [f"{name}={getattr(experts, name)}" for name, wanted in unlike.items() if getattr(experts, name, wanted) != wanted]:
        return f"its experts have {', '.join(flags)}"
    sample = torch.linspace(-8, 8, 4 * width, dtype=gate_up.dtype, device=gate_up.device).view(2, 2 * width)
    gate, up = sample.chunk(2, -1)
    return "" if torch.allclose(experts._apply_gate(sample), F.silu(gate) * up) else "its experts' activation is not SiLU(gate) * up"
