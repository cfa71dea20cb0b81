"""The trainer's end of a link, without a socket: checks the Welcome, grants credit, takes samples in order, offers checkpoints.

How a shell drives it, and what its errors mean, stands in rules.py."""
from __future__ import annotations

from collections import Counter, deque

from common.contract import ExtractionContract, differences
from common.errors import PeerError
from protocol.events import (Ack, AgainArrived, AssetData, AssetGet, Bye, CheckpointData, CheckpointGet, CheckpointOffer, Credit, Cursor, Differs,
                             Event, Heartbeat, Hello, LinkLost, LocalError, Message, Refuse, Refused, Report, ReportArrived, SampleAgain,
                             SampleArrived, SampleData, SampleGet, StreamHeartbeat, Welcome, Welcomed)
from protocol.rules import MAX_OFFERS, STREAMING, Core, ReadChunk, State, Timing, may_send
from protocol.transfer import Pull


class TrainerSession:
    """The trainer's end.  counters: stale_requests, stale_reports (about an offer that was
    replaced meanwhile)."""

    def __init__(self, name: str, cursor: Cursor, *, samples: bool, window: int, timing: Timing, read_chunk: ReadChunk, now: float) -> None:
        """window: bytes of samples that may be on their way (> 0).  read_chunk serves the keys (offer, name) of offer()."""
        self._c = Core("trainer", timing, now)
        self._cursor, self._samples, self._window, self._read = cursor, samples, window, read_chunk
        self._c.waiting.append(Hello(name, cursor.stream, cursor.next_seq, cursor.contract and cursor.contract.to_dict(), samples, cursor.newest))
        self.next_seq = self._stored = cursor.next_seq           # to arrive next; to be stored next
        self._sizes: deque[int] = deque()                        # of samples arrived and not stored
        self._received = self._consumed = self._granted = self._told = 0
        self._receiving, self._ack_due = samples, False
        self._again: int | None = None                           # asked for once more
        self._offers: dict[str, CheckpointOffer] = {}
        self._contract_hash = ""
        self.producer_next, self.ended = 0, False
        self.counters: Counter[str] = Counter()

    @property
    def state(self) -> State:
        return self._c.state

    @property
    def credit(self) -> int:
        """Bytes granted and not yet used."""
        return self._granted - self._received

    def receive(self, message: Message, now: float) -> list[Event]:
        """Take one message.  Raises PeerError; Differs where the Welcome does not fit this box, naming the fields."""
        self._c.heard_now(message, now)
        match message:
            case Welcome():
                return self._welcome(message)
            case Refuse():
                return [Refused(message.reason, message.fields)]
            case SampleData():
                return self._sample(message)
            case SampleAgain():
                if message.seq != self._again:
                    raise PeerError(f"sent sample {message.seq} again, which was not asked for")
                self._again = None
                return [AgainArrived(message.seq, message.data)]
            case AssetData():
                return self._c.chunk((message.sha256,), message.offset, message.data)
            case CheckpointGet():
                return self._request(message)
            case Report():
                if (offer := self._offers.pop(message.offer, None)) is None:
                    self.counters["stale_reports"] += 1
                    return []
                return [ReportArrived(offer.offer, offer.run, offer.step, message.result, message.error)]
            case StreamHeartbeat():
                self.producer_next, self.ended = message.next_seq, message.ended
                return []
            case Bye():
                return [LinkLost(f"the producer said: {message.reason}")]
        raise LocalError(f"no rule for {type(message).__name__}")

    def to_send(self, now: float) -> list[Message]:
        """What to send now, in order; [] when nothing is due."""
        c = self._c
        out = c.drain()
        if c.state is STREAMING:
            if self._ack_due:
                out.append(c.said(Ack(self._stored - 1)))
                self._ack_due = False
            if self._granted != self._told:
                out.append(c.said(Credit(self._granted)))
                self._told = self._granted
            out += [c.said(AssetGet(key[0], offset, length)) for key, offset, length in c.asks()]
            if c.asked:
                get = c.asked.popleft()
                if get.offer not in self._offers:
                    self.counters["stale_requests"] += 1     # replaced while the request waited here
                else:
                    out.append(c.said(CheckpointData(get.offer, get.name, get.offset, self._read((get.offer, get.name), get.offset, get.length))))
            if c.pulse_due(now):
                out.append(c.said(Heartbeat(c.status)))
        return out

    def tick(self, now: float) -> list[Event]:
        return self._c.silence(now)

    # ---- what the shell tells

    def stored(self, seq: int) -> None:
        """The sample is durable: acknowledge it and grant its bytes again."""
        if seq != self._stored or not self._sizes:
            raise LocalError(f"stored {seq}, expected {self._stored} of {len(self._sizes)} arrived")
        self._stored += 1
        self._consumed += self._sizes.popleft()
        self._ack_due = True
        self._grant()

    def receiving(self, on: bool) -> None:
        """False: grant no more (a full disk).  What was granted may still come: at most the window, or one sample."""
        self._receiving = on and self._samples
        self._grant()

    def again(self, seq: int) -> bool:
        """Ask for a sample that came before; AgainArrived follows.  False while another one is asked, or before the Welcome."""
        if self._again is not None or self._c.state is not STREAMING:
            return False
        self._again = seq
        self._c.waiting.append(SampleGet(seq))
        return True

    def pull(self, sha256: str, size: int, have: int) -> None:
        """Fetch an asset, from byte have < size on; Chunk events follow."""
        self._c.pulls[(sha256,)] = Pull(size, have)

    def offer(self, offer: CheckpointOffer) -> list[str]:
        """Offer a checkpoint; returns the offers it replaces (an older one of the same run, or the oldest of too many)."""
        old = [o for o, known in self._offers.items() if known.run == offer.run and o != offer.offer]
        old += [o for o in self._offers if o not in old and o != offer.offer][:max(0, len(self._offers) - len(old) - MAX_OFFERS + 1)]
        for gone in old:
            del self._offers[gone]
        self._c.waiting.append(offer)
        self._offers[offer.offer] = offer
        return old

    @property
    def contract_hash(self) -> str:
        """Of the stream that this session was welcomed to; "" before."""
        return self._contract_hash

    def close(self, reason: str) -> None:
        """Say Bye with the next to_send()."""
        self._c.close(reason)

    def set_status(self, status: dict) -> None:
        self._c.status = status

    # ---- rules

    def _welcome(self, message: Welcome) -> list[Event]:
        ours, theirs = self._cursor, ExtractionContract.from_dict(message.contract)
        if ours.contract is not None and (fields := differences(ours.contract, theirs)):
            raise Differs("the producer's contract differs from this box's", tuple(fields))
        if ours.stream not in (None, message.stream):
            raise Differs("the producer has another stream", (f"stream: {ours.stream} -> {message.stream}",))
        if message.first_seq > message.next_seq:
            raise PeerError(f"Welcome: samples {message.first_seq} to {message.next_seq}")
        if ours.stream is None:
            self.next_seq = self._stored = message.first_seq
        elif self._samples and not message.first_seq <= self.next_seq <= message.next_seq:
            raise PeerError(f"welcomed to samples {message.first_seq} to {message.next_seq - 1}; this box needs {self.next_seq}")
        self.producer_next, self._contract_hash = message.next_seq, theirs.hash
        self._grant()
        return [Welcomed(message, theirs, self.next_seq)]

    def _grant(self) -> None:
        if self._receiving and self._c.state is STREAMING:
            self._granted = self._consumed + self._window

    def _sample(self, message: SampleData) -> list[Event]:
        if message.seq != self.next_seq:
            raise PeerError(f"samples {self.next_seq} to {message.seq - 1} are missing" if message.seq > self.next_seq
                            else f"sample {message.seq} came again; {self.next_seq} is next")
        size = len(message.data)
        if not may_send(self.credit, size, 0):               # in flight as the sender saw it is unknown here: at least 0
            raise PeerError(f"sample {message.seq} of {size} bytes came without credit ({self.credit} left)")
        self._received += size
        self._sizes.append(size)
        self.next_seq += 1
        return [SampleArrived(message.seq, message.data)]

    def _request(self, message: CheckpointGet) -> list[Event]:
        if (offer := self._offers.get(message.offer)) is None:
            self.counters["stale_requests"] += 1             # replaced while the request was on its way
            return []
        self._c.queue_request(message, {f.name: f.size for f in offer.files}.get(message.name))
        return []
