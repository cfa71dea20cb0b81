"""The rate of a healthy trainer beside one that stalls, against its rate alone, over loopback; and what the other costs the producer in memory.

    python benchmarks/stall.py [--samples 100] [--size 6] [--rounds 7] [--rate 300] [--flood 5000] [--encrypted]

The producer's link is in this process, over samples in memory; the healthy trainer (TrainerLink, nothing stored) and the ill one are
processes of their own.  It takes --rate MB a second and no more, as at the end of a cable of 2.5 Gbit/s; 0: what two processes on this
box can do, which measures their share of its cores as much as the link.  Each round takes every kind once, in turn, each next to a measurement alone: a ratio is of those two, median and
range shown.  Memory is this process' resident size, the most that it grew from before the ill one came.  The ill ones:

    reads nothing         grants all credit and never reads
    stops in a message    raw TCP: greeting, Hello, and half of a frame of a MiB
    asks, reads nothing   asks for 36 chunks of an asset, which fill its queue, and reads none; one more that waits, and it is dropped
    floods                heartbeats, as many a second as `--flood`; 0: as fast as it can, which on two cores takes one of them away

Fairness without a clock is in tests/protocol/test_stall.py.  Left out: disks, which are the same for both."""
from __future__ import annotations

import argparse
import hashlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import psutil
import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.contract import ExtractionContract
from protocol import events as e, keys as curve
from protocol.events import Cursor
from protocol.frames import CHUNK, encode
from protocol.producer_link import ProducerLink
from protocol.trainer_link import TrainerLink
from protocol.transfer import OUTSTANDING
from protocol.wire import QUEUED_BYTES
from tools.demo import free_port

KINDS = ("reads nothing", "stops in a message", "asks, reads nothing", "floods")
CONTRACT = ExtractionContract(target="toy", weights="0" * 64, tokenizer="1" * 64, chat_template="", thinking=None, taps=(1, 3), n_layers=6,
                              hidden_size=8, vocab_size=32, mask_token_id=31, dtype="float32", delta_rule="", versions={})
PATIENCE = 120.0
ASKED = (QUEUED_BYTES >> 20) + OUTSTANDING
SETTLED = 1.0                # seconds after which an ill one is as it stays: its queue is full


class Store:
    """count samples, all the same bytes: what grows is not the store."""

    stream, first = "s", 0

    def __init__(self, count: int, size: int) -> None:
        self.next, self.data = count, bytearray(os.urandom(size))

    def read(self, _seq: int) -> bytes:
        return bytes(self.data)                              # a copy, as from a disk

    def bytes_between(self, first: int, end: int) -> int:
        return max(0, end - first) * len(self.data)

    def drop_below(self, _seq: int) -> None:
        """All are kept."""


def well(address: str, keys: str, rate: float) -> None:
    """A trainer that takes everything: prints the seconds from its Welcome to the last acknowledgement."""
    began, count, last = [0.0], [0], threading.Event()
    end = [0]

    def welcomed(welcome, _contract) -> None:
        began[0], end[0] = time.perf_counter(), welcome.next_seq

    def came(_seq: int, data) -> None:
        count[0] += 1
        if rate:
            time.sleep(max(0.0, began[0] + count[0] * len(data) / (rate * 1e6) - time.perf_counter()))
        if count[0] == end[0]:
            last.set()
    with TrainerLink(address, f"well-{os.getpid()}", cursor=lambda: Cursor(None, 0, None), assets_dir=Path(tempfile.mkdtemp()), on_welcome=welcomed,
                     on_sample=came, keys=curve.TrainerKeys(Path(keys)) if keys else None):
        assert last.wait(PATIENCE)
        print(time.perf_counter() - began[0], flush=True)


