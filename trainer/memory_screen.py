"""`hstrain memory` on a screen: the parts, the peak, and what would fit."""
from __future__ import annotations

import dataclasses

from rich import box
from rich.console import Console
from rich.table import Table

from trainer import arms, config, memory
from trainer.memory import GIB, RESERVE, STEP, Job


def job_of(settings: config.Memory) -> Job:
    shape = {"hidden": settings.hidden, "layers": settings.target_layers, "vocab": settings.vocab, "tied": settings.tied}
    if settings.target_config:
        shape = memory.shape_of(settings.target_config)
    arm = arms.changed(arms.named(settings.arm), loss=settings.loss, draft_vocab=settings.draft_vocab, block_size=settings.block_size)
    recipe = config.recipe_for(shape["hidden"])
    drafter = memory.drafter_for(shape["hidden"], shape["layers"], shape["vocab"], settings.taps, arm, num_hidden_layers=settings.layers,
                                 block_size=arm.block_size)
    sequences, anchors, optimizer, tokens = (getattr(recipe, name) if getattr(settings, name) is None else getattr(settings, name)
                                             for name in ("sequences", "anchors", "optimizer", "max_tokens"))
    return Job(drafter, arm.loss, sequences, anchors, tokens, optimizer, head=arm.draft_vocab or shape["vocab"],
               gpu=settings.device == "cuda", tied=shape["tied"])


def show(settings: config.Memory) -> int:
    """-> exit code: 0 where the step fits, 1 where it does not."""
    job, console = job_of(settings), Console()
    usable = int((settings.vram - RESERVE) * GIB)
    table = Table(box=box.SIMPLE, padding=(0, 1), title=f"One step of {settings.arm}: {job.sequences} x {job.tokens} tokens, {job.anchors} anchors "
                  f"of {job.config.block_size} in each, {job.optimizer}")
    for name, how in (("part", {}), ("GiB", {"justify": "right"})):
        table.add_column(name, **how)
    for name, size in memory.parts(job).items():
        table.add_row(name, f"{size / GIB:.2f}")
    moments = memory.moments(job)
    worst = max(moments, key=moments.get)
    need = moments[worst]
    table.add_section()
    table.add_row(f"at its peak ({worst}); parts that never meet are not added", f"{need / GIB:.2f}")
    table.add_row(f"of --vram {settings.vram:g} less {RESERVE:g} in reserve", f"{usable / GIB:.2f}")
    console.print(table)
    if job.recomputes:
        console.print("Layers are run again in the backward: kept, they would need more than 2 GiB.")
    console.print(suggestion(job, usable))
    return 0 if need <= usable else 1


def suggestion(job: Job, usable: int) -> str:
    def fits(**over: int) -> bool:
        return memory.peak(dataclasses.replace(job, **over)) <= usable
    anchors = memory.largest(lambda n: fits(anchors=n), STEP, 4096)
    tokens = memory.largest(lambda n: fits(tokens=n), 16 * STEP, job.config.max_position_embeddings)
    if fits():
        return f"It fits. The most that would: --anchors {anchors} at {job.tokens} tokens, --max-tokens {tokens} at {job.anchors} anchors."
    ways = [f"--anchors {anchors}"] * bool(anchors) + [f"--max-tokens {tokens}"] * bool(tokens)
    if job.sequences > 1 and fits(sequences=1):
        ways.append("--sequences 1")
    return "It does not fit. Any of these would: " + ", ".join(ways) if ways else (
        "It does not fit, with few anchors neither: choose a smaller drafter (--layers), or a card with more memory")
