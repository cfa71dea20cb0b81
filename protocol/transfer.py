"""Files over the link: pulled by who wants them, in chunks, resumed where a cut left them, believed once their sha256 fits.

`Pull` decides what to ask (pure); `PartFile` is the file that grows (disk).  The one who pulls is never surprised by
bytes it did not ask for, and the one who serves holds no state but an open file."""
from __future__ import annotations

import hashlib
import os
from collections import deque
from pathlib import Path

from common.errors import CorruptError, PeerError
from common.files import fsync_dir, sha256_file
from protocol.events import FileInfo
from protocol.frames import CHUNK

OUTSTANDING = 4              # chunks asked and not yet here, per link: hides one round trip of a patch cable several times over


class Pull:
    """What is still to ask of one file of `size` bytes, `have` of which are here."""

    def __init__(self, size: int, have: int) -> None:
        self._size, self._next = size, have
        self._asked: deque[tuple[int, int]] = deque()

    def asks(self) -> list[tuple[int, int]]:
        """(offset, length) of the chunks to ask now; at most OUTSTANDING are under way."""
        new = []
        while self._next < self._size and len(self._asked) < OUTSTANDING:
            piece = (self._next, min(CHUNK, self._size - self._next))
            self._next += piece[1]
            self._asked.append(piece)
            new.append(piece)
        return new

    def arrived(self, offset: int, length: int) -> bool:
        """True where the file is complete with this piece.  PeerError unless it is the oldest one asked."""
        if not self._asked or self._asked[0] != (offset, length):
            raise PeerError(f"sent {length} bytes at {offset}; asked next: {self._asked[0] if self._asked else 'nothing'}")
        self._asked.popleft()
        return not self._asked and self._next == self._size


class PartFile:
    """`path` while it is being fetched: path.part, kept across restarts."""

    def __init__(self, path: Path, info: FileInfo) -> None:
        """have: bytes already here.  Raises OSError."""
        self._path, self._info = path, info
        self._part = path.with_name(path.name + ".part")
        self._part.parent.mkdir(parents=True, exist_ok=True)
        if self._part.exists() and self._part.stat().st_size > info.size:      # of another, larger file of this name
            self._part.unlink()
        self._file = self._part.open("ab")
        self.have = self._file.tell()

    def write(self, offset: int, data: bytes) -> None:
        assert offset == self.have, (offset, self.have)                        # Pull holds the order
        self._file.write(data)
        self.have += len(data)

    def finish(self) -> None:
        """Durable under its own name.  CorruptError where the sha256 differs; the part is then removed."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if (got := sha256_file(self._part)) != self._info.sha256:
            self._part.unlink()
            raise CorruptError(f"{self._info.name}: sha256 is {got[:12]}, announced {self._info.sha256[:12]}")
        self._part.replace(self._path)
        fsync_dir(self._path.parent)

    def close(self) -> None:
        """Leave the part for the next attempt."""
        self._file.close()


class Serving:
    """Files that this end lets the other read, held open: deleting one does not cut a transfer short."""

    def __init__(self) -> None:
        self._fds: dict[tuple[str, ...], int] = {}

    def add(self, key: tuple[str, ...], path: Path) -> None:
        if key not in self._fds:
            self._fds[key] = os.open(path, os.O_RDONLY)

    def adopt(self, other: Serving) -> None:
        """Take over all that other holds; what is here already stays."""
        for key, fd in other._fds.items():
            if key in self._fds:
                os.close(fd)
            else:
                self._fds[key] = fd
        other._fds = {}

    def drop(self, key: tuple[str, ...]) -> None:
        if key in self._fds:
            os.close(self._fds.pop(key))

    def read(self, key: tuple[str, ...], offset: int, length: int) -> bytes:
        """OSError where the file has become shorter than it was when it was offered."""
        data = os.pread(self._fds[key], length, offset)
        if len(data) != length:
            raise OSError(f"{'/'.join(key)} is shorter than announced: {len(data)} of {length} bytes at {offset}")
        return data

    def close(self) -> None:
        for key in list(self._fds):
            self.drop(key)


def describe(names: dict[str, Path]) -> tuple[FileInfo, ...]:
    """{name: path} as the wire announces it.  Reads every byte."""
    return tuple(FileInfo(name, path.stat().st_size, sha256_file(path)) for name, path in sorted(names.items()))


def offer_id(run: str, step: int, files: tuple[FileInfo, ...]) -> str:
    """32 hex digits of what is offered: the same checkpoint offered again, after a cut, is the same offer."""
    return hashlib.sha256(repr((run, step, sorted((f.name, f.sha256) for f in files))).encode()).hexdigest()[:32]
