"""What this box has received: its store, the link that fills it, the target's assets.

The store belongs to the box, not to a run.  One process receives (it holds the store's lock); every other run here follows
the files it writes, has a link of its own for evaluations only, and takes over when the receiver ends.  Bytes are stored
as they came, and acknowledged once they are durable."""
from __future__ import annotations

import json
import logging
import queue
import time
from collections.abc import Callable
from pathlib import Path

from common import files, service
from common.contract import ExtractionContract
from common.errors import CorruptError, UserError
from common.files import write_whole
from common.status import Rate
from protocol import codec
from protocol.events import Cursor, LinkDown, LinkUp, Refused, ReportArrived, Welcome
from protocol.keys import TrainerKeys
from protocol.store import DiskFull, SampleStore, StoreLocked, should_pause
from protocol.trainer_link import TrainerLink
from trainer import seen
from trainer.config import ADDRESS, Run as Settings

log = logging.getLogger("inbox")
CLAIM_EVERY_S = 5.0          # a follower looks this often whether the receiver has ended
REFRESH_EVERY_S = 1.0
MEND_S = 30.0                # how often it is said that a sample damaged here has not come again
STORE, ASSETS = "store", "assets"          # folders of a box's state


class Inbox:
    """store: the box's samples, of no stream yet on a box that never received.  receiving: this process fills it.

    ends_at, hopeless: as replay.Stored has them; a live stream's end is not known before it comes, and its producer is waited for."""

    ends_at, hopeless = None, False

    def __init__(self, settings: Settings, run_name: str, stop: service.Stop) -> None:
        """stop: asked at each turn of a wait (mend)."""
        self._settings, self._run_name, self._address, self._stop = settings, run_name, settings.producer or ADDRESS, stop
        self._folder, self._assets = settings.state_dir / STORE, settings.state_dir / ASSETS
        self._assets.mkdir(parents=True, exist_ok=True)
        self._keys = TrainerKeys(settings.keys) if settings.keys else None
        self._looked = self._refreshed = 0.0
        self._later: list[LinkUp | LinkDown | ReportArrived] = []           # heard during a wait in mend
        self._received = Rate()
        try:
            store = SampleStore(self._folder)
            files.check_room(self._folder, store.bytes_used, int(settings.disk_budget * 1e9))
            self._connect(store)
        except StoreLocked as error:
            log.info("%s; following its files", error)
            self._connect(SampleStore(self._folder, readonly=True))

    def _connect(self, store: SampleStore) -> None:
        """A link to match: one that takes samples where the store may be written."""
        self.store, self.receiving, self._paused = store, not store.readonly, False
        name = self._settings.name if self.receiving else f"{self._settings.name}.{self._run_name}"
        self.mended = 0                                          # samples that were damaged here and came again
        self.link = TrainerLink(self._address, name, cursor=self._cursor, assets_dir=self._assets, on_welcome=self._welcomed,
                                on_sample=self._sample if self.receiving else None, window=self._settings.credit * 1_000_000,
                                keys=self._keys)
        if self.receiving:
            self._keep_budget()                                  # before the first Welcome: what is granted there comes
        self.link.start()

    def close(self) -> None:
        self.link.close()
        self.store.close()

    def __enter__(self) -> Inbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- called on the link's thread

    def _cursor(self) -> Cursor:
        if not self.store.stream:
            return Cursor(None, 0, None)
        newest = self.store.newest() if self.receiving else None
        return Cursor(self.store.stream, self.store.next, ExtractionContract.from_dict(self.store.contract), newest)

    def _welcomed(self, welcome: Welcome, contract: ExtractionContract) -> None:
        if self.receiving and not self.store.stream:
            if welcome.first_seq:
                log.warning("samples 0 to %d are no longer on the producer; this store begins at %d", welcome.first_seq - 1, welcome.first_seq)
            self.store.begin(welcome.stream, welcome.contract, welcome.first_seq)
        if self.receiving:
            write_whole(_names(self._assets, contract.hash), json.dumps({a.name: a.sha256 for a in welcome.assets}).encode())

    def _sample(self, seq: int, data: bytes) -> None:
        """Durable on return.  Checked whole first, so that a sample that was damaged on its way comes again instead of lying here."""
        check_shape(codec.verify(data), self.store.contract)
        self.store.append(seq, data)
        self._keep_budget()

    # ---- called on the main thread

    def wait(self, stop: service.Stop, say: Callable[[str], None]) -> tuple[ExtractionContract, dict[str, Path]] | None:
        """The contract and the assets' files; from this box alone where it has them, else once the producer has sent them.

        None where the daemon is to stop first.  Raises UserError for a producer that refuses or differs.
        """
        while not stop:
            if self.store.stream and (assets := assets_of(self._assets, self.store.contract_hash)):
                return ExtractionContract.from_dict(self.store.contract), assets
            self.news()
            say("waiting for the producer")
            stop.wait(0.2)
        return None

    def news(self) -> list[LinkUp | LinkDown | ReportArrived]:
        """What the link has to say since the last call; also the box's own housekeeping.  Raises UserError, or a link's fault."""
        found, self._later = self._later + self._heard(), []
        return found

    def _heard(self) -> list[LinkUp | LinkDown | ReportArrived]:
        now, found = time.monotonic(), heard(self.link, self._address)
        if self.receiving:
            return found
        if now - self._refreshed > REFRESH_EVERY_S:
            self._refreshed = now
            self.store.refresh()
        if now - self._looked > CLAIM_EVERY_S:
            self._looked = now
            found += self._take_over()
        return found

    def mend(self, seq: int, found: CorruptError) -> None:
        """Fetch a stored sample again that is damaged here; it is whole on return.  A producer that is away and a full disk are waited for.

        Raises UserError with what to do where the producer has it no more, or refuses this box; service.Stopped."""
        log.warning("%s; asking the producer for it again", found)
        why, said = f"{self._address} does not answer", time.monotonic()
        while True:
            self._stop.check()
            self._later += self._heard()
            data = self.link.again(seq, 1.0)
            if data == b"":
                raise UserError(f"sample {seq} of {self._folder} is damaged, and the producer does not have it any more: train on the samples "
                                f"before it with --from {self._folder} --samples {seq - self.store.first}, or move that folder away to receive "
                                "anew what the producer has")
            try:
                if data is not None:
                    check_shape(codec.verify(data), self.store.contract)
                    self.store.restore(seq, data)
                    self.mended += 1
                    log.warning("sample %d came again and is whole", seq)
                    return
            except (CorruptError, DiskFull) as error:            # damaged on its way, too
                why = f"what came again could not be stored ({error})"
                self._stop.wait(0.5)
            if time.monotonic() - said > MEND_S:
                said = time.monotonic()
                log.warning("sample %d is damaged here, and %s; waiting", seq, why)

    def _keep_budget(self) -> None:
        """At each sample, on the link's thread: beyond the budget comes what was granted before, the window at most."""
        budget = int(self._settings.disk_budget * 1e9)
        paused = should_pause(self.store.bytes_used, budget, self._paused)
        if paused != self._paused:
            advice = "; a run reads all of its samples, so none is dropped: a larger --disk-budget has the rest sent" if paused else ""
            log.warning("disk budget: receiving %s at %.3f of %.3f GB%s", "paused" if paused else "goes on", self.store.bytes_used / 1e9,
                        budget / 1e9, advice)
            self.link.pause(paused)
            self._paused = paused

    def _take_over(self) -> list[LinkDown]:
        """Become the receiver if there is none any more."""
        try:
            store = SampleStore(self._folder)
        except StoreLocked:
            return []
        self.link.close()
        log.info("the receiving process has ended: receiving for this box from here on")
        self._connect(store)
        return [LinkDown("took over as receiver")]

    def complete(self) -> bool:
        """The producer has no more prompts and the store has all its samples."""
        link = self.link.snapshot()
        return bool(link.get("complete") and self.store.stream and self.store.next >= link["producer_next"])

    def line(self) -> str:
        link, store = self.link.snapshot(), self.store
        behind = f", {link['lag']} behind" if link.get("lag") else ""
        return f"{link['state']}; {store.next - store.first:,} samples, {store.bytes_used / 1e6:.1f} MB{behind}"

    def numbers(self) -> dict:
        """As seen.NUMBERS names them."""
        link = self.link.snapshot()
        rate = self._received(link["counters"].get("bytes", 0), time.monotonic()) if self.receiving else 0.0
        return seen.of_store(self.store, int(self._settings.disk_budget * 1e9)) | {
            "connected": int(self.up), "receiving": int(self.receiving), "lag": link.get("lag", 0), "credit_bytes": link.get("credit", 0),
            "received_bytes_per_second": max(0.0, rate)}

    def counters(self) -> dict:
        """As seen.COUNTED names them: the link's, since it was made, and the store's."""
        return self.link.snapshot()["counters"] | seen.counted_in(self.store) | {"mended": self.mended}

    @property
    def up(self) -> bool:
        return self.link.up

    def offer(self, folder: Path, *, step: int, record: dict) -> None:
        self.link.offer(folder, run=self._run_name, step=step, record=record)


