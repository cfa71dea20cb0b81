"""Experts woken while decoding (table 4): a block pays for every expert that any of its rows asks for.

Hooks on the routers hear what the loop's own forwards choose; the loop is untouched.  Counted are different experts, per layer
and block: of all rows verified, of the rows that gave tokens (the anchor and the drafts that stand), and of a block's first v
rows, which says what a shorter verify would save.  Beside each stands what rows that choose at random would wake.
Left out: which experts they are, and what they cost (roofline)."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

from common.drafter.model import Drafter
from producer.evaluate import Prompts
from producer.speculate import Limit, plain, speculate
from producer.tables import table
from producer.target import Target

STEPS = 16              # plain steps a prompt: they wake top_k exactly, or the hooks hear something else


def distinct(indices: Tensor, rows: int) -> Tensor:
    """indices [L, T, k] int64: a block's choices in L layers; of its first `rows` rows -> different experts [L] int64."""
    if not 1 <= rows <= indices.shape[1]:
        raise ValueError(f"{rows} rows of a block of {indices.shape[1]}")
    ordered = indices[:, :rows].flatten(1).sort(1).values
    return 1 + (ordered.diff(dim=1) != 0).sum(1)


def uniform(experts: int, top_k: int, rows: int) -> float:
    """Different experts expected of `rows` rows that choose top_k of them at random, each by itself."""
    return experts * (1 - (1 - top_k / experts) ** rows)


def routers(target: Target) -> dict[int, nn.Module]:
    """Layer -> its router, whose output's third item is what it chose, [T, k]; empty for a dense target."""
    mlps = {i: getattr(layer, "mlp", None) for i, layer in enumerate(target.text.layers)}
    return {i: mlp.gate for i, mlp in mlps.items() if hasattr(mlp, "experts") and hasattr(mlp, "gate")}


@contextlib.contextmanager
def listening(target: Target) -> Iterator[list[list[Tensor]]]:
    """Per router, in the layers' order, what it chose in each forward since: a list of [T, k]."""
    gates = list(routers(target).values())
    heard: list[list[Tensor]] = [[] for _ in gates]
    hooks = [gate.register_forward_hook(lambda _module, _args, out, into=into: into.append(out[2]))
             for gate, into in zip(gates, heard, strict=True)]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


def forwards(heard: list[list[Tensor]], rows: list[int]) -> list[Tensor]:
    """What was heard during one text -> [L, T, k] for each forward after the prefill, on the CPU.

    rows: T of each, in order.  ValueError where the routers heard another number of forwards, or of rows: a block's choices
    must not be taken for another's."""
    shapes = [[len(chosen) for chosen in layer[1:]] for layer in heard]
    if any(layer != rows for layer in shapes):
        raise ValueError(f"the routers heard forwards of {shapes[0][:8]} rows, the loop ran {rows[:8]}")
    return [torch.stack(layers).cpu() for layers in zip(*(layer[1:] for layer in heard))]


def measure(target: Target, drafter: Drafter, prompts: Prompts, limit: Limit) -> dict:
    """Decode every prompt with the drafter, and a few steps plainly -> counts, as `summarise` says; {} for a dense target."""
    gates = routers(target)
    if not gates:
        return {}
    blocks, kept, steps = [], [], []
    for _, ids in prompts:
        with listening(target) as heard:
            spec = speculate(target, drafter, ids, limit)
        blocks += forwards(heard, [1 + offered for offered in spec.offered])
        kept += [1 + accepted for accepted in spec.accepted]
        with listening(target) as heard:
            tokens = plain(target, ids, Limit(min(STEPS, limit.max_new_tokens), limit.eos_ids)).tokens
        steps += forwards(heard, [1] * (len(tokens) - 1))
    experts = max(len(gate.weight) for gate in gates.values())
    return summarise(list(gates), experts, blocks, kept, steps) if blocks else {}


