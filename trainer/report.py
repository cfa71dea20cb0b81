"""`hstrain report`: what was measured of the runs' checkpoints, in the terminal, as a picture, as a page and as JSON.

Joins the parts: report_runs (folders), report_document (figures, by evidence), report_plots and report_html (what is written).
Here: the command, and the terminal's tables.  Left out: any figure of its own."""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from common.errors import UserError
from common.version import versions
from trainer import config, report_document, report_runs
from trainer.report_words import tokens_text

PLAIN = {"box": box.SIMPLE_HEAD, "padding": (0, 1), "pad_edge": False, "collapse_padding": True}
SEED = 0                     # of the bootstrap: the same runs give the same report
LISTED = 10                  # divergences and alarms that the terminal shows
STEPS = ("tokens: trained on, re-reads included; tau: tokens per verify, pooled over blocks; prompt: mean of per-prompt means; "
         "sim.: simulated on the same texts; aside: simulated on texts held aside here; plain, spec.: tokens/s; eta: speedup measured; "
         "same: texts identical to plain decoding")
ARMS = "tau: tokens per verify, mean over seeds; sim.: simulated on the same texts; eta: speedup measured; theory: tau L / (T_t + T_d)"


def show(settings: config.Report) -> None:
    files = outputs(settings)
    runs = report_runs.load(settings.runs)
    from trainer.offline import parted             # torch, for one rule that training has, too
    document = report_document.build(runs, np.random.default_rng(SEED), parted, report_runs.sweeps_under_way(settings.runs))
    if settings.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        terminal(document, Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100))
    told = Console(file=sys.stderr if settings.json else sys.stdout)
    for what, path in write(document, files).items():
        told.print(f"{what}: {path.resolve()}", soft_wrap=True, highlight=False)


def outputs(settings: config.Report) -> dict[str, Path]:
    """{"picture" | "page" | "JSON": file to write}.  --out FILE.png is a picture, any other --out a folder for all three."""
    out = settings.out or (Path("report.png") if not settings.html and not settings.json else None)
    files = {}
    if out:
        folder = {"picture": out / "report.png", "page": out / "report.html", "JSON": out / "report.json"}
        files = {"picture": out} if out.suffix == ".png" else folder
    if settings.html:
        files["page"] = settings.html
    for file in files.values():
        if file.is_dir() or any(parent.exists() and not parent.is_dir() for parent in file.parents):
            raise UserError(f"{file} cannot be written: a folder has this name, or a file the name of its folder")
    return files


def write(document: dict, files: dict[str, Path]) -> dict[str, Path]:
    """Write them; returns those written: where nothing is measured there is nothing to draw."""
    if not any(document["curves"].values()):
        return {}
    from trainer import report_html, report_plots
    made = f"{time.strftime('%Y-%m-%d %H:%M')}, hstrain report of {', '.join(f'{k} {v}' for k, v in versions().items())}"
    for what, path in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if what == "picture":
            report_plots.png(document, path)
        else:
            text = report_html.page(document, made) if what == "page" else json.dumps(document, indent=1, allow_nan=False)
            path.write_text(text, encoding="utf-8")
    return files


def terminal(document: dict, console: Console) -> None:
    """The summary in words, then tables: steps of a single run, or arms and pairs."""
    for sweep, asked, begun in document["sweeps_under_way"]:
        console.print(f"sweep {sweep}: {begun} of {asked} runs have begun", highlight=False)
    for name in document["not_measured"]:
        console.print(f"{name}: no acceptance measured yet", highlight=False)
    if not document["curves"]:
        return
    single = document["runs"][0] if len(document["runs"]) == 1 else None
    for table in [steps_table(single)] if single else [arms_table(document), pairs_table(document)]:
        if table:
            console.print(table)
    if not single:
        for heading, sentences in (("Shows", document["shows"]), ("Does not show", document["lacks"])):
            console.print(bullets(heading, sentences))
    console.print(slots_table(document))
    if document["speed"] and single:
        console.print("{identical} of {prompts} held-out texts are identical to plain decoding".format(**document["speed"][0]), highlight=False)
    listed(console, [f"{d['run']}, prompt {d['prompt'][:12]}: differs first at token {d['position']}, where the target's top-1/top-2 margin is "
                     f"{d['margin']:.2g}" for d in document["divergences"]], document["divergences_left_out"])
    listed(console, [f"ALARM {alarm['run']} step {alarm['step']}: {alarm['says']}" for alarm in document["alarms"]], 0)


