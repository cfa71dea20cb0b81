"""`hsprod bench`: every section from one command, a record that can be compared, and mistakes that end in one line."""
from __future__ import annotations

import copy
import io
import json

import pytest
import tiny
import torch
from drafters import BLOCK, TAPS
from rich.console import Console
from typer.testing import CliRunner

from common.drafter import checkpoint
from common.drafter.config import shape_for
from common.drafter.model import Drafter
from common.errors import UserError
from producer import bench, cli, fitting, overhead, pieces, record, roofline, sections, tables
from producer.config import Bench, Serve
from producer.prompt_sets import read
from producer.prompts import SALT, split
from producer.speculate import PARTS

NEW, SLOTS = 9, 4
TG = {"n_prompt": 0, "n_gen": 128, "avg_ts": 41.2, "stddev_ts": 0.1, "model_type": "llama", "backends": "CPU", "build_commit": "b1"}


@pytest.fixture(scope="module")
def target():
    return tiny.hybrid(template=tiny.CHATML)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A random drafter: nothing it says stands, unless by chance."""
    config = shape_for(target.hidden_size, target.vocab_size, target.n_layers, TAPS, target.mask_token_id, "mixed", block_size=BLOCK,
                       sliding_window=24)
    path = tmp_path_factory.mktemp("d") / "step-1"
    made = {"contract": target.contract(TAPS, None).hash, "target": target.name}
    checkpoint.save(path, Drafter(config, torch.Generator().manual_seed(1)), made, torch.float32)
    return path


@pytest.fixture
def prompts_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"f{i}(x) number {i}"}) + "\n" for i in range(4)))
    return path


@pytest.fixture
def hsprod(target, monkeypatch):
    monkeypatch.setattr(fitting, "load", lambda *_args, **_kwargs: target)
    monkeypatch.setattr(fitting, "sizes", lambda _name: target)
    for module, name, value in ((roofline, "COPIED", 1 << 20), (roofline, "ROUNDS", 1), (pieces, "REPEATS", 1), (overhead, "CYCLES", 2)):
        monkeypatch.setattr(module, name, value)                     # nothing here is about how long things take
    return lambda *args: CliRunner().invoke(cli.app, ["bench", *map(str, args)])


def test_the_whole_command(hsprod, target, folder, prompts_file, tmp_path):
    (tmp_path / "llama.json").write_text(json.dumps([TG]))
    out = tmp_path / "new" / "a.json"
    common = ("--drafter", folder, "--prompts", prompts_file, "--count", 2, "--max-new-tokens", NEW, "--block-size", SLOTS)
    got = hsprod(*common, "--llama-bench", tmp_path / "llama.json", "--out", out)
    assert got.exit_code == 0, got.output
    for title in ("1. Token rates", "2a. Pieces", "2b. A cycle", "3a. Speedup", "3b. What the gap", "4a. Experts", "5. Draft head", "6. Lossless",
                  "7. Roofline", "8. Verify length", f"record: {out}"):
        assert title in got.stdout, title
    assert "llama.cpp b1" in got.stdout and "[8/8]" in got.stderr and "2 prompts, at most 9 tokens" in " ".join(got.stdout.split())
    found = json.loads(out.read_text())
    assert found["finished"] and list(found["sections"]) == list(sections.SECTIONS)
    assert not any("not_measured" in section for section in found["sections"].values())
    assert found["identity"]["contract"] == target.contract(TAPS, None).hash and found["identity"]["prompts"]["count"] == 2
    assert found["identity"]["drafter"]["sha256"] == checkpoint.checkpoint_hash(folder)
    assert found["identity"]["drafter"]["record"]["target"] == target.name
    cycle = found["sections"]["pieces"]["cycle"]
    assert list(cycle["parts"]) == [*PARTS, "remainder"] and sum(cycle["parts"].values()) == pytest.approx(cycle["seconds"], rel=1e-9)
    assert len(found["sections"]["pieces"]["alone"]["verify"]) == SLOTS < BLOCK          # --block-size holds in every table
    assert found["sections"]["experts"]["by_rows"][-1]["rows"] == SLOTS == found["sections"]["shortlist"]["drafts"] + 1
    assert found["sections"]["lossless"]["identical"] == found["sections"]["lossless"]["prompts"] == 2
    assert found["sections"]["rates"]["plain"]["tokens"] == found["sections"]["rates"]["speculative"]["tokens"] <= 2 * (NEW - 1)

    again = hsprod(*common, "--only", "rates", "--out", tmp_path / "b.json", "--against", out)
    assert again.exit_code == 0 and "What differs:" in again.stdout and 'only: "" -> "rates"' in again.stdout, again.output
    compared = json.loads((tmp_path / "b.json").read_text())
    assert list(compared["sections"]) == ["rates"]
    rows = {row["figure"]: row for row in compared["compared"]["figures"]}
    assert rows["plain, tokens/s"]["ratio"] == pytest.approx(rows["plain, tokens/s"]["now"] / rows["plain, tokens/s"]["then"])
    assert rows["eta"]["now"] is None and rows["eta"]["ratio"] is None


def test_what_cannot_be_measured_is_said(target, folder):
    """A dense target has no experts, one prompt leaves none to count on: the other sections go on, and the reason is printed."""
    scene = sections.Scene(tiny.dense(), None, None, BLOCK, [], [], [])
    for name, says in (("experts", "no experts"), ("shortlist", "other text")):
        found, why = sections.attempt(sections.SECTIONS[name], scene, {}, lambda done, of: None)
        assert found == {} and says in why


def test_sections_by_name_come_with_what_they_need():
    assert sections.named("") == list(sections.SECTIONS)
    assert sections.named("speedup") == ["pieces", "speedup"] and sections.named("roofline, rates") == ["rates", "pieces", "experts", "roofline"]
    with pytest.raises(UserError, match="--only speed: choose among rates, pieces"):
        sections.named("speed")


def test_every_need_stands_before_what_needs_it():
    order = list(sections.SECTIONS)
    for name, section in sections.SECTIONS.items():
        assert all(order.index(need) < order.index(name) for need in section.needs)


def test_prompts_are_spread_and_the_others_are_others(prompts_file, tmp_path):
    assert sections.spread(list(range(10)), 3) == [0, 3, 6] and sections.spread([1, 2], 5) == [1, 2] and sections.spread([], 3) == []
    measured, others = bench.choose(Bench(drafter=tmp_path, prompts=prompts_file, count=3))
    given = read(prompts_file).prompts
    assert measured == [given[0], given[1], given[2]] and others == [given[3]]
    measured, others = bench.choose(Bench(drafter=tmp_path, count=5))
    kept = split(read(bench.SHIPPED).prompts, Serve.held_out, SALT)
    assert len(measured) == 5 and all(prompt in kept.held_out for prompt in measured) and all(prompt in kept.train for prompt in others)
    assert len(others) == sections.COUNTED * 5
    shared = bench.choose(Bench(drafter=tmp_path, prompts=bench.SHIPPED, held_out=Serve.held_out, count=5))
    assert shared == (measured, others)


@pytest.mark.parametrize("args, says", [
    (("--drafter", "/nowhere"), "/nowhere"), (("--drafter", "x", "--prompts", "/nowhere"), "/nowhere"),
    (("--drafter", "x", "--only", "all"), "--only all"), (("--drafter", "x", "--llama-bench", "/nowhere"), "--llama-bench /nowhere"),
    (("--drafter", "x", "--against", "/nowhere"), "--against /nowhere"), (("--drafter", "x", "--block-size", 1), "nothing would be drafted"),
    (("--drafter", "x", "--out", "."), "--out .: a folder")])
def test_mistakes_are_one_line_before_the_target_is_read(hsprod, monkeypatch, tmp_path, args, says):
    monkeypatch.setattr(fitting, "load", None)
    got = hsprod("--out", tmp_path / "o.json", *args)
    assert isinstance(got.exception, UserError) and says in str(got.exception) and "\n" not in str(got.exception)
    assert not (tmp_path / "o.json").exists()


def test_only_a_record_of_this_format_is_compared(tmp_path):
    path = tmp_path / "r.json"
    for text in ("{}", "[]", '{"hsdraft_bench": 0}', '{"hsdraft_bench": 1}', '{"hsdraft_bench": 1, "identity": {}, "settings": 1, "sections": {}}'):
        path.write_text(text)
        with pytest.raises(UserError, match="no record"):
            record.read(path)
    path.write_text("no")
    with pytest.raises(UserError, match="no JSON"):
        record.read(path)


def test_compare_names_what_differs_and_sets_figures_side_by_side():
    old = {"started": "then", "identity": {"code": {"commit": "a", "torch": "1"}, "threads": 1, "target": {"taps": [1, 2]}}, "settings": {"count": 2},
           "sections": {"rates": {"plain": {"tokens_per_s": 10.0}}, "speedup": {"eta": 2.0}, "lossless": {"speculative": {"departures": 0}}}}
    new = copy.deepcopy(old)
    assert record.compare(old, new)["differs"] == [] and {row["ratio"] for row in record.compare(old, new)["figures"]} == {1.0, None}
    new["identity"]["code"]["commit"], new["identity"]["target"]["taps"], new["settings"]["count"] = "b", [1, 3], 4
    new["sections"]["speedup"]["eta"], new["sections"]["lossless"] = 3.0, {"not_measured": "why"}
    del new["identity"]["threads"]
    got = record.compare(old, new)
    assert got["differs"] == ['code.commit: "a" -> "b"', "target.taps: [1, 2] -> [1, 3]", "threads: 1 -> null", "count: 2 -> 4"]
    figures = {row["figure"]: (row["then"], row["now"], row["ratio"]) for row in got["figures"]}
    assert figures == {"plain, tokens/s": (10.0, 10.0, 1.0), "eta": (2.0, 3.0, 1.5), "departures": (0, None, None)}
    assert len(record.show(got)) == 2
    old["sections"]["speedup"]["eta"] = "2"                          # somebody wrote in the file: no figure
    assert {"figure": "eta", "then": None, "now": 3.0, "ratio": None} in record.compare(old, new)["figures"]


def test_a_narrow_screen_cuts_no_figure():
    made = tables.table("t", *(f"figure {i}" for i in range(12)), words=0)
    made.add_row(*(f"{100 + i}.25" for i in range(12)))
    console = Console(width=60, record=True, file=io.StringIO())
    tables.put(console, made)
    said = console.export_text()
    assert "\N{HORIZONTAL ELLIPSIS}" not in said and sum(map(str.isdigit, said)) == 12 * 5 + 10 + 2 * 2      # rows, and the headers' numbers