def unmendable(_seq: int, found: CorruptError) -> None:
    """Where no producer is there to send a sample again.  Raises UserError."""
    raise UserError(f"{found}. Run hstrain once with its producer and one process: a damaged sample that is read there comes again") from None


def check_shape(header: codec.Header, contract: dict) -> None:
    """CorruptError where a sample's states are not of the contract's shape: it would be acknowledged, and end every run that reads it."""
    said, wanted = (header.taps, header.hidden), (len(contract["taps"]), contract["hidden_size"])
    if said != wanted:
        raise CorruptError(f"sample {header.seq}: {said[0]} taps {said[1]} wide, the contract says {wanted[0]} taps {wanted[1]} wide")


def assets_of(folder: Path, contract_hash: str) -> dict[str, Path] | None:
    """{name: file} as the last Welcome named them; None until all are in the folder."""
    names = _names(folder, contract_hash)
    if not names.exists():
        return None
    found = {name: folder / sha256 for name, sha256 in json.loads(names.read_text()).items()}
    return found if all(path.exists() for path in found.values()) else None


def _names(folder: Path, contract_hash: str) -> Path:
    return folder / f"{contract_hash}.json"


def heard(link: TrainerLink, address: str) -> list[LinkUp | LinkDown | ReportArrived]:
    """What the link has to say since the last call.  Raises UserError for a producer that refuses, or the link's fault."""
    link.raise_if_failed()
    found = []
    while True:
        try:
            item = link.inbox.get_nowait()
        except queue.Empty:
            return found
        if isinstance(item, Refused):
            differs = f": {'; '.join(item.fields)}. Use another --state-dir for another stream, or start the producer as it was"
            raise UserError(f"{address}: {item.reason}{differs if item.fields else ''}")
        found.append(item)
