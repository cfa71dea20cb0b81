"""The whole path of a sample over loopback beside plain ZeroMQ: encode, store, send, receive, check, fsync, acknowledge.

    python benchmarks/link.py [--samples 24] [--rounds 5] [--cable 2.5] [--store FOLDER] [--only "ours;plain ZeroMQ"]

ours          the producer's codec (two threads), store and ProducerLink in this process, the trainer's Inbox (link, checksums, store) in
              another; from the first capture to the last acknowledgement, which means fsync there.  The producer's store fsyncs, too,
              reads each sample back and checks it before it sends.
plain ZeroMQ  the same encoded bytes, made before the clock starts: DEALER to DEALER in two processes, libzmq's defaults, one frame a sample,
              no copy at either end, nothing looked at, stored or acknowledged; the clock stops at the receiver's one word after the last.
              "stored": the receiver writes each to a file of its own, whole and fsynced, before it takes the next.  "raw states": taps and
              final states as they are, a frame each, for whoever has no codec.

Each round takes every way once, in turn; a ratio is of one round's seconds for the same captures, median and range shown.  The
pieces (encode, checks, fsync) run alone in this process.  Captures: random bf16 numbers at 2048 wide, 8 taps and final state, 512 tokens,
which compress as real ones do (1.5); or a stored stream's.  --cable: a network namespace of its own, whose loopback carries so many Gbit/s (tbf;
needs root and iproute2)."""
from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import service
from common.capture import Capture
from common.contract import ExtractionContract
from common.files import write_whole
from protocol import codec, keys as curve
from protocol.producer_link import ProducerLink
from protocol.store import SampleStore
from tools.demo import free_port

ENCODERS = 2                 # threads, as producer/production.py has them
PATIENCE_S = 20.0            # without an acknowledgement: something is broken
AHEAD = 4                    # samples encoded and not yet stored
STREAM = "0" * 32
DISTINCT = 4                 # random captures; more would only fill memory
OURS, BARE, PLAIN, STORED, RAW = "ours", "ours, encoded before", "plain ZeroMQ", "plain ZeroMQ, stored", "plain ZeroMQ, raw states"
CURVE = ", CURVE"
PIECES = ENCODE, CHECK, FSYNC = f"encode alone, {ENCODERS} threads", "check alone (verify)", "fsync alone, one store"


@dataclass(frozen=True, eq=False)
class Load:
    """Captures and the bytes they become; captures[i % len(captures)] is sample i."""

    contract: ExtractionContract
    captures: list[Capture]
    encoded: list[bytes]

    def encode(self, seq: int) -> bytes:
        return codec.encode(self.captures[seq % len(self.captures)], stream=STREAM, seq=seq, contract=self.contract.hash)

    def raw(self, seq: int) -> list[memoryview]:
        """Taps and final states of a sample, as they lie in memory."""
        capture = self.captures[seq % len(self.captures)]
        return [memoryview(capture.taps).cast("B"), memoryview(capture.final).cast("B")]


def load_of(options: argparse.Namespace) -> Load:
    if options.store:
        with SampleStore(options.store / "store", readonly=True) as store:
            contract = ExtractionContract.from_dict(store.contract)
            captures = [store.sample(seq).capture for seq in range(store.first, store.next)[:options.samples]]
    else:
        from benchmarks.random_capture import random_capture
        contract = ExtractionContract(target="random", weights="a" * 64, tokenizer="b" * 64, chat_template="", thinking=None,
                                      taps=tuple(range(8)), n_layers=10, hidden_size=2048, vocab_size=248320, mask_token_id=248077,
                                      dtype="bfloat16", delta_rule="", versions={})
        shape = {"dflash_config": {"target_layer_ids": contract.taps, "mask_token_id": contract.mask_token_id}, "hidden_size": contract.hidden_size}
        captures = [random_capture(shape, options.tokens - i) for i in range(DISTINCT)]
    load = Load(contract, captures, [])
    load.encoded.extend(map(load.encode, range(options.samples)))
    return load


# ---- the other process

def receiver(asked: dict) -> None:
    """What the child does: {"inbox": address, "folder": ..., "keys": ...} or {"plain": address, "frames": n, ...}."""
    used = time.process_time()
    if "inbox" in asked:
        from trainer import config
        from trainer.inbox import Inbox
        settings = config.Run(producer=asked["inbox"], state_dir=Path(asked["folder"]), name="link", disk_budget=asked["budget"],
                              keys=asked["keys"] and Path(asked["keys"]))
        with Inbox(settings, "link", service.Stop()) as inbox:
            while not inbox.up:
                inbox.news()
                time.sleep(0.01)
            used = time.process_time()
            print("ready", flush=True)
            while not os.path.exists(asked["done"]):
                inbox.news()
                time.sleep(0.05)
    else:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            if asked["curve"]:
                socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
                socket.curve_serverkey = asked["curve"].encode()
            socket.connect(asked["plain"])
            socket.send(b"here")
            print("ready", flush=True)
            for seq in range(asked["frames"]):
                frame = socket.recv(copy=False)
                if asked["folder"]:
                    write_whole(Path(asked["folder"], f"{seq:012d}.hs"), [frame.buffer])
            socket.send(b"all")
    print(time.process_time() - used, flush=True)


