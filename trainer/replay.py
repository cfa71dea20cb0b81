"""`hstrain run --from STORE`: training from a stored stream, without a producer.

A box's store as it lies there, read only: many runs may read one at once, also while a receiver fills it.  The stream counts as ended
at the store's present end; the run writes that number down, so later samples change nothing.  With an inbox's face (inbox.py),
so that the rest of a run does not know which of the two it has.  A link is made only where a producer is named, and for
evaluations alone; any producer of the same contract will do, whatever its stream.  Left out: receiving."""
from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from common import service
from common.contract import ExtractionContract
from common.errors import CorruptError, UserError
from protocol.events import Cursor, LinkDown, LinkUp, ReportArrived
from protocol.keys import TrainerKeys
from protocol.store import META, SampleStore
from protocol.trainer_link import TrainerLink
from trainer import seen
from trainer.config import Run as Settings
from trainer.inbox import ASSETS, STORE, assets_of, heard, unmendable

UNREACHED_S = 60.0           # training is done and no producer was reached for so long: what waits for it is left waiting


class Stored:
    """store: the box's samples, read only.  ends_at: how many of them are the stream."""

    def __init__(self, settings: Settings, run_name: str) -> None:
        """settings.stored: a store, or the state folder that holds it and the assets.  UserError where it holds no stream, no
        assets, or fewer samples than settings.samples."""
        self._settings, self._run_name, self._lost = settings, run_name, time.monotonic()
        folder = store_folder(settings.stored)
        self.store = SampleStore(folder, readonly=True)
        self._contract = ExtractionContract.from_dict(self.store.contract)
        here = self.store.next - self.store.first
        self.ends_at = settings.samples or here
        if not 1 <= self.ends_at <= here:
            raise UserError(f"--from {folder} holds {here} samples, {max(1, self.ends_at)} are asked for")
        self._assets = assets_of(folder.parent / ASSETS, self.store.contract_hash)
        if self._assets is None:
            raise UserError(f"{folder.parent / ASSETS}: the target's embedding, head and tokenizer belong here, beside the store, and are not all "
                            "here; they come over the link with the samples: copy the folder whole, or start hstrain run with a producer once")
        self._link = None if settings.producer is None else TrainerLink(
            settings.producer, f"{settings.name}.{run_name}", cursor=lambda: Cursor(None, 0, self._contract), assets_dir=folder.parent / ASSETS,
            on_welcome=lambda _welcome, _contract: None, on_sample=None, keys=TrainerKeys(settings.keys) if settings.keys else None)

    def __enter__(self) -> Stored:
        if self._link:
            self._link.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._link:
            self._link.close()
        self.store.close()

    def wait(self, _stop: service.Stop, _say: Callable[[str], None]) -> tuple[ExtractionContract, dict[str, Path]]:
        return self._contract, self._assets

    def news(self) -> list[LinkUp | LinkDown | ReportArrived]:
        found = heard(self._link, self._settings.producer) if self._link else []
        if self.up:
            self._lost = time.monotonic()
        return found

    def complete(self) -> bool:
        return True

    def line(self) -> str:
        link = f"; producer: {self._link.snapshot()['state']}" if self._link else ""
        return f"replay of {self.ends_at:,} samples in {self.store.folder}{link}"

    def numbers(self) -> dict:
        """As seen.NUMBERS names them."""
        return seen.of_store(self.store, int(self._settings.disk_budget * 1e9)) | {"connected": int(self.up), "receiving": 0}

    def counters(self) -> dict:
        return (self._link.snapshot()["counters"] if self._link else {}) | seen.counted_in(self.store)

    @property
    def up(self) -> bool:
        return self._link is not None and self._link.up

    @property
    def hopeless(self) -> bool:
        """Nobody is there to measure a checkpoint: no producer was named, or none was reached for a while."""
        return self._link is None or (not self.up and time.monotonic() - self._lost > UNREACHED_S)

    def mend(self, seq: int, found: CorruptError) -> None:
        """Raises UserError: a producer that is named here may have another stream."""
        unmendable(seq, found)

    def offer(self, folder: Path, *, step: int, record: dict) -> None:
        self._link.offer(folder, run=self._run_name, step=step, record=record)


def store_folder(path: Path) -> Path:
    """The store that `--from` names: itself, or the one in that state folder.  UserError where there is none."""
    for folder in (path, path / STORE):
        if (folder / META).exists():
            return folder
    raise UserError(f"--from {path}: no stored stream here (no {META}, nor {STORE}/{META}); give the state folder of a trainer that has received "
                    f"one, or its {STORE} folder")
