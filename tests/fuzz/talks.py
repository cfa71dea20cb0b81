"""Conversations that no honest peer holds, against the real shells of both ends; only the socket and the clock are not real.

An input is a list of steps (shapes.split), each: what happens (its first byte), then for a message the header's length in two
bytes, header, buffer.  A step is one message of the other end, or time that passes, or this end's main thread at work.  The end
under test may drop the link, count, say Bye; it may not raise, grow, write elsewhere than where it should, or keep what is wrong."""
from __future__ import annotations

import contextlib
import queue
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import zmq

from common.files import sha256_file
from protocol import codec, offers, producer_link, trainer_link
from protocol.events import Cursor
from protocol.frames import CHECKPOINT_NAMES, MAX_DOCUMENT
from protocol.producer_link import MAX_PEERS, ProducerLink
from protocol.store import SampleStore
from protocol.trainer_link import TrainerLink
from tests.fuzz.readers import folder, quiet
from tests.fuzz.shapes import split
from tests.protocol.samples import CONTRACT, STREAM, sample

MESSAGE, TIME, WORK, MORE = range(4)             # what happens, by the low two bits; the third says which of two peers
MOST_ROUNDS = 200                                # of sending; an end that has more to say after one message does not stop
CHECKPOINT = {"config.json": b"{}", "model.safetensors": b"0123456789" * 30, "record.json": b"{}"}
ASSETS = {"embedding": b"embedding" * 20, "tokenizer": b"{}"}
SAMPLES = [sample(seq, tokens=3, hidden=4, taps=1) for seq in range(3)]


def step(what: int, parts: Sequence[bytes] = (), who: int = 0) -> bytes:
    first, buffer = (*parts, b"", b"")[:2]
    return bytes([what | who << 2]) + len(first).to_bytes(2, "little") + first + buffer


def _frames(part: bytes) -> list[bytes]:
    end = 3 + int.from_bytes(part[1:3], "little")
    return [part[3:end]] + ([part[end:]] if part[end:] else [])


class Clock:
    """Stands for the module time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


class Store:
    """Stands for SampleStore on the producer: samples in memory."""

    stream, first = STREAM, 0

    def __init__(self) -> None:
        self.next = len(SAMPLES)

    def read(self, seq: int) -> bytes:
        assert self.first <= seq < self.next
        return SAMPLES[seq % len(SAMPLES)]

    def bytes_between(self, first: int, end: int) -> int:
        return sum(len(SAMPLES[seq % len(SAMPLES)]) for seq in range(max(first, self.first), min(end, self.next)))

    def drop_below(self, seq: int) -> None:
        self.first = max(self.first, min(seq, self.next))


class Socket:
    """Stands for Listener; its peers take everything."""

    counters: Counter = Counter()

    def __init__(self) -> None:
        self.sent = 0

    def send(self, peer: bytes, parts: list[bytes]) -> bool:
        self.sent += 1
        return True

    def still_allowed(self, _key: None) -> bool:
        return True


def trainer_says(data: bytes) -> bool:
    """Anything a trainer can say, to the producer's link."""
    clock = Clock()
    with folder() as path, mock.patch.object(producer_link, "time", clock), quiet():
        for name, content in ASSETS.items():
            (path / name).write_bytes(content)
        link = ProducerLink("tcp://127.0.0.1:1", Store(), CONTRACT.to_dict(), {name: path / name for name in ASSETS},
                            cursors=path / "cursors" / "subscribers.json", inbox_dir=path / "inbox")
        link._listener = Socket()
        try:
            for part in split(data):
                _producers_turn(link, clock, part or b"\0")
            _producer_is_sound(link, path)
            return not (link.counters["malformed"] or link.counters["refused"] or link.counters["strangers"])
        finally:
            link._worker.close()
            link._serving.close()
            for peer in link._peers.values():
                if peer.fetch is not None:
                    peer.fetch.close()


def _producers_turn(link: ProducerLink, clock: Clock, part: bytes) -> None:
    match part[0] & 3:
        case 0:                                          # MESSAGE
            link._arrived(b"ab"[part[0] >> 2 & 1:][:1], None, _frames(part))
        case 1:
            clock.now += 2.0
        case 2:                                          # the main thread judges what waits
            with contextlib.suppress(queue.Empty):
                ready = link.inbox.get_nowait()
                assert {path.name for path in ready.folder.iterdir()} <= set(CHECKPOINT_NAMES)
                link.report(ready, **{"error": "no"} if part[1:2] == b"\1" else {"result": {"tau": 2.0}})
        case 3:
            link._store.next += 1
            link.drop_acked()
    for _ in range(MOST_ROUNDS):
        link._worker.obey()
        if not any([link._pump(identity, peer) for identity, peer in list(link._peers.items())]):
            break
    else:
        raise AssertionError("it does not stop sending")
    link._subscribers.save(clock.now)
    link._obey_person(clock.now)


