"""`make chaos`: both daemons, each in a network of its own, a cable between them, and a seeded schedule of faults.

    python -m tests.chaos.run --faults 240 --seed 0 --folder FOLDER

First the producer makes the whole stream undisturbed: the truth.  Then both daemons run under bursts of faults.  After each burst
samples must flow again, by themselves and within PATIENCE; when all are over and the trainer has the stream's end, each of its
samples is held against the truth, number by number, token by token, state by state.  At every kill of the trainer the files that are there
must be an unbroken row that holds all that it had acknowledged.  A sample that was spoiled in the trainer's store is found when it is read:
at the end it is the same again, or damaged still and counted; nothing else may be.

Runs in namespaces of its own (users where it is not root, mounts, networks), so that nothing of the machine is touched.  A daemon that
ends by itself is brought back after a second, as systemd would, and counted; only a full disk excuses it."""
from __future__ import annotations

import argparse
import heapq
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from common.errors import CorruptError
from protocol.store import SampleStore
from tests.chaos.cable import ADDRESSES, Weather
from tests.chaos.faults import KINDS, Fault, schedule
from tests.daemons.processes import ROOT, Daemon, stored

PORT, DISK_MB = 5757, 512
INSIDE = "HSDRAFT_CHAOS_INSIDE"
SERVE = ["serve", "--target", "embedded", "--layers", "1,3", "--batch", "8", "--max-new-tokens", "16", "--temperature", "1", "--eval-prompts", "1",
         "--eval-new-tokens", "8", "--threads", "1"]
RUN = ["run", "--name", "box", "--sequences", "1", "--anchors", "2", "--layers", "1", "--block-size", "4", "--steps", "1000000", "--eval-every", "150",
       "--cache", "64", "--threads", "1"]
NAMES = {"p": "hsprod", "t": "hstrain"}
ENDS = {"p": "producer", "t": "trainer"}
PATIENCE = 120.0             # seconds without a new sample, and without a fault, until this has failed: starting takes most of it on a busy box
EXCUSED = 5.0                # seconds after a full disk in which a daemon may still be seen to have ended by it
FLOW = 8                     # new samples after a burst until the next
NEWEST = 8                   # samples of which one is spoiled


class Failed(Exception):
    """What was not as it must be."""


