"""Checkpoints that trainers offer, on the producer's disk: fetched, waiting for the evaluation, in it, reported.

One waits per trainer and run: a newer one takes its place, counted.  Folders are <inbox>/<hash of trainer and run>/<offer>;
nothing that a trainer says becomes part of a path (the offer's id is made again here from what it offers)."""
from __future__ import annotations

import hashlib
import queue
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from common.errors import PeerError
from common.files import sha256_file
from protocol.events import CheckpointOffer
from protocol.transfer import PartFile, offer_id

MAX_HANDED = 32              # checkpoints that wait or are in evaluation, of all trainers: each holds a record of up to a MiB
MAX_REPORTS = 32             # kept to answer an offer repeated after a cut without another evaluation


@dataclass(frozen=True)
class CheckpointReady:
    """A checkpoint, whole and checked, in `folder`; answer it with ProducerLink.report(), which removes the folder."""

    peer: str
    offer: str
    run: str
    step: int
    folder: Path
    record: dict


class Waiting(queue.Queue):
    """The main thread's inbox: at most one checkpoint a trainer and run."""

    def replace(self, item: CheckpointReady) -> CheckpointReady | None:
        """Queue item; returns the older one whose place it took."""
        with self.mutex:
            for place, old in enumerate(self.queue):
                if (old.peer, old.run) == (item.peer, item.run):
                    self.queue[place] = item
                    return old
        self.put(item)
        return None


class Fetch:
    """One checkpoint on its way.  Raises PeerError where the offer's id is not that of its content, OSError."""

    def __init__(self, root: Path, peer: str, offer: CheckpointOffer) -> None:
        if offer_id(offer.run, offer.step, offer.files) != offer.offer:
            raise PeerError("CheckpointOffer: offer is not the id of what it lists")
        self.offer, self.peer = offer, peer
        run = hashlib.sha256(f"{peer}\0{offer.run}".encode()).hexdigest()[:16]
        self.folder = root / run / offer_id(offer.run, offer.step, offer.files)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.have: dict[str, int] = {}
        self._parts: dict[str, PartFile] = {}
        for info in offer.files:
            path = self.folder / info.name
            if path.exists() and path.stat().st_size == info.size and sha256_file(path) == info.sha256:
                self.have[info.name] = info.size
                continue
            part = self._parts[info.name] = PartFile(path, info)
            self.have[info.name] = part.have
            if part.have == info.size:
                self._parts.pop(info.name).finish()

    @property
    def complete(self) -> bool:
        return not self._parts

    def write(self, name: str, offset: int, data: bytes, last: bool) -> None:
        """Raises CorruptError where the finished file is not what was announced, OSError."""
        self._parts[name].write(offset, data)
        if last:
            self._parts.pop(name).finish()

    def ready(self) -> CheckpointReady:
        o = self.offer
        return CheckpointReady(self.peer, o.offer, o.run, o.step, self.folder, o.record)

    def close(self) -> None:
        for part in self._parts.values():
            part.close()


class Offers:
    """What became of each offer.  Used by the link's thread alone, but for `inbox`.

    One is known by what is in it: a run that another process of its box goes on with, under another name, is not evaluated twice.
    counters: checkpoints, replaced_checkpoints (by a newer one before they were evaluated), reports.
    """

    def __init__(self, root: Path) -> None:
        self._root, self.inbox, self.counters = root, Waiting(), Counter()
        self._handed: dict[str, CheckpointReady] = {}          # by offer: waiting or in evaluation
        self._reports: dict[str, tuple[dict, str | None]] = {}

    def report_for(self, offer: str) -> tuple[dict, str | None] | None:
        return self._reports.get(offer)

    def handed(self, offer: str) -> bool:
        return offer in self._handed

    def fetch(self, peer: str, offer: CheckpointOffer) -> Fetch:
        """Raises PeerError where too many wait, or as Fetch does."""
        if len(self._handed) >= MAX_HANDED and all((ready.peer, ready.run) != (peer, offer.run) for ready in self._handed.values()):
            raise PeerError(f"CheckpointOffer: {MAX_HANDED} checkpoints wait already; offer it again later")
        fetch = Fetch(self._root, peer, offer)
        kept = {ready.folder for ready in self._handed.values()} | {fetch.folder}
        for old in fetch.folder.parent.iterdir():                            # of this trainer and run, never to be asked for again
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)
        return fetch

    def arrived(self, fetch: Fetch) -> None:
        ready = fetch.ready()
        self._handed[ready.offer] = ready
        if old := self.inbox.replace(ready):
            self.counters["replaced_checkpoints"] += 1
            del self._handed[old.offer]
            shutil.rmtree(old.folder, ignore_errors=True)
        self.counters["checkpoints"] += 1

    def reported(self, ready: CheckpointReady, result: dict, error: str | None) -> None:
        self.counters["reports"] += 1
        self._handed.pop(ready.offer, None)
        self._reports[ready.offer] = (result, error)
        while len(self._reports) > MAX_REPORTS:
            del self._reports[next(iter(self._reports))]
        shutil.rmtree(ready.folder, ignore_errors=True)
