"""Which prompt is answered next, across restarts, each exactly once a pass.

`order` is pure.  `Progress` is the one small file that ties sequence numbers to prompts: it is written, durably, before
a batch's samples are appended, so that after a kill the store's own next sequence number says how far the batch came.
"""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

from common.files import write_whole
from producer.prompts import Prompt
from protocol.store import FULL, DiskFull


def order(prompts: list[Prompt], number: int) -> list[Prompt]:
    """Prompts of pass `number` (0, 1, ...), shuffled by a hash of (pass, id): no state, no seed to lose."""
    return sorted(prompts, key=lambda p: hashlib.sha256(f"{number}/{p.id}".encode()).digest())


class Progress:
    """Where production stands: item k is prompt k % n of pass k // n.

    The file holds the batch in hand: which items became sequence numbers first, first + 1, ...
    """

    def __init__(self, path: Path, prompts: str, next_seq: int) -> None:
        """prompts: hash of the prompt list; another list starts at item 0.  next_seq: of the store, after a restart."""
        self._path, self._prompts = path, prompts
        held = json.loads(path.read_text()) if path.exists() else {}
        self.item = 0
        if held.get("prompts") == prompts:
            done = next_seq - held["first_seq"]
            items = held["items"]
            self.item = items[done] if 0 <= done < len(items) else held["after"]

    def begin(self, first_seq: int, items: list[int], after: int) -> None:
        """items[i] will be appended as first_seq + i; `after` is the item that follows the batch.  DiskFull: call it again later."""
        held = {"prompts": self._prompts, "first_seq": first_seq, "items": items, "after": after}
        try:
            write_whole(self._path, json.dumps(held).encode())
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(f"{self._path}: no space") from error
            raise
        self.item = after
