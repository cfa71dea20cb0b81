"""`hsprod eval`: how well a drafter drafts, ours or imported, without a trainer.

The prompts, the decoding and the figures are those of `hsprod serve`, when a checkpoint is sent back to it (evaluate.py), so the same
checkpoint on the same prompts has the same tau.  Rows for each file and category are the same texts, taken apart.
Left out: what a drafter is worth in time, and why (hsprod bench)."""
from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console, RenderableType
from rich.text import Text

from common import files, logs
from common.drafter import acceptance
from common.drafter.model import Drafter
from common.errors import UserError
from producer import evaluate, fitting, progress, prompt_sets, prompts as prompt_files, record, tables
from producer.config import Eval, share_held_out
from producer.evaluate import Measured, PlainTexts
from producer.progress import say
from producer.prompts import SALT, SHIPPED, Prompt
from producer.speculate import Limit
from producer.target import Target

FORMAT = 1
SEED = 0                     # of the bootstrap: the same texts give the same interval, here and in hsprod serve
LISTED = 10                  # texts that differ, in the terminal
ALL = "all"


@dataclass(frozen=True)
class Asked:
    """One prompt to measure on.  source: the file it came from, as it was named."""

    source: str
    prompt: Prompt
    ids: list[int]


def run(settings: Eval) -> int:
    """The exit code: 1 where something cannot be right (`alarms`)."""
    if settings.json and (settings.json.is_dir() or not settings.json.absolute().parent.is_dir()):
        raise UserError(f"--json {settings.json}: give the name of a file in a folder that is there")
    if settings.block_size == 1:
        raise UserError("--block-size 1: nothing would be drafted, so there is nothing to measure; use 2 or more")
    logs.replacing(sys.stdout)
    sets = choose(settings)
    target, drafter, thinking = fitting.ready(settings)
    asked = rendered(target, drafter, sets, thinking, settings.new_tokens)
    made = measure(target, drafter, asked, settings.new_tokens)
    made |= {"hsdraft_eval": FORMAT, "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "new_tokens": settings.new_tokens,
             "block_size": drafter.config.block_size, "held_out": share_held_out(settings),
             "identity": record.identity(target.contract(drafter.config.taps, thinking), target.device, settings.drafter,
                                         [one.prompt for one in asked])}
    console = Console(width=None if sys.stdout.isatty() else 110)
    for shown in show(made, settings):
        tables.put(console, shown)
    if settings.json:
        files.write_whole(settings.json, json.dumps(made, indent=1, allow_nan=False).encode())
        console.print(f"\nJSON: {settings.json}", highlight=False, soft_wrap=True)
    return int(bool(made["alarms"]))


def choose(settings: Eval) -> list[tuple[str, list[Prompt]]]:
    """(file, its prompts to measure on) each.  What was read, and what of it does not count a second time, is said."""
    share, known, sets = share_held_out(settings), set(), []
    for source in settings.prompts or [SHIPPED]:
        found = prompt_sets.read(source)
        say(found.line())
        given = prompt_files.split(found.prompts, share, SALT).held_out if share else found.prompts
        unique = {prompt.id for prompt in found.prompts}
        chosen = prompt_files.judges((prompt for prompt in given if prompt.id not in known), settings.count)
        if twice := len(found.prompts) - len(unique) + len(unique & known):
            say(f"{source}: {twice} prompts stand there or in an earlier file already, and count once")
        if len(chosen) < settings.count:
            say(f"{source}: {len(chosen)} prompts to measure on, of {settings.count} asked for")
        known |= {prompt.id for prompt in chosen}
        sets.append((Path(source).name if settings.prompts else "shipped prompts", chosen))
    return sets


def rendered(target: Target, drafter: Drafter, sets: list[tuple[str, list[Prompt]]], thinking: bool | None, new_tokens: int) -> list[Asked]:
    """Prompts that leave the drafter no room for the text are left out and counted.  UserError where none is left."""
    room = drafter.config.max_position_embeddings - new_tokens
    asked = [Asked(source, prompt, prompt_files.render(target.tokenizer, prompt, thinking)) for source, chosen in sets for prompt in chosen]
    fit = [one for one in asked if len(one.ids) <= room]
    if len(fit) < len(asked):
        say(f"{len(asked) - len(fit)} of {len(asked)} prompts are longer than the {room} tokens that this drafter has room for, and left out")
    if not fit:
        raise UserError("no prompt is left to measure on")
    return fit


def measure(target: Target, drafter: Drafter, asked: list[Asked], new_tokens: int) -> dict:
    """"all" as evaluate.evaluate has it; rows: the figures of each file and category; alarms: what cannot be right, in words."""
    texts = PlainTexts(target, Limit(new_tokens, target.eos_ids), drafter.config.taps)
    with progress.section(f"decoding {len(asked)} prompts both ways") as tell:
        found = evaluate.measure(target, drafter, [(one.prompt.id, one.ids) for one in asked], texts, progress=tell)
    whole = evaluate.report(target, drafter, found, SEED)
    rows = [row(name, [one for one, of in zip(found, asked) if of in members], drafter.config.block_size, whole)
            for name, members in groups(asked).items()]
    return {ALL: whole, "rows": rows, "alarms": alarms(whole, target.dtype)}


