"""The report as one page: no script, nothing fetched, light and dark, phone and desk.

Text and tables are HTML, charts inline SVG (report_plots.py) in colours that follow the page's.  Left out: whatever needs a script."""
from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trainer import report_plots
from trainer.report_plots import COLOURS, CSS_MARKS, INK, NARROW, WIDE
from trainer.report_words import tokens_text

LISTED = 40                  # divergences and alarms in a table; how many more there are is said
CAPTIONS = {
    "curves": "Thin: one seed each. Strong: their mean, with its 95 % interval over prompts and seeds shaded (one seed: over prompts). Bands "
              "of two arms may overlap though their difference is separated: it is taken prompt by prompt, where what both share cancels. "
              "Dotted: where arms are compared.",
    "pairs": "Each difference with its 95 % interval: thin over prompts and seeds, thick over prompts alone (these very drafters). Strong: "
             "separated after correction for all pairs. More than ten pairs: each arm beside the one it is compared with; the table has all.",
    "slots": "Share of blocks in which this slot and all before it were accepted, mean over seeds, where arms are compared.",
    "simulation": "One mark a measurement. Filled: simulated on the same texts, where real must equal simulated up to rounding. Hollow: "
                  "simulated on texts held aside on the trainer's box, other texts, so only roughly alike. Ringed: an alarm.",
}
CSS = """
:root{color-scheme:light dark;LIGHT}
@media (prefers-color-scheme:dark){:root{DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Liberation Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:.2rem 0 .3rem}
h2{font-size:1.2rem;margin:2.4rem 0 .5rem}
.sub,figcaption,.note{color:var(--faint);font-size:.875rem}
.sub{margin:0 0 1.2rem;overflow-wrap:anywhere}
.words{display:grid;gap:1rem}
.words section{border:1px solid var(--rule);border-radius:10px;padding:.9rem 1.1rem}
.words h2{margin:0 0 .4rem;font-size:1rem}
.words ul{margin:0;padding-left:1.1rem}
.words li{margin:.35rem 0}
.alarm{color:var(--alarm);font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;list-style:none;margin:1.6rem 0 0;padding:.5rem 0;font-size:.9rem}
.legend{border-bottom:1px solid var(--rule)}
.stays{position:sticky;top:0;background:var(--paper);z-index:1}
.charts{display:grid;gap:0 2.2rem}
figure{margin:0;min-width:0}
figcaption{margin:.3rem 0 0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg *{stroke-linejoin:round;stroke-linecap:butt}
svg text{font-family:inherit}
.wide{display:none}
.scroll{overflow-x:auto;margin:.4rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;width:100%}
thead th{white-space:normal;vertical-align:bottom}
.note{margin:.3rem 0}
ul.note{padding-left:1.1rem}
th,td{text-align:right;padding:.32rem .6rem;border-bottom:1px solid var(--rule);white-space:nowrap;vertical-align:top}
th{font-weight:600}
th[scope=row]{font-weight:400}
th:first-child,td:first-child{padding-left:0}
.text,th.text{text-align:left}
td.long{white-space:normal;text-align:left;min-width:15rem}
tr.strong td,tr.strong th{font-weight:600}
code{font-size:.85em;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;font-size:.9rem}
dt{color:var(--faint)}dd{margin:0;overflow-wrap:anywhere;min-width:0}
@media (min-width:800px){.words,.charts{grid-template-columns:1fr 1fr}.span{grid-column:1/-1}}
@media (min-width:800px){.wide{display:block}.wide+.narrow{display:none}main{padding-top:2.5rem}}
@media (min-width:1000px){.charts{grid-template-columns:1fr 1fr 1fr}}
@media print{.legend{position:static}}
"""


def page(document: dict, made: str) -> str:
    """The whole page.  made: when and with what, in words, for its foot."""
    title = escape(document["title"])
    parts = [f"<header><h1>{title}</h1><p class=sub>{escape(subtitle(document))}</p></header>"]
    parts += [part(document) for part in (words, legend, charts, arms_table, pairs_table, speed_table, alarms_table, divergences_table)]
    body = "\n".join(part for part in [*parts, identity(document, made)] if part)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{title}</title><style>{_css()}</style></head>\n<body><main>\n{body}\n</main></body></html>\n")


def subtitle(document: dict) -> str:
    compared = document["compared"]
    runs = f"{len(document['runs'])} runs" if len(document["runs"]) != 1 else f"run {document['runs'][0]['run']}"
    how = "real decoding of held-out prompts" if document["source"] == "real" else "simulated on texts held aside"
    return f"{runs}, {how}" + (f", compared after {tokens_text(compared['tokens'])} training tokens" if compared else "")


