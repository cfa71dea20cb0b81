"""`hstrain report`: what the producer measured of each run's checkpoints, as a table, a picture and JSON.

Reads metrics.jsonl alone, so it works while a run goes on and on another box.  Pairwise statistics come elsewhere."""
from __future__ import annotations

import json
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from common import metrics
from common.errors import UserError
from trainer import config

LEGEND = ("tokens: trained on, re-reads included; tau: tokens per verify, pooled over blocks; prompt: mean of per-prompt means; "
          "sim.: simulated on the plain texts; plain, spec.: tokens/s; eta: speedup measured; same: texts identical to plain decoding")


def load(folder: Path) -> dict:
    """{"run", "arm", "seed", "evals": [rows, ascending step]}; UserError where the folder is no run."""
    try:
        identity = json.loads((folder / "run.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{folder} is not a run folder (it has no run.json)") from None
    rows = sorted(metrics.read(folder / "metrics.jsonl", "eval"), key=lambda row: row["step"])
    return {"run": folder.name, "arm": identity["arm"]["name"], "seed": identity["seed"], "contract": identity["contract"], "evals": rows}


def show(settings: config.Report) -> None:
    runs = [load(folder) for folder in settings.runs]
    if settings.json:
        print(json.dumps(runs, indent=1))
        return
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
    for run in runs:
        if not run["evals"]:
            console.print(f"{run['run']}: no acceptance measured yet")
            continue
        console.print(table(run))
        console.print(identity_line(run["evals"][-1]))
        console.print(slots_line(run["evals"][-1]))
    if any(run["evals"] for run in runs):
        draw(runs, settings.out)
        console.print(f"picture: {settings.out.resolve()}", soft_wrap=True)


def table(run: dict) -> Table:
    out = Table(title=f"{run['arm']}, seed {run['seed']}: acceptance on held-out prompts, real decoding",
                box=box.SIMPLE, padding=(0, 1), caption=LEGEND)
    for name in ("step", "tokens", "tau (95 %)", "prompt", "sim.", "plain", "spec.", "eta", "same"):
        out.add_column(name, justify="right", no_wrap=True)
    for row in run["evals"]:
        low, high = row["tau_interval"]
        out.add_row(str(row["step"]), f"{row['tokens'] / 1e3:,.0f}k", f"{row['tau']:.2f} ({low:.2f} {high:.2f})", f"{row['tau_prompt']:.2f}",
                    f"{row['tau_simulated']:.2f}", f"{row['plain_tokens_per_s']:.0f}", f"{row['spec_tokens_per_s']:.0f}",
                    f"{row['eta']:.2f}", f"{row['identical']}/{row['prompts']}")
    return out


def identity_line(row: dict) -> str:
    """How many texts speculation left as they were, and each one that differs with the target's own margin there."""
    text = f"{row['identical']} of {row['prompts']} held-out texts are identical to plain decoding"
    for d in row["divergences"]:
        text += f"\n  prompt {d['prompt'][:12]}: differs first at token {d['position']}, where the target's top-1/top-2 margin is {d['margin']:.2g}"
    return text


def slots_line(row: dict) -> str:
    return "accepted by slot: " + "  ".join(f"{j}: {rate:.0%}" for j, rate in enumerate(row["acceptance_by_slot"], 1))


def draw(runs: list[dict], path: Path) -> None:
    """tau against tokens trained on, one line a run, 95 % interval shaded, simulated acceptance dotted."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(7.5, 4.6), dpi=130, layout="constrained")
    for i, run in enumerate(run for run in runs if run["evals"]):
        tokens, taus = [r["tokens"] for r in run["evals"]], [r["tau"] for r in run["evals"]]
        [line] = axes.plot(tokens, taus, marker="o", markersize=4, linewidth=1.8, color=f"C{i}", label=f"{run['arm']}, seed {run['seed']}")
        axes.fill_between(tokens, *zip(*(r["tau_interval"] for r in run["evals"])), alpha=0.15, color=line.get_color(), linewidth=0)
        axes.plot(tokens, [r["tau_simulated"] for r in run["evals"]], ":", color=line.get_color(), linewidth=1.2,
                  label="simulated on plain text" if i == 0 else None)
        axes.annotate(f"{taus[-1]:.2f}", (tokens[-1], taus[-1]), textcoords="offset points", xytext=(6, -3), fontsize=9)
    axes.axhline(1, color="0.6", linewidth=0.8)
    axes.annotate("no draft accepted", (0.995, 1), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8, color="0.4")
    axes.set(xlabel="tokens trained on (re-reads included)", ylabel="tau: tokens per verify, held-out prompts", ylim=(0.8, None))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1e3:g}k" if value < 1e6 else f"{value / 1e6:g}M")
    axes.margins(x=0.08)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