class World:
    """Both daemons, their disks, their networks and the cable.  strike and mend are called in time's order."""

    def __init__(self, folder: Path, words: dict[str, list[str]], seed: int) -> None:
        self.folder, self.words = folder, words
        self.counts: Counter[str] = Counter()
        self.holders = {side: subprocess.Popen(["unshare", "-n", "sleep", "infinity"]) for side in NAMES}
        time.sleep(0.3)
        for side in NAMES:
            (folder / side).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", folder / side], check=True)
        self.cable = subprocess.Popen([sys.executable, "-m", "tests.chaos.cable", *(str(h.pid) for h in self.holders.values()), str(seed)], cwd=ROOT,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.cable.stdout.readline() != "up\n":
            raise Failed("the cable did not come up")
        self.daemons: dict[str, Daemon | None] = {side: self._start(side) for side in NAMES}
        self.active: list[Fault] = []
        self.back: dict[str, float] = {}                                   # side -> when one that ended by itself comes back
        self.full: dict[str, float] = {}                                   # side -> when its disk was full last
        self.spoiled: dict[str, set[int]] = {side: set() for side in NAMES}

    def _start(self, side: str) -> Daemon:
        self.counts[f"starts of {NAMES[side]}"] += 1
        return Daemon(NAMES[side], *self.words[side], log=self.folder / f"{side}.log", prefix=("nsenter", f"--net=/proc/{self.holders[side].pid}/ns/net"))

    def strike(self, fault: Fault) -> None:
        self.counts[fault.kind] += 1
        self.active.append(fault)
        for side in sides(fault):
            daemon = self.daemons[side]
            if fault.kind.startswith("kill") and daemon:
                acked = self.acknowledged() if side == "t" else -1
                daemon.kill()
                self.daemons[side] = None
                self.back.pop(side, None)
                if side == "t":
                    self.check_row(acked)
            elif fault.kind.endswith("still") and daemon and daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGSTOP)
            elif fault.kind.endswith("full"):
                self.fill(side)
            elif fault.kind.endswith("spoiled"):
                self.spoil(side, fault.strength)
        self.weather()

    def mend(self, fault: Fault) -> None:
        self.active.remove(fault)
        for side in sides(fault):
            daemon, others = self.daemons[side], [other.kind for other in self.active if side in sides(other)]
            if fault.kind.startswith("kill") and daemon is None and not any(kind.startswith("kill") for kind in others):
                self.daemons[side] = self._start(side)
            elif fault.kind.endswith("still") and daemon and not any(kind.endswith("still") for kind in others):
                if daemon.process.poll() is None:
                    daemon.process.send_signal(signal.SIGCONT)
            elif fault.kind.endswith("full") and not any(kind.endswith("full") for kind in others):
                (self.folder / side / "ballast").unlink()
                self.full[side] = time.monotonic()
        self.weather()

    def weather(self) -> None:
        now = Weather(loss=max((f.strength for f in self.active if f.kind == "loss"), default=0.0),
                      delay=max((f.strength for f in self.active if f.kind == "delay"), default=0.0), cut=any(f.kind == "cut" for f in self.active))
        self.cable.stdin.write(json.dumps(asdict(now)) + "\n")
        self.cable.stdin.flush()

    def fill(self, side: str) -> None:
        """All of the disk's free space, to the last page."""
        with (self.folder / side / "ballast").open("ab") as file:
            space = os.statvfs(self.folder / side)
            size = file.tell() + space.f_bavail * space.f_frsize
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            except OSError:
                self.counts["disks not filled to the last page"] += 1

    def spoil(self, side: str, strength: float) -> None:
        """On the producer's rather one that the trainer still lacks: nobody asks for the others again."""
        newest, acked = stored(self.folder / side)[-NEWEST:], self.acknowledged()
        newest = [seq for seq in newest if side == "p" and seq > acked] or newest
        if not newest:
            self.counts["nothing there to spoil"] += 1
            return
        seq = newest[int(strength * 1e6) % len(newest)]
        [path] = (self.folder / side).glob(f"**/{seq:012d}.hs")
        size = path.stat().st_size
        with path.open("r+b") as file:
            if strength < 0.3:
                file.truncate(int(size * strength / 0.3))
            else:
                file.seek(int(size * strength))
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1 << int(strength * 1e9) % 8]))
        self.spoiled[side].add(seq)

    def look(self, now: float) -> None:
        """Bring back who ended by itself, if it may have."""
        for side, daemon in self.daemons.items():
            if daemon and side not in self.back and (code := daemon.process.poll()) is not None:
                if not any(f.kind.endswith("full") and side in sides(f) for f in self.active) and now - self.full.get(side, -EXCUSED) > EXCUSED:
                    raise Failed(f"{daemon.name} ended by itself with {code}\n{daemon.text[-3000:]}")
                self.counts[f"{NAMES[side]} ended by itself on a full disk"] += 1
                self.back[side] = now + 1.0
            if side in self.back and now >= self.back[side]:
                del self.back[side]
                self.daemons[side] = self._start(side)

    def acknowledged(self) -> int:
        """The last sample that the producer has written down as acknowledged; -1: none."""
        found = [json.loads(path.read_text())["acked"].get("box", -1) for path in (self.folder / "p").glob("**/subscribers.json")]
        return max(found, default=-1)

    def check_row(self, acked: int) -> None:
        """What was spoiled is put aside when it is found, and comes again."""
        here = stored(self.folder / "t")
        if lacks := set(range(max([acked, *here]) + 1)) - set(here) - self.spoiled["t"]:
            raise Failed(f"the trainer, killed, holds {len(here)} samples up to {here[-1] if here else None}, {acked} was acknowledged, and "
                         f"{sorted(lacks)[:9]} are not there")

    def stop(self) -> dict[str, int]:
        return {NAMES[side]: daemon.stop() for side, daemon in self.daemons.items() if daemon}

    def close(self) -> dict:
        for daemon in self.daemons.values():
            if daemon and daemon.process.poll() is None:
                daemon.kill()
        said, _ = self.cable.communicate()
        for holder in self.holders.values():
            holder.kill()
            holder.wait()
        for side in NAMES:
            subprocess.run(["umount", "-l", self.folder / side], check=False)
        return json.loads(said or "{}")


