"""The runner's own rules: how a budget is split, what libFuzzer's lines say, and that a finding of a child becomes one of the table."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fuzz import run
from tests.fuzz.targets import TARGETS, Target


@pytest.mark.parametrize("runs", [0, 1, 99, 100, 1_000_000, 1_000_003])
def test_the_budget_is_split_by_share_to_the_last_input(runs):
    given = run.split(runs, list(TARGETS.values()))
    assert sum(given.values()) == runs and list(given) == list(TARGETS) and min(given.values()) >= 0
    whole = sum(target.share for target in TARGETS.values())
    assert all(abs(given[name] - runs * target.share / whole) < 1 for name, target in TARGETS.items())


def test_lines_of_libfuzzer():
    outcome = run.Outcome("x")
    for line in ("INFO: Seed: 12", "#2\tINITED cov: 29 ft: 40 corp: 1/1b exec/s: 0 rss: 40Mb",
                 "#4096\tpulse  cov: 291 ft: 512 corp: 9/1Kb lim: 11 exec/s: 100",
                 "#4111\tREDUCE cov: 292 ft: 513 corp: 9/1Kb lim: 11 exec/s: 100 rss: 80Mb L: 9/9 MS: 1 Custom-"):
        run.heard(line, outcome)
    assert (outcome.runs, outcome.features) == (4111, 513)
    run.heard("stat::number_of_executed_units: 5000", outcome)
    assert (outcome.runs, outcome.features) == (5000, 513)


TARGET = Target("toy", lambda data: True, lambda: [b"seed"], lambda data, rng: data, 10, 1)
CHILD = """import sys, pathlib
args = dict(a[1:].split("=", 1) for a in sys.argv if a.startswith("-") and "=" in a)
print("#7\\tDONE cov: 3 ft: 5 corp: 1/1b", file=sys.stderr)
assert pathlib.Path(sys.argv[2], "seed-0").read_bytes() == b"seed" and args["runs"] == "9" and args["max_len"] == "10"
{end}
"""


@pytest.mark.parametrize("end, findings, broken", [
    ("", 0, False), ("sys.exit(3)", 0, True), ('pathlib.Path(args["artifact_prefix"] + "crash-1").write_bytes(b"x"); sys.exit(77)', 1, False)])
def test_how_a_child_ends_is_in_the_table(end, findings, broken, tmp_path, monkeypatch):
    (tmp_path / "child.py").write_text(CHILD.format(end=end))
    real = run.subprocess.Popen
    monkeypatch.setattr(run.subprocess, "Popen", lambda command, **how: real([sys.executable, str(tmp_path / "child.py"), *command[3:]], **how))
    (tmp_path / "found").mkdir()
    Path(tmp_path / "found" / "toy-old").write_bytes(b"of another time")
    outcome = run.fuzz(TARGET, 9, tmp_path, print)
    assert (outcome.runs, outcome.features, len(outcome.findings), bool(outcome.broken)) == (7, 5, findings, broken)
    assert run.table([outcome]).row_count == 2
