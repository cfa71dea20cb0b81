"""Table 2: where the time of a cycle goes, in two ways.

Alone: one plain step (L_target), one draft (T_d) and one verify of v = 1..B slots (T_t), each from an idle device to an idle
device, taken in turn at one context length.  In the loop: what the loop itself timed of every part over all prompts, and the
remainder that the clock around the whole call saw and no part did (making the caches, the last block's end).  The loop's parts
and the remainder are the cycle: nothing is left over.  How much of each part is Python is another question (overhead)."""
from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from rich.table import Table

from common.drafter.model import Drafter
from producer.overhead import note as overhead_note
from producer.pairs import Pair, Progress, clocked
from producer.rollback import TargetCache
from producer.speculate import PARTS, Network
from producer.tables import ms, percent, table
from producer.target import Target

REPEATS = 5                 # of each piece alone; a plain step and a draft are taken beside each verify, so B times as often
SAYS = {"draft": "draft", "verify": "verify", "judge": "judge", "loop": "loop on the host", "rollback": "rollback",
        "context": "drafter's context", "remainder": "remainder"}


def cycle(pairs: Sequence[Pair]) -> dict:
    """The loop over all prompts -> seconds a cycle of each part and the remainder; they add up to `seconds`, the whole.

    tau: tokens after the first, per verify.  sizes: how many blocks had v slots verified, by v (the last block of a text is short).
    """
    specs = [pair.spec for pair in pairs if pair.counts]
    verifies = sum(len(run.decoded.accepted) for run in specs)
    whole = sum(run.decoding for run in specs)
    parts = {part: sum(run.decoded.seconds[part] for run in specs) / verifies for part in PARTS}
    sizes: dict[int, int] = {}
    for slots in (offered + 1 for run in specs for offered in run.decoded.offered):
        sizes[slots] = sizes.get(slots, 0) + 1
    return {"verifies": verifies, "tau": sum(run.new for run in specs) / verifies, "seconds": whole / verifies,
            "parts": parts | {"remainder": whole / verifies - sum(parts.values())}, "sizes": dict(sorted(sizes.items()))}


def plain_step(pairs: Sequence[Pair]) -> float:
    """L_target: seconds a token of plain decoding over all prompts, by the wall clock, its own remainder included."""
    counted = [pair.plain for pair in pairs if pair.counts]
    return sum(run.decoding for run in counted) / sum(run.new for run in counted)


