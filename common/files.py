"""Files that are whole or absent: temporary name in the same folder, fsync, rename, fsync of the folder."""
from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from common.errors import UserError


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


def usable(folder: Path, option: str) -> None:
    """Make the folder where it is not there; UserError where it cannot be written, naming the option that chose it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(None, "it may not be written")
    except OSError as error:
        raise UserError(f"{option} {folder}: {error.strerror}; choose another folder, or mend its owner") from None


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