def summarise(layers: list[int], experts: int, blocks: list[Tensor], kept: list[int], steps: list[Tensor]) -> dict:
    """blocks [L, T, k] each, kept: rows of each that gave tokens, steps [L, 1, k] each -> the record.

    verified and accepted: over blocks and layers, with `rows` a block, and what `uniform` expects of the same blocks
    per_layer: the same for each layer; by_rows: a block's first v rows, over the blocks that have so many
    plain: of single steps"""
    top_k = blocks[0].shape[2]
    lengths = [block.shape[1] for block in blocks]
    counted = {name: np.stack([distinct(block, rows).numpy() for block, rows in zip(blocks, wanted, strict=True)])
               for name, wanted in (("verified", lengths), ("accepted", kept))}                 # [blocks, L]
    pooled = {}
    for (name, counts), rows in zip(counted.items(), (lengths, kept)):
        chance = float(np.mean([uniform(experts, top_k, r) for r in rows]))
        pooled[name] = spread(counts) | {"rows": float(np.mean(rows)), "uniform": chance}
    per_layer = [{"layer": layer} | {name: spread(counts[:, i]) for name, counts in counted.items()}
                 for i, layer in enumerate(layers)]
    by_rows = []
    for rows in range(1, max(lengths) + 1):
        longer = [block for block in blocks if block.shape[1] >= rows]
        mean = float(np.mean([distinct(block, rows).numpy() for block in longer]))
        by_rows.append({"rows": rows, "blocks": len(longer), "mean": mean, "uniform": uniform(experts, top_k, rows)})
    alone = spread(np.stack([distinct(step, 1).numpy() for step in steps])) if steps else None
    return {"experts": experts, "top_k": top_k, "blocks": len(blocks), "steps": len(steps), "plain": alone,
            **pooled, "per_layer": per_layer, "by_rows": by_rows}


def spread(counts: np.ndarray) -> dict[str, float]:
    low, high = np.quantile(counts, [0.05, 0.95])
    return {"mean": float(counts.mean()), "std": float(counts.std()), "min": int(counts.min()), "p5": float(low),
            "p95": float(high), "max": int(counts.max())}


def show(measured: dict) -> list[Table]:
    """Pooled counts and those of a shorter verify; then each layer's.  Nothing for a dense target."""
    if not measured:
        return []
    experts, top_k = measured["experts"], measured["top_k"]
    first = table(f"4a. Experts woken a layer, of {experts}", "forward", "rows", "mean", "std", "5..95 %", "min..max", "uniform",
                  note=f"Over {measured['blocks']} blocks and {measured['steps']} plain steps, all layers. Accepted rows: the known "
                       f"token and the drafts that stand. uniform: were each row's {top_k} chosen at random.")
    if measured["plain"]:
        first.add_row("plain step", "1", *_cells(measured["plain"]), f"{uniform(experts, top_k, 1):.1f}")
    for name, said in (("verified", "block, all rows"), ("accepted", "block, accepted rows")):
        row = measured[name]
        first.add_row(said, f"{row['rows']:.1f}", *_cells(row), f"{row['uniform']:.1f}")
    for row in measured["by_rows"]:
        rows = row["rows"]
        if rows > 1 and (rows & (rows - 1) == 0 or row is measured["by_rows"][-1]):     # 2, 4, 8, .. and the longest
            first.add_row(f"block, first {rows} rows", str(rows), f"{row['mean']:.1f}", *[""] * 3, f"{row['uniform']:.1f}")
    second = table("4b. By layer: mean (5..95 %)", "layer", "all rows", "accepted rows", words=0)
    for row in measured["per_layer"]:
        second.add_row(str(row["layer"]), *(f"{row[name]['mean']:.1f} ({row[name]['p5']:.0f}..{row[name]['p95']:.0f})"
                                            for name in ("verified", "accepted")))
    return [first, second]


def _cells(row: dict) -> list[str]:
    return [f"{row['mean']:.1f}", f"{row['std']:.1f}", f"{row['p5']:.0f}..{row['p95']:.0f}", f"{row['min']}..{row['max']}"]
