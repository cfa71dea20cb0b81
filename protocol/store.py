"""Samples on disk, one file each; the producer's box and the trainer's use this same class.

A file appears by rename after fsync, so it is whole or absent; what can still go wrong (a bit flips, somebody cuts it) is found
by the codec's checksums when it is read, or by the disk.  One process writes, others follow.  Sequence numbers have no holes: each number in
first..next-1 is a sample or was found corrupt and put aside, and then says so when it is asked for.
Left out: two-level folders (one serves well below a million files; at a megabyte or more a sample the disk ends first), and
any choice of what to drop (the caller's).
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from common import jsons
from common.contract import ExtractionContract, differences
from common.errors import CorruptError, HsdraftError, PeerError, UserError
from common.files import fsync_dir, no_room, write_whole
from protocol import codec

META, LOCK = "meta.json", "lock"
NAME = re.compile(r"([0-9]{12})\.hs(\.corrupt)?")
log = logging.getLogger("store")


class DiskFull(HsdraftError, OSError):
    """No space.  Nothing of the sample is left behind; the same append may be tried again."""


class StoreLocked(UserError):
    """Another process writes this store; open it readonly to follow."""


class SampleStore:
    """The samples of one stream in one folder; sequence numbers first <= seq < next.

    readonly=False  the one writer: takes the lock (StoreLocked), clears temporary files, checks the newest sample and, while that is
                    corrupt, puts it aside, so that its number comes again
    readonly=True   a follower: no lock, changes nothing; refresh() finds what the writer added or dropped
    contract        ExtractionContract.to_dict().  Begins a stream of its own where the folder is new (the producer); where it
                    holds a stream of another contract, UserError names the fields that differ.  Without it a new folder stays
                    empty, stream == "", until begin() (a trainer, which learns both from the Welcome).

    One thread may read while another one appends and drops.
    Counters for people: duplicates (appends ignored) and corrupt (samples put aside) since opening.
    """

    def __init__(self, folder: Path, *, contract: dict | None = None, readonly: bool = False) -> None:
        self.folder, self.readonly = Path(folder), readonly
        self.duplicates = self.corrupt = 0
        self.stream, self.contract, self.contract_hash = "", None, ""
        self.first = self.next = 0
        self._sizes: dict[int, int] = {}                            # seq -> bytes
        self._used, self._counting = 0, threading.Lock()            # their sum, kept, as it is asked for at every sample of a long stream
        self._lock = -1
        if not readonly:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.folder)
        try:
            if not readonly:
                self._clean()
            self.refresh()
            if not readonly and self._sizes:
                self._check_newest()
            if contract is not None and self.contract is not None:
                unlike = differences(ExtractionContract.from_dict(self.contract), ExtractionContract.from_dict(contract))
                if unlike:
                    raise UserError(f"{self.folder} holds samples of another extraction contract: {'; '.join(unlike)}")
            elif contract is not None and not readonly:
                self.begin(uuid.uuid4().hex, contract, 0)
        except BaseException:
            self.close()
            raise

    def begin(self, stream: str, contract: dict, first: int) -> None:
        """Give an empty folder its stream, durably; `first` is the sequence number to be appended first."""
        self._writer()
        if self.stream:
            raise UserError(f"{self.folder} already holds stream {self.stream}")
        ExtractionContract.from_dict(contract)
        self._write_meta(stream, contract, first)
        self.refresh()

    @property
    def bytes_used(self) -> int:
        return self._used

    def bytes_between(self, first: int, end: int) -> int:
        """Of the samples first..end-1 that are here."""
        return sum(size for seq, size in list(self._sizes.items()) if first <= seq < end)     # list(): the other thread may write

    def path(self, seq: int) -> Path:
        return self.folder / f"{seq:012d}.hs"

    def append(self, seq: int, data: bytes | memoryview) -> bool:
        """Durable on return.  False, and counted, where seq is already here.

        Raises PeerError naming the range where seq leaves a gap; CorruptError where the header is not of this stream, number
        and contract; DiskFull.  The states' checksums are not looked at: the bytes are stored as they came.
        """
        self._writer()
        if seq < self.next:
            self.duplicates += 1
            return False
        if seq > self.next:
            raise PeerError(f"samples {self.next} to {seq - 1} are missing: {seq} came after {self.next - 1}")
        self._belongs(seq, codec.read_header(data))
        self._write(self.path(seq).name, data)
        self._count(seq, len(data))
        self.next = seq + 1
        return True

    def read(self, seq: int) -> bytes:
        """One sample's bytes, every checksum verified.  A corrupt one is put aside, counted, and named in a CorruptError, now
        and whenever it is asked for again; KeyError outside first..next-1."""
        return self._read(seq, lambda data: (data, codec.verify(data)))

    def newest(self) -> str | None:
        """sha256 (hex) of the bytes of sample next - 1; None where it is not here, or damaged: then nobody can tell whose sample it was.

        A damaged one is left for who reads it to find."""
        try:
            with self._reading(self.next - 1):
                data = self.path(self.next - 1).read_bytes()
            codec.verify(data)
        except (KeyError, CorruptError):
            return None
        return hashlib.sha256(data).hexdigest()

    def restore(self, seq: int, data: bytes) -> None:
        """Put a sample that was found corrupt here back, durably.  A follower may, too: they are the bytes that were here.

        Raises CorruptError where data is not that sample, whole; KeyError outside first..next-1; DiskFull, OSError."""
        if not self.first <= seq < self.next:
            raise KeyError(f"sample {seq} is not among {self.first} to {self.next - 1} of {self.folder}")
        self._belongs(seq, codec.verify(data))
        self._write(self.path(seq).name, data)
        self._count(seq, len(data))
        self.path(seq).with_suffix(".hs.corrupt").unlink(missing_ok=True)

    def sample(self, seq: int) -> codec.Sample:
        """One sample decoded; as read() otherwise, and cheaper than decoding what read() gave, which verifies twice."""
        return self._read(seq, lambda data: (codec.decode(data),) * 2)

    def text(self, seq: int) -> tuple[np.ndarray, np.ndarray]:
        """One sample's ids (T,) int32 and loss_mask (T,) bool alone: a few kilobytes of its file are read, whatever its size.

        Raises as read() does, but puts nothing aside: the states were not looked at."""
        self._here(seq)
        try:
            with self._reading(seq), self.path(seq).open("rb") as file:
                return codec.read_text(file, os.fstat(file.fileno()).st_size)
        except CorruptError as error:
            raise CorruptError(f"{self.path(seq)}: {error}") from None

    def _here(self, seq: int) -> None:
        if seq not in self._sizes:
            if self.first <= seq < self.next:
                raise CorruptError(f"{self.path(seq)}.corrupt: sample {seq} was put aside")
            raise KeyError(f"sample {seq} is not among {self.first} to {self.next - 1} of {self.folder}")

    def _read(self, seq: int, use: Callable) -> object:
        self._here(seq)
        try:
            with self._reading(seq):
                data = self.path(seq).read_bytes()
            result, says = use(data)
            self._belongs(seq, says)
        except CorruptError as error:
            self._put_aside(seq)
            raise CorruptError(f"{self.path(seq)}: {error}") from None
        return result

    @contextlib.contextmanager
    def _reading(self, seq: int) -> Iterator[None]:
        """What a file's reading can raise: a sector that the disk cannot give any more is a damaged sample, as a flipped bit is."""
        try:
            yield
        except FileNotFoundError:                                   # dropped by the writer since this follower looked
            raise KeyError(f"sample {seq} is gone from {self.folder}") from None
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise CorruptError(f"the disk cannot read it: {error.strerror}") from None

    def _belongs(self, seq: int, says: codec.Header | codec.Sample) -> None:
        for name, ours, theirs in (("stream", self.stream, says.stream), ("sample", seq, says.seq),
                                   ("contract", self.contract_hash, says.contract)):
            if ours != theirs:
                raise CorruptError(f"it says {name} {theirs}, expected {ours}")

    def _put_aside(self, seq: int) -> None:
        """Under a name that no one takes for a sample's.  A follower may not rename: it only stops reading it."""
        self.corrupt += 1
        self._forget(seq)
        if not self.readonly:
            self.path(seq).rename(self.path(seq).with_suffix(".hs.corrupt"))
            fsync_dir(self.folder)

    def drop_below(self, seq: int) -> int:
        """Free the samples before seq, which everybody has; returns the bytes freed.  first never goes back, not by a kill."""
        self._writer()
        seq = min(seq, self.next)
        if seq <= self.first:
            return 0
        self._write_meta(self.stream, self.contract, seq)           # before the files go: a kill in between leaves only files
        self.first = seq
        return sum(self._remove(old) for old in sorted(self._sizes) if old < seq)

    def _remove(self, seq: int) -> int:
        self.path(seq).unlink()
        return self._forget(seq)

    def _count(self, seq: int, size: int) -> None:
        with self._counting:
            self._used += size - self._sizes.get(seq, 0)
            self._sizes[seq] = size

    def _forget(self, seq: int) -> int:
        with self._counting:
            size = self._sizes.pop(seq, 0)
            self._used -= size
            return size

    def refresh(self) -> list[int]:
        """Look into the folder again; returns the new sequence numbers, ascending.

        Only what follows without a hole is taken: a listing made while the writer works can miss a file and have the next.
        """
        meta = _read_meta(self.folder)
        if meta is None:
            return []
        self.stream, self.contract, self.first = meta
        self.contract_hash = ExtractionContract.from_dict(self.contract).hash
        self.next = max(self.next, self.first)
        for seq in [s for s in self._sizes if s < self.first]:
            self._forget(seq)
        found = _listing(self.folder)
        new, seq = [], self.next
        while seq in found:
            if found[seq] is not None:
                self._count(seq, found[seq])
                new.append(seq)
            seq += 1
        self.next = max([self.next, *(s + 1 for s in new)])         # one put aside at the very end may come again
        return new

    def _clean(self) -> None:
        """What a kill left: half-written files, and files of a drop_below that did not get through."""
        for path in self.folder.glob(".*.tmp"):
            path.unlink()
        if meta := _read_meta(self.folder):
            for seq in _listing(self.folder):
                if seq < meta[2]:
                    self.path(seq).unlink(missing_ok=True)

    def _check_newest(self) -> None:
        """Back to the newest that is whole."""
        while self._sizes:
            newest = max(self._sizes)
            try:
                self.read(newest)
                return
            except CorruptError as error:                           # put aside and counted; its number is free again
                log.warning("%s; it is put aside, and sample %d comes again", error, newest)
                self.next = max(self._sizes, default=self.first - 1) + 1        # as refresh() counts, once it is opened again

    def _write_meta(self, stream: str, contract: dict, first: int) -> None:
        self._write(META, json.dumps({"stream": stream, "contract": contract, "first": first}, indent=1).encode())

    def _write(self, name: str, data: bytes | memoryview) -> None:
        try:
            write_whole(self.folder / name, [data])
        except OSError as error:
            if no_room(error):
                raise DiskFull(f"{self.folder}: no space for {name} ({len(data)} bytes)") from error
            raise

    def _writer(self) -> None:
        if self.readonly:
            raise UserError(f"{self.folder} is open for reading only")

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)                                    # the lock goes with the descriptor
            self._lock = -1

    def __enter__(self) -> SampleStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def should_pause(used: int, budget: int, paused: bool, *, low_water: float = 0.9) -> bool:
    """Whether writing rests: from `budget` bytes on, until fewer than low_water of the budget are used."""
    return used >= budget * low_water if paused else used >= budget


def _take_lock(folder: Path) -> int:
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise StoreLocked(f"{folder} is written by process {holder}: stop it, or use another folder") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _read_meta(folder: Path) -> tuple[str, dict, int] | None:
    """Stream, contract, first sequence number; None where the folder has no stream yet."""
    try:
        meta = jsons.loads((folder / META).read_text("utf-8"))
        stream, contract, first = meta["stream"], meta["contract"], meta["first"]
        if type(stream) is not str or not stream or type(first) is not int or first < 0:
            raise ValueError("stream or first is not what it should be")
        ExtractionContract.from_dict(contract)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, CorruptError) as error:
        raise UserError(f"{folder / META} is damaged ({error}): restore it, or move the folder away") from None
    return stream, contract, first


def _listing(folder: Path) -> dict[int, int | None]:
    """seq -> bytes; None for a number of which only a corrupt file is there."""
    found: dict[int, int | None] = {}
    for entry in os.scandir(folder):
        if match := NAME.fullmatch(entry.name):
            try:
                size = entry.stat().st_size
            except FileNotFoundError:                               # dropped between listing and stat
                continue
            if not match[2]:
                found[int(match[1])] = size
            else:
                found.setdefault(int(match[1]), None)
    return found
