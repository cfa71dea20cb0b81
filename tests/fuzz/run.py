"""`make fuzz RUNS=1000000`: a budget of inputs, split over the targets, each fuzzed by atheris from our own valid messages.

    python -m tests.fuzz.run --runs N [--only NAME ..] [--folder .fuzz]

What libFuzzer finds new stays in FOLDER/corpus/NAME and is where the next time starts; an input that is a finding lies in
FOLDER/found, with its traceback in FOLDER/NAME.log: mend the code, and keep the input as tests/fuzz/cases/NAME/WHAT-IT-WAS.
A reader that takes longer than SECONDS for one input, or more memory than child.HEADROOM, is a finding.
Ends with a table; exit code 1 on a finding."""
from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz.targets import TARGETS, Target

SECONDS = 20                 # of one input; the slowest honest one takes milliseconds
RSS_MB = 2048                # of a whole process; torch takes 0.5 GB of it
SAID = re.compile(r"#(\d+)\s+[\w-]+\s+cov: (\d+) ft: (\d+)")
DONE = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
EVERY = 30.0                 # seconds between lines that say how far it is


@dataclass
class Outcome:
    """runs: inputs tried.  features: libFuzzer's count of what was covered.  findings: files that hold one."""

    name: str
    runs: int = 0
    features: int = 0
    seconds: float = 0.0
    findings: tuple[Path, ...] = ()
    broken: str = ""         # why it did not run to its end, where that is no finding


def split(runs: int, targets: list[Target]) -> dict[str, int]:
    """Inputs for each target, by its share; they sum to runs, and each gets one at least where there are enough."""
    whole, out, given, seen = sum(target.share for target in targets), {}, 0, 0
    for target in targets:
        seen += target.share
        out[target.name] = runs * seen // whole - given
        given += out[target.name]
    return out


def heard(line: str, outcome: Outcome) -> None:
    """What one line of libFuzzer's says."""
    if match := SAID.search(line):
        outcome.runs, outcome.features = max(outcome.runs, int(match[1])), int(match[3])
    if match := DONE.search(line):
        outcome.runs = int(match[1])


def fuzz(target: Target, runs: int, folder: Path, say: Callable[[str], None]) -> Outcome:
    """Run one target to its end or its first finding."""
    outcome, began = Outcome(target.name), time.monotonic()
    corpus, found = folder / "corpus" / target.name, folder / "found"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.glob(f"{target.name}-*"))
    for number, seed in enumerate([*target.seeds(), *(path.read_bytes() for path in target.cases())]):
        (corpus / f"seed-{number}").write_bytes(seed)
    command = [sys.executable, "-m", "tests.fuzz.child", target.name, str(corpus), f"-runs={runs}", f"-max_len={target.longest}",
               f"-timeout={SECONDS}", f"-rss_limit_mb={RSS_MB}", f"-artifact_prefix={found}/{target.name}-", "-print_final_stats=1"]
    said = began
    with (folder / f"{target.name}.log").open("w") as log, \
            subprocess.Popen(command, stdout=log, stderr=subprocess.PIPE, text=True, errors="replace") as child:
        for line in child.stderr:
            log.write(line)
            heard(line, outcome)
            if time.monotonic() - said > EVERY:
                said = time.monotonic()
                say(f"{target.name}: {outcome.runs:,} of {runs:,}, {outcome.features:,} features, {said - began:.0f} s")
    outcome.seconds = time.monotonic() - began
    outcome.findings = tuple(sorted(set(found.glob(f"{target.name}-*")) - before))
    if child.returncode and not outcome.findings:
        outcome.broken = f"exit code {child.returncode}, see {folder / target.name}.log"
    return outcome


def table(outcomes: list[Outcome]) -> Table:
    out = Table("target", "inputs", "features", "seconds", "findings")
    for column in out.columns[1:4]:
        column.justify = "right"
    for o in outcomes:
        out.add_row(o.name, f"{o.runs:,}", f"{o.features:,}", f"{o.seconds:.0f}", o.broken or "\n".join(path.name for path in o.findings) or "none")
    out.add_row("all", f"{sum(o.runs for o in outcomes):,}", "", f"{sum(o.seconds for o in outcomes):.0f}",
                str(sum(len(o.findings) for o in outcomes) or "none"))
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--only", nargs="*", choices=TARGETS, default=list(TARGETS), metavar="NAME", help=", ".join(TARGETS))
    parser.add_argument("--folder", type=Path, default=Path(".fuzz"))
    asked = parser.parse_args()
    console, outcomes = Console(), []
    for name, runs in split(asked.runs, [TARGETS[name] for name in asked.only]).items():
        console.print(f"{name}: {runs:,} inputs", highlight=False)
        outcomes.append(fuzz(TARGETS[name], runs, asked.folder.absolute(), lambda text: console.print(text, highlight=False)))
        for path in outcomes[-1].findings:
            console.print(f"FINDING {path}", highlight=False, soft_wrap=True)
    console.print(table(outcomes))
    return int(any(o.findings or o.broken for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
