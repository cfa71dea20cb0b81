"""The producer's end of one trainer's link, without a socket: welcomes or refuses, sends in sequence within credit, pulls checkpoints.

How a shell drives it, and what its errors mean, stands in rules.py."""
from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass

from common.contract import ExtractionContract, differences
from common.errors import HsdraftError, PeerError, one_line
from protocol.events import (Ack, Acked, AssetData, AssetGet, Bye, CheckpointData, CheckpointGet, CheckpointOffer, Credit, Event, FileInfo,
                             Heartbeat, Hello, Joined, LinkLost, LocalError, Message, Offered, Refuse, Refused, Report, SampleAgain,
                             SampleData, SampleGet, StreamHeartbeat, Welcome)
from protocol.rules import MAX_IN_FLIGHT, MAX_OFFERS, MAX_UNACKED, STREAMING, Core, ReadChunk, ReadSample, State, Timing, clip, may_send
from protocol.transfer import Pull


MOST_NAMED = 32              # differing fields in one Refuse: of 256 characters of 4 bytes each, half a header


@dataclass(frozen=True)
class StreamFacts:
    """What the producer tells every trainer."""

    stream: str
    contract: ExtractionContract
    assets: tuple[FileInfo, ...]
    evaluation: dict


class PeerSession:
    """The producer's end of one trainer.  counters: samples, bytes (sent), again (samples sent once more), stale_chunks (of an
    offer replaced meanwhile).  unread: a sample that it waits for once more and that cannot be read here; the shell takes note and sets None."""

    def __init__(self, facts: StreamFacts, *, timing: Timing, read_sample: ReadSample, read_chunk: ReadChunk, now: float) -> None:
        """read_chunk serves assets by the key (sha256,)."""
        self._c = Core("producer", timing, now)
        self._facts, self._read_sample, self._read_chunk = facts, read_sample, read_chunk
        self._first = self._end = self._made = 0                 # the stream holds _first.._end-1, and once held all below _made
        self._ended = self._samples = False
        self._next, self._acked = 0, -1                          # to be sent next; durable there
        self._ahead: bytes | None = None                         # sample _next, read and not yet sendable
        self._again: int | None = None                           # asked for once more
        self.unread: int | None = None
        self._sent = self._total = 0                             # bytes sent and granted since the Welcome
        self._in_flight: deque[int] = deque()                    # sizes of samples _acked+1.._next-1
        self._pulled: str | None = None                          # the offer being pulled
        self._replaced: deque[str] = deque(maxlen=MAX_OFFERS)
        self.hello: Hello | None = None
        self.trainer_status: dict = {}
        self.counters: Counter[str] = Counter()

    @property
    def state(self) -> State:
        return self._c.state

    @property
    def acked(self) -> int:
        return self._acked

    @property
    def credit(self) -> int:
        return self._total - self._sent

    def stream_is(self, first: int, end: int, ended: bool, made: int = 0) -> None:
        """The stream now holds samples first..end-1; ended: there will be no more.  Call it before Hello and at each change.

        made: samples below it were made here once, whether or not they still are (a trainer has acknowledged them).
        """
        if (end, ended) != (self._end, self._ended):
            self._c.beat -= self._c.timing.interval              # tell at once
        self._first, self._end, self._ended, self._made = first, end, ended, max(made, end)

    def receive(self, message: Message, now: float) -> list[Event]:
        """Take one message.  Raises PeerError."""
        self._c.heard_now(message, now)
        match message:
            case Hello():
                return self._greet(message)
            case Credit():
                if message.total < self._total:
                    raise PeerError(f"credit went back from {self._total} to {message.total}")
                self._total = message.total
                return []
            case Ack():
                return self._ack(message.seq)
            case SampleGet():
                if self._again is not None:
                    raise PeerError(f"asks for sample {message.seq} again while {self._again} is asked")
                self._again = message.seq
                return []
            case AssetGet():
                self._c.queue_request(message, {a.sha256: a.size for a in self._facts.assets}.get(message.sha256))
                return []
            case CheckpointOffer():
                return self._offered(message)
            case CheckpointData():
                if message.offer in self._replaced:
                    self.counters["stale_chunks"] += 1
                    return []
                return self._c.chunk((message.offer, message.name), message.offset, message.data)
            case Heartbeat():
                self.trainer_status = message.status
                return []
            case Bye():
                return [LinkLost(f"the trainer said: {message.reason}")]
        raise LocalError(f"no rule for {type(message).__name__}")

    def to_send(self, now: float) -> list[Message]:
        """What to send now, in order; at most one sample, one that is sent again and one chunk a call, so call again until it is []."""
        c = self._c
        out = c.drain()
        if c.state is STREAMING:
            out += [c.said(CheckpointGet(*key, offset, length)) for key, offset, length in c.asks()]
            if c.asked:
                get = c.asked.popleft()
                out.append(c.said(AssetData(get.sha256, get.offset, self._read_chunk((get.sha256,), get.offset, get.length))))
            if self._again is not None and (data := self._once_more(self._again)) is not None:
                out.append(c.said(SampleAgain(self._again, data)))
                self._again = None
            if (data := self._next_sample()) is not None:
                out.append(c.said(SampleData(self._next, data)))
                self._next += 1
            if c.pulse_due(now):
                out.append(c.said(StreamHeartbeat(self._end, self._ended, c.status)))
        return out

    def tick(self, now: float) -> list[Event]:
        return self._c.silence(now)

    # ---- what the shell tells

    def pull(self, offer: CheckpointOffer, have: dict[str, int]) -> None:
        """Fetch what is missing of an offer's files (have: bytes here, by name); Chunk events follow, key (offer, name).

        A pull that is under way is given up for it: what still comes of that is counted and ignored.
        """
        if self._pulled is not None and self._pulled != offer.offer:
            self._replaced.append(self._pulled)
        self._pulled = offer.offer
        while offer.offer in self._replaced:
            self._replaced.remove(offer.offer)
        self._c.pulls = {(offer.offer, f.name): Pull(f.size, have[f.name]) for f in offer.files if have[f.name] < f.size}

    def lost(self, seq: int) -> None:
        """That sample is damaged here and cannot be made again: said to the trainer, where it waits for it."""
        if self._again == seq:
            self._c.waiting.append(SampleAgain(seq, b""))
            self._again = None

    def report(self, offer: str, result: dict, error: str | None) -> None:
        self._c.waiting.append(Report(offer, result, error and clip(error)))

    def close(self, reason: str) -> None:
        self._c.close(reason)

    def set_status(self, status: dict) -> None:
        self._c.status = status

    # ---- rules

    def _greet(self, hello: Hello) -> list[Event]:
        self.hello, self._samples = hello, hello.samples
        facts = self._facts
        if refuse := judge(hello, facts, self._first, self._end, self._made) or self._unlike(hello):
            self._c.waiting.append(refuse)
            return [Refused(refuse.reason, refuse.fields if isinstance(refuse, Refuse) else ())]
        self._next = self._first if hello.stream is None else hello.next_seq
        self._acked = self._next - 1
        self._c.waiting.append(Welcome(facts.contract.to_dict(), facts.stream, self._first, self._end, facts.assets, facts.evaluation))
        return [Joined(hello, self._next)]

    def _unlike(self, hello: Hello) -> Refuse | None:
        """Whether the trainer's newest sample is another one than ours of that number; where ours cannot be read, nobody knows."""
        seq = hello.next_seq - 1
        if hello.newest is None or not hello.samples or not self._first <= seq < self._end:
            return None
        try:
            data = self._read_sample(seq)
        except HsdraftError:
            return None
        return None if hashlib.sha256(data).hexdigest() == hello.newest else Refuse(other_sample(seq), ())

    def _once_more(self, seq: int) -> bytes | None:
        """b"" where it is here no more: that trainer must be told, not dropped.  None, and named in `unread`, where it cannot be read now:
        the question waits."""
        try:
            data = self._read_sample(seq) if self._first <= seq < self._end else b""
        except HsdraftError:
            self.unread = seq
            return None
        self.counters["again"] += bool(data)
        return data

    def _next_sample(self) -> bytes | None:
        """The next sample's bytes, taken, if it may go now; read at most once."""
        credit = min(self.credit, MAX_IN_FLIGHT - sum(self._in_flight))
        if not self._samples or credit <= 0 or len(self._in_flight) >= MAX_UNACKED or self._next >= self._end:
            return None
        if self._ahead is None:
            self._ahead = self._read_sample(self._next)
        data = self._ahead
        if not may_send(credit, len(data), sum(self._in_flight)):
            return None
        self._ahead = None
        self._sent += len(data)
        self._in_flight.append(len(data))
        self.counters["samples"] += 1
        self.counters["bytes"] += len(data)
        return data

    def _ack(self, seq: int) -> list[Event]:
        if not self._acked <= seq < self._next:
            raise PeerError(f"acknowledged {seq}; {self._acked} was last, {self._next - 1} is the newest sent")
        while self._acked < seq:
            self._in_flight.popleft()
            self._acked += 1
        return [Acked(seq)]

    def _offered(self, offer: CheckpointOffer) -> list[Event]:
        if len(self._c.waiting) >= MAX_OFFERS:
            raise PeerError(f"offers checkpoints and leaves {len(self._c.waiting)} answers unread")
        if offer.contract_hash != self._facts.contract.hash:
            self.report(offer.offer, {}, f"contract: {self._facts.contract.hash[:12]} -> {offer.contract_hash[:12]}")
            return []
        return [Offered(offer)]


