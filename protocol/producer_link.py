"""The producer's end of all links: one thread owns the socket, reads samples from the store and answers every trainer.

A trainer that breaks the protocol loses its session, counted and logged; the others go on.  A fault of ours ends the thread
and is raised in the main thread by raise_if_failed().  What may be said when stands in peer_session.py."""
from __future__ import annotations

import logging
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path

from common.contract import ExtractionContract
from common.errors import HsdraftError, PeerError
from protocol.events import (Acked, Bye, CheckpointOffer, Chunk, Differs, Event, Hello, Joined, LinkLost, Message, Offered, Refuse, Refused,
                             Report)
from protocol.frames import decode, encode
from protocol.keys import ProducerKeys
from protocol.offers import CheckpointReady, Fetch, Offers
from protocol.peer_session import PeerSession, StreamFacts
from protocol.rules import CLOSED, MAX_OFFERS, STREAMING, Timing, clip
from protocol.standing import Connected, standing
from protocol.subscribers import Subscribers
from protocol.transfer import Serving, describe
from protocol.wire import Listener, Worker

log = logging.getLogger("link")
TIMING = Timing(interval=2.0, limit=15.0)
MAX_PEERS = 64               # sessions at once; a home has two or three
ROUNDS = 16                  # samples a trainer may get before the socket is looked at again
RETRY = 0.005                # seconds until a full queue is tried again
LOOK_EVERY = 1.0             # seconds between looks at what a person has changed: names to forget, keys


class Unreadable(HsdraftError):
    """This box's own store or asset cannot be read: the trainer that needs it waits, for a sample to be made again or for a person here."""

    sample: int | None = None


@dataclass
class _Peer:
    session: PeerSession
    seen: float
    key: str | None                                              # its CURVE public key
    pending: deque[list[bytes]] = field(default_factory=deque)     # encoded, waiting for room in the socket
    fetch: Fetch | None = None
    offered: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_OFFERS))        # whose report it waits for

    @property
    def name(self) -> str:
        return self.session.hello.name if self.session.hello else "(unknown)"


