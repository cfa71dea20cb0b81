"""`make demo`: two real daemons on loopback, and a drafter that learns while its acceptance is measured.

Starts `hsprod serve` and `hstrain run --arm ce_causal` as a person would, watches the status each of them writes, and
ends with `hstrain report`.  Everything lies in ./demo/ and is made anew each time."""
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

BIN = Path(sys.executable).parent
ARM = "ce_causal"
PROMPTS = Path(__file__).parents[1] / "producer" / "data" / "demo-prompts.jsonl"    # few shapes of task, so that minutes are enough
# What a few minutes on two cores allow.  The daemons' own defaults are for the user's target and for days.
PLANS = {
    "embedded": {"serve": ["--batch", "64", "--max-new-tokens", "160", "--eval-prompts", "16", "--eval-new-tokens", "128"],
                 "run": ["--steps", "900", "--eval-every", "180"]},
    "smollm2": {"serve": ["--batch", "48", "--max-new-tokens", "96", "--eval-prompts", "4", "--eval-new-tokens", "48"],
                "run": ["--steps", "320", "--eval-every", "80", "--sequences", "4", "--anchors", "12", "--replay", "5"]},
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start(command: str, *words: str, log: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}
    return subprocess.Popen([BIN / command, *words], stdout=log.open("ab"), stderr=subprocess.STDOUT, env=environment)


def last_status(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def screen(producer: dict, trainer: dict, seconds: float) -> Table:
    table = Table(title=f"hsdraft demo, {seconds:.0f} s", show_header=False, width=100)
    table.add_row("producer", producer.get("doing", "starting"))
    table.add_row("stream", producer.get("stream", ""))
    table.add_row("trainer", line_of(trainer))
    table.add_row("acceptance", trainer.get("acceptance", "not measured yet"))
    return table


def line_of(trainer: dict) -> str:
    """What it does, with its step and loss once there are any."""
    return trainer.get("line") or trainer.get("doing", "starting")


def watch(daemons: dict[str, subprocess.Popen], views: dict[str, Path], console: Console) -> None:
    """Until the trainer has ended.  On a terminal one live table; elsewhere a line whenever something has moved."""
    began, said, due = time.monotonic(), "", 0.0
    with Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else _Quiet() as live:
        while daemons["hstrain"].poll() is None:
            if daemons["hsprod"].poll() is not None:
                daemons["hstrain"].terminate()
                return
            producer, trainer = (last_status(views[name]) for name in ("hsprod", "hstrain"))
            seconds = time.monotonic() - began
            live.update(screen(producer, trainer, seconds))
            line = f"producer: {producer.get('doing', 'starting')} | trainer: {line_of(trainer)} | {trainer.get('acceptance', '')}"
            if not console.is_terminal and line != said and seconds >= due:
                print(f"[{seconds:4.0f} s] {line}", flush=True)
                said, due = line, seconds + 10
            time.sleep(0.5)


class _Quiet:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self, _table: Table) -> None:
        """Nobody watches a live table in a log file."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", default="embedded", choices=sorted(PLANS))
    parser.add_argument("--steps", type=int, help="optimisation steps, instead of the plan's")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder, made anew")
    options = parser.parse_args()
    console, plan, out = Console(), PLANS[options.target], options.out / options.target
    shutil.rmtree(out, ignore_errors=True)
    folders = {name: out / name for name in ("hsprod", "hstrain")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    address = f"tcp://127.0.0.1:{free_port()}"
    run_dir = out / "run"
    steps = ["--steps", str(options.steps)] if options.steps else []
    commands = {
        "hsprod": ["serve", "--target", options.target, "--layers", "auto", "--prompts", str(PROMPTS), "--bind", address,
                   "--state-dir", str(folders["hsprod"]), "--threads", "1", *plan["serve"]],
        "hstrain": ["run", "--arm", ARM, "--producer", address, "--state-dir", str(folders["hstrain"]), "--run-dir", str(run_dir),
                    "--threads", "1", *plan["run"], *steps]}
    for name, words in commands.items():
        console.print(f"$ {name} {' '.join(words)}", style="dim", soft_wrap=True, highlight=False)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))        # else the daemons would outlive the demo
    daemons = {name: start(name, *words, log=out / f"{name}.log") for name, words in commands.items()}
    try:
        watch(daemons, {"hsprod": folders["hsprod"] / "status.json", "hstrain": folders["hstrain"] / "status" / "run.json"}, console)
        code = daemons["hstrain"].wait() or (daemons["hsprod"].poll() is not None)
    finally:
        for daemon in daemons.values():
            daemon.terminate()
        for daemon in daemons.values():
            daemon.wait(timeout=30)
    if code:
        console.print(f"a daemon has failed; the logs are in {out}/", style="red")
        for name in daemons:
            console.print(f"--- {name}.log\n" + "".join((out / f"{name}.log").read_text().splitlines(keepends=True)[-15:]), markup=False)
        return 1
    return subprocess.run([BIN / "hstrain", "report", run_dir, "--out", out / "report.png"]).returncode


if __name__ == "__main__":
    sys.exit(main())
