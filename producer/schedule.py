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

KEPT = 4096                  # runs of samples back, each ended by a prompt that gave no sample; 100 kB at most, written at every batch


def order(prompts: list[Prompt], number: int) -> list[Prompt]:
    """Prompts of pass `number` (0, 1, ...), shuffled by a hash of (pass, id): no state, no seed to lose."""
    return sorted(prompts, key=lambda p: hashlib.sha256(f"{number}/{p.id}".encode()).digest())


def extended(runs: list[list[int]], first_seq: int, items: list[int]) -> list[list[int]]:
    """runs: [seq, item, count] each, samples seq, seq + 1, ... of items item, item + 1, ... -> the KEPT runs that lead up to first_seq, and then
    items[i] as first_seq + i.  What was said of first_seq and later is forgotten, and all where samples before it are not known."""
    found = [[seq, item, min(count, first_seq - seq)] for seq, item, count in runs if seq < first_seq][-KEPT:]
    if found and found[-1][0] + found[-1][2] < first_seq:
        found = []
    for seq, item in enumerate(items, first_seq):
        if found and item - found[-1][1] == seq - found[-1][0]:
            found[-1][2] += 1
        else:
            found.append([seq, item, 1])
    return found


class Progress:
    """Where production stands: item k is prompt k % n of pass k // n.

    The file holds which items became which sequence numbers: the batch in hand, and the KEPT runs of samples before it, which may
    be found damaged and are then made again.
    """

    def __init__(self, path: Path, prompts: str, next_seq: int) -> None:
        """prompts: hash of the prompt list; another list starts at item 0.  next_seq: of the store, after a restart."""
        self._path, self._prompts = path, prompts
        held = json.loads(path.read_text()) if path.exists() else {}
        self.item, self._runs = 0, []
        if held.get("prompts") == prompts:
            self._runs = held["runs"] if "runs" in held else extended([], held["first_seq"], held["items"])          # as it was before runs
            again = self.item_of(next_seq)
            self.item = held["after"] if again is None else again

    def item_of(self, seq: int) -> int | None:
        """Of a sample made before; None where that is too long ago, or was with another prompt list."""
        return next((item + seq - first for first, item, count in reversed(self._runs) if first <= seq < first + count), None)

    def begin(self, first_seq: int, items: list[int], after: int) -> None:
        """items[i] will be appended as first_seq + i; `after` is the item that follows the batch.  DiskFull: call it again later."""
        runs = extended(self._runs, first_seq, items)
        held = {"prompts": self._prompts, "runs": runs, "after": after}
        try:
            write_whole(self._path, json.dumps(held).encode())
        except OSError as error:
            if no_room(error):
                raise DiskFull(f"{self._path}: no space") from error
            raise
        self._runs, self.item = runs, after