class Child:
    """The receiving process; cpu: its processor seconds, once it has ended."""

    def __init__(self, **asked: object) -> None:
        self._process = subprocess.Popen([sys.executable, __file__, "--child", json.dumps(asked)], stdout=subprocess.PIPE, text=True)
        self.cpu, self._acked, self._moved = 0.0, None, time.monotonic()

    def ready(self) -> None:
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the receiving process ended with {self._process.wait()}")

    def alive(self, acked: int) -> None:
        """RuntimeError where it has ended, or has acknowledged nothing new for PATIENCE_S."""
        now = time.monotonic()
        if acked != self._acked:
            self._acked, self._moved = acked, now
        if (code := self._process.poll()) is not None or now - self._moved > PATIENCE_S:
            raise RuntimeError(f"the receiving process {'stands still' if code is None else f'ended with {code}'} after sample {acked}")

    def end(self) -> None:
        self.cpu = float(self._process.stdout.readline())
        self._process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()


# ---- the ways: each returns seconds, and processor seconds of both processes

def ours(load: Load, folder: Path, *, encoding: bool, keys: bool) -> tuple[float, float]:
    producer_keys, trainer_keys = key_folders(folder) if keys else (None, None)
    address, count, budget = f"tcp://127.0.0.1:{free_port()}", len(load.encoded), 1 + 2e-9 * sum(map(len, load.encoded))     # never full
    with SampleStore(folder / "samples") as store, ThreadPoolExecutor(ENCODERS) as encoders:
        store.begin(STREAM, load.contract.to_dict(), 0)
        link = ProducerLink(address, store, load.contract.to_dict(), {}, cursors=folder / "subscribers.json", inbox_dir=folder / "checkpoints",
                            keys=producer_keys and curve.ProducerKeys(producer_keys))
        with link, Child(inbox=address, folder=str(folder / "trainer"), keys=trainer_keys and str(trainer_keys), budget=budget,
                         done=str(folder / "done")) as child:
            child.ready()
            begin, used = time.perf_counter(), time.process_time()
            for seq, data in enumerate(encoded_ahead(load, encoders) if encoding else load.encoded):
                store.append(seq, data)
                link.samples_ready()
            while (acked := link.lowest_acked()) != count - 1:
                link.raise_if_failed()
                child.alive(acked)
                time.sleep(0.001)
            seconds, used = time.perf_counter() - begin, time.process_time() - used
            (folder / "done").touch()
            child.end()
    return seconds, used + child.cpu


def encoded_ahead(load: Load, encoders: ThreadPoolExecutor) -> Iterator[bytes]:
    """Each sample's bytes in order, at most AHEAD of them made before they are taken."""
    jobs = deque()
    for seq in range(len(load.encoded)):
        jobs.append(encoders.submit(load.encode, seq))
        if len(jobs) > AHEAD:
            yield jobs.popleft().result()
    while jobs:
        yield jobs.popleft().result()


def plain(frames: list[bytes], folder: Path | None, *, keys: bool) -> tuple[float, float]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        public = None
        if keys:
            public, secret = zmq.curve_keypair()
            socket.curve_secretkey, socket.curve_server = secret, True
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        with Child(plain=f"tcp://127.0.0.1:{port}", frames=len(frames), curve=public and public.decode(), folder=folder and str(folder)) as child:
            child.ready()
            assert socket.recv() == b"here"
            begin, used = time.perf_counter(), time.process_time()
            for frame in frames:
                socket.send(frame, copy=False)
            assert socket.recv() == b"all"
            seconds, used = time.perf_counter() - begin, time.process_time() - used
            child.end()
    return seconds, used + child.cpu


def key_folders(folder: Path) -> tuple[Path, Path]:
    """Keys of the two boxes that know each other: the producer's, the trainer's."""
    producer, trainer = folder / "producer-keys", folder / "trainer-keys"
    public = curve.generate(producer)
    curve.allow(producer, curve.generate(trainer))
    curve.set_producer(trainer, public)
    return producer, trainer


def piece(name: str, load: Load, folder: Path) -> tuple[float, float]:
    begin, used = time.perf_counter(), time.process_time()
    if name == ENCODE:
        with ThreadPoolExecutor(ENCODERS) as encoders:
            list(encoders.map(load.encode, range(len(load.encoded))))
    for seq, data in enumerate(load.encoded):
        if name == CHECK:
            codec.verify(data)
        elif name == FSYNC:
            write_whole(folder / f"{seq:012d}.hs", data)
    return time.perf_counter() - begin, time.process_time() - used


