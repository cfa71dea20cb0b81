"""The rules both ends of a link share: legal moves, credit, pulse, requests.  Pure; trainer_session.py and peer_session.py
are the two ends.

A shell owns the socket and does, for ever:

    for message in session.to_send(now): send it          # again until it returns nothing
    events = session.receive(message, now)                 # for each message that came
    events += session.tick(now)

and acts on the events.  `now` is monotonic seconds.  PeerError out of receive() is the other end's fault: say Bye, drop the
session, begin a new one after `backoff`.  LocalError is ours, a bug: it ends the process.  A session that returned LinkLost
or Refused is over.

Every buffer is bounded: one sample read ahead per peer, MAX_IN_FLIGHT bytes of unacknowledged samples whatever credit the
peer grants, OUTSTANDING chunks asked, one chunk read per to_send().  The shell must not call to_send() while earlier
messages wait for the socket: so a peer that asks and does not read costs one sample and one chunk here."""
from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from collections.abc import Callable
from enum import Enum

from common.errors import PeerError, one_line
from protocol.events import (Ack, AssetData, AssetGet, Bye, CheckpointData, CheckpointGet, CheckpointOffer, Chunk, Credit, Event, Heartbeat,
                             Hello, LinkLost, LocalError, Message, Refuse, Report, SampleAgain, SampleData, SampleGet, StreamHeartbeat, Welcome)
from protocol.transfer import OUTSTANDING, Pull

MAX_IN_FLIGHT = 256 << 20    # bytes sent and not acknowledged, per trainer: what a peer that never reads can hold here
MAX_UNACKED = 1024           # samples, for the same reason where they are tiny
MAX_OFFERS = 16              # offers remembered per link; one a run waits, runs on a box are few

ReadSample = Callable[[int], bytes]                               # seq -> bytes
ReadChunk = Callable[[tuple[str, ...], int, int], bytes]          # key, offset, length -> exactly length bytes


class State(Enum):
    START = "start"          # nothing said
    GREETING = "greeting"    # Hello is out, no answer yet
    STREAMING = "streaming"
    CLOSED = "closed"


START, GREETING, STREAMING, CLOSED = State
# (role, state) -> what that role may SAY there -> its next state.  What one says is what the other may hear, judged by the
# same table: a receiver follows the speaker's moves.
_TRAINER_SAYS = {START: {Hello: GREETING},
                 GREETING: {Bye: CLOSED},
                 STREAMING: {m: STREAMING for m in (Credit, Ack, SampleGet, AssetGet, CheckpointOffer, CheckpointData, Heartbeat)} | {Bye: CLOSED},
                 CLOSED: {}}
_PRODUCER_SAYS = {START: {Bye: CLOSED},
                  GREETING: {Welcome: STREAMING, Refuse: CLOSED, Bye: CLOSED},
                  STREAMING: {m: STREAMING for m in (SampleData, SampleAgain, AssetData, CheckpointGet, Report, StreamHeartbeat)} | {Bye: CLOSED},
                  CLOSED: {}}
MOVES = {"trainer": _TRAINER_SAYS, "producer": _PRODUCER_SAYS}


def move(role: str, state: State, message: Message) -> State | None:
    """The link's state after `role` says message in `state`; None where it may not."""
    return MOVES[role][state].get(type(message))


def may_send(credit: int, size: int, in_flight: int) -> bool:
    """Whether a sample of size bytes may go now.  credit: bytes granted and unused; in_flight: bytes unacknowledged.

    It may where it fits; and where it is larger than any window, alone: nothing in flight and some credit left.  So a
    sample is never too large to pass, and a trainer that grants nothing gets nothing.
    """
    return size <= credit or (in_flight == 0 and credit > 0)


def backoff(attempt: int, rng: random.Random) -> float:
    """Seconds to wait before connection attempt `attempt` (1, 2, ...): 0.25 doubling to 8, less up to a half at random.

    The cap is low: two boxes on a cable, and a person waits.  The jitter keeps several trainers from knocking in step.
    """
    return min(8.0, 0.25 * 2 ** min(attempt - 1, 10)) * rng.uniform(0.5, 1.0)


@dataclass(frozen=True)
class Timing:
    """Seconds.  A heartbeat goes out every `interval`; silence longer than `limit` ends the session."""

    interval: float
    limit: float


class Core:
    """What a session of either role keeps: state, pulse, messages that wait, pulls and requests.  No behaviour of either role."""

    def __init__(self, role: str, timing: Timing, now: float) -> None:
        self.role, self.peer = role, "producer" if role == "trainer" else "trainer"
        self.state, self.timing = START, timing
        self.heard, self.beat = now, now - timing.interval
        self.waiting: deque[Message] = deque()
        self.pulls: dict[tuple[str, ...], Pull] = {}                  # in order; the first is the active one
        self.asked: deque[AssetGet | CheckpointGet] = deque()
        self.status: dict = {}

    def said(self, message: Message) -> Message:
        after = move(self.role, self.state, message)
        if after is None:
            raise LocalError(f"{self.role} may not say {type(message).__name__} while {self.state.value}")
        self.state = after
        return message

    def heard_now(self, message: Message, now: float) -> None:
        after = move(self.peer, self.state, message)
        if after is None:
            raise PeerError(f"the {self.peer} said {type(message).__name__} while {self.state.value}")
        self.state, self.heard = after, now
        if after is CLOSED:
            self.waiting.clear()

    def silence(self, now: float) -> list[Event]:
        if self.state is not CLOSED and now - self.heard > self.timing.limit:
            reason = "no answer" if self.state is GREETING else "nothing heard"
            self.state = CLOSED
            self.waiting.clear()
            return [LinkLost(f"{reason} for {now - self.heard:.1f} s")]
        return []

    def pulse_due(self, now: float) -> bool:
        if now - self.beat < self.timing.interval:
            return False
        self.beat = now
        return True

    def asks(self) -> list[tuple[tuple[str, ...], int, int]]:
        for key, pull in self.pulls.items():
            return [(key, offset, length) for offset, length in pull.asks()]
        return []

    def chunk(self, key: tuple[str, ...], offset: int, data: bytes) -> list[Event]:
        if key not in self.pulls:
            raise PeerError(f"sent {'/'.join(key)}, which was not asked for")
        last = self.pulls[key].arrived(offset, len(data))
        if last:
            del self.pulls[key]
        return [Chunk(key, offset, data, last)]

    def queue_request(self, message: AssetGet | CheckpointGet, size: int | None) -> None:
        if size is None or message.offset + message.length > size:
            raise PeerError(f"{type(message).__name__}: asks for {message.offset}+{message.length} of {size or 'nothing that is on offer'}")
        if len(self.asked) >= OUTSTANDING:
            raise PeerError(f"asks for more than {OUTSTANDING} chunks at once")
        self.asked.append(message)

    def drain(self) -> list[Message]:
        out = [self.said(message) for message in self.waiting]
        self.waiting.clear()
        return out

    def close(self, reason: str) -> None:
        """Bye is the next and last thing said, where this role may say it yet."""
        self.waiting.clear()
        if Bye in MOVES[self.role][self.state]:
            self.waiting.append(Bye(clip(reason)))


def clip(reason: object) -> str:
    """Any text as a reason on the wire."""
    return one_line(reason)
