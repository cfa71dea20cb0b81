"""A GGUF's counts and lengths against the file's own size, before the gguf package believes them.

Its reader walks past the end of a file without noticing: an array that says it has 2**60 numbers makes it append empty views until
memory ends.  Here each field is stepped over once, by its length alone.  Left out: big-endian files, and arrays of arrays, which
no drafter has."""
from __future__ import annotations

import mmap
import struct
from pathlib import Path

from common.errors import CorruptError

MAGIC, VERSIONS = b"GGUF", (2, 3)
MOST_ITEMS = 1 << 24         # of one array: the largest vocabularies have a quarter of a million tokens, and as many merges
MOST_DIMS = 4                # ggml's own
STRING, ARRAY = 8, 9
SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}         # GGUFValueType -> bytes


class _Walk:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def over(self, size: int) -> None:
        if size > len(self.data) - self.at:
            raise CorruptError(f"gguf: no whole GGUF file: {size} bytes wanted at {self.at} of {len(self.data)}")
        self.at += size

    def number(self, form: str) -> int:
        begin = self.at
        self.over(struct.calcsize(form))
        return struct.unpack_from(form, self.data, begin)[0]

    def string(self) -> None:
        self.over(self.number("<Q"))

    def value(self) -> None:
        if (kind := self.number("<I")) != ARRAY:
            self.items(kind, 1)
            return
        kind, count = self.number("<I"), self.number("<Q")
        if count > MOST_ITEMS:
            raise CorruptError(f"gguf: no whole GGUF file: an array of {count} items, at most {MOST_ITEMS}")
        self.items(kind, count)

    def items(self, kind: int, count: int) -> None:
        if kind == STRING:
            for _ in range(count):
                self.string()
        elif kind in SCALARS:
            self.over(SCALARS[kind] * count)
        else:
            raise CorruptError(f"gguf: no whole GGUF file: a value of kind {kind}")


def check(path: Path) -> None:
    """CorruptError unless every key, value and tensor that the file announces lies within it.  OSError where it cannot be read."""
    with path.open("rb") as file:
        if path.stat().st_size < 24:
            raise CorruptError(f"gguf: no whole GGUF file: {path.stat().st_size} bytes")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            walk = _Walk(data)
            walk.over(8)
            if data[:4] != MAGIC or struct.unpack_from("<I", data, 4)[0] not in VERSIONS:
                raise CorruptError(f"gguf: no whole GGUF file: it begins with {data[:8]!r}")
            tensors, fields = walk.number("<Q"), walk.number("<Q")
            for _ in range(fields):
                walk.string()
                walk.value()
            for _ in range(tensors):
                walk.string()
                if (dims := walk.number("<I")) > MOST_DIMS:
                    raise CorruptError(f"gguf: no whole GGUF file: a tensor of {dims} dimensions")
                walk.over(8 * dims + 12)