def ways_of(load: Load) -> dict[str, Callable[[Path], tuple[float, float]]]:
    raw = [part for seq in range(len(load.encoded)) for part in load.raw(seq)]
    return {PLAIN: lambda _folder: plain(load.encoded, None, keys=False),
            OURS: lambda folder: ours(load, folder, encoding=True, keys=False),
            BARE: lambda folder: ours(load, folder, encoding=False, keys=False),
            STORED: lambda folder: plain(load.encoded, folder, keys=False),
            RAW: lambda _folder: plain(raw, None, keys=False),
            PLAIN + CURVE: lambda _folder: plain(load.encoded, None, keys=True),
            OURS + CURVE: lambda folder: ours(load, folder, encoding=True, keys=True),
            **{name: lambda folder, name=name: piece(name, load, folder) for name in PIECES}}


# ---- rounds, table

def measure(ways: dict[str, Callable], rounds: int, work: Path) -> dict[str, list[tuple[float, float]]]:
    """{way: (seconds, processor seconds) of each round}; round 0 warms up and is left out."""
    found = defaultdict(list)
    for round_ in range(rounds + 1):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(dir=work) as folder:
                result = way(Path(folder))
            if round_:
                found[name].append(result)
    return found


def over(found: dict[str, list[tuple[float, float]]], name: str, base: str) -> str:
    """Speed of one way over another's, round by round: median and range; "" where one was not taken."""
    if not {name, base} <= set(found):
        return ""
    ratios = [theirs / own for (own, _), (theirs, _) in zip(found[name], found[base])]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def show(found: dict[str, list[tuple[float, float]]], load: Load, options: argparse.Namespace) -> None:
    sent = sum(map(len, load.encoded))
    states = sum(part.nbytes for seq in range(len(load.encoded)) for part in load.raw(seq))
    place = f"a cable of {options.cable} Gbit/s" if options.cable else "loopback"
    table = Table("way", "encoded MB/s", "states MB/s", f"over {PLAIN}", "CPU s a GB of states",
                  title=f"{len(load.encoded)} samples, {states / 1e6:.0f} MB of states, {sent / 1e6:.0f} MB encoded "
                  f"(ratio {states / sent:.2f}), {place}, {os.cpu_count()} cores, {options.rounds} rounds")
    for name, rows in found.items():
        seconds, cpu = (statistics.median(column) for column in zip(*rows))
        table.add_row(name, "" if name == RAW else f"{sent / seconds / 1e6:.0f}", f"{states / seconds / 1e6:.0f}",
                      "" if name in PIECES else over(found, name, PLAIN), f"{cpu / states * 1e9:.2f}")
    Console(width=130).print(table)
    pairs = ((OURS, STORED), (BARE, STORED), (OURS, RAW), (OURS + CURVE, OURS), (PLAIN + CURVE, PLAIN), (OURS + CURVE, PLAIN + CURVE), (OURS, FSYNC))
    for name, base in pairs:
        if ratio := over(found, name, base):
            print(f"{name} over {base}: {ratio}")


def lay_cable(gbit: float) -> None:
    """Run this very command again in a network namespace whose loopback carries gbit a second.  Does not return."""
    if os.geteuid() or not all(map(shutil.which, ("unshare", "ip", "tc"))):
        sys.exit("--cable needs root, and unshare, ip and tc (util-linux, iproute2)")
    script = f'ip link set lo up && tc qdisc add dev lo root tbf rate {gbit}gbit burst 512kb latency 50ms && exec "$@"'
    os.execvp("unshare", ["unshare", "-n", "sh", "-c", script, "sh", sys.executable, *sys.argv, "--laid"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="length of a random capture")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cable", type=float, help="Gbit/s")
    parser.add_argument("--store", type=Path, help="--state-dir of an hstrain run: send its samples")
    parser.add_argument("--only", help="ways to take, of those in the table")
    parser.add_argument("--work", type=Path, default=Path("demo"), help="where the stores lie meanwhile: the disk that is measured")
    parser.add_argument("--laid", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return receiver(json.loads(options.child))
    if options.cable and not options.laid:
        lay_cable(options.cable)
    options.work.mkdir(parents=True, exist_ok=True)
    load = load_of(options)
    ways = ways_of(load)
    if options.only:
        if unknown := set(options.only.split(";")) - set(ways):
            parser.error(f"--only: no {', '.join(unknown)} among {'; '.join(ways)}")
        ways = {name: ways[name] for name in options.only.split(";")}
    show(measure(ways, options.rounds, options.work), load, options)


if __name__ == "__main__":
    main()
