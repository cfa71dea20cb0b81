"""The report's charts, drawn once with matplotlib: together as a PNG, and each as an SVG whose colours are CSS variables.

A chart takes axes and the report's document (report_document.py) and draws; it computes no figure.  Left out: legends of single
charts (the PNG has one for all, the page has its own)."""
from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path

from common.errors import UserError
from trainer.report_words import tokens_text

# name -> (on light, on dark).  The light values stand in the PNG; in an SVG each becomes var(--name).
INK = {"ink": ("#1f2328", "#e6e8eb"), "faint": ("#656d76", "#9aa4af"), "rule": ("#d8dce1", "#363d46"), "paper": ("#ffffff", "#16191d"),
       "alarm": ("#c92a2a", "#ff8787"),
       "arm0": ("#2563eb", "#74a9ff"), "arm1": ("#d9480f", "#ff922b"), "arm2": ("#087f5b", "#38d9a9"), "arm3": ("#9c36b5", "#da77f2"),
       "arm4": ("#946200", "#ffd43b"), "arm5": ("#0e7490", "#3bc9db"), "arm6": ("#c2255c", "#f783ac"), "arm7": ("#5f3dc4", "#b197fc"),
       "arm8": ("#4d6b0a", "#a9e34b")}
COLOURS = [name for name in INK if name.startswith("arm")]
MARKERS = "osD^vPX<>"
CSS_MARKS = "●■◆▲▼✚✖◀▶"       # MARKERS as text
MOST_PAIRS = 10              # in the chart of differences
NARROW, WIDE = (4.0, 3.2), (9.2, 4.0)      # inches of 72 units: 4 wide on a phone of 360 pixels, text of 9 is 11 pixels high


def ink(name: str) -> str:
    return INK[name][0]


def looks(document: dict) -> dict[str, dict]:
    """{arm: {"color", "marker"}}: the same in every chart, in order of the report's arms."""
    return {arm: {"color": ink(COLOURS[i % len(COLOURS)]), "marker": MARKERS[i % len(MARKERS)]} for i, arm in enumerate(document["arms"])}


def curves(axes, document: dict) -> None:
    """tau by training tokens: seeds thin, their mean strong, its 95 % interval shaded."""
    style = looks(document)
    for arm, curve in document["curves"].items():
        color = style[arm]["color"]
        for points in curve["seeds"].values():
            axes.plot(*zip(*points), color=color, linewidth=0.8, alpha=0.55, marker="." if len(points) == 1 else "", markersize=3)
        if curve["mean"]:
            tokens, tau, low, high = zip(*curve["mean"])
            axes.plot(tokens, tau, linewidth=2, markersize=5, markeredgewidth=0, **style[arm])
            if None not in low:
                axes.fill_between(tokens, low, high, color=color, alpha=0.13, linewidth=0)
    if compared := document["compared"]:
        axes.axvline(compared["tokens"], color=ink("faint"), linewidth=0.8, linestyle=(0, (2, 3)))
    axes.axhline(1, color=ink("faint"), linewidth=0.8)
    axes.annotate("1: no draft accepted", (0.01, 0.99), xycoords=("axes fraction", "data"), va="top", fontsize=8, color=ink("faint"))
    axes.set(xlabel="tokens trained on, re-reads included", ylabel="tau (tokens per verify)", ylim=(0.8, None))
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(lambda value, _: tokens_text(value))


def slots(axes, document: dict) -> None:
    """Share of blocks accepted up to each slot."""
    style, most = looks(document), 0
    for arm, rates in document["slots"].items():
        axes.plot(range(1, len(rates) + 1), [100 * rate for rate in rates], linewidth=1.8, markersize=5, markeredgewidth=0, **style[arm])
        most = max(most, len(rates))
    axes.set(xlabel="slot of the block", ylabel="accepted up to here, %", ylim=(0, 103), xlim=(0.7, most + 0.3))
    axes.set_xticks(range(1, most + 1, 1 if most < 12 else 2))


