"""The trainer's end: one thread connects, receives, has each sample stored, acknowledges, fetches assets, serves checkpoints.

It never gives up: whatever ends a session is said once (and at most every minute after), then it connects again from the
store's cursor, after `backoff`.  A full disk (DiskFull or OSError out of on_sample) is one such end: nothing was acknowledged, so the
sample comes again.  What may be said when stands in trainer_session.py."""
from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import zmq

from common.contract import ExtractionContract
from common.errors import PeerError, UserError
from protocol.events import (AgainArrived, CheckpointOffer, Chunk, Cursor, Differs, Event, LinkDown, LinkLost, LinkUp, Refused,
                             ReportArrived, SampleArrived, Welcome, Welcomed)
from protocol.frames import CHECKPOINT_NAMES, NAME, decode, encode
from protocol.keys import TrainerKeys
from protocol.rules import STREAMING, Timing, backoff
from protocol.store import DiskFull
from protocol.trainer_session import TrainerSession
from protocol.transfer import PartFile, Serving, describe, offer_id
from protocol.wire import Dialer, Worker

log = logging.getLogger("link")
TIMING = Timing(interval=2.0, limit=15.0)
WINDOW = 64 << 20            # bytes of samples on their way; a patch cable holds 0.1 MiB, the rest covers slow fsyncs
AGAIN = 60.0                 # seconds until the same state is said again, and of quiet until the producer is called idle


