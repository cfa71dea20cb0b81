"""`hsprod bench`: one drafter on one target, measured from every side; tables as they are ready, and one record of all.

This file joins settings, target, drafter and prompts, and says which section is measured from what; each section is a module of
its own with measure -> plain numbers and show -> what is printed.  The record is written after every section, so that a long
run that is ended keeps what it has.  Greedy throughout: that is where texts can be compared.  Left out: several drafters in
one run (run it once each, and --against)."""
from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console, RenderableType

from common import files
from common.drafter.model import Drafter
from common.errors import UserError
from common.settings import state_home
from producer import lossless, overhead, pairs, pieces, progress, prompts as prompt_files, rates, record, roofline, shortlist, speedup, woken
from producer.config import Bench, Serve
from producer.evaluate import PlainTexts, Prompts
from producer.pairs import Pair, Progress
from producer.prompts import SALT, SHIPPED, Prompt
from producer.sampling import Sampling
from producer.speculate import Limit
from producer.target import Target, load
from producer.writing import Writer, load_drafter, say

COUNTED = 2                 # training-side prompts that a shortlist's counts come from, for each prompt that is measured


@dataclass(frozen=True)
class Scene:
    """What every section measures on."""

    target: Target
    drafter: Drafter
    limit: Limit
    block_size: int
    prompts: Prompts                    # measured
    others: Prompts                     # of the same source, not measured
    llama: list[dict]
    pairs: list[Pair] = field(default_factory=list)


@dataclass(frozen=True)
class Section:
    """measure(scene, what is measured already, progress) -> numbers; {} where this target or these prompts have nothing of it."""

    title: str
    measure: Callable[[Scene, dict, Progress], dict]
    show: Callable[[dict], RenderableType]
    needs: tuple[str, ...] = ()


def measure_pieces(scene: Scene, _done: dict, tell: Progress) -> dict:
    found = pieces.measure(scene.target, scene.drafter, scene.pairs, scene.block_size, tell)
    longest = max(scene.pairs, key=lambda pair: min(pair.plain.new, pair.spec.new))
    return found | {"overhead": overhead.measure(scene.target, scene.drafter, longest.ids, scene.limit, scene.block_size, found)}


def measure_shortlist(scene: Scene, _done: dict, _tell: Progress) -> dict:
    if not scene.others:
        return {}
    counts = shortlist.counted(scene.target, scene.drafter, spread(scene.others, COUNTED * len(scene.prompts)), scene.limit)
    return shortlist.measure(scene.target, scene.drafter, scene.prompts,
                             PlainTexts(scene.target, scene.limit, scene.drafter.config.taps), counts)


def measure_roofline(scene: Scene, done: dict, _tell: Progress) -> dict:
    """At the longest block that was met: a text shorter than a block has no whole one."""
    alone, heard = done["pieces"]["alone"], done["experts"]
    rows = min(scene.block_size, heard["by_rows"][-1]["rows"]) if heard else scene.block_size
    seconds = {"step": alone["step"], "verify": alone["verify"][rows - 1], "draft": alone["draft"] + alone["context"]}
    inside = overhead.within(done["pieces"]["overhead"], seconds)
    return roofline.measure(scene.target, scene.drafter, *seconds.values(), heard, alone["context_tokens"], rows, inside)


SECTIONS = {
    "rates": Section("token rates", lambda scene, _done, _tell: rates.measure(scene.pairs, scene.llama), rates.show),
    "pieces": Section("pieces of a cycle", measure_pieces, lambda found: pieces.show(found, found["overhead"])),
    "speedup": Section("speedup and its formula", lambda _scene, done, _tell: speedup.measure(done["pieces"]), speedup.show, ("pieces",)),
    "experts": Section("experts woken", lambda scene, _done, _tell: woken.measure(scene.target, scene.drafter, scene.prompts, scene.limit),
                       woken.show),
    "shortlist": Section("draft heads of fewer tokens", measure_shortlist, shortlist.show),
    "lossless": Section("texts compared", lambda scene, _done, tell: lossless.measure(scene.target, scene.pairs, tell), lossless.show),
    "roofline": Section("roofline", measure_roofline, roofline.show, ("pieces", "experts"))}
NOTHING = {"experts": "4. Experts woken: a dense target has none.",
           "shortlist": "5. Draft heads of fewer tokens: not measured, for every prompt of the file is among the measured ones, and a list "
                        "must be chosen on other text."}


