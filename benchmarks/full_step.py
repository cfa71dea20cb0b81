"""The step that must fit a 16 GB card, run once for real: the released drafter, 2048 wide, V = 248320, 3072 tokens, 512 anchors of 16.

    python benchmarks/full_step.py [--anchors 512] [--tokens 3072] [--layers 6] [--arm ce_causal] [--fp32] [--threads 1]

On a CPU, but in a GPU's numbers: embedding and head in bf16, not tied, the drafter fp32 under autocast to bf16.  Only how blocks
attend is a CPU's (grouped, not flex).  By part of the step: seconds, and how high resident memory stood at most, above what Python
and torch take.  Captures are random: what is shown is room and time, not learning.  Some 12 GB must be free."""
from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.memory import MALLOC, job_of
from trainer import memory
from trainer.memory import GIB, Job


class Laps:
    """What each part of a step took: seconds, and the kernel's high-water mark of resident memory while it ran."""

    def __init__(self) -> None:
        from benchmarks.rivals import Peak
        self._made, self._peak = Peak, Peak()
        self._base, self._began = self._peak.before, time.perf_counter()
        self.rows: list[tuple[str, float, int]] = []                 # part, seconds, bytes above the start

    def lap(self, name: str) -> None:
        """The part called `name` ends here, the next begins."""
        self.rows.append((name, time.perf_counter() - self._began, self._peak.bytes() + self._peak.before - self._base))
        self._peak, self._began = self._made(), time.perf_counter()


def measure(job: Job, arm_name: str, fp32: bool, threads: int) -> list[tuple[str, float, int]]:
    import torch

    from benchmarks.random_capture import embedding_of, random_capture
    from common.drafter.model import Drafter
    from trainer import arms
    from trainer.batch import make_batch
    from trainer.optim import CLIP, Optimizer
    from trainer.step import sums
    torch.set_num_threads(threads)
    torch.nn.functional.linear(torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)).sum().backward()        # torch's own first use
    laps, arm, shape = Laps(), arms.named(arm_name), job.config.to_json()
    embedding = embedding_of(shape).to(torch.float32 if fp32 else torch.bfloat16)
    head = embedding.clone()
    drafter = Drafter(job.config, generator=torch.Generator().manual_seed(0))
    optimizer = Optimizer(drafter, "adamw", 1e-4)
    laps.lap("embedding, head and drafter made")

    def network(*values: torch.Tensor) -> torch.Tensor:
        out = drafter(*values)
        laps.lap("drafter, forward")
        return out

    def step(anchors: int, tokens: int) -> None:
        """trainer.step.train_step, part by part, autocast on a CPU, too."""
        batch = make_batch([random_capture(shape, tokens)], job.config, arm, anchors=anchors, max_tokens=tokens,
                           generators=[torch.Generator().manual_seed(0)])
        laps.lap("batch")
        with torch.autocast("cpu", torch.bfloat16, enabled=not fp32):
            made, _ = sums(drafter, embedding, head, batch, arm, network)
        laps.lap("head and loss")
        (made.numerator / made.denominator).backward()
        laps.lap("backward")
        norm = torch.nn.utils.clip_grad_norm_(drafter.parameters(), CLIP)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"gradient norm is {norm.item()}")
        optimizer.step(1.0)
        laps.lap("clip and optimiser")
    step(1, 64)                                                      # it makes the optimiser's state
    first = len(laps.rows)
    step(job.anchors, job.tokens)
    return laps.rows[first:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("anchors", 512), ("tokens", 3072), ("layers", 6), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arm", default="ce_causal")
    parser.add_argument("--fp32", action="store_true", help="as `hstrain run` on a CPU, and not in bf16")
    options = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in MALLOC.items()):                # malloc reads them as it starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | MALLOC)
    job = job_of(2048, 40, 248320, 8, options.layers, options.tokens, options.anchors, options.arm, gpu=not options.fp32, tied=False)
    expected, free = memory.peak(job), psutil.virtual_memory().available
    if free < 1.15 * expected:
        sys.exit(f"{free / GIB:.1f} GiB are free, about {1.15 * expected / GIB:.1f} are needed: take fewer --anchors or --layers")
    rows = measure(job, options.arm, options.fp32, options.threads)
    table = Table("part", "seconds", "peak, GiB", title=f"{options.arm}, {options.layers} layers, {options.tokens} tokens, {options.anchors} anchors of 16, "
                  f"{'fp32' if options.fp32 else 'bf16'}, {options.threads} thread(s)")
    for name, seconds, size in rows:
        table.add_row(name, f"{seconds:.1f}", f"{size / GIB:.2f}")
    most = max(size for _, _, size in rows)
    table.add_section()
    table.add_row("the step", f"{sum(row[1] for row in rows):.1f}", f"{most / GIB:.2f}")
    table.add_row(f"hstrain memory --device {'cpu' if options.fp32 else 'cuda'} says", "", f"{expected / GIB:.2f} ({expected / most:.2f} of it)")
    Console().print(table)


if __name__ == "__main__":
    main()