class ProducerLink:
    """store needs: stream, first, next, read(seq), bytes_between(first, end), drop_below(seq).  inbox: CheckpointReady items for the main thread."""

    def __init__(self, address: str, store, contract: dict, assets: dict[str, Path], *, cursors: Path, inbox_dir: Path,
                 evaluation: dict | None = None, keys: ProducerKeys | None = None, insecure: bool = False, timing: Timing = TIMING) -> None:
        """assets: {name: file}; hashed here.  evaluation: flat dict, how checkpoints are judged.  Times in seconds."""
        self._address, self._keys, self._insecure, self._timing = address, keys, insecure, timing
        self._store = store
        self._facts = StreamFacts(store.stream, ExtractionContract.from_dict(contract), describe(assets), evaluation or {})
        self._serving = Serving()
        for info in self._facts.assets:
            self._serving.add((info.sha256,), assets[info.name])
        self._subscribers = Subscribers(cursors, store.stream)
        self._looked = 0.0
        self._offers = Offers(inbox_dir)
        self.inbox = self._offers.inbox
        self._peers: dict[bytes, _Peer] = {}
        self._needed: set[int] = set()                               # both touched by two threads, one operation at a time
        self._lost: set[int] = set()
        self._ended, self._sent = False, 0                           # bytes of samples over links that have ended
        self.counters: Counter[str] = Counter()
        self._worker = Worker("producer-link", self._run)
        self._listener: Listener | None = None

    # ---- for the main thread

    def start(self) -> None:
        """Listen.  Raises UserError: the port is taken, or the address is open to a network without keys."""
        self._listener = Listener(self._address, self._keys, insecure=self._insecure, bell=self._worker.bell)
        self._worker.start()

    def close(self) -> None:
        """Say Bye to all, save cursors, free the port."""
        self._worker.close()
        if self._listener is not None:
            self._listener.close()
        self._serving.close()

    def __enter__(self) -> ProducerLink:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def raise_if_failed(self) -> None:
        self._worker.raise_if_failed()

    def samples_ready(self) -> None:
        """The store has new samples."""
        self._worker.bell.ring()

    def set_ended(self, ended: bool) -> None:
        """No prompts are left: the stream is complete as configured."""
        if ended != self._ended:
            self._ended = ended
            self._worker.bell.ring()

    def needed(self) -> list[int]:
        """Samples of the store that a trainer needs and that cannot be read here, ascending; each until made_again() or lost()."""
        return sorted(seq for seq in self._needed.copy() if seq >= self._store.first)          # who needed an older one was forgotten

    def made_again(self, seq: int) -> None:
        """The store has that sample whole."""
        self._needed.discard(seq)
        self._worker.bell.ring()

    def lost(self, seq: int) -> None:
        """It cannot be made again: a trainer that asks for it is told so, one that still lacks it is refused until a person decides."""
        self._lost.add(seq)
        self._needed.discard(seq)
        self._worker.bell.ring()

    def report(self, ready: CheckpointReady, *, result: dict | None = None, error: str | None = None) -> None:
        """Answer a checkpoint, now or when its trainer is back.  LocalError where the result is no JSON or too large."""
        encode(Report(ready.offer, result or {}, error and clip(error)))
        self._worker.do(lambda: self._report(ready, result or {}, error))

    def lowest_acked(self) -> int | None:
        """The last sample that every known trainer has (-1: none); None where no trainer is known."""
        return self._subscribers.lowest()

    def drop_acked(self) -> None:
        """Free what every known trainer has; a trainer that joins meanwhile starts after it."""
        with self._subscribers.lock:
            if (acked := self._subscribers.lowest()) is not None:
                self._store.drop_below(acked + 1)

    def forget(self, name: str) -> bool:
        """Keep nothing back for this trainer any more; False where it was not known."""
        return self._subscribers.forget(name, time.monotonic())

    @property
    def sent_bytes(self) -> int:
        """Of samples, since this start, to all trainers."""
        return self._sent + sum(peer.session.counters["bytes"] for peer in list(self._peers.values()))

    def snapshot(self) -> dict:
        """{"peers": {name: {...}} as standing() has them, "counters": {...}} for status."""
        now = time.monotonic()
        with self._subscribers.lock:
            known, seen = self._subscribers.all(), self._subscribers.seen()
            live = {p.name: Connected(p.session.credit, now - p.seen, p.session.counters) for p in self._peers.values()
                    if p.session.state is STREAMING}
        peers = standing(known, seen, live, self._store.next, self._store.bytes_between, time.time())
        counters = self.counters + self._offers.counters + (self._listener.counters if self._listener else Counter())
        return {"peers": peers, "counters": dict(counters) | {"unsaved_cursors": self._subscribers.failures}}

    # ---- the link's thread

    def _run(self) -> None:
        more = False
        while not self._worker.closing:
            self._worker.obey()
            more = self._turn(0.0 if more else RETRY if any(p.pending for p in self._peers.values()) else min(0.5, self._timing.interval / 2))
        for identity, peer in list(self._peers.items()):
            self._drop(identity, peer, "the producer stops")
        self._subscribers.save(time.monotonic(), force=True)

    def _turn(self, wait: float) -> bool:
        """Hear whoever has spoken, then give each trainer its share; True where one has more to get."""
        for identity, key, parts in self._listener.receive(wait):
            self._arrived(identity, key, parts)
        more = any([self._pump(identity, peer) for identity, peer in list(self._peers.items())])
        now = time.monotonic()
        self._subscribers.save(now)
        if now - self._looked >= LOOK_EVERY:
            self._looked = now
            self._obey_person(now)
        return more

    def _obey_person(self, now: float) -> None:
        """Names to forget, and keys that are no longer allowed."""
        for name in self._subscribers.forget_asked({peer.name for peer in self._peers.values()}, now):
            self._count("forgotten", "%s is forgotten, as asked: no sample is kept for it any more", name)
        for identity, peer in list(self._peers.items()):
            if not self._listener.still_allowed(peer.key):
                self._count("revoked", "%s: its key %s is no longer allowed; link dropped", peer.name, peer.key)
                self._drop(identity, peer, "this key is no longer allowed")

    def _arrived(self, identity: bytes, key: str | None, parts: list[bytes]) -> None:
        """One message: a session's, or a stranger's first."""
        peer, now = self._peers.get(identity), time.monotonic()
        try:
            message = decode(parts)
            if peer is None:
                peer = self._admit(identity, key, message, now)
                if peer is None:
                    return
            peer.seen = now
            with self._subscribers.lock:                             # no sample is dropped between the judging of a Hello and its join
                self._tell_stream(peer.session)
                events = peer.session.receive(message, now)
                for event in events:
                    if isinstance(event, Joined):
                        self._joined(identity, event, now)
            for event in events:
                self._handle(identity, peer, event)
        except Differs as error:
            self._count("refused", "%s refused: %s", peer.name if peer else "a peer", error)
            self._listener.send(identity, encode(Refuse(clip(error.reason), error.fields)))
            self._remove(identity)
        except PeerError as error:
            self._count("malformed", "%s: %s; link dropped", peer.name if peer else "a stranger", error)
            self._drop(identity, peer, str(error))
        except OSError as error:                                     # the disk, where a checkpoint is fetched to
            self._count("disk_errors", "checkpoint of %s: %s; link dropped", peer.name, error)
            self._drop(identity, peer, f"cannot store the checkpoint: {error}")

    def _tell_stream(self, session: PeerSession) -> None:
        ended = self._ended                                          # read before next: "ended" must not go with a next of before
        session.stream_is(self._store.first, self._store.next, ended, self._subscribers.highest() + 1)

    def _admit(self, identity: bytes, key: str | None, message: Message, now: float) -> _Peer | None:
        """A session for one who says Hello; others are told to (after a restart of this end, say)."""
        if not self._listener.still_allowed(key):                    # it was when it connected
            self.counters["revoked"] += 1
            return None
        if not isinstance(message, Hello) or len(self._peers) >= MAX_PEERS:
            if not isinstance(message, Bye):
                self.counters["strangers"] += 1
                reason = "say Hello first" if not isinstance(message, Hello) else f"{MAX_PEERS} trainers are connected already"
                self._listener.send(identity, encode(Bye(reason)))
            return None
        if reason := self._not_free(message, key):
            self._count("refused_names", "%s: %s", message.name, reason)
            self._listener.send(identity, encode(Refuse(reason, ())))
            return None
        session = PeerSession(self._facts, timing=self._timing, read_sample=self._read_sample, read_chunk=self._read_chunk, now=now)
        peer = _Peer(session, now, key)
        with self._subscribers.lock:
            self._peers[identity] = peer
        return peer

    def _not_free(self, hello: Hello, key: str | None) -> str:
        """Why this trainer may not have the name it gives; "" where it may.  Without keys a name is whoever's says it."""
        holders = {self._subscribers.key_of(hello.name), *(peer.key for peer in self._peers.values() if peer.name == hello.name)} - {key, None}
        if key is not None and any(self._listener.still_allowed(holder) for holder in holders):
            return (f"the name {hello.name} is another key's: give --name another, or, where that key is this box's old one, take it out of the "
                    f"producer's list of allowed keys")
        if hello.samples and self._subscribers.full(hello.name):
            return "too many trainers are known: forget one with hsprod forget NAME"
        return ""

    def _joined(self, identity: bytes, event: Joined, now: float) -> None:
        name = event.hello.name
        for other_id, other in list(self._peers.items()):
            if other_id != identity and other.name == name:
                self._count("replaced_links", "%s connected again: its older link is dropped", name)
                self._drop(other_id, other, f"{name} connected again; two trainers need two names")
        if event.hello.samples:
            self._subscribers.join(name, event.start_seq - 1, now, self._peers[identity].key)
        log.info("%s joined%s", name, f" at sample {event.start_seq}" if event.hello.samples else " without samples")

    def _handle(self, identity: bytes, peer: _Peer, event: Event) -> None:
        match event:
            case Acked(seq):
                self._subscribers.acknowledge(peer.name, seq)
            case Refused(reason, fields):
                self._count("refused", "%s refused: %s: %s", peer.name, reason, "; ".join(fields))
            case Offered(offer):
                self._offered(peer, offer)
            case Chunk((_, name), offset, data, last):
                peer.fetch.write(name, offset, data, last)
                self._hand_over(peer)
            case LinkLost(reason):
                log.info("%s left: %s", peer.name, reason)
                self._remove(identity)

    def _pump(self, identity: bytes, peer: _Peer) -> bool:
        """Send what is due, as far as the socket takes it; True where there is more."""
        now = time.monotonic()
        try:
            self._tell_stream(peer.session)
            for event in peer.session.tick(now):
                self._handle(identity, peer, event)
                return False
            for _ in range(ROUNDS):
                while peer.pending:
                    sent = self._listener.send(identity, peer.pending[0])
                    if sent is None:
                        log.info("%s is gone: connection closed", peer.name)
                        self._remove(identity)
                    if not sent:
                        return False
                    peer.pending.popleft()
                if peer.session.state is CLOSED:
                    self._remove(identity)
                    return False
                peer.pending.extend(encode(m) for m in peer.session.to_send(now))
                if peer.session.unread is not None:
                    self._need(peer, peer.session.unread, f"sample {peer.session.unread}, damaged on both boxes")
                    peer.session.unread = None
                if not peer.pending:
                    return False
            return True
        except Unreadable as error:
            self._need(peer, error.sample, error)
            self._drop(identity, peer, str(error))
            return False

    def _need(self, peer: _Peer, seq: int | None, why: object) -> None:
        """That trainer needs what cannot be read here: sample seq, or (None) an asset."""
        if seq not in self._needed:                                  # else it is being made again, and was said
            self._count("unreadable", "%s needs what this box cannot read: %s", peer.name, why)
        if seq in self._lost:
            peer.session.lost(seq)
        elif seq is not None:
            self._needed.add(seq)

    def _offered(self, peer: _Peer, offer: CheckpointOffer) -> None:
        peer.offered.append(offer.offer)
        if report := self._offers.report_for(offer.offer):
            peer.session.report(offer.offer, *report)
        elif self._offers.handed(offer.offer) or (peer.fetch and peer.fetch.offer.offer == offer.offer):
            log.info("%s step %d from %s is here already", offer.run, offer.step, peer.name)
        else:
            if peer.fetch is not None:
                if peer.fetch.offer.run != offer.run:
                    raise PeerError(f"CheckpointOffer: run {offer.run} while {peer.fetch.offer.run} is fetched; a link is for one run")
                self._offers.counters["replaced_checkpoints"] += 1
                peer.fetch.close()
            peer.fetch = self._offers.fetch(peer.name, offer)
            peer.session.pull(offer, peer.fetch.have)
            self._hand_over(peer)

    def _hand_over(self, peer: _Peer) -> None:
        if peer.fetch.complete:
            self._offers.arrived(peer.fetch)
            peer.fetch = None

    def _report(self, ready: CheckpointReady, result: dict, error: str | None) -> None:
        self._offers.reported(ready, result, error)
        for peer in self._peers.values():
            if ready.offer in peer.offered and peer.session.state is STREAMING:
                peer.session.report(ready.offer, result, error)

    def _read_sample(self, seq: int) -> bytes:
        try:
            return self._store.read(seq)
        except (HsdraftError, OSError, KeyError) as error:
            unreadable = Unreadable(f"sample {seq}: {error}")
            unreadable.sample = seq
            raise unreadable from error

    def _read_chunk(self, key: tuple[str, ...], offset: int, length: int) -> bytes:
        try:
            return self._serving.read(key, offset, length)
        except OSError as error:
            raise Unreadable(str(error)) from error

    def _drop(self, identity: bytes, peer: _Peer | None, reason: str) -> None:
        """Bye, as far as the socket takes it now, and forget the session."""
        self._listener.send(identity, encode(Bye(clip(reason))))
        self._remove(identity)

    def _remove(self, identity: bytes) -> None:
        with self._subscribers.lock:
            peer = self._peers.pop(identity, None)
        if peer is not None:
            self._sent += peer.session.counters["bytes"]
            self._subscribers.left(peer.name)
            if peer.fetch is not None:
                peer.fetch.close()

    def _count(self, counter: str, line: str, *values: object) -> None:
        self.counters[counter] += 1
        log.warning(line, *values)
