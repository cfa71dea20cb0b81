"""Our Triton kernels compiled for cards that are not there: run in a process that does not interpret (test_grouped)."""
from __future__ import annotations

import re

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from producer import grouped, grouped_kernels as kernels

TARGETS = (GPUTarget("hip", "gfx1151", 32), GPUTarget("cuda", 86, 32))       # a Strix Halo; a 16 GB card


def build(kernel, target: GPUTarget, types: dict[str, str], constants: dict, options: dict):
    """types: Triton's names of the tensors and ints; pointers are taken as aligned, as torch's are."""
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind[0] == "*"}
    return triton.compile(ASTSource(kernel, signature, constexprs=constants, attrs=aligned), target=target, options=options)


def report() -> None:
    """A line for each target, length and projection of the user's size in bf16; on AMD with the registers that do not fit."""
    ints = {"S": "i32", "ids": "*i64", "order": "*i32", "table": "*i32"}
    for target in TARGETS:
        build(kernels.route, target, ints, dict(E=256, M=16, BLOCK=1024), {})
        build(kernels.combine, target, {"x": "*bf16", "out": "*bf16"}, dict(TOP=8, H=2048, BLOCK=1024), {})
        for tokens in (1, 4096):
            shape = grouped.tiles(tokens, 8, 256, torch.bfloat16, amd=target.backend == "hip")
            how = dict(E=256, H=2048, WIDTH=512, M=shape.rows, K=shape.depth, ROUTED=tokens > 1)
            types = ints | dict.fromkeys(("x", "weight", "out"), "*bf16")
            for kernel, more, constants in ((kernels.gate_up, {}, dict(TOP=8, N=shape.columns // 2)),
                                            (kernels.down, {"share": "*bf16"}, dict(N=shape.columns))):
                made = build(kernel, target, types | more, how | constants, dict(num_warps=shape.warps, num_stages=shape.stages))
                spills = re.search(r"vgpr_spill_count:\s+(\d+)", made.asm.get("amdgcn", ""))
                assert made.metadata.shared <= 64 << 10, (target, tokens, made.metadata.shared)
                print(target.arch, tokens, f"spills {spills[1]} " if spills else "", "ok")