def judge(hello: Hello, facts: StreamFacts, first: int, end: int, made: int = 0) -> Refuse | Bye | None:
    """Why a trainer cannot follow this stream, which holds first..end-1 and once held all below made; None where it can.

    A box without a stream starts at `first`.  One that lacks a sample already dropped here, or claims one not made yet, is
    refused with the range: a gap is never skipped.  One that has what was damaged here comes back later (Bye): those samples
    are made again, and then both ends' are held against each other.
    """
    if hello.contract is not None and (fields := differences(facts.contract, ExtractionContract.from_dict(hello.contract))):
        return Refuse("the trainer's contract differs from the producer's", named(fields))
    if hello.stream not in (None, facts.stream):
        return Refuse("the trainer's store is of another stream", (f"stream: {facts.stream} -> {hello.stream}",))
    if hello.stream is None and hello.next_seq:
        raise PeerError(f"Hello: next_seq {hello.next_seq} of no stream")
    if hello.samples and hello.stream is not None and not first <= hello.next_seq <= end:
        if end < hello.next_seq <= made:
            return Bye(f"samples {end} to {hello.next_seq - 1} were damaged here and are made again; until then you are ahead")
        what = (f"samples {hello.next_seq} to {first - 1} are gone here" if hello.next_seq < first
                else f"samples {end} to {hello.next_seq - 1} were never made here")
        return Refuse(f"{what}; this stream holds {first} to {end - 1}", (f"next_seq: {first}..{end} -> {hello.next_seq}",))
    return None


def other_sample(seq: int) -> str:
    return (f"sample {seq} of the trainer is not sample {seq} of this stream: one of the two was damaged or made again. Stop hstrain, remove "
            f"store/{seq:012d}.hs from its state folder, and start it: that sample comes again")


def named(fields: list[str]) -> tuple[str, ...]:
    """Fields as one Refuse carries them, whatever the peer wrote there: the first MOST_NAMED, cut; how many more there are is said."""
    shown = tuple(one_line(text)[:256] for text in fields[:MOST_NAMED])
    return shown + ((f"{len(fields) - MOST_NAMED} more",) if len(fields) > MOST_NAMED else ())
