"""trainer's Triton kernel compiled for cards that are not there: run in a process that does not interpret (test_fused)."""
from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trainer import fused, fused_kernels

TARGETS = (GPUTarget("hip", "gfx1151", 32), GPUTarget("cuda", 86, 32))       # a Strix Halo; a 16 GB card
TYPES = {"logits": "*fp32", "teacher": "*fp32", "labels": "*i64", "loss": "*fp32", "ce": "*fp32", "hits": "*i8", "V": "i32", "stride": "i64"}

for target in TARGETS:
    for kl in (False, True):
        signature = {name: TYPES.get(name, "constexpr") for name in fused_kernels.rows.arg_names}
        made = triton.compile(ASTSource(fused_kernels.rows, signature, constexprs=dict(KL=kl, BLOCK=fused.BLOCK)), target=target,
                              options=dict(num_warps=fused.WARPS))
        assert made.metadata.shared <= 48 << 10, made.metadata.shared
        print(target.arch, "kl" if kl else "ce", "ok")
