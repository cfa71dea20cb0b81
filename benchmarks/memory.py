"""`hstrain memory`'s arithmetic against real steps: peak resident memory of one, each shape in a process of its own.

    python benchmarks/memory.py [--full] [--anchors 512] [--layers 6]

Resident memory above what Python and torch take before anything is built, by the kernel's high-water mark; fp32 on a CPU,
random captures.  --full adds the released drafter's step (2048 wide, V = 248320, 3072 tokens), cut to --anchors and
--layers; on a card it would be bf16, which no CPU run shows."""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from trainer import arms, memory
from trainer.memory import GIB, Job

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}      # freed memory goes back, as on a card its allocator reuses it
SHAPES = {                     # hidden, target layers, vocabulary, taps, drafter's layers, tokens, anchors, arm
    "SmolLM2, CE": (576, 30, 49152, 5, 2, 1024, 128, "ce_causal"),
    "SmolLM2, KL": (576, 30, 49152, 5, 2, 1024, 128, "kl_mixed_full"),
    "1024 wide, 4 layers, CE": (1024, 28, 32000, 8, 4, 512, 48, "ce_bidi"),
    "1024 wide, layers run again": (1024, 28, 32000, 8, 6, 768, 512, "ce_causal"),
}


def job_of(hidden: int, layers: int, vocab: int, taps: int, depth: int, tokens: int, anchors: int, arm: str, *, gpu: bool = False,
           tied: bool = True) -> Job:
    config = memory.drafter_for(hidden, layers, vocab, taps, arms.named(arm), num_hidden_layers=depth, block_size=16)
    return Job(config, arms.named(arm).loss, 1, anchors, tokens, "adamw", head=vocab, gpu=gpu, tied=tied)


def measure(values: list, threads: int) -> dict:
    """In a process of its own: {bytes, seconds of the step, parameters}."""
    import torch

    from benchmarks.random_capture import embedding_of, random_capture
    from benchmarks.rivals import Peak
    from common.drafter.model import Drafter
    from trainer.batch import make_batch
    from trainer.optim import Optimizer
    from trainer.step import train_step
    torch.set_num_threads(threads)
    job, arm = job_of(*values), arms.named(values[-1])
    torch.nn.functional.linear(torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)).sum().backward()        # torch's own first use
    peak, shape = Peak(), job.config.to_json()
    embedding = embedding_of(shape)
    drafter = Drafter(job.config, generator=torch.Generator().manual_seed(0))
    optimizer = Optimizer(drafter, "adamw", 1e-4)
    for anchors, tokens in ((1, 64), (job.anchors, job.tokens)):                # a small step first: the optimiser's state is made by it
        batch = make_batch([random_capture(shape, tokens)], job.config, arm, anchors=anchors, max_tokens=tokens,
                           generators=[torch.Generator().manual_seed(0)])
        began = time.perf_counter()
        train_step(drafter, optimizer, embedding, embedding, batch, arm, 1.0)
    return {"bytes": peak.bytes(), "seconds": time.perf_counter() - began, "parameters": sum(p.numel() for p in drafter.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", help="one of the shapes")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(json.loads(options.measure), options.threads)))
        return
    shapes = {name: values for name, values in SHAPES.items() if options.only in (None, name)}
    if options.full:
        shapes = {f"full width, {options.layers} layers, {options.anchors} anchors": (2048, 40, 248320, 8, options.layers, 3072, options.anchors, "ce_causal")}
    table = Table("shape", "measured, GiB", "predicted, GiB", "predicted / measured", "s a step")
    for name, values in shapes.items():
        done = subprocess.run([sys.executable, __file__, "--threads", str(options.threads), "--measure", json.dumps(values)], capture_output=True, text=True,
                              env=os.environ | MALLOC)
        if done.returncode:
            sys.exit(done.stderr)
        found, expected = json.loads(done.stdout), memory.peak(job_of(*values))
        table.add_row(name, f"{found['bytes'] / GIB:.2f}", f"{expected / GIB:.2f}", f"{expected / found['bytes']:.2f}", f"{found['seconds']:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
