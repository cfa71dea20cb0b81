"""`make soak`: both daemons on loopback under CURVE for an hour, and whether their memory stays flat.

The embedded target answers at temperature 1, pass after pass; a drafter of one small layer trains all the while and has its
checkpoints measured.  Every ten minutes the trainer stands still (SIGSTOP) until the producer's small disk budget is full, so
that production pauses and goes on again.  Seen from outside, by psutil: private memory, threads, open files; from status.json:
samples, steps, evaluations.  Ends, on Ctrl-C too, with a table, a picture and the numbers; exit code 1 where memory grew.

The rule: the first quarter is not judged (caches fill, the allocator settles).  Through the medians of twelfths of the rest goes a line; where
it rises by more than 5 % of the memory an hour, memory grew.  Less than twenty minutes say nothing about hours and are not judged."""
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.demo import PROMPTS, free_port, last_status

EVERY_S = 5.0
STILL_EVERY_S, STILL_S = 600.0, 45.0          # the trainer stands still so often, so long
WARM = 0.25                                   # share of the time that is not judged: caches fill, the allocator settles
MOST_GROWTH = 0.05                            # of memory, over an hour, by the fitted line
JUDGED_FROM_S = 1200.0                        # shorter, the line is noise: two minutes said +1170 % an hour
MIB = 1 << 20
SERVE = ["--target", "embedded", "--layers", "auto", "--prompts", str(PROMPTS), "--temperature", "1", "--passes", "100000", "--batch", "16",
         "--max-new-tokens", "96", "--eval-prompts", "4", "--eval-new-tokens", "48", "--disk-budget", "0.01", "--threads", "1"]
RUN = ["--arm", "ce_causal", "--name", "soak", "--layers", "1", "--sequences", "2", "--anchors", "8", "--steps", "1000000", "--eval-every", "400",
       "--cache", "64", "--threads", "1"]
ENTRY = {"hsprod": "producer", "hstrain": "trainer"}
READ = {"paused": ("hsprod", "paused"), "samples": ("hsprod", "next_sample"), "evaluations": ("hsprod", "evaluations"), "step": ("hstrain", "step"),
        "disk": ("hsprod", "disk_used_bytes"), "stored": ("hstrain", "disk_used_bytes")}           # of each status.json


def command(name: str, *words: str) -> list[str]:
    """This checkout's code, whatever is installed."""
    return [sys.executable, "-c", f"from {ENTRY[name]}.cli import main; main()", *words]


def said(name: str, *words: str) -> str:
    return subprocess.run(command(name, *words), capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]).stdout.strip()


def start(name: str, *words: str, log: Path) -> subprocess.Popen:
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(name, *words), stdout=log.open("ab"), stderr=subprocess.STDOUT, env=environment, cwd=Path(__file__).parents[1],
                            start_new_session=True)             # a Ctrl-C is ours alone; we stop them


def growth(seconds: np.ndarray, sizes: np.ndarray) -> tuple[float, float]:
    """seconds (n,), sizes (n,) in bytes -> bytes an hour by a line fitted to the medians of twelfths of the time after WARM, and that as a
    share of the size.  Medians, because an evaluation's tensors come and go."""
    later = seconds >= seconds[0] + WARM * (seconds[-1] - seconds[0])
    parts = [(np.median(s), np.median(b)) for s, b in zip(np.array_split(seconds[later], 12), np.array_split(sizes[later], 12)) if len(s)]
    at, size = np.array(parts).T
    slope = np.polyfit(at, size, 1)[0] * 3600
    return float(slope), float(slope / np.median(sizes[later]))


def grew(seconds: float, share: float) -> bool:
    """Whether that share an hour, of a run of so many seconds, is memory that grew."""
    return seconds >= JUDGED_FROM_S and share > MOST_GROWTH


def look(process: psutil.Process) -> dict:
    with process.oneshot():
        return {"uss": process.memory_full_info().uss, "rss": process.memory_info().rss, "threads": process.num_threads(), "files": process.num_fds()}


def watch(daemons: dict[str, subprocess.Popen], views: dict[str, Path], seconds: float, stop: threading.Event) -> tuple[list[dict], int]:
    """-> a row every EVERY_S until `seconds` are over or stop is set, and how often the trainer stood still."""
    began, rows, stood, next_said = time.monotonic(), [], 0, 0.0
    processes = {name: psutil.Process(daemon.pid) for name, daemon in daemons.items()}
    while (now := time.monotonic() - began) < seconds and not stop.is_set():
        if ended := [name for name, daemon in daemons.items() if daemon.poll() is not None]:
            raise RuntimeError(f"{ended[0]} ended by itself after {now:.0f} s")
        still = now % STILL_EVERY_S > STILL_EVERY_S - STILL_S
        if still != bool(stood % 2):
            daemons["hstrain"].send_signal(signal.SIGSTOP if still else signal.SIGCONT)
            stood += 1
        numbers = {name: last_status(view).get("numbers", {}) for name, view in views.items()}
        rows.append({"s": round(now, 1), "still": still} | {key: numbers[name].get(number, 0) for key, (name, number) in READ.items()}
                    | {name: look(process) for name, process in processes.items()})
        if now >= next_said:
            last, next_said = rows[-1], now + 60
            print(f"[{now:5.0f} s] {last['samples']} samples, step {last['step']}, {last['evaluations']} evaluations, "
                  + ", ".join(f"{name} {last[name]['uss'] / MIB:.0f} MiB" for name in processes), flush=True)
        stop.wait(EVERY_S)
    if stood % 2:
        daemons["hstrain"].send_signal(signal.SIGCONT)
    return rows, (stood + 1) // 2