def sides(fault: Fault) -> str:
    """Which daemons a fault strikes: of "pt"; "" for the cable's own."""
    if fault.kind == "kill both":
        return "pt"
    return "p" if "producer" in fault.kind else "t" if "trainer" in fault.kind else ""


def storm(world: World, faults: list[Fault], say) -> None:
    """A burst, in real time, to the end of its last fault."""
    began, events = time.monotonic(), []
    for number, fault in enumerate(faults):
        heapq.heappush(events, (fault.at, 2 * number, world.strike, fault))
        heapq.heappush(events, (fault.at + fault.seconds, 2 * number + 1, world.mend, fault))
    while events:
        now = time.monotonic() - began
        while events and events[0][0] <= now:
            _, number, act, fault = heapq.heappop(events)
            act(fault)
            say(f"{fault.kind} {'strikes' if number % 2 == 0 else 'is over'}", len(stored(world.folder / 't')))
        world.look(time.monotonic())
        time.sleep(0.05)


def calm(world: World, samples: int, say) -> None:
    """Until the trainer has so many."""
    last, moved = -1, time.monotonic()
    while (here := len(stored(world.folder / "t"))) < samples:
        if here != last:
            last, moved = here, time.monotonic()
        if time.monotonic() - moved > PATIENCE:
            raise Failed(f"no new sample for {PATIENCE:.0f} s without a fault: {here} of {samples}\n" + "\n".join(
                f"--- {d.name}\n{d.text[-1500:]}" for d in world.daemons.values() if d))
        world.look(time.monotonic())
        say("calm", here)
        time.sleep(0.2)


def truth(folder: Path, words: list[str]) -> Path:
    """The folder of the undisturbed stream's samples."""
    state = folder / "truth"
    daemon = Daemon("hsprod", *words, "--bind", "tcp://127.0.0.1:0", "--state-dir", str(state), log=folder / "truth.log")
    view = state / "status.json"
    while not (view.exists() and json.loads(view.read_text())["numbers"].get("ended")):
        if daemon.process.poll() is not None:
            raise Failed(daemon.text[-3000:])
        time.sleep(0.2)
    if daemon.stop():
        raise Failed(daemon.text[-3000:])
    return next(state.glob("streams/*/samples"))


def compare(true: Path, ours: Path, spoiled: set[int] = frozenset()) -> tuple[int, int]:
    """Samples that are the same in both stores, and those of the spoiled that are damaged in ours: together all there are.  Failed names the
    first that is neither."""
    damaged = 0
    with SampleStore(true, readonly=True) as one, SampleStore(ours, readonly=True) as other:
        if (one.first, one.next) != (other.first, other.next):
            raise Failed(f"samples {other.first} to {other.next - 1}, the truth has {one.first} to {one.next - 1}")
        for seq in range(one.first, one.next):
            try:
                expected, came = (vars(store.sample(seq).capture) for store in (one, other))
            except CorruptError as error:
                if seq not in spoiled:
                    raise Failed(str(error)) from None
                damaged += 1
                continue
            for name, value in expected.items():
                if not np.array_equal(value, came[name]) if isinstance(value, np.ndarray) else value != came[name]:
                    raise Failed(f"sample {seq}: {name} is not what was made undisturbed")
        return one.next - one.first - damaged, damaged


def inside(arguments: list[str]) -> list[str]:
    """The command that runs this in namespaces of its own."""
    users = [] if os.geteuid() == 0 else ["-r"]
    return ["unshare", *users, "-m", "-n", "--propagation", "private", sys.executable, "-m", "tests.chaos.run", *arguments]