def ill(kind: str, address: str, keys: str, flood: int) -> None:
    """Says "there" once it is what it is, and stays so."""
    hello = encode(e.Hello(f"ill-{os.getpid()}", None, 0, None, kind != "floods"))
    if kind == "stops in a message" and not keys:
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port))) as one:
            one.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
            one.sendall(b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
            one.sendall(b"\x02" + len(hello[0]).to_bytes(8, "big") + hello[0] + b"\x02" + (1 << 20).to_bytes(8, "big") + bytes(1 << 19))
            stay()
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.rcvhwm, one.linger = 1, 0
        if keys:
            mine = curve.TrainerKeys(Path(keys))
            one.curve_serverkey, one.curve_publickey, one.curve_secretkey = mine.producer, mine.public, mine.secret
        one.connect(address)
        one.send_multipart(hello)
        assert one.poll(10_000), "no Welcome"
        one.recv_multipart()
        if kind == "reads nothing":
            one.send_multipart(encode(e.Credit(1 << 40)))
        if kind == "asks, reads nothing":
            ask = encode(e.AssetGet(hashlib.sha256(bytes(CHUNK)).hexdigest(), 0, CHUNK))
            for _ in range(ASKED):
                one.send_multipart(ask)
                time.sleep(0.02)                             # a fifth that waits would end its session
        print("there", flush=True)
        beat, began, sent = encode(e.Heartbeat({})), time.monotonic(), 0
        while True:
            due = int((time.monotonic() - began) * flood) if flood else sent + 1000
            for _ in range(min(1000, due - sent) if kind == "floods" else 1):
                one.send_multipart(beat)
                sent += 1
            while one.poll(0) and kind == "floods":
                one.recv_multipart()
            time.sleep(1.0 if kind != "floods" else 0.005 if flood else 0.0)


def stay() -> None:
    print("there", flush=True)
    while True:
        time.sleep(60)


@contextmanager
def process(*words: object, wait_for: str = ""):
    one = subprocess.Popen([sys.executable, __file__, *map(str, words)], stdout=subprocess.PIPE, text=True)
    try:
        if wait_for:
            assert one.stdout.readline() == wait_for + "\n"
            time.sleep(SETTLED)
        yield one
    finally:
        one.kill()
        one.wait()


class Peak(threading.Thread):
    """The most that this process' resident memory grew since it began."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._process, self._over = psutil.Process(), threading.Event()
        self.start_bytes = self.most = self._process.memory_info().rss
        self.start()

    def run(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, self._process.memory_info().rss)

    def grown(self) -> int:
        self._over.set()
        self.join()
        return self.most - self.start_bytes


def seconds(address: str, keys: str, rate: float) -> float:
    with process("--well", address, "--keys", keys, "--rate", rate) as one:
        return float(one.stdout.readline())


def measure(options: argparse.Namespace, folder: Path, console: Console) -> None:
    address, keys, given = f"tcp://127.0.0.1:{free_port()}", "", {}
    if options.encrypted:
        keys = str(folder / "t")
        curve.set_producer(folder / "t", curve.generate(folder / "p"))
        curve.allow(folder / "p", curve.generate(folder / "t"))
        given = {"keys": curve.ProducerKeys(folder / "p")}
    (folder / "embedding").write_bytes(bytes(CHUNK))
    store = Store(options.samples, int(options.size * 1e6))
    alone, beside, ratios, grown = [], defaultdict(list), defaultdict(list), defaultdict(list)
    with ProducerLink(address, store, CONTRACT.to_dict(), {"embedding": folder / "embedding"}, cursors=folder / "cursors.json",
                      inbox_dir=folder / "inbox", **given) as link:
        seconds(address, keys, options.rate)                 # once for nothing: pages, ports, caches
        for round_ in range(options.rounds):
            console.print(f"round {round_ + 1} of {options.rounds}", highlight=False)
            for kind in KINDS:
                if keys and kind == "stops in a message":
                    continue                                 # without the key there is no such message; tests/protocol has one with it
                order = [False, True] if round_ % 2 else [True, False]
                took = {}
                for with_ill in order:
                    if with_ill:
                        peak = Peak()
                        with process("--ill", kind, address, "--keys", keys, "--flood", options.flood, wait_for="there"):
                            took[True] = seconds(address, keys, options.rate)
                        grown[kind].append(peak.grown())
                    else:
                        took[False] = seconds(address, keys, options.rate)
                    link.raise_if_failed()
                alone.append(took[False])
                beside[kind].append(took[True])
                ratios[kind].append(took[False] / took[True])
    show(options, store, alone, beside, ratios, grown, console)


def show(options, store: Store, alone, beside, ratios, grown, console: Console) -> None:
    rate = options.samples * len(store.data) / 1e6
    table = Table(title=f"{options.samples} samples of {options.size} MB, {options.rounds} rounds{', CURVE' if options.encrypted else ''}"
                        f"{f', taken at {options.rate:.0f} MB/s at most' if options.rate else ''}; "
                        f"alone {rate / statistics.median(alone):.0f} MB/s")
    for head in ("beside one that", "MB/s", "of alone", "range", "producer grew by at most"):
        table.add_column(head, justify="left" if head == "beside one that" else "right")
    for kind in beside:
        table.add_row(kind + (f" ({options.flood or 'no'} a second)" if kind == "floods" and options.flood else ""),
                      f"{rate / statistics.median(beside[kind]):.0f}", f"{statistics.median(ratios[kind]):.2f}",
                      f"{min(ratios[kind]):.2f} to {max(ratios[kind]):.2f}", f"{max(grown[kind]) / (1 << 20):.0f} MiB")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, kind, default in (("samples", int, 100), ("size", float, 6.0), ("rounds", int, 7), ("rate", float, 300.0), ("flood", int, 5000)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--encrypted", action="store_true", help="with CURVE, all with one key that is allowed")
    for name in ("well", "keys"):
        parser.add_argument(f"--{name}", default="", help=argparse.SUPPRESS)
    parser.add_argument("--ill", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.well:
        well(options.well, options.keys, options.rate)
    elif options.ill:
        ill(*options.ill, options.keys, options.flood)
    else:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, Path(folder), Console(width=120))


if __name__ == "__main__":
    main()
