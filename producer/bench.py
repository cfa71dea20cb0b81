"""`hsprod bench`: one drafter on one target, measured from every side; tables as they are ready, and one record of all.

This file joins settings, target, drafter and prompts; what is measured from what stands in sections.  The record is written after
every section, so that a long run that is ended keeps what it has.  Greedy throughout: that is where texts can be compared.
Left out: several drafters in one run (run it once each, and --against)."""
from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import torch
from rich.console import Console, RenderableType

from common import files
from common.drafter.model import Drafter
from common.errors import UserError
from common.settings import state_home
from producer import fitting, pairs, progress, prompt_sets, prompts as prompt_files, rates, record, sections, tables
from producer.config import Bench, share_held_out
from producer.pairs import Pair, Progress
from producer.progress import say
from producer.prompts import SALT, SHIPPED, Prompt
from producer.sampling import Sampling
from producer.speculate import Limit
from producer.target import Target
from producer.writing import Writer


def run(settings: Bench) -> None:
    if settings.block_size == 1:
        raise UserError("--block-size 1: nothing would be drafted, so there is nothing to measure; use 2 or more")
    wanted = sections.named(settings.only)
    llama = rates.read_llama_bench(settings.llama_bench) if settings.llama_bench else []
    old = record.read(settings.against) if settings.against else None
    measured, others = choose(settings)
    out = settings.out or state_home() / "hsprod" / "bench" / time.strftime("%Y%m%d-%H%M%S.json")
    files.usable(out.parent, "--out")
    if out.is_dir():
        raise UserError(f"--out {out}: a folder; give the name of a file")
    target, drafter, thinking = fitting.ready(settings)
    scene = sections.Scene(target, drafter, Limit(settings.max_new_tokens, target.eos_ids), drafter.config.block_size,
                           *(rendered(target, side, thinking) for side in (measured, others)), llama)
    contract = target.contract(drafter.config.taps, thinking)
    new = {"hsdraft_bench": record.FORMAT, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "finished": False,
           "settings": options(settings), "identity": record.identity(contract, target.device, settings.drafter, measured),
           "seconds": {}, "sections": {}}
    console = Console()
    console.print(headline(scene, settings, len(measured)), highlight=False)
    measure(scene, wanted, new, out, console)
    if old:
        new["compared"] = record.compare(old, new)
        show(console, record.show(new["compared"]))
    save(out, new | {"finished": True})
    console.print(f"\nrecord: {out}", highlight=False, soft_wrap=True)


def measure(scene: sections.Scene, wanted: list[str], new: dict, out: Path, console: Console) -> None:
    """Each wanted section into new["sections"], printed and saved as it is ready."""
    began = time.perf_counter()
    with progress.section(f"[0/{len(wanted)}] decoding {len(scene.prompts)} prompts both ways") as tell:
        scene = dataclasses.replace(scene, pairs=decode(scene, tell))
    new["seconds"]["decoding"], done = time.perf_counter() - began, {}
    for number, name in enumerate(wanted, 1):
        began, section = time.perf_counter(), sections.SECTIONS[name]
        with progress.section(f"[{number}/{len(wanted)}] {section.title}") as tell:
            done[name], why = sections.attempt(section, scene, done, tell)
        new["seconds"][name] = time.perf_counter() - began
        new["sections"][name] = done[name] or {"not_measured": why}
        save(out, new)
        show(console, section.show(done[name]) if done[name] else f"{section.title}: not measured, {why}")


def show(console: Console, shown: RenderableType | list[RenderableType]) -> None:
    for part in shown if isinstance(shown, list) else [shown]:
        tables.put(console, part)


def decode(scene: sections.Scene, tell: Progress) -> list[Pair]:
    def way(drafter: Drafter | None) -> pairs.Way:
        def decoded(ids: list[int], most: int | None):
            limit = scene.limit if most is None else Limit(min(most, scene.limit.max_new_tokens), scene.limit.eos_ids)
            return Writer(scene.target, drafter, limit, Sampling(), scene.block_size, None).decode(ids, "")
        return decoded
    return pairs.decode(scene.target.device, way(None), way(scene.drafter), scene.prompts, tell)


def choose(settings: Bench) -> tuple[list[Prompt], list[Prompt]]:
    """-> the prompts to measure on, and some of the source's others, each once."""
    found = prompt_sets.read(settings.prompts or SHIPPED)
    say(found.line())
    given, share = found.prompts, share_held_out(settings)
    if share is None:
        unique = list({prompt.id: prompt for prompt in given}.values())
        measured = sections.spread(unique, settings.count)
        others = [prompt for prompt in unique if prompt not in measured]
    else:
        split = prompt_files.split(given, share, SALT)
        measured, others = sections.spread(split.held_out, settings.count), split.train
    return measured, sections.spread(others, sections.COUNTED * len(measured))


def rendered(target: Target, asked: list[Prompt], thinking: bool | None) -> list[tuple[str, list[int]]]:
    return [(prompt.id, prompt_files.render(target.tokenizer, prompt, thinking)) for prompt in asked]


def options(settings: Bench) -> dict:
    """As the record holds them: what may move a figure, and not where files lie (the identity has their hashes)."""
    names = ("count", "max_new_tokens", "block_size", "held_out", "only", "dtype", "experts", "threads")
    return {name: getattr(settings, name) for name in names}


def headline(scene: sections.Scene, settings: Bench, prompts: int) -> str:
    device, threads = record.device_name(scene.target.device), torch.get_num_threads()
    where = f"{device}, {threads} thread{'s' if threads > 1 else ''}" if scene.target.device.type == "cpu" else device
    asked = "" if prompts == settings.count else f" (of {settings.count} asked for: there are no more)"
    return (f"{scene.target.name}, {str(scene.target.dtype).removeprefix('torch.')}, on {where}; drafter {settings.drafter}, blocks of "
            f"{scene.block_size}; {prompts} prompts{asked}, at most {settings.max_new_tokens} tokens each, greedy")


def save(path: Path, found: dict) -> None:
    files.write_whole(path, json.dumps(found, indent=1).encode())