def words(document: dict) -> str:
    def items(sentences: Sequence[str]) -> str:
        return "".join(f"<li{' class=alarm' if text.startswith('ALARM') else ''}>{escape(text)}</li>" for text in sentences)
    return (f"<div class=words><section aria-labelledby=shows><h2 id=shows>What this shows</h2><ul>{items(document['shows'])}</ul></section>"
            f"<section aria-labelledby=lacks><h2 id=lacks>What it does not show</h2><ul>{items(document['lacks'])}</ul></section></div>")


def legend(document: dict) -> str:
    stays = " stays" if len(document["arms"]) <= 4 else ""            # on a phone, more would cover the charts
    return (f'<ul class="legend{stays}" aria-label="Arms, by mark and colour">'
            + "".join(f"<li>{_mark(document, arm)} {escape(arm)}</li>" for arm in document["arms"]) + "</ul>")


def charts(document: dict) -> str:
    """Each chart with its caption; the first one drawn twice, for wide and for narrow pages."""
    out = []
    for name, (_, title) in report_plots.panels(document).items():
        label = f"Chart: {title}. {CAPTIONS[name]} The numbers are in the tables below."
        rows = len(report_plots.drawn_pairs(document)) if name == "pairs" else 0
        narrow = (NARROW[0], max(NARROW[1], 0.42 * rows + 0.6))
        drawn = f"<div class=narrow>{report_plots.svg(document, name, narrow, label, name)}</div>"
        if name == "curves":
            drawn = f"<div class=wide>{report_plots.svg(document, name, WIDE, label, name + '-wide')}</div>" + drawn
        out.append(f"<figure{' class=span' if name == 'curves' else ''}><h2>{escape(title)}</h2>{drawn}"
                   f"<figcaption>{escape(CAPTIONS[name])}</figcaption></figure>")
    return f"<div class=charts>{''.join(out)}</div>"


def arms_table(document: dict) -> str:
    compared = document["compared"]
    if not compared:
        return ""
    rows = []
    for arm in sorted(compared["arms"], key=lambda arm: -arm["tau"]):
        rows.append(([f"{_mark(document, arm['arm'])} {escape(arm['arm'])}", f"{arm['tau']:.2f}", _interval(arm["interval"]),
                      _interval(arm["over_prompts"]), " ".join(f"{tau:.2f}" for tau in arm["taus"]), _number(arm["tau_prompt"])], ""))
    asks = "".join(f"<li>{escape(arm)}: {escape(said['question'])} Compared with {escape(said['beside'])}.</li>"
                   for arm, said in document["questions"].items() if said["question"])
    caption = f"tau after {tokens_text(compared['tokens'])} training tokens; one seed: no interval over seeds."
    columns = ["arm", "tau", "95 %, prompts and seeds", "95 %, prompts", "by seed", "mean of prompts"]
    return _table("Arms", caption, columns, rows, {0: "text"}) + (f"<ul class=note>{asks}</ul>" if asks else "")


def pairs_table(document: dict) -> str:
    compared = document["compared"]
    if not compared or not compared["pairs"]:
        return ""
    rows = []
    for pair in compared["pairs"]:
        figure = pair["difference"]
        note = f" (blocks of {pair['block_sizes'][0]} against {pair['block_sizes'][1]})" if pair["block_sizes_differ"] else ""
        cells = [f"{escape(pair['a'])} − {escape(pair['b'])}", f"{figure['estimate']:+.2f}", _interval(figure["interval"]),
                 _interval(figure["over_prompts"]), _number(pair["superiority"], "{:.1%}"), _p(pair["p"]), _p(pair["p_holm"]),
                 escape(pair["outcome"] + note)]
        rows.append((cells, "strong" if pair["separated"] else ""))
    how = "Paired by prompt and seed." if compared["paired"] else f"Not paired: {compared['not_paired']}."
    columns = ["tau of", "difference", "95 %, prompts and seeds", "95 %, prompts", "sure", "p", "p (Holm)", "verdict"]
    return _table("Pairs", how, columns, rows, {0: "text", 7: "text"}) + f"<p class=note>{escape(document['method'])}</p>"


