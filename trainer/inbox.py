"""This box's store, and who fills it.

The store belongs to the box, not to a run: one process receives (it holds the store's lock), every other run on this
box follows the files it writes and takes over when it ends.  Bytes are stored as they came; a sample is acknowledged
once it is durable."""
from __future__ import annotations

import logging
from pathlib import Path

from common.contract import ExtractionContract, differences
from common.errors import PeerError, UserError
from protocol import codec
from protocol.store import SampleStore, StoreLocked

log = logging.getLogger("inbox")


class Inbox:
    """contract: None until the first Welcome of an empty box.  receiving: this process holds the lock."""

    def __init__(self, folder: Path, *, budget: int) -> None:
        """budget: bytes on disk; at it, receiving pauses."""
        self._folder, self._budget = folder, budget
        self.store: SampleStore | None = None
        self.open()

    def open(self) -> None:
        """Take the lock, or follow; also called now and then by a follower."""
        try:
            self.store, self.receiving = SampleStore(self._folder), True
        except StoreLocked as error:
            if self.store is None:
                log.info("%s: following its files", error)
            self.store, self.receiving = SampleStore(self._folder, readonly=True), False
