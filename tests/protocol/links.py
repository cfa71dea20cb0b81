"""Both links on loopback, for tests: a stream in memory, a trainer's box, a peer that says what it likes, and patience."""
from __future__ import annotations

import socket
import time
from collections.abc import Callable

import zmq

from common.errors import CorruptError
from protocol.events import Cursor
from protocol.frames import decode
from protocol.rules import Timing
from protocol.trainer_link import TrainerLink

TIMING = Timing(interval=0.2, limit=3.0)


class Store:
    """Stands for SampleStore: a stream in memory."""

    def __init__(self, count: int = 0, stream: str = "s1") -> None:
        self.stream, self.first, self.data = stream, 0, {n: b"%d" % n * 50 for n in range(count)}

    @property
    def next(self) -> int:
        return self.first + len(self.data)

    def read(self, seq: int) -> bytes:
        if seq not in self.data:
            raise CorruptError(f"sample {seq} is not here")
        return self.data[seq]

    def append(self, seq: int, data: bytes) -> None:
        assert seq == self.next
        self.data[seq] = data

    def bytes_between(self, first: int, end: int) -> int:
        return sum(len(self.data[seq]) for seq in self.data if first <= seq < end)

    def drop_below(self, seq: int) -> None:
        for old in range(self.first, seq):
            del self.data[old]
        self.first = max(self.first, seq)


class Box:
    """A trainer's box: what it stored, and a link."""

    def __init__(self, address: str, tmp_path, name: str = "box", *, follower: bool = False, contract=None, **options) -> None:
        self.samples: list[tuple[int, bytes]] = []
        self.stream, self.contract = (None, None) if contract is None else ("s1", contract)
        self.fail: Exception | None = None
        self.link = TrainerLink(address, name, cursor=self.cursor, on_welcome=self.welcomed, on_sample=None if follower else self.store,
                                assets_dir=tmp_path / f"{name}-assets", timing=TIMING, **options)

    def cursor(self) -> Cursor:
        return Cursor(self.stream, len(self.samples), self.contract)

    def welcomed(self, welcome, contract) -> None:
        self.stream, self.contract = welcome.stream, contract

    def store(self, seq: int, data: bytes) -> None:
        if self.fail:
            raise self.fail
        self.samples.append((seq, data))


def wait_for(true: Callable[[], object], *links) -> None:
    end = time.monotonic() + 20
    while not true():
        for link in links:
            link.raise_if_failed()
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.01)


def news(link, kind):
    """The next event of that kind."""
    end = time.monotonic() + 20
    while True:
        event = link.inbox.get(timeout=max(0.01, end - time.monotonic()))
        if isinstance(event, kind):
            return event


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


class Raw:
    """A DEALER that says what it likes."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 1)                       # what it does not read stays with the producer
        self._dealer.connect(address)

    def say(self, *parts: bytes):
        """The answer's message, skipping pulses and samples."""
        self._dealer.send_multipart(parts)
        return self.hear()

    def hear(self):
        assert self._dealer.poll(20_000), "no answer"
        return decode(self._dealer.recv_multipart())

    def close(self) -> None:
        self._dealer.close()
        self._context.term()