def simulation(axes, document: dict) -> None:
    """Real tau by simulated tau: filled on the same texts, hollow on texts held aside; measurements with an alarm are ringed."""
    style, alarmed = looks(document), {(alarm["run"], alarm["step"]) for alarm in document["alarms"]}
    points = document["simulation"]
    for point in points:
        look = style[point["arm"]]
        for what, face in (("same_texts", look["color"]), ("aside", "none")):
            if point[what] is not None:
                axes.plot(point[what], point["real"], linestyle="", markersize=5 if what == "same_texts" else 6, marker=look["marker"],
                          markerfacecolor=face, markeredgecolor=look["color"], markeredgewidth=0 if what == "same_texts" else 0.9,
                          alpha=0.9 if what == "same_texts" else 0.75)
        if (point["run"], point["step"]) in alarmed:
            axes.plot(point["same_texts"], point["real"], linestyle="", marker="o", markersize=13, markerfacecolor="none",
                      markeredgecolor=ink("alarm"), markeredgewidth=1.6)
    values = [point[what] for point in points for what in ("real", "same_texts", "aside") if point[what] is not None]
    low, high = min(values), max(values)
    edge = 0.06 * (high - low) or 0.2
    axes.plot([low - edge, high + edge], [low - edge, high + edge], color=ink("faint"), linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    axes.set(xlabel="simulated tau", ylabel="real tau", xlim=(low - edge, high + edge),
             ylim=(low - edge, high + edge))


def pairs(axes, document: dict) -> None:
    """Differences with intervals, one row a pair: thin over prompts and seeds, thick over prompts alone."""
    found = drawn_pairs(document)
    for row, pair in enumerate(found):
        figure, strong = pair["difference"], ink("ink" if pair["separated"] else "faint")
        if figure["interval"]:
            axes.plot(figure["interval"], [row, row], color=strong, linewidth=1.2, solid_capstyle="butt")
        if figure["over_prompts"]:
            axes.plot(figure["over_prompts"], [row, row], color=strong, linewidth=3.6, alpha=0.55, solid_capstyle="butt")
        axes.plot(figure["estimate"], row, marker="o", color=strong, markersize=6, markeredgewidth=0)
        axes.annotate(f"{pair['a']} − {pair['b']}", (0.01, row - 0.24), xycoords=("axes fraction", "data"), va="bottom", fontsize=9, color=strong,
                      bbox={"facecolor": ink("paper"), "edgecolor": "none", "pad": 1.5})
    axes.axvline(0, color=ink("alarm"), linewidth=1)
    axes.set(xlabel="difference of tau", ylim=(len(found) - 0.5, -0.85))
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def drawn_pairs(document: dict) -> list[dict]:
    """All pairs, or where they are too many to read each arm beside the one it is compared with (none such: pairs of the highest)."""
    found, asks = document["compared"]["pairs"], document["questions"]
    if len(found) <= MOST_PAIRS:
        return found
    asked = [pair for pair in found if asks[pair["a"]]["beside"] == pair["b"] or asks[pair["b"]]["beside"] == pair["a"]]
    highest = max(document["compared"]["arms"], key=lambda arm: arm["tau"])["arm"]
    return (asked or [pair for pair in found if pair["a"] == highest])[:MOST_PAIRS]


def panels(document: dict) -> dict[str, tuple[Callable, str]]:
    """{name: (chart, title)} of the charts that this report has something for."""
    return {name: (chart, title) for name, chart, title, there in (
        ("curves", curves, "Acceptance against training tokens", any(curve["seeds"] for curve in document["curves"].values())),
        ("pairs", pairs, "Differences between arms", bool(document["compared"] and document["compared"]["pairs"])),
        ("slots", slots, "Acceptance per slot", any(document["slots"].values())),
        ("simulation", simulation, "Simulated against real", bool(document["simulation"]))) if there}


def png(document: dict, path: Path) -> None:
    """All charts on one sheet, with one legend."""
    plt = _pyplot()
    drawn = list(panels(document).values())
    wide = min(2, len(drawn))
    with plt.rc_context(_rc()):
        figure, grid = plt.subplots(-(-len(drawn) // wide), wide, figsize=(6.2 * wide, 4.4 * -(-len(drawn) // wide)), dpi=130, squeeze=False,
                                    layout="constrained")
        for axes, (chart, title) in itertools.zip_longest(grid.flat, drawn, fillvalue=(None, "")):
            if chart is None:
                axes.set_visible(False)
                continue
            chart(axes, document)
            axes.set_title(title, loc="left", fontsize=11)
        handles = [plt.Line2D([], [], label=arm, linewidth=2, markeredgewidth=0, **look) for arm, look in looks(document).items()]
        figure.legend(handles=handles, loc="outside upper center", ncols=min(5, len(handles)), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        plt.close(figure)


def svg(document: dict, name: str, size: tuple[float, float], label: str, prefix: str) -> str:
    """One chart as an <svg> for a page: scales with its box, colours from CSS variables, named for screen readers.

    size: inches.  label: what it shows, in words, as plain text.  prefix: makes its ids its own on the page."""
    plt = _pyplot()
    with plt.rc_context(_rc() | {"svg.fonttype": "none", "svg.hashsalt": prefix, "savefig.transparent": True}):
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        panels(document)[name][0](axes, document)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        plt.close(figure)
    return _for_page(out.getvalue(), label, prefix)


def _for_page(text: str, label: str, prefix: str) -> str:
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()
    body = text[text.index(">", text.index("<svg")) + 1:]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r"url\(#", f"url(#{prefix}-", body)
    body = re.sub(r'xlink:href="#', f'href="#{prefix}-', body)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.S)              # holds for a whole page; the page has its own
    body = re.sub(r"font-family: [^;]+; ", "", body)
    for variable, (light, _) in INK.items():
        body = body.replace(light, f"var(--{variable})")
    escaped = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg role="img" aria-label="{escaped}" viewBox="0 0 {width} {height}">{body}'


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise UserError("charts need matplotlib: pip install 'hsdraft[trainer]', or ask for --json alone") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    return plt


def _rc() -> dict:
    return {"font.size": 9, "axes.edgecolor": ink("rule"), "axes.labelcolor": ink("faint"), "xtick.color": ink("faint"), "ytick.color": ink("faint"),
            "text.color": ink("ink"), "axes.grid": True, "grid.color": ink("rule"), "grid.linewidth": 0.6, "axes.spines.top": False,
            "axes.spines.right": False, "axes.axisbelow": True, "figure.facecolor": ink("paper"), "axes.facecolor": ink("paper")}