def steps_table(run: dict) -> Table:
    """Every measured step of one run; '-' where only one of the two boxes has measured it."""
    out = Table(title=f"{run['arm']}, seed {run['seed']}: acceptance on held-out prompts, real decoding", **PLAIN, caption=STEPS)
    for name in ("step", "tokens", "tau (95 %)", "prompt", "sim.", "aside", "plain", "spec.", "eta", "same"):
        out.add_column(name, justify="right", no_wrap=True)
    real, aside = ({row["step"]: row for row in run[source]} for source in ("real", "simulated"))
    for step in sorted({*real, *aside}):
        row = real.get(step)
        cells = [_of(row, "tau", "{:.2f}") + (" ({:.2f} {:.2f})".format(*row["tau_interval"]) if row else ""), _of(row, "tau_prompt", "{:.2f}"),
                 _of(row, "tau_simulated", "{:.2f}"), _of(aside.get(step), "tau", "{:.2f}"), _of(row, "plain_tokens_per_s", "{:.0f}"),
                 _of(row, "spec_tokens_per_s", "{:.0f}"), _of(row, "eta", "{:.2f}"), f"{row['identical']}/{row['prompts']}" if row else "-"]
        out.add_row(str(step), tokens_text((row or aside[step])["tokens"]), *cells)
    return out


def arms_table(document: dict) -> Table | None:
    if not (compared := document["compared"]):
        return None
    title = f"Arms after {tokens_text(compared['tokens'])} training tokens, {document['source']} acceptance"
    out = Table(title=title, **PLAIN, caption=ARMS)
    for name in ("arm", "seeds", "tau (95 %)", "prompt", "sim.", "eta", "theory"):
        out.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for arm in sorted(compared["arms"], key=lambda arm: -arm["tau"]):
        interval = arm["interval"] or arm["over_prompts"]
        out.add_row(arm["arm"], str(len(arm["seeds"])), f"{arm['tau']:.2f}" + (" ({:.2f} {:.2f})".format(*interval) if interval else ""),
                    *(_of(arm, name, "{:.2f}") for name in ("tau_prompt", "tau_simulated", "eta", "eta_theory")))
    return out


def pairs_table(document: dict) -> Table | None:
    if not (compared := document["compared"]) or not compared["pairs"]:
        return None
    how = "paired by prompt and seed" if compared["paired"] else f"not paired: {compared['not_paired']}"
    out = Table(title="Differences of tau, the higher arm first", **PLAIN,
                caption=f"95 % over prompts and seeds (one seed: over prompts); {how}; p corrected by Holm over {len(compared['pairs'])}")
    for name in ("higher", "lower", "by", "95 %", "p", "verdict"):
        out.add_column(name, justify="right" if name in ("by", "95 %", "p") else "left", no_wrap=name in ("by", "95 %", "p"), overflow="fold")
    for pair in compared["pairs"]:
        interval = pair["difference"]["interval"] or pair["difference"]["over_prompts"]
        out.add_row(pair["a"], pair["b"], f"{pair['difference']['estimate']:.2f}", "{:.2f} {:.2f}".format(*interval) if interval else "-",
                    _of(pair, "p_holm", "{:.3f}"), pair["outcome"], style="bold" if pair["separated"] else None)
    return out


def slots_table(document: dict) -> Table:
    """Share of blocks whose slots 1..j were all accepted, a line an arm."""
    out = Table.grid(padding=(0, 2, 0, 0))
    many = len(document["arms"]) > 1
    if many:
        out.add_row("accepted by slot")
    for arm, rates in document["slots"].items():
        out.add_row(f"  {arm}" if many else "accepted by slot:", "  ".join(f"{j}:{rate:.0%}" for j, rate in enumerate(rates, 1)))
    return out


def bullets(heading: str, sentences: list[str]) -> Table:
    out = Table.grid(padding=(0, 1))
    out.add_row("", f"[bold]{heading}[/bold]")
    for sentence in sentences:
        out.add_row("-", sentence)
    return out


def listed(console: Console, lines: list[str], left_out: int) -> None:
    for line in lines[:LISTED]:
        console.print(f"  {line}", highlight=False)
    if more := len(lines[LISTED:]) + left_out:
        console.print(f"  and {more} more" + ("" if not left_out else f" ({left_out} did not fit the producer's message)"), highlight=False)


def _of(row: dict | None, name: str, form: str) -> str:
    return "-" if row is None or row.get(name) is None else form.format(row[name])
