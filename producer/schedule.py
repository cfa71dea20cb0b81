"""Which prompt is answered next, across restarts, each exactly once a pass.

`order` is pure.  `Progress` is the one small file that ties sequence numbers to prompts: it is written, durably, before
a batch's samples are appended, so that after a kill the store's own next sequence number says how far the batch came.
"""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

from common.files import no_room, write_whole
from producer.prompts import Prompt
from protocol.store import DiskFull

KEPT = 65536                 # samples back; half a megabyte, written at every batch


def order(prompts: list[Prompt], number: int) -> list[Prompt]:
    """Prompts of pass `number` (0, 1, ...), shuffled by a hash of (pass, id): no state, no seed to lose."""
    return sorted(prompts, key=lambda p: hashlib.sha256(f"{number}/{p.id}".encode()).digest())


class Progress:
    """Where production stands: item k is prompt k % n of pass k // n.

    The file holds which items became sequence numbers first, first + 1, ...: the batch in hand, and the KEPT samples before it,
    which may be found damaged and are then made again.
    """

    def __init__(self, path: Path, prompts: str, next_seq: int) -> None:
        """prompts: hash of the prompt list; another list starts at item 0.  next_seq: of the store, after a restart."""
        self._path, self._prompts = path, prompts
        held = json.loads(path.read_text()) if path.exists() else {}
        self.item, self._items = 0, {}                            # seq -> item
        if held.get("prompts") == prompts:
            self._items = dict(enumerate(held["items"], held["first_seq"]))
            self.item = self._items.get(next_seq, held["after"])

    def item_of(self, seq: int) -> int | None:
        """Of a sample made before; None where that is too long ago, or was with another prompt list."""
        return self._items.get(seq)

    def begin(self, first_seq: int, items: list[int], after: int) -> None:
        """items[i] will be appended as first_seq + i; `after` is the item that follows the batch.  DiskFull: call it again later."""
        first = first_seq
        while first - 1 in self._items and first_seq - first < KEPT:
            first -= 1
        known = [self._items[seq] for seq in range(first, first_seq)] + items
        self._items = dict(enumerate(known, first))
        held = {"prompts": self._prompts, "first_seq": first, "items": known, "after": after}
        try:
            write_whole(self._path, json.dumps(held).encode())
        except OSError as error:
            if no_room(error):
                raise DiskFull(f"{self._path}: no space") from error
            raise
        self.item = after
