"""Files that are whole or absent: temporary name in the same folder, fsync, rename, fsync of the folder.  And folders: whose they
are, whether they can be written, whether there is room."""
from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import UserError

log = logging.getLogger("disk")


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def no_room(error: Exception) -> bool:
    """Whether that is a full disk: what the system says, or safetensors, which wraps it in words."""
    return getattr(error, "errno", None) in NO_ROOM or any(f"(os error {number})" in str(error) for number in NO_ROOM)


def fsync_dir(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, parts: bytes | Iterable[bytes | memoryview]) -> None:
    """Durable once this returns.  A failure (a full disk) leaves no temporary file behind and raises."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            for part in [parts] if isinstance(parts, bytes) else parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def publish_file(temporary: Path, final: Path) -> None:
    """The same for a file that a library wrote: durable, then under its name."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(final)
    fsync_dir(final.parent)


def publish_folder(temporary: Path, final: Path) -> None:
    """Make a finished temporary folder appear under its name durably; an older one is first put aside, then removed.

    A kill in between leaves the older one as `.NAME.old`, never half of either."""
    for path in temporary.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    fsync_dir(temporary)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    temporary.rename(final)
    fsync_dir(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill; at the end it is durable and stands as `folder`, in place of one of that name.  A failure leaves neither
    it nor a change."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def usable(folder: Path, option: str) -> None:
    """Make the folder where it is not there; UserError where it cannot be written, naming the option that chose it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(None, "it may not be written")
    except OSError as error:
        raise UserError(f"{option} {folder}: {error.strerror}; choose another folder, or mend its owner") from None


def fits(free: int, used: int, budget: int) -> int | None:
    """None where a budget, of which `used` is there already, has room on a disk with `free` left; else the budget that would.  Bytes."""
    return None if free >= budget - used else int((used + free) * 0.9)


def check_room(folder: Path, used: int, budget: int) -> None:
    """Warn before anything is written where the disk cannot hold the budget: the rest is others' files, whom a full disk hurts, too."""
    free = shutil.disk_usage(folder).free
    if (better := fits(free, used, budget)) is not None:
        log.warning("--disk-budget %.1f: %.1f GB of it are still to be filled, and %s has %.1f GB free: it will wait on a full disk; "
                    "--disk-budget %.1f leaves a tenth free", budget / 1e9, (budget - used) / 1e9, folder, free / 1e9, better / 1e9)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def held(folder: Path, option: str, patience: float = 0.0) -> Iterator[None]:
    """Keep other processes from working in the folder, which is made where it is not there; the lock ends with the process.

    UserError where another one is still at work after `patience` seconds, naming it, or as usable()."""
    usable(folder, option)
    fd, end = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), time.monotonic() + patience
    try:
        while not _locked(fd):
            if time.monotonic() >= end:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                raise UserError(f"{option} {folder}: process {holder} is at work here; stop it first, or give another folder")
            time.sleep(0.1)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