def run(settings: Bench) -> None:
    wanted = sections(settings.only)
    llama = rates.read_llama_bench(settings.llama_bench) if settings.llama_bench else []
    old = record.read(settings.against) if settings.against else None
    measured, others = choose(settings)
    out = settings.out or state_home() / "hsprod" / "bench" / time.strftime("%Y%m%d-%H%M%S.json")
    files.usable(out.parent, "--out")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    target = load(settings.target, dtype=settings.dtype, device=settings.device, experts=settings.experts, say=say)
    thinking = prompt_files.thinking_mode(target.tokenizer, settings.thinking)
    drafter = load_drafter(settings, target, thinking)
    render = functools.partial(prompt_files.render, target.tokenizer, thinking=thinking)
    scene = Scene(target, drafter, Limit(settings.max_new_tokens, target.eos_ids), settings.block_size or drafter.config.block_size,
                  *([(p.id, render(p)) for p in side] for side in (measured, others)), llama)
    new = {"hsdraft_bench": record.FORMAT, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "finished": False, "settings": options(settings),
           "identity": record.identity(target.contract(drafter.config.taps, thinking), target.device, settings.drafter, measured),
           "seconds": {}, "sections": {}}
    console = Console()
    console.print(headline(scene, settings, len(measured)), highlight=False)
    measure(scene, wanted, new, out, console)
    if old:
        new["compared"] = record.compare(old, new)
        console.print("", record.show(new["compared"]), sep="\n", highlight=False)
    save(out, new | {"finished": True})
    console.print(f"\nrecord: {out}", highlight=False, soft_wrap=True)


def measure(scene: Scene, wanted: list[str], new: dict, out: Path, console: Console) -> None:
    """Each wanted section into new["sections"], printed and saved as it is ready."""
    began = time.perf_counter()
    with progress.section(f"[0/{len(wanted)}] decoding {len(scene.prompts)} prompts both ways") as tell:
        scene = dataclasses.replace(scene, pairs=decode(scene, tell))
    new["seconds"]["decoding"] = time.perf_counter() - began
    for number, name in enumerate(wanted, 1):
        began = time.perf_counter()
        with progress.section(f"[{number}/{len(wanted)}] {SECTIONS[name].title}") as tell:
            found = new["sections"][name] = SECTIONS[name].measure(scene, new["sections"], tell)
        new["seconds"][name] = time.perf_counter() - began
        save(out, new)
        shown = SECTIONS[name].show(found) if found else NOTHING[name]
        for part in shown if isinstance(shown, list) else [shown]:
            console.print("", part, sep="\n", highlight=False)


def decode(scene: Scene, tell: Progress) -> list[Pair]:
    def way(drafter: Drafter | None) -> pairs.Way:
        def decoded(ids: list[int], most: int | None):
            limit = scene.limit if most is None else Limit(min(most, scene.limit.max_new_tokens), scene.limit.eos_ids)
            return Writer(scene.target, drafter, limit, Sampling(), scene.block_size, None).decode(ids, "")
        return decoded
    return pairs.decode(scene.target.device, way(None), way(scene.drafter), scene.prompts, tell)


def sections(only: str) -> list[str]:
    """--only's names and what they need, in the tables' order.  UserError for a name that is none."""
    asked = [name.strip() for name in only.split(",") if name.strip()] or list(SECTIONS)
    if wrong := [name for name in asked if name not in SECTIONS]:
        raise UserError(f"--only {wrong[0]}: choose among {', '.join(SECTIONS)}")
    needed = {need for name in asked for need in SECTIONS[name].needs} | set(asked)
    return [name for name in SECTIONS if name in needed]


def choose(settings: Bench) -> tuple[list[Prompt], list[Prompt]]:
    """-> the prompts to measure on, and the source's others, each once."""
    given = prompt_files.read(settings.prompts or SHIPPED)
    share = settings.held_out if settings.held_out is not None or settings.prompts else Serve.held_out
    if share is None:
        unique = list({prompt.id: prompt for prompt in given}.values())
        measured = spread(unique, settings.count)
        return measured, [prompt for prompt in unique if prompt not in measured]
    split = prompt_files.split(given, share, SALT)
    return spread(split.held_out, settings.count), split.train


def spread(items: list, count: int) -> list:
    """`count` of the items, evenly over the list and in its order; all where there are no more."""
    return [items[i * len(items) // count] for i in range(count)] if count < len(items) else list(items)


def options(settings: Bench) -> dict:
    """As the record holds them: what may move a figure, and not where files lie (the identity has their hashes)."""
    values = {name: getattr(settings, name) for name in ("max_new_tokens", "block_size", "only", "dtype", "experts", "threads", "held_out")}
    return values | {"prompts": settings.count}


def headline(scene: Scene, settings: Bench, prompts: int) -> str:
    device = record.device_name(scene.target.device)
    where = f"{device}, {torch.get_num_threads()} threads" if scene.target.device.type == "cpu" else device
    asked = "" if prompts == settings.count else f" (of {settings.count} asked for: there are no more)"
    return (f"{scene.target.name}, {str(scene.target.dtype).removeprefix('torch.')}, on {where}; drafter {settings.drafter}, blocks of "
            f"{scene.block_size}; {prompts} prompts{asked}, at most {settings.max_new_tokens} tokens each, greedy")


def save(path: Path, found: dict) -> None:
    files.write_whole(path, json.dumps(found, indent=1).encode())