@torch.inference_mode()
def alone(target: Target, drafter: Drafter, pairs: Sequence[Pair], block_size: int, progress: Progress) -> dict:
    """Medians in seconds: step, verify [T_t(1), ..., T_t(B)], draft (a whole block), context (tau's tokens).

    The text is a prompt of median length with its plain answer, over again where it is too short; the context is the length
    that the prompts have on average in the middle of their answers.  The blocks hold the text's own tokens, so a mixture of
    experts wakes what agreeing drafts wake, and wrong drafts may wake a little more."""
    counted = sorted((pair for pair in pairs if pair.counts), key=lambda pair: len(pair.ids) + pair.plain.new)
    pair = counted[len(counted) // 2]
    middle = int(statistics.mean(len(p.ids) + p.plain.new / 2 for p in counted))
    kept = min(block_size, max(1, round(cycle(pairs)["tau"])))
    grows = block_size - 1 + kept                                    # tokens, while one repeat goes through the sizes
    begin = max(1, middle - grows // 2)
    ids = pair.ids + pair.plain.decoded.tokens
    text = torch.tensor(ids * (1 + (begin + grows + block_size) // len(ids)), device=target.device)
    seen: dict[str, list[float]] = {"step": [], "draft": [], "context": []}
    verify: list[list[float]] = [[] for _ in range(block_size)]
    for repeat in range(REPEATS + 1):                                # the first is for warmth
        progress(repeat, REPEATS + 1)
        one = _once(target, drafter, text, begin, [1 + (v + repeat) % block_size for v in range(block_size)], kept)
        for name, seconds in one if repeat else ():
            (verify[name - 1] if isinstance(name, int) else seen[name]).append(seconds)
    return {"context_tokens": middle, "repeats": REPEATS, "verify": [statistics.median(v) for v in verify],
            **{name: statistics.median(values) for name, values in seen.items()}}


def _once(target: Target, drafter: Drafter, text: torch.Tensor, at: int, sizes: list[int], kept: int) -> list[tuple[str | int, float]]:
    """One plain step, one draft and one verify for each size, in turn, from context `at` on -> (piece or size, seconds).

    A block keeps one token, the longest one `kept`, so both caches go along the text together."""
    device, taps, found = target.device, drafter.config.taps, []
    blocks, steps, net = TargetCache(target), target.new_cache(), Network(drafter, target, len(text))
    net.extend(blocks.prefill(text[None, :at], taps).taps)
    target.forward(text[None, :at], cache=steps)
    for size in sizes:
        keep = kept if size == max(sizes) else 1
        found.append(("step", clocked(device, lambda at=at: target.forward(text[None, at:at + 1], cache=steps))[1]))
        if keep > 1:
            target.forward(text[None, at + 1:at + keep], cache=steps)
        found.append(("draft", clocked(device, lambda at=at: net.propose(text[at:at + 1], max(sizes), max(sizes)))[1]))
        seen, seconds = clocked(device, lambda at=at, size=size: blocks.verify(text[None, at:at + size], taps))
        found.append((size, seconds))
        blocks.commit(keep)
        context = clocked(device, lambda seen=seen, keep=keep: net.extend(seen.taps[:, :, :keep]))[1]
        found += [("context", context)] if keep == kept else []
        at += keep
    return found


def measure(target: Target, drafter: Drafter, pairs: Sequence[Pair], block_size: int,
            progress: Progress = lambda done, of: None) -> dict:
    return {"block_size": block_size, "L_target": plain_step(pairs), "cycle": cycle(pairs),
            "alone": alone(target, drafter, pairs, block_size, progress)}


def show(measured: dict, overhead: dict | None = None) -> list[Table]:
    """overhead: of producer.overhead, where it was measured."""
    return [_show_alone(measured), _show_cycle(measured["cycle"], overhead)]


def _show_alone(measured: dict) -> Table:
    piece = measured["alone"]
    step, draft = piece["step"], piece["draft"] + piece["context"]
    made = table("2a. Pieces, each timed alone", "slots v", "verify T_t, ms", "T_t / L_target", "T_d / T_t", words=0,
                 note=f"L_target, one plain step: {ms(step)} ms here, {ms(measured['L_target'])} ms over all prompts. "
                      f"T_d, one draft of {measured['block_size']} slots with its context: {ms(draft)} ms. "
                      f"Medians of {piece['repeats']} at a context of {piece['context_tokens']} tokens, taken in turn, each waited for.")
    for v, seconds in enumerate(piece["verify"], 1):
        made.add_row(str(v), ms(seconds), f"{seconds / step:.2f}", f"{draft / seconds:.2f}")
    return made


def _show_cycle(measured: dict, overhead: dict | None) -> Table:
    note = (f"Mean of {measured['verifies']} cycles of {measured['tau']:.2f} tokens; the whole is the clock around each text, less its "
            "prefill. judge: which drafts stand and what follows; loop: tokens to the host; remainder: in none of the loop's parts.")
    split = (overhead or {}).get("parts", {})
    made = table("2b. A cycle in the loop", "part", "ms", "share", "in operators, ms", "around them, ms",
                 note=f"{note} {overhead_note(overhead) if overhead else 'Operators and Python: not measured in this run.'}")
    for part, seconds in measured["parts"].items():
        inside, outside = (split.get(part, {}).get(key) for key in ("inside", "outside"))
        made.add_row(SAYS[part], ms(seconds), percent(seconds / measured["seconds"]), ms(inside), ms(outside))
    sums = [sum(part[key] for part in split.values()) if split else None for key in ("inside", "outside")]
    made.add_section()
    made.add_row("the whole cycle", ms(measured["seconds"]), percent(1.0), *map(ms, sums))
    return made
