"""What the two ends say to each other (messages) and what a session tells its shell (events).

Messages are frozen and carry checked values only: frames.py refuses anything else before one is made.  README.md says
why each is there.  No bytes, sockets or clocks here."""
from __future__ import annotations

from dataclasses import dataclass, field

from common.contract import ExtractionContract
from common.errors import PeerError

VERSION = 2                  # first in every message: either end can name a difference, whatever else has changed


class LocalError(Exception):
    """We were about to say what the protocol does not allow: a bug of ours, so it stops the process loudly."""


class Differs(PeerError):
    """The other end follows another target, stream or protocol; fields: 'name: ours -> theirs'."""

    def __init__(self, reason: str, fields: tuple[str, ...]) -> None:
        super().__init__(f"{reason}: {'; '.join(fields)}" if fields else reason)
        self.reason, self.fields = reason, fields


@dataclass(frozen=True)
class FileInfo:
    """One file on offer.  name is one of a fixed set and never becomes a path by itself; size in bytes; sha256 hex."""

    name: str
    size: int
    sha256: str


# ---- trainer -> producer

@dataclass(frozen=True)
class Hello:
    """First word.  stream and contract: what this box's store was filled from, None where it is empty.

    next_seq: the first sample not yet durable here.  samples: False for a trainer that follows another process' store
    and wants only assets and evaluations; it has no cursor and holds nothing back.  newest: sha256 of the bytes of sample
    next_seq - 1 as they lie here, None where there is none: whether both ends mean the same stream.
    """

    name: str
    stream: str | None
    next_seq: int
    contract: dict | None
    samples: bool
    newest: str | None = None


@dataclass(frozen=True)
class Credit:
    """Bytes of samples this trainer takes, counted from the Welcome on (cumulative: saying it twice changes nothing)."""

    total: int


@dataclass(frozen=True)
class Ack:
    """Every sample up to and including seq is durable here; -1: none yet."""

    seq: int


@dataclass(frozen=True)
class SampleGet:
    """A sample that came before, and was damaged here since: once more, please.  One is asked at a time."""

    seq: int


@dataclass(frozen=True)
class AssetGet:
    sha256: str
    offset: int
    length: int


@dataclass(frozen=True)
class CheckpointOffer:
    """offer: hex id made of run, step and files, so that the same checkpoint offered again is the same offer."""

    offer: str
    run: str
    step: int
    contract_hash: str
    files: tuple[FileInfo, ...]
    record: dict


@dataclass(frozen=True)
class CheckpointData:
    offer: str
    name: str
    offset: int
    data: bytes


# ---- producer -> trainer

@dataclass(frozen=True)
class Welcome:
    """The stream holds first_seq..next_seq-1 now; a trainer without a stream starts at first_seq, others at their cursor.

    evaluation: how checkpoints are judged here (prompts hash and the like), a flat dict.
    """

    contract: dict
    stream: str
    first_seq: int
    next_seq: int
    assets: tuple[FileInfo, ...]
    evaluation: dict


@dataclass(frozen=True)
class Refuse:
    reason: str
    fields: tuple[str, ...]


@dataclass(frozen=True)
class SampleData:
    seq: int
    data: bytes


@dataclass(frozen=True)
class SampleAgain:
    """Answers SampleGet; outside credit and order.  data is empty where the sample is not here any more."""

    seq: int
    data: bytes


@dataclass(frozen=True)
class AssetData:
    sha256: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class CheckpointGet:
    offer: str
    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class Report:
    """What came of an offer: result, or error (then result is {})."""

    offer: str
    result: dict
    error: str | None


@dataclass(frozen=True)
class StreamHeartbeat:
    """next_seq: the producer's next sample; ended: no prompts are left, the stream is complete as configured."""

    next_seq: int
    ended: bool
    status: dict


# ---- both ways

@dataclass(frozen=True)
class Heartbeat:
    """The trainer's pulse; the producer's is StreamHeartbeat."""

    status: dict


@dataclass(frozen=True)
class Bye:
    reason: str


Message = (Hello | Credit | Ack | SampleGet | AssetGet | CheckpointOffer | CheckpointData | Welcome | Refuse | SampleData | SampleAgain
           | AssetData | CheckpointGet | Report | StreamHeartbeat | Heartbeat | Bye)


# ---- a session to its shell

@dataclass(frozen=True)
class Cursor:
    """What a trainer's box has: stream and contract (None where the store is empty), first sample it lacks, sha256 of the one before."""

    stream: str | None
    next_seq: int
    contract: ExtractionContract | None
    newest: str | None = None


@dataclass(frozen=True)
class Welcomed:
    """Trainer: the stream is ours.  start_seq is the first sample that will come."""

    welcome: Welcome
    contract: ExtractionContract
    start_seq: int


@dataclass(frozen=True)
class Joined:
    """Producer: a trainer was welcomed.  start_seq is the first sample it will get."""

    hello: Hello
    start_seq: int


@dataclass(frozen=True)
class Refused:
    """This link cannot be, until a person changes something.  fields: 'name: producer's -> trainer's' or the like."""

    reason: str
    fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class SampleArrived:
    """Trainer: make it durable, then call session.stored(seq)."""

    seq: int
    data: bytes | memoryview


@dataclass(frozen=True)
class AgainArrived:
    """Trainer: what session.again() asked for; data is empty where the producer does not have it any more."""

    seq: int
    data: bytes | memoryview


@dataclass(frozen=True)
class Acked:
    """Producer: everything up to seq is durable at this trainer."""

    seq: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a file that this end pulls, in order.  key as given to session.pull; last: the file is complete."""

    key: tuple[str, ...]
    offset: int
    data: bytes
    last: bool


@dataclass(frozen=True)
class Offered:
    """Producer: a checkpoint is on offer."""

    offer: CheckpointOffer


@dataclass(frozen=True)
class ReportArrived:
    """Trainer: what came of run's step.  error None: result holds the acceptance figures."""

    offer: str
    run: str
    step: int
    result: dict
    error: str | None


@dataclass(frozen=True)
class LinkLost:
    """The session is over (silence, or the other end's Bye); a new one may be begun."""

    reason: str


Event = (Welcomed | Joined | Refused | SampleArrived | AgainArrived | Acked | Chunk | Offered | ReportArrived | LinkLost)


@dataclass(frozen=True)
class LinkUp:
    """Trainer's link to its main thread: welcomed."""

    welcome: Welcome
    contract: ExtractionContract = field(repr=False)


@dataclass(frozen=True)
class LinkDown:
    """Trainer's link to its main thread: lost after it was up; it reconnects by itself."""

    reason: str