def groups(asked: list[Asked]) -> dict[str, list[Asked]]:
    """Rows of the table: each file, where there are several, and each category of each, where there is more than one row to tell apart.

    Prompts of a file without a category, where others of it have one, are its "no category"."""
    sources, made = list(dict.fromkeys(one.source for one in asked)), {}
    for source in sources:
        own = [one for one in asked if one.source == source]
        if len(sources) > 1:
            made[source] = own
        for category in sorted({one.prompt.category for one in own}):
            if any(one.prompt.category for one in own):
                name = category or "no category"
                made[f"{source}: {name}" if len(sources) > 1 else name] = [one for one in own if one.prompt.category == category]
    return made


def row(name: str, found: list[Measured], size: int, whole: dict) -> dict:
    """Figures of some of the texts; those of a group whose texts all have one token are None."""
    differ = {one["prompt"] for one in whole["divergences"]}
    figures = dict.fromkeys(("verifies", "tau", "tau_interval", "tau_prompt", "tau_simulated", "acceptance_by_slot", "spec_tokens_per_s", "eta"))
    if any(one.spec.accepted for one in found):
        made = evaluate.accepted(found, size, SEED) | evaluate.speed(found, whole["step_seconds"])
        figures = {key: made[key] for key in figures}
    return {"name": name, "prompts": len(found), "identical": sum(one.prompt not in differ for one in found)} | figures


def alarms(whole: dict, dtype: torch.dtype) -> list[str]:
    """What in a report cannot be right.  In fp32 a text that differs; in fewer bits it may, by rounding."""
    found = [acceptance.parted(whole["tau"], whole["tau_simulated"], str(dtype).removeprefix("torch."))]
    if dtype == torch.float32 and whole["divergences"]:
        found.append(f"{len(whole['divergences'])} of {whole['prompts']} texts are not plain decoding's; in float32 all must be")
    return [words for words in found if words]


def show(made: dict, settings: Eval) -> list[RenderableType]:
    whole, where = made[ALL], made["identity"]
    note = (f"{where['target']['dtype']}, {where['device']}; at most {made['new_tokens']} tokens each, greedy. tau: tokens per verify, pooled over "
            "blocks, and its 95 % interval over prompts; prompt: mean of per-prompt means; sim.: simulated on the plain texts, as a trainer sees "
            f"them; eta: speedup. Plain decoding: {whole['plain_tokens_per_s']:.1f} tokens/s; by the formula tau L / (T_t + T_d), eta is "
            f"{whole['eta_theory']:.2f}.")
    main = tables.table(f"Acceptance of {settings.drafter} on {settings.target}", "", "prompts", "tau (95 %)", "prompt", "sim.", "tokens/s", "eta",
                        "same text", note=note)
    for column in main.columns:
        column.no_wrap = True
    for one in [*made["rows"], {"name": ALL} | whole]:
        if one["name"] == ALL and made["rows"]:
            main.add_section()
        main.add_row(*cells(one))
    slots = tables.table(f"Accepted by slot, blocks of {made['block_size']}", "", *map(str, range(1, len(whole["acceptance_by_slot"]) + 1)),
                         note="Of the blocks whose text went so far. First row: all drafts up to this slot stand; second: this one does, given those "
                         "before it.")
    for name, key in (("up to here", "acceptance_by_slot"), ("given those before", "acceptance_given_previous")):
        slots.add_row(name, *(f"{100 * rate:.0f} %" if rate is not None else "-" for rate in whole[key]))
    return [main, slots, Text("\n".join(texts_lines(whole) + [f"ALARM: {words}" for words in made["alarms"]]))]


def cells(one: dict) -> list[str]:
    def figure(key: str, form: str) -> str:
        return "-" if one[key] is None else form.format(one[key])
    interval = " ({:.2f} {:.2f})".format(*one["tau_interval"]) if one["tau_interval"] and one["prompts"] > 1 else ""
    return [one["name"], str(one["prompts"]), figure("tau", "{:.2f}") + interval, figure("tau_prompt", "{:.2f}"), figure("tau_simulated", "{:.2f}"),
            figure("spec_tokens_per_s", "{:.1f}"), figure("eta", "{:.2f}"), f"{one['identical']}/{one['prompts']}"]


def texts_lines(whole: dict) -> list[str]:
    differ = whole["divergences"]
    lines = [f"{whole['identical']} of {whole['prompts']} texts are identical to plain decoding's"]
    lines += [f"  prompt {one['prompt'][:12]}: differs first at new token {one['position']}, where the target's first choice leads by "
              f"{one['margin']:.2g} in logits" for one in differ[:LISTED]]
    return lines + ([f"  and {len(differ) - LISTED} more"] if len(differ) > LISTED else [])