def why_not() -> str:
    """Why this machine cannot run it; "" where it can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages util-linux, iproute2)"
    users = [] if os.geteuid() == 0 else ["-r"]
    trial = "unshare -n true && mount -t tmpfs none /mnt && : <>/dev/net/tun"
    done = subprocess.run(["unshare", *users, "-m", "-n", "sh", "-c", trial], capture_output=True, text=True)
    return done.stderr.strip()[-200:] and f"no namespaces, tmpfs or TUN here: {done.stderr.strip()[-200:]}" if done.returncode else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, kind, default in (("faults", int, 240), ("seed", int, 0), ("prompts", int, 1240), ("passes", int, 1)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--truth", type=Path, help="the folder `truth` of an earlier run with the same prompts and passes, instead of making it anew")
    parser.add_argument("--folder", type=Path, default=Path("demo/chaos"), help="made anew")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        if why := why_not():
            sys.exit(why)
        return subprocess.run(inside(sys.argv[1:]), env=os.environ | {INSIDE: "1"}).returncode
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))        # else the daemons would outlive it
    folder = options.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    prompts = folder / "prompts.jsonl"
    lines = (ROOT / "producer" / "data" / "demo-prompts.jsonl").read_text("utf-8").splitlines(keepends=True)
    prompts.write_text("".join(lines[:options.prompts]), "utf-8")
    serve = [*SERVE, "--prompts", str(prompts), "--passes", str(options.passes)]
    began, console = time.monotonic(), Console()
    said = [0.0]

    def say(what: str, here: int) -> None:
        now = time.monotonic() - began
        if now - said[0] > 5:
            said[0] = now
            print(f"[{now:5.0f} s] {here} samples; {what}", flush=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    true = next(options.truth.absolute().glob("streams/*/samples")) if options.truth else truth(folder, serve)
    say("the truth is made", 0)
    address = f"tcp://{ADDRESSES[0]}:{PORT}"
    world = World(folder, {"p": [*serve, "--bind", address, "--insecure", "--state-dir", str(folder / "p")],
                           "t": [*RUN, "--producer", address, "--state-dir", str(folder / "t")]}, options.seed)
    bursts, failed, passed, waited = schedule(options.seed, options.faults), "", {}, []
    try:
        calm(world, 1, say)
        for burst in bursts:
            storm(world, burst, say)
            over, here = time.monotonic(), len(stored(folder / "t"))
            calm(world, min(here + 1, len(stored(true))), say)
            waited.append(time.monotonic() - over)
            calm(world, min(here + FLOW, len(stored(true))), say)
        world.counts["samples when the faults were over"] = len(stored(folder / "t"))
        calm(world, len(stored(true)), say)
        codes = world.stop()
        if any(codes.values()):
            raise Failed(f"exit codes {codes}")
        same, damaged = compare(true, folder / "t" / "store", world.spoiled["t"])
        world.counts["samples the same as undisturbed, none lost, none doubled"] = same
        world.counts["samples spoiled in the trainer's store and not read since"] = damaged
        for side, words in (("p", "made again"), ("t", "came again and is whole")):
            world.counts[f"samples spoiled on the {ENDS[side]}"] = len(world.spoiled[side])
            world.counts[f"lines of {NAMES[side]}: {words}"] = (folder / f"{side}.log").read_text("utf-8").count(words)
    except Failed as error:
        failed = str(error)
    finally:
        passed = world.close()
    table = Table(title=f"seed {options.seed}, {sum(world.counts[kind] for kind in KINDS)} faults in {len(waited)} bursts, {time.monotonic() - began:.0f} s in all",
                  show_header=False)
    for name, count in [*world.counts.items(), *((f"packets {name}", n) for name, n in passed.items())]:
        table.add_row(name, f"{count:,}")
    if waited:
        table.add_row("seconds from a burst's end to the next sample, median and most", f"{np.median(waited):.1f}, {max(waited):.1f}")
    console.print(table)
    if failed:
        print(f"FAILED with seed {options.seed}: {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