def speed_table(document: dict) -> str:
    rows = [([escape(row["run"]), f"{row['tau']:.2f}", f"{row['plain_tokens_per_s']:.0f}", f"{row['spec_tokens_per_s']:.0f}",
              f"{row['eta']:.2f}", f"{row['eta_theory']:.2f}", f"{row['eta'] / row['eta_theory']:.0%}",
              f"{row['identical']}/{row['prompts']}"], "") for row in document["speed"]]
    caption = ("Tokens a second on the producer's box while it measured; eta: how many times plain decoding's speed; eta_theory: "
               "tau L / (T_t + T_d); identical: texts equal to plain decoding's.")
    columns = ["run", "tau", "plain", "speculative", "eta", "eta_theory", "of theory", "identical"]
    return _table("Speed", caption, columns, rows, {0: "text"}) if rows else ""


def alarms_table(document: dict) -> str:
    rows = [([escape(alarm["run"]), str(alarm["step"]), escape(alarm["says"])], "") for alarm in document["alarms"]]
    caption = "A fault between training and serving shows here first."
    columns, kinds = ["run", "step", "what parts"], {0: "text", 2: "long"}
    return _table("Where simulated and real acceptance part", caption, columns, rows, kinds) if rows else ""


def divergences_table(document: dict) -> str:
    rows = [([escape(found["run"]), f"<code>{escape(found['prompt'][:12])}</code>", str(found["position"]), f"{found['margin']:.2g}"], "")
            for found in document["divergences"]]
    left_out = f" {document['divergences_left_out']} more did not fit the producer's message." if document["divergences_left_out"] else ""
    caption = ("First differing token, and the target's own margin between its first two choices there: small is rounding, large would be "
               "a fault.") + left_out
    columns = ["run", "prompt", "token", "margin"]
    return _table("Texts that differ from plain decoding", caption, columns, rows, {0: "text", 1: "text"}) if rows or left_out else ""


def identity(document: dict, made: str) -> str:
    first = document["runs"][0]["identity"]
    facts = {"target": first.get("target", "not said"), "contract": first["contract"]}
    if compared := document["compared"]:
        facts["prompts"] = str(compared["prompts_hash"] or "texts held aside on the trainer's box")
    for name in ("hsdraft", "commit", "torch", "python"):
        facts[name] = ", ".join(sorted({str(run["identity"].get(name, "not said")) for run in document["runs"]}))
    facts["made"] = made
    said = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    rows = []
    for run in document["runs"]:
        last = (run[document["source"]] or [{}])[-1]
        rows.append(([escape(run["run"]), escape(run["arm"]), str(run["seed"]), str(run["block_size"] or ""),
                      str(last.get("step", "not measured")), tokens_text(last["tokens"]) if last else "",
                      f"<code>{escape(last.get('checkpoint', '')[:12])}</code>"], ""))
    columns = ["run", "arm", "seed", "block", "step", "tokens", "checkpoint"]
    return f"<h2>Identity</h2><dl>{said}</dl>" + _table("Runs", "Last measurement of each.", columns, rows, {0: "text", 1: "text"}, level=3)


def _table(title: str, caption: str, columns: Sequence[str], rows: Sequence[tuple[Sequence[str], str]], kinds: dict[int, str],
           level: int = 2) -> str:
    """cells are HTML already; the first of each row heads it.  kinds: {column: CSS class}."""
    def cell(i: int, html: str) -> str:
        kind = f' class="{kinds[i]}"' if i in kinds else ""
        return f'<th scope="row"{kind}>{html}</th>' if i == 0 else f"<td{kind}>{html}</td>"
    head = "".join(f'<th scope="col"{" class=text" if i in kinds else ""}>{escape(name)}</th>' for i, name in enumerate(columns))
    body = "".join(f"<tr{f' class={kind}' if kind else ''}>" + "".join(cell(i, html) for i, html in enumerate(cells)) + "</tr>"
                   for cells, kind in rows[:LISTED])
    more = f"<p class=note>{len(rows) - LISTED} more rows are in the JSON.</p>" if len(rows) > LISTED else ""
    name = "table-" + title.lower().replace(" ", "-")
    return (f'<h{level} id={name}>{escape(title)}</h{level}><p class=note id={name}-note>{escape(caption)}</p>'
            f"<div class=scroll tabindex=0 role=region aria-labelledby={name}><table aria-labelledby={name} aria-describedby={name}-note>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}")


def _mark(document: dict, arm: str) -> str:
    i = document["arms"].index(arm)
    return f'<span aria-hidden=true style="color:var(--{COLOURS[i % len(COLOURS)]})">{CSS_MARKS[i % len(CSS_MARKS)]}</span>'


def _interval(interval: Sequence[float] | None) -> str:
    return "–" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def _p(value: float | None) -> str:
    return "–" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _css() -> str:
    light, dark = (";".join(f"--{name}:{pair[side]}" for name, pair in INK.items()) for side in (0, 1))
    return CSS.replace("LIGHT", light).replace("DARK", dark)