class TrainerLink:
    """inbox: LinkUp, LinkDown, Refused, ReportArrived for the main thread.

    cursor()                 what this box has; called before each connection
    on_welcome(welcome, contract)   before any sample: a fresh box prepares its store (first sample: max(cursor, first_seq))
    on_sample(seq, data)     durable when it returns; None for a follower, which takes no samples, fetches no assets (the process that
                             fills its store does, into the same assets_dir) and has no cursor there
    Both run on the link's thread.  PeerError from them drops the session, DiskFull and OSError too (tried again later);
    UserError and anything else ends the thread: raise_if_failed().
    """

    def __init__(self, address: str, name: str, *, cursor: Callable[[], Cursor], assets_dir: Path,
                 on_welcome: Callable[[Welcome, ExtractionContract], None], on_sample: Callable[[int, bytes], None] | None,
                 window: int = WINDOW, keys: TrainerKeys | None = None, timing: Timing = TIMING) -> None:
        """window: bytes.  Raises UserError on a name that cannot travel."""
        try:
            self._name = NAME(name)
        except ValueError as error:
            raise UserError(f"--name {name!r} {error}") from None
        self._address, self._cursor, self._assets_dir, self._keys, self._timing = address, cursor, assets_dir, keys, timing
        self._on_welcome, self._on_sample, self._window = on_welcome, on_sample, window
        self.inbox: queue.Queue = queue.Queue()
        self.welcome: Welcome | None = None              # the latest
        self.contract: ExtractionContract | None = None  # of it
        self.counters: Counter[str] = Counter()
        self._rng, self._context = random.Random(), zmq.Context()
        self._worker = Worker("trainer-link", self._run)
        self._news = threading.Condition()
        self._session: TrainerSession | None = None      # the link's thread's own, with the four below
        self._serving, self._parts = Serving(), {}
        self._pending: deque[list[bytes]] = deque()
        self._answer: queue.SimpleQueue[AgainArrived] = queue.SimpleQueue()          # to again()
        self._receiving, self._progress, self._last_sample = True, False, 0.0
        self._shown: dict = {"state": "not started"}
        self._said, self._said_at = "", 0.0

    # ---- for the main thread

    def start(self) -> None:
        self._worker.start()

    def close(self) -> None:
        """Say Bye and end; parts of files stay for the next time."""
        self._worker.close()
        self._context.term()

    def __enter__(self) -> TrainerLink:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def raise_if_failed(self) -> None:
        self._worker.raise_if_failed()

    @property
    def up(self) -> bool:
        return bool(self._shown.get("connected"))

    @property
    def complete(self) -> bool:
        """The producer has no more prompts, and every sample of the stream has been stored here (or it is a follower)."""
        return bool(self._shown.get("complete"))

    def wait_ready(self, timeout: float) -> bool:
        """Until welcomed and every asset is here; False after timeout seconds.  Raises what ended the link's thread."""
        end = time.monotonic() + timeout
        with self._news:
            while not self.assets_ready():
                self.raise_if_failed()
                if (left := end - time.monotonic()) <= 0:
                    return False
                self._news.wait(min(left, 0.5))
        return True

    def assets_ready(self) -> bool:
        return self.welcome is not None and all(self._asset_path(a.sha256).exists() for a in self.welcome.assets)

    def assets(self) -> dict[str, Path]:
        """{asset name: file} of the latest Welcome; call it once assets_ready()."""
        return {a.name: self._asset_path(a.sha256) for a in self.welcome.assets}

    def offer(self, folder: Path, *, run: str, step: int, record: dict) -> str:
        """Offer the checkpoint in folder to the producer; returns the offer's id, which its ReportArrived carries.

        It lasts as long as this connection: offer it again after LinkDown.  It takes an older offer's place.  The files are
        held open meanwhile, so that the folder may be deleted.  Raises OSError.
        """
        paths = {name: folder / name for name in CHECKPOINT_NAMES if (folder / name).exists()}
        files = describe(paths)
        made = offer_id(run, step, files)
        contract = self.contract.hash
        encode(CheckpointOffer(made, run, step, contract, files, record))        # LocalError here, not on the link's thread
        opened = Serving()
        for name, path in paths.items():
            opened.add((made, name), path)
        self._worker.do(lambda: self._offer(CheckpointOffer(made, run, step, contract, files, record), opened))
        return made

    def again(self, seq: int, patience: float) -> bytes | None:
        """A sample that came before, once more; b"" where the producer has it no more; None: no answer within `patience` seconds.

        For one thread at a time, and not the link's own."""
        self._answer, end = queue.SimpleQueue(), time.monotonic() + patience
        self._worker.do(lambda: self._session and self._session.again(seq))
        while (left := end - time.monotonic()) > 0:
            try:
                came = self._answer.get(timeout=left)
            except queue.Empty:
                break
            if came.seq == seq:                                  # else the answer to a question that was given up
                return came.data
        return None

    def pause(self, paused: bool) -> None:
        """True: grant no more credit (the disk budget is used up); at most the window still comes."""
        if paused is self._receiving:                            # a change: it may be called at every turn
            self._receiving = not paused
            self._worker.do(lambda: self._session and self._session.receiving(self._receiving))

    def snapshot(self) -> dict:
        """For status: state, connected, next_seq, producer_next, lag, ended, complete, credit, idle_s, counters."""
        return self._shown | {"counters": dict(self.counters)}

    # ---- the link's thread

    def _run(self) -> None:
        attempt = 0
        self._say(f"{self._address}: connecting as {self._name}")
        while not self._worker.closing:
            self._progress = False
            reason = self._one_session()
            if self._worker.closing:
                break
            attempt = 1 if self._progress else attempt + 1
            self._say(f"{self._address}: {reason}; connecting again", warn=True)
            until = time.monotonic() + backoff(attempt, self._rng)
            while not self._worker.closing and (left := until - time.monotonic()) > 0:
                self._worker.wait(left)
                self._worker.obey()

    def _one_session(self) -> str:
        """Connect, be welcomed, stream; returns why it ended."""
        began, reason = time.monotonic(), "a fault of this trainer's"
        session = self._session = TrainerSession(self._name, self._cursor(), samples=self._on_sample is not None, window=self._window,
                                                 timing=self._timing, read_chunk=self._serving.read, now=began)
        session.receiving(self._receiving)
        dialer = Dialer(self._context, self._address, self._keys, self._worker.bell)
        try:
            reason = self._converse(session, dialer)
        except Differs as error:
            self.counters["refused"] += 1
            self.inbox.put(Refused(error.reason, error.fields))
            reason = str(error)
        except PeerError as error:
            self.counters["malformed"] += 1
            reason = str(error)
        except (OSError, DiskFull) as error:
            self.counters["disk_errors"] += 1
            reason = f"this box's disk: {error}"
        finally:                                                 # a bug passes through here, too, on its way to the main thread
            self._part_with(session, dialer, reason)
            self._progress |= time.monotonic() - began > 4 * self._timing.limit
        return reason

    def _part_with(self, session: TrainerSession, dialer: Dialer, reason: str) -> None:
        """Bye, and everything that belonged to the session closed; parts of files stay on disk."""
        session.close(reason)
        try:
            self._flush(session, dialer)
        finally:
            dialer.close()
        self._serving.close()
        for part in self._parts.values():
            part.close()
        self._parts.clear()
        self._pending.clear()
        self.counters.update(session.counters)
        self._session, was_up = None, self.up
        self._show(connected=False, state=reason)
        if was_up:
            self.inbox.put(LinkDown(reason))

    def _converse(self, session: TrainerSession, dialer: Dialer) -> str:
        """Until the session is over.  Raises PeerError, OSError."""
        while not self._worker.closing:
            self._worker.obey()
            self._flush(session, dialer)
            found = dialer.receive(min(0.5, self._timing.interval / 2), until_writable=bool(self._pending))
            for parts in found:
                for event in session.receive(decode(parts), time.monotonic()):
                    if isinstance(event, Refused):
                        raise Differs(event.reason, event.fields)
                    if isinstance(event, LinkLost):
                        return event.reason
                    self._handle(session, event)
                self._flush(session, dialer)
                if self._worker.closing:
                    break
            if not found:                                        # silence is judged only when nothing waits to be read
                for lost in session.tick(time.monotonic()):
                    return lost.reason + ("" if self.up else self._hint())
            self._show_session(session)
        return "this trainer stops"

    def _hint(self) -> str:
        """For no answer at all: a producer does not speak to who may not connect."""
        key = self._keys and f"this box's key allowed there: hsprod allow '{self._keys.public.decode()}'"
        return f" (is it up, and {key or 'without --keys'}?)"

    def _flush(self, session: TrainerSession, dialer: Dialer) -> None:
        """Send what is due, as far as the socket takes it."""
        now = time.monotonic()
        while True:
            while self._pending:
                if not dialer.send(self._pending[0]):
                    return
                self._pending.popleft()
            self._pending.extend(encode(m) for m in session.to_send(now))
            if not self._pending:
                return

    def _handle(self, session: TrainerSession, event: Event) -> None:
        match event:
            case Welcomed(welcome, contract, _):
                self._on_welcome(welcome, contract)
                self.welcome, self.contract = welcome, contract
                if self._on_sample is not None:                  # a follower finds the receiver's: two writers would spoil one file
                    self._fetch_assets(session, welcome)
                self._last_sample = time.monotonic()
                self._show_session(session)
                self.inbox.put(LinkUp(welcome, contract))
                self._tell()
            case SampleArrived(seq, data):
                self._on_sample(seq, data)
                session.receiving(self._receiving)               # it may have asked for a pause
                session.stored(seq)
                self.counters["samples"] += 1
                self.counters["bytes"] += len(data)
                self._progress, self._last_sample = True, time.monotonic()
            case Chunk((sha256,), offset, data, last):
                self._parts[sha256].write(offset, data)
                self._progress = True
                if last:
                    self._parts.pop(sha256).finish()
                    self._tell()
            case AgainArrived():
                self._answer.put(event)
            case ReportArrived(offer=offer):
                self._stop_serving(offer)
                self.inbox.put(event)

    def _fetch_assets(self, session: TrainerSession, welcome: Welcome) -> None:
        for info in welcome.assets:
            path = self._asset_path(info.sha256)
            if path.exists() or info.sha256 in self._parts:
                continue
            part = PartFile(path, info)
            if part.have == info.size:
                part.finish()
            else:
                self._parts[info.sha256] = part
                session.pull(info.sha256, info.size, part.have)

    def _offer(self, offer: CheckpointOffer, opened: Serving) -> None:
        session = self._session
        if session is None or session.state is not STREAMING or session.contract_hash != offer.contract_hash:
            self.counters["unsent_offers"] += 1                  # the main thread has LinkDown in its inbox, or soon
            opened.close()
            return
        for old in session.offer(offer):
            self._stop_serving(old)
        self._serving.adopt(opened)

    def _stop_serving(self, offer: str) -> None:
        for name in CHECKPOINT_NAMES:
            self._serving.drop((offer, name))

    def _asset_path(self, sha256: str) -> Path:
        return self._assets_dir / sha256                         # checked to be 64 hex digits

    # ---- what people see

    def _show_session(self, session: TrainerSession) -> None:
        if session.state is not STREAMING:
            return
        behind = session.producer_next - session.next_seq if self._on_sample is not None else 0
        quiet = time.monotonic() - self._last_sample
        complete = session.ended and behind <= 0
        state = ("the stream is complete" if complete else "paused: no credit is granted" if not self._receiving
                 else "following" if self._on_sample is None
                 else f"the producer is idle: no sample for {AGAIN:.0f} s or more" if quiet > AGAIN else "receiving")
        self._say(f"{self._address}: {state}", again="idle" in state)
        self._show(state=state, connected=True, next_seq=session.next_seq, producer_next=session.producer_next, lag=max(0, behind),
                   ended=session.ended, complete=complete, credit=session.credit, idle_s=round(quiet, 1))
        session.set_status({"state": state, "samples": self.counters["samples"]})

    def _show(self, **values: object) -> None:
        self._shown = self._shown | values                       # one assignment: readable from any thread

    def _say(self, text: str, *, warn: bool = False, again: bool = True) -> None:
        """Log text where it is news, or has been true for another minute."""
        now = time.monotonic()
        steady = "".join(c for c in text if not c.isdigit())       # "for 15.3 s" is no news after "for 15.1 s"
        if steady != self._said or (again and now - self._said_at > AGAIN):
            self._said, self._said_at = steady, now
            log.log(logging.WARNING if warn else logging.INFO, text)

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()