def _producer_is_sound(link: ProducerLink, path: Path) -> None:
    assert len(link._peers) <= MAX_PEERS and all(len(peer.pending) <= 8 for peer in link._peers.values())
    assert link.inbox.qsize() <= len(link._offers._handed) <= offers.MAX_HANDED + 1, "checkpoints wait without a bound"
    assert {p.name for p in path.iterdir()} <= {*ASSETS, "cursors", "inbox"}
    assert all(name.relative_to(path / "inbox").parts[0].isalnum() for name in (path / "inbox").rglob("*"))
    assert len(str(link.snapshot())) < 100 * MAX_DOCUMENT


def producer_says(data: bytes) -> bool:
    """Anything a producer can say, to a trainer's link with a real store behind it."""
    steps, clock = split(data), Clock()
    with folder() as path, mock.patch.object(trainer_link, "time", clock), quiet(), SampleStore(path / "store") as store:
        (path / "step-1").mkdir()
        for name, content in CHECKPOINT.items():
            (path / "step-1" / name).write_bytes(content)
        link = _link(path, store)
        malformed = 0
        with mock.patch.object(trainer_link, "Dialer", lambda *_: Dialer(link, steps, clock, path / "step-1")):
            try:
                for _ in range(8):                       # sessions: each begins where the last one was dropped
                    if not steps:
                        break
                    link._one_session()
                    clock.now += 10.0
                _trainer_is_sound(link, store, path)
                malformed = link.counters["malformed"] + link.counters["refused"]
            finally:
                link._worker.close()
                link._context.destroy()
        return not malformed and store.next == len(SAMPLES) and link.assets_ready()


def _link(path: Path, store: SampleStore) -> TrainerLink:
    """As trainer/inbox.py makes it."""
    def cursor() -> Cursor:
        return Cursor(store.stream, store.next, CONTRACT) if store.stream else Cursor(None, 0, None)

    def welcomed(welcome, contract) -> None:
        if not store.stream:
            store.begin(welcome.stream, welcome.contract, welcome.first_seq)

    def arrived(seq: int, sample_: bytes) -> None:
        codec.verify(sample_)
        store.append(seq, sample_)
    with mock.patch.object(zmq, "Context", mock.Mock):
        return TrainerLink("tcp://127.0.0.1:1", "box", cursor=cursor, assets_dir=path / "assets", on_welcome=welcomed, on_sample=arrived, window=5000)


class Dialer:
    """Stands for the socket: hands over one step at a time, and ends the session after the last."""

    def __init__(self, link: TrainerLink, steps: list[bytes], clock: Clock, checkpoint: Path) -> None:
        self._link, self._steps, self._clock, self._checkpoint = link, steps, clock, checkpoint
        self._sent = 0

    def receive(self, seconds: float, *, until_writable: bool) -> list[list[bytes]]:
        self._sent = 0
        if not self._steps:
            self._link._worker._closing.set()
            return []
        part = self._steps.pop(0) or b"\0"
        match part[0] & 3:
            case 0:
                return [_frames(part)]
            case 1:
                self._clock.now += 2.0
            case 2:
                if self._link.contract is not None:
                    self._link.offer(self._checkpoint, run="run", step=part[1] if part[1:] else 0, record={})
            case 3:
                self._link.pause(bool(part[0] >> 2 & 1))
        return []

    def send(self, parts: list[bytes]) -> bool:
        self._sent += 1
        assert self._sent < MOST_ROUNDS, "it does not stop sending"
        return True

    def close(self) -> None:
        pass


def _trainer_is_sound(link: TrainerLink, store: SampleStore, path: Path) -> None:
    assert {p.name for p in path.iterdir()} <= {"store", "assets", "step-1"}
    for asset in (path / "assets").glob("*") if (path / "assets").exists() else ():
        assert asset.suffix == ".part" or sha256_file(asset) == asset.name, "an asset that is not what its name says"
    for seq in range(store.first, store.next):
        store.read(seq)                                  # raises CorruptError: it was acknowledged
    assert store.corrupt == 0 and len(link._serving._fds) <= 4 * 17 and len(str(link.snapshot())) < MAX_DOCUMENT