def draw(rows: list[dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    minutes = [row["s"] / 60 for row in rows]
    figure, axes = pyplot.subplots(3, 1, figsize=(9, 7.5), sharex=True, layout="constrained", height_ratios=[2, 1, 1])
    for name, colour in (("hsprod", "#2563eb"), ("hstrain", "#dc4a12")):
        axes[0].plot(minutes, [row[name]["uss"] / MIB for row in rows], color=colour, label=name, linewidth=1)
        axes[1].plot(minutes, [row[name]["files"] for row in rows], color=colour, label=f"{name}, open files", linewidth=1)
    axes[2].plot(minutes, [row["samples"] for row in rows], color="#047857", label="samples streamed", linewidth=1.5)
    axes[2].plot(minutes, [row["step"] for row in rows], color="#7c3aed", label="training steps", linewidth=1.5)
    for axis, title in zip(axes, ("private memory, MiB", "open files", "work done")):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(color="#e5e7eb")
        axis.spines[["top", "right"]].set_visible(False)
        for first, row in zip(rows, rows[1:]):
            if row["still"]:
                axis.axvspan(first["s"] / 60, row["s"] / 60, color="#9ca3af", alpha=0.35, linewidth=0)
        axis.legend(frameon=False, loc="upper left" if axis is axes[2] else "lower right", fontsize=9)
    axes[2].set_xlabel("minutes; grey: the trainer stands still, the producer's disk budget fills")
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--work", type=Path, default=Path("demo/soak"), help="the daemons' folder, made anew")
    parser.add_argument("--out", type=Path, default=Path("docs/soak"), help="where picture and numbers go")
    options = parser.parse_args()
    work = options.work.absolute()
    shutil.rmtree(work, ignore_errors=True)
    for name in ENTRY:
        (work / name).mkdir(parents=True)
    keys, address = {name: work / name / "keys" for name in ENTRY}, f"tcp://127.0.0.1:{free_port()}"
    public = {name: said(name, "keygen", "--keys", str(keys[name])).split()[-1] for name in ENTRY}
    said("hsprod", "allow", "--keys", str(keys["hsprod"]), "--", public["hstrain"])
    said("hstrain", "trust", "--keys", str(keys["hstrain"]), "--", public["hsprod"])
    words = {"hsprod": ["serve", *SERVE, "--bind", address], "hstrain": ["run", *RUN, "--producer", address, "--run-dir", str(work / "run")]}
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    daemons = {name: start(name, *words[name], "--state-dir", str(work / name), "--keys", str(keys[name]), log=work / f"{name}.log")
               for name in ENTRY}
    try:
        rows, stood = watch(daemons, {"hsprod": work / "hsprod" / "status.json", "hstrain": work / "hstrain" / "status" / "run.json"},
                            options.minutes * 60, stop)
    finally:
        for daemon in daemons.values():
            daemon.send_signal(signal.SIGCONT)
            daemon.terminate()
        codes = {name: daemon.wait(timeout=60) for name, daemon in daemons.items()}
    if len(rows) < 8:
        print("stopped before anything was to be seen")
        return 1
    return show(rows, stood, codes, options.out)


def summary(rows: list[dict], name: str) -> dict:
    """What became of one daemon: memory in MiB, its growth by `growth`; files and threads after a quarter of the time and at the end."""
    seconds, sizes = np.array([row["s"] for row in rows]), np.array([row[name]["uss"] for row in rows], float)
    slope, share = growth(seconds, sizes)
    quarter, last = rows[len(rows) // 4][name], rows[-1][name]
    return {"median_mib": np.median(sizes[seconds >= WARM * seconds[-1]]) / MIB, "most_mib": sizes.max() / MIB, "mib_an_hour": slope / MIB,
            "share_an_hour": share, "files": (quarter["files"], last["files"]), "threads": (quarter["threads"], last["threads"])}


def show(rows: list[dict], stood: int, codes: dict[str, int], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    found, last = {name: summary(rows, name) | {"exit": codes[name]} for name in ENTRY}, rows[-1]
    paused = sum(bool(row["paused"]) for row in rows)
    table, forms = Table("", *ENTRY), {"median_mib": "{:.0f} MiB", "most_mib": "{:.0f} MiB", "mib_an_hour": "{:+.1f} MiB", "share_an_hour": "{:+.1%}",
                                       "files": "{}", "threads": "{}", "exit": "{}"}
    for label, form in forms.items():
        table.add_row(label.replace("_", " "), *(form.format(found[name][label]) for name in ENTRY))
    print(f"{last['s'] / 60:.0f} minutes: {last['samples']} samples, {last['step']} steps, {last['evaluations']} evaluations; the trainer "
          f"stood still {stood} times, production was paused in {paused} of {len(rows)} rows")
    draw(rows, out / "soak.png")
    (out / "soak.json").write_text(json.dumps({"summary": found, "stood_still": stood, "rows": rows}))
    Console().print(table)
    failed = any(grew(last["s"], found[name]["share_an_hour"]) or codes[name] for name in ENTRY)
    judged = "too short to judge" if last["s"] < JUDGED_FROM_S else "FAILED" if failed else "it did not"
    print(f"private memory (USS) after the first {WARM:.0%}; a line through medians may rise by {MOST_GROWTH:.0%} an hour: {judged}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
