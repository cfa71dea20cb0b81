"""The bench's sections: which module measures what, from what.  Each has measure -> plain numbers and show -> tables.

A section that cannot be measured on this target or these prompts raises UserError, which says why; the others go on."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import RenderableType

from common.drafter.model import Drafter
from common.errors import UserError
from producer import lengths_bench, lossless, overhead, pieces, rates, roofline, shortlist, speedup, woken
from producer.evaluate import PlainTexts, Prompts
from producer.pairs import Pair, Progress
from producer.speculate import Limit
from producer.target import Target

COUNTED = 2                 # prompts that a shortlist is counted on, for each that is measured


@dataclass(frozen=True)
class Scene:
    """What every section measures on."""

    target: Target
    drafter: Drafter
    limit: Limit
    block_size: int
    prompts: Prompts                    # measured
    others: Prompts                     # of the same source, not measured: what a shortlist is counted on
    llama: list[dict]
    pairs: list[Pair] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """measure(scene, what is measured already, progress) -> numbers; needs: sections that it reads them of."""

    title: str
    measure: Callable[[Scene, dict, Progress], dict]
    show: Callable[[dict], RenderableType | list[RenderableType]]
    needs: tuple[str, ...] = ()


def attempt(section: Section, scene: Scene, done: dict, tell: Progress) -> tuple[dict, str]:
    """-> numbers, or {} and why not: what one section cannot measure here costs the run no other."""
    try:
        return section.measure(scene, done, tell), ""
    except UserError as error:
        return {}, str(error)


def measure_pieces(scene: Scene, _done: dict, tell: Progress) -> dict:
    found = pieces.measure(scene.target, scene.drafter, scene.pairs, scene.block_size, tell)
    longest = max(scene.pairs, key=lambda pair: min(pair.plain.new, pair.spec.new))
    return found | {"overhead": overhead.measure(scene.target, scene.drafter, longest.ids, scene.limit, scene.block_size, found)}


def measure_experts(scene: Scene, _done: dict, _tell: Progress) -> dict:
    if not woken.routers(scene.target):
        raise UserError("a dense target has no experts")
    return woken.measure(scene.target, scene.drafter, scene.prompts, scene.limit)


def measure_shortlist(scene: Scene, _done: dict, _tell: Progress) -> dict:
    if not scene.others:
        raise UserError("a list must be chosen on other text, and every prompt of the file is among those measured")
    if (own := scene.drafter.shortlist) is not None:
        raise UserError(f"this drafter was trained to draft {len(own)} tokens only; lists are compared with one trained on all")
    counts = shortlist.counted(scene.target, scene.drafter, scene.others, scene.limit)
    return shortlist.measure(scene.target, scene.drafter, scene.prompts,
                             PlainTexts(scene.target, scene.limit, scene.drafter.config.taps), counts)


def measure_roofline(scene: Scene, done: dict, _tell: Progress) -> dict:
    """At the longest block that was met: a text shorter than a block has no whole one."""
    alone, heard = done["pieces"]["alone"], done["experts"]
    rows = min(scene.block_size, heard["by_rows"][-1]["rows"]) if heard else scene.block_size
    seconds = {"step": alone["step"], "verify": alone["verify"][rows - 1], "draft": alone["draft"] + alone["context"]}
    inside = overhead.within(done["pieces"]["overhead"], seconds)
    return roofline.measure(scene.target, scene.drafter, *seconds.values(), heard, alone["context_tokens"], rows, inside)


def measure_lengths(scene: Scene, _done: dict, tell: Progress) -> dict:
    return lengths_bench.measure(scene.target, scene.drafter, scene.prompts, scene.limit, block_size=scene.block_size, progress=tell)


SECTIONS = {            # in the tables' order
    "rates": Section("token rates", lambda scene, _done, _tell: rates.measure(scene.pairs, scene.llama), rates.show),
    "pieces": Section("pieces of a cycle", measure_pieces, lambda found: pieces.show(found, found["overhead"])),
    "speedup": Section("speedup and its formula", lambda _scene, done, _tell: speedup.measure(done["pieces"]), speedup.show,
                       ("pieces",)),
    "experts": Section("experts woken", measure_experts, woken.show),
    "shortlist": Section("draft heads of fewer tokens", measure_shortlist, shortlist.show),
    "lossless": Section("texts compared", lambda scene, _done, tell: lossless.measure(scene.target, scene.pairs, tell), lossless.show),
    "roofline": Section("roofline", measure_roofline, roofline.show, ("pieces", "experts")),
    "lengths": Section("verify lengths", measure_lengths, lengths_bench.show)}


def named(only: str) -> list[str]:
    """--only's names and what they need, in the tables' order.  UserError for a name that is none."""
    asked = [name.strip() for name in only.split(",") if name.strip()] or list(SECTIONS)
    if wrong := [name for name in asked if name not in SECTIONS]:
        raise UserError(f"--only {wrong[0]}: choose among {', '.join(SECTIONS)}")
    needed = {need for name in asked for need in SECTIONS[name].needs} | set(asked)
    return [name for name in SECTIONS if name in needed]


def spread(items: list, count: int) -> list:
    """`count` of the items, evenly over the list and in its order; all where there are no more."""
    return [items[i * len(items) // count] for i in range(count)] if count < len(items) else list(items)
