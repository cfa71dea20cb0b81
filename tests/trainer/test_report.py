"""The report of runs whose truth is known: which may stand side by side, what is said of them, and what a person gets to see."""
from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from common.errors import UserError
from tests.trainer import synthetic
from tests.trainer.synthetic import FOUR, accepted_of, eval_row, identity, offline_row, sweep, write
from trainer import cli, report, report_document, report_html, report_plots, report_runs
from trainer.offline import parted
from trainer.report_runs import common_tokens, row_at

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "br", "use", "path", "img", "rect", "line"}


def document(*folders) -> dict:
    return report_document.build(report_runs.load(folders), np.random.default_rng(0), parted)


def seen(made: dict, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    report.terminal(made, console)
    return console.export_text()


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    sweep(folder, FOUR)
    return folder


@pytest.fixture(scope="module")
def made(four):
    return document(four)


@pytest.fixture
def one(tmp_path):
    """one(name, arm, seed, rows, **identity): a run folder; rows {step: logit} or rows themselves."""
    def build(name, arm="ce_causal", seed=0, rows=None, *, paired=True, block_size=8, **over):
        rng = np.random.default_rng(seed)
        rows = {500: 0.0, 1000: 0.8} if rows is None else rows
        if isinstance(rows, dict):
            rows = [eval_row(step, [accepted_of(rng, 1 / (1 + np.exp(-logit)), block_size) for _ in range(8)], block_size, paired=paired)
                    for step, logit in rows.items()]
        return write(tmp_path / name, identity(arm, seed, block_size=block_size, **over), rows)
    return build


# Which runs

def test_a_sweeps_folder_stands_for_its_runs(four):
    runs = report_runs.load([four])
    assert [run.name for run in runs] == [run.name for run in report_runs.load([four / "runs"])] == [f"{arm}-s{seed}" for arm in sorted(FOUR) for seed in range(3)]
    assert [run.name for run in report_runs.load([four / "runs/kl_mixed_full-s0", four / "runs"])][0] == "kl_mixed_full-s0"      # once, and first
    with pytest.raises(UserError, match="neither a run folder .* nor a folder of runs that have begun"):
        report_runs.load([four / "runs/ce_bidi-s0/.."  / ".." / ".."])


def test_a_sweep_that_is_not_all_there_says_so(tmp_path):
    sweep(tmp_path / "night", {"ce_causal": 0.0}, seeds=(0, 1))
    said = {"arms": ["ce_causal", "ce_bidi"], "seeds": [0, 1]}
    (tmp_path / "night/sweep.json").write_text(json.dumps(said))
    under_way = report_runs.sweeps_under_way([tmp_path / "night"])
    made = report_document.build(report_runs.load([tmp_path / "night"]), np.random.default_rng(0), parted, under_way)
    assert made["lacks"][0] == "The sweep night asks for 4 runs, of which 2 have begun." and "sweep night: 2 of 4 runs have begun" in seen(made)
    (tmp_path / "night/sweep.json").write_text(json.dumps(said | {"arms": ["ce_causal"]}))
    assert report_runs.sweeps_under_way([tmp_path / "night", tmp_path]) == []


def test_other_contracts_are_refused_by_field(one):
    a, b = one("a"), one("b", seed=1, contract=synthetic.CONTRACT | {"taps": [1, 2, 3], "versions": {"transformers": "5.25.0"}})
    with pytest.raises(UserError, match=r"a and b cannot be compared.*taps: \[1, 2, 3, 4, 5\] -> \[1, 2, 3\]; versions.transformers: 5.24.0 -> 5.25.0"):
        report_runs.load([a, b])
    bare = json.loads((b / "run.json").read_text())
    del bare["extraction"]
    (b / "run.json").write_text(json.dumps(bare))
    with pytest.raises(UserError, match=r"contract: \w{12} -> \w{12} \(the runs do not say in which field\)"):
        report_runs.load([a, b])


def test_one_arm_and_seed_twice_and_a_broken_folder_are_refused(one):
    a, b = one("a"), one("b")
    with pytest.raises(UserError, match="a and b are both ce_causal, seed 0"):
        report_runs.load([a, b])
    (b / "run.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        report_runs.load([b])


def test_tokens_are_equal_or_there_is_no_comparison():
    assert common_tokens([[100, 200, 300], [100, 200], [200, 400]]) == 200
    assert common_tokens([[100, 200], [99.5, 150]]) == 100 and common_tokens([[100], [98]]) is None and common_tokens([[], [100]]) is None
    rows = [{"tokens": 995}, {"tokens": 1002}, {"tokens": 2000}]
    assert row_at(rows, 1000) == {"tokens": 1002} and row_at(rows, 1500) is None


# What is said

def test_what_was_put_in_comes_out(made):
    compared = made["compared"]
    assert made["source"] == "real" and compared["tokens"] == 929_000 and compared["paired"] and compared["prompts"] == 16
    tau = {arm["arm"]: arm["tau"] for arm in compared["arms"]}
    assert sorted(tau, key=tau.get) == sorted(FOUR, key=FOUR.get)
    best = next(pair for pair in compared["pairs"] if {pair["a"], pair["b"]} == {"kl_mixed_full", "ce_bidi"})
    assert best["separated"] and best["a"] == "kl_mixed_full" and best["difference"]["estimate"] == pytest.approx(tau["kl_mixed_full"] - tau["ce_bidi"])
    assert any(best["verdict"] in sentence for sentence in made["shows"]) and "3 seeds an arm" in made["lacks"][0]


def test_figures_are_those_of_the_rows(made, four):
    """tau of an arm: mean over seeds of what the producer said; its curve ends there; slots and eta likewise."""
    rows = [json.loads((four / f"runs/ce_bidi-s{seed}/metrics.jsonl").read_text().splitlines()[-2]) for seed in range(3)]
    assert all(row["kind"] == "eval" for row in rows)
    arm = next(arm for arm in made["compared"]["arms"] if arm["arm"] == "ce_bidi")
    assert arm["taus"] == pytest.approx([row["tau"] for row in rows]) and arm["tau"] == pytest.approx(np.mean(arm["taus"]))
    assert arm["eta"] == pytest.approx(np.mean([row["eta"] for row in rows])) and arm["seeds"] == [0, 1, 2]
    assert made["slots"]["ce_bidi"] == pytest.approx(np.mean([row["acceptance_by_slot"] for row in rows], axis=0).tolist())
    tokens, tau, low, high = made["curves"]["ce_bidi"]["mean"][-1]
    assert (tokens, tau) == (929_000, pytest.approx(arm["tau"])) and low < tau < high and len(made["curves"]["ce_bidi"]["mean"]) == 5


def test_a_run_that_lags_sets_the_comparison_back(one):
    made = document(one("a"), one("b", "ce_bidi", rows={500: 0.3}))
    assert made["compared"]["tokens"] == 500 * synthetic.TOKENS_A_STEP
    assert any("Measured before their end: b (step 500 of 1000)" in sentence for sentence in made["lacks"])
    apart = document(one("c", rows={400: 0.0}), one("d", "ce_bidi", rows={500: 0.3}))
    assert apart["compared"] is None and apart["shows"] == ["No comparison: there is no number of training tokens at which all these runs were measured."]


def test_rows_of_older_versions_are_not_paired_and_that_is_said(one):
    made = document(one("a", rows={1000: 0.8}, paired=False), one("b", "ce_bidi", rows={1000: -1.5}))
    [pair] = made["compared"]["pairs"]
    assert not made["compared"]["paired"] and not pair["paired"] and pair["difference"]["over_prompts"][0] > 0
    assert any(sentence.startswith("Not paired: 1 of 2 measurements hold no accepted lists") for sentence in made["lacks"])
    assert "not paired: 1 of 2" in " ".join(seen(made).split()) and "Not paired: 1 of 2" in report_html.page(made, "today")


def test_a_result_too_large_for_the_link_is_not_paired_either(one):
    row = eval_row(1000, [[1, 2, 3]] * 3, 8) | {"texts": None, "texts_left_out": 3}
    assert not document(one("a", rows=[row]))["compared"]["paired"]


def test_one_seed_other_prompts_and_other_block_sizes_are_said(one):
    two = document(one("a"), one("b", "ce_bidi", block_size=16))
    assert two["compared"]["pairs"][0]["block_sizes_differ"] and any("Block sizes differ (8, 16)" in sentence for sentence in two["lacks"])
    assert any("One seed of ce_causal, ce_bidi" in sentence for sentence in two["lacks"]) and "(blocks of" in report_html.page(two, "today")
    other = one("c", "ce_mixed_full", rows=[eval_row(1000, [[1, 2, 3]] * 8, 8, prompts_hash="ef" * 32)])
    made = document(one("d", rows={1000: 0.5}), other)
    assert made["compared"] is None and "prompts_hash differs (cdcdcdcdcdcd, efefefefefef)" in made["why_not"]


def test_settings_that_differ_are_said_and_the_arms_own_are_not(one):
    made = document(one("a"), one("b", "ce_bidi", lr=0.05))
    assert set(made["settings_that_differ"]) == {"plan.lr"} and made["settings_that_differ"]["plan.lr"] == {"0.02": ["a"], "0.05": ["b"]}
    assert any("plan.lr (0.02, 0.05)" in sentence for sentence in made["lacks"]) and not any("same recipe" in sentence for sentence in made["lacks"])


def test_without_a_producer_the_simulated_figures_stand_and_are_called_so(tmp_path):
    sweep(tmp_path, {"ce_causal": 0.0, "kl_causal": 1.0}, real=False)
    made = document(tmp_path)
    assert made["source"] == "simulated" and made["compared"]["paired"] and made["compared"]["pairs"][0]["separated"] and made["speed"] == []
    assert "simulated on 16 texts held aside" in made["shows"][0] and "no real decoding has been measured" in made["shows"][-1]
    assert "simulated acceptance" in seen(made) and "simulated on texts held aside" in report_html.page(made, "today")


def test_a_run_without_measurements_is_named_and_in_no_figure(one):
    made = document(one("a"), one("b", "ce_bidi", rows=[]))
    assert made["not_measured"] == ["b"] and [arm["arm"] for arm in made["compared"]["arms"]] == ["ce_causal"] and "b: no acceptance measured yet" in seen(made)
    assert "Not measured yet" in made["lacks"][0] and ">b</th>" in report_html.page(made, "today")
    nothing = document(one("c", rows=[]))
    assert nothing["compared"] is None and "nothing is measured yet" in nothing["shows"][0] and seen(nothing).startswith("c: no acceptance")


def test_where_simulated_and_real_part_there_is_an_alarm(one):
    rows = [eval_row(1000, [[1, 2, 3]] * 8, 8, simulated=4.5), offline_row(1000, [[7] * 15] * 8, 8)]
    made = document(one("a", rows=rows))
    assert [alarm["run"] for alarm in made["alarms"]] == ["a", "a"] and made["simulation"][0]["aside"] == 8.0
    assert "ALARM a step 1000" in seen(made) and any(s.startswith("ALARM") for s in made["shows"]) and "class=alarm" in report_html.page(made, "today")
    fine = document(one("b", rows=[eval_row(1000, [[1, 2, 3]] * 8, 8)]))
    assert fine["alarms"] == [] and fine["simulation"][0]["aside"] is None and "ALARM" not in seen(fine)


def test_divergences_are_listed_and_those_left_out_are_counted(one):
    found = [{"prompt": "ab" * 32, "position": 17, "margin": 0.0012}]
    made = document(one("a", rows=[eval_row(1000, [[1, 2, 3]] * 8, 8, divergences=found) | {"divergences_left_out": 2}]))
    shown = seen(made)
    assert "differs first at token 17, where the target's top-1/top-2 margin is 0.0012" in shown and "7 of 8" in shown and "and 2 more" in shown
    assert "0.0012" in report_html.page(made, "today") and "2 more did not fit" in report_html.page(made, "today")


# What a person sees

class Page(HTMLParser):
    """Raises on tags that do not close in order; gathers ids, references and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.refs, self.headers, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.refs += [ref for name in ("aria-labelledby", "aria-describedby") if name in values for ref in values[name].split()]
        self.refs += [values["href"][1:]] if "href" in values else []
        self.headers += [values.get("scope")] if tag == "th" else []
        assert tag not in ("script", "link", "img", "iframe", "object") and "src" not in values and not any(name.startswith("on") for name in values)
        assert tag != "svg" or (values["role"] == "img" and values["aria-label"])
        assert "href" not in values or values["href"].startswith("#")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        if tag not in VOID:
            self.handle_starttag(tag, attrs)
            self.open.pop()
        else:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_and_fetches_nothing(made):
    text = report_html.page(made, "today")
    page = Page(text)
    said = " ".join(page.words)
    assert len(page.ids) == len(set(page.ids)) and set(page.refs) <= set(page.ids) and set(page.headers) == {"row", "col"}
    assert not re.search(r"https?:|//|@import|url\((?!#)", text) and not re.search(r"\b(nan|NaN|inf|None)\b", text)
    assert all(run["run"] in said and run["arm"] in said for run in made["runs"]) and all(html.escape(s, quote=False) in html.escape(said, quote=False) for s in made["shows"] + made["lacks"])
    assert made["runs"][0]["identity"]["contract"] in said and made["compared"]["prompts_hash"] in said and "6410c9a" in said and "2.13.0+cpu" in said
    assert '<html lang="en">' in text and "<title>Acceptance of 4 arms on embedded</title>" in text and 'name="viewport"' in text


def test_colours_of_charts_follow_the_page(made):
    """Every colour outside the two palettes is a variable, and each variable that is used has a light and a dark value."""
    text = report_html.page(made, "today")
    light, dark = (set(re.findall(r"--(\w+):#", part)) for part in re.findall(r":root\{([^}]*)\}", text))
    assert light == dark == set(report_plots.INK) and set(re.findall(r"var\(--(\w+)\)", text)) <= light
    assert not re.search(r"#[0-9a-f]{6}\b", text[text.index("</style>"):])
    assert len(text) < 400_000


def test_of_many_pairs_the_chart_draws_those_that_are_asked_about(tmp_path):
    sweep(tmp_path, {"ce_causal": 0.0, **{f"arm{i}": i / 10 for i in range(5)}}, seeds=(0,), steps=(1000,))
    made = document(tmp_path)
    assert len(made["compared"]["pairs"]) == 15 and {pair["b"] for pair in report_plots.drawn_pairs(made)} == {"ce_causal"}
    for said in made["questions"].values():
        said["beside"] = "elsewhere"
    assert {pair["a"] for pair in report_plots.drawn_pairs(made)} == {"arm4"} and len(report_plots.drawn_pairs(made)) == 5


def test_names_are_escaped(one):
    folder = one("a<b>&c", rows={1000: 0.5})
    text = report_html.page(document(folder), "<i>")
    Page(text)
    assert "a&lt;b&gt;&amp;c" in text and "<b>" not in text and "<i>" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal(made, four, width):
    for shown in (seen(made, width), seen(document(four / "runs/ce_bidi-s0"), width)):
        assert max(map(len, shown.splitlines())) <= width and "…" not in shown
    assert "kl_mixed_uniform" in seen(made, width) and "not separated" in seen(made, width)


def test_the_command_writes_what_it_is_asked_for(four, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    out = run(cli.app, ["report", str(four), "--json"])
    assert out.exit_code == 0 and json.loads(out.stdout)["compared"]["tokens"] == 929_000 and list(tmp_path.iterdir()) == []
    assert run(cli.app, ["report", str(four)]).exit_code == 0 and [file.name for file in tmp_path.iterdir()] == ["report.png"]
    assert (tmp_path / "report.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run(cli.app, ["report", str(four), "--out", "all", "--html", "page.html"]).exit_code == 0
    assert sorted(file.name for file in (tmp_path / "all").iterdir()) == ["report.json", "report.png"] and Page((tmp_path / "page.html").read_text())
    assert json.loads((tmp_path / "all/report.json").read_text()) == json.loads(out.stdout)                  # the same runs, the same report
    bad = run(cli.app, ["report", str(four), "--html", str(tmp_path)])
    assert isinstance(bad.exception, UserError) and "cannot be written" in str(bad.exception)


HARNESS = """<!doctype html><body><p id=said></p><iframe style="border:0;width:{width}px;height:900px" srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{ const d = document.querySelector("iframe").contentDocument, w = d.defaultView;
 const shown = [...d.querySelectorAll("svg")].filter(s => s.getBoundingClientRect().width > 0);
 said.textContent = JSON.stringify({{overflow: d.documentElement.scrollWidth - {width}, charts: shown.length,
  narrowest: Math.min(...shown.map(s => s.getBoundingClientRect().width)), paper: w.getComputedStyle(d.body).backgroundColor,
  label: w.getComputedStyle(d.querySelector("svg text")).fill,
  smallest: Math.min(...shown.flatMap(s => [...s.querySelectorAll("text")].map(t => t.getBoundingClientRect().height).filter(h => h > 0)))}}) }})
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: the page is not rendered (apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("mode", ["light", "dark"])
def test_a_browser_shows_it(made, tmp_path, width, mode):
    page = report_html.page(made, "today")
    (tmp_path / "harness.html").write_text(HARNESS.format(width=width, page=html.escape(page)))
    done = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
                           "--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}", f"--blink-settings=preferredColorScheme={int(mode == 'light')}",
                           "--window-size=1400,1000", "--dump-dom", (tmp_path / "harness.html").as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(html.unescape(re.search(r'<p id="said">(.*?)</p>', done.stdout).group(1)))
    assert found["overflow"] <= 0 and found["charts"] == 4 and found["narrowest"] > 300 and found["smallest"] >= 9
    assert found["paper"] == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 25, 29)"}[mode]
    assert found["label"] == {"light": "rgb(101, 109, 118)", "dark": "rgb(154, 164, 175)"}[mode]
