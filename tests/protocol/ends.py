"""Two ends joined in memory, for tests: what one says reaches the other through real frames, in order, until the cable is cut."""
from __future__ import annotations

import dataclasses
from collections import deque

from common.contract import ExtractionContract
from protocol.events import Cursor, FileInfo, SampleArrived, Welcomed
from protocol.frames import decode, encode
from protocol.peer_session import PeerSession, StreamFacts
from protocol.rules import Timing
from protocol.trainer_session import TrainerSession

TIMING = Timing(interval=1.0, limit=5.0)
CONTRACT = ExtractionContract(target="toy", weights="0" * 64, tokenizer="1" * 64, chat_template="", thinking=None, taps=(1, 3), n_layers=6,
                              hidden_size=8, vocab_size=32, mask_token_id=31, dtype="float32", delta_rule="", versions={"torch": "2"})
OTHER = dataclasses.replace(CONTRACT, taps=(0, 2), target="another")


class Ends:
    """samples: the producer's store, a list of bytes.  stored: what the trainer has made durable.  first: oldest kept sample."""

    def __init__(self, samples: list[bytes], *, window: int = 1000, assets: dict[str, bytes] | None = None, first: int = 0) -> None:
        self.samples, self.window, self.first, self.ended = samples, window, first, False
        self.blobs = assets or {}                                  # sha256 -> bytes
        self.facts = StreamFacts("s1", CONTRACT, tuple(FileInfo(n, len(b), k) for n, (k, b) in
                                                       zip(("embedding", "tokenizer"), self.blobs.items())), {})
        self.stored: list[bytes] = []
        self.start = 0
        self.stream: str | None = None
        self.now, self.in_flight_most = 0.0, 0
        self.trainer = self.producer = None
        self.events: list = []
        self.offered: dict[tuple[str, str], bytes] = {}
        self.connect()

    def connect(self, **changes) -> None:
        cursor = Cursor(self.stream, self.start + len(self.stored), CONTRACT if self.stream else None)
        self.trainer = TrainerSession("box", changes.pop("cursor", cursor), samples=True, window=self.window, timing=TIMING,
                                      read_chunk=lambda key, o, n: self.offered[key][o:o + n], now=self.now)
        self.producer = PeerSession(changes.pop("facts", self.facts), timing=TIMING, read_sample=lambda seq: self.samples[seq],
                                    read_chunk=lambda key, o, n: self.blobs[key[0]][o:o + n], now=self.now)
        self.up, self.down = deque(), deque()                      # trainer -> producer, producer -> trainer

    def say(self) -> bool:
        """Each end says what is due; True where anything was said."""
        self.producer.stream_is(self.first, len(self.samples), self.ended)
        up, down = self.trainer.to_send(self.now), self.producer.to_send(self.now)
        self.up += map(encode, up)
        self.down += map(encode, down)
        return bool(up or down)

    def hear_up(self) -> None:
        if self.up:
            self.events += self.producer.receive(decode(self.up.popleft()), self.now)

    def hear_down(self) -> None:
        """The trainer takes one message; a sample is stored at once."""
        if self.down:
            for event in self.trainer.receive(decode(self.down.popleft()), self.now):
                self.events.append(event)
                if isinstance(event, Welcomed):
                    if self.stream is None:
                        self.start = event.start_seq
                    self.stream = event.welcome.stream
                if isinstance(event, SampleArrived):
                    assert event.seq == self.start + len(self.stored)
                    self.stored.append(event.data)
                    self.trainer.stored(event.seq)

    def flow(self) -> None:
        """Until nothing is said any more."""
        while self.say() or self.up or self.down:
            while self.up or self.down:
                self.hear_up()
                self.hear_down()
