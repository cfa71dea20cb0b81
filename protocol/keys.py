"""CURVE keys: who may connect, and to whom.  Files in one folder per box, text, made by `hsprod keygen` and the like.

    secret.key      this box's secret key, mode 0600
    allowed         producer: one trainer's public key a line, anything after it is a comment; re-read when it changes: a key that
                    is taken out of it loses its link within a second
    producer.key    trainer: the producer's public key

Encryption and authentication are libzmq's; here is only which keys, and the answer to its question (ZAP, RFC 27) whether
a key is allowed.  Which name in Hello a key may use stands in subscribers.py."""
from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import zmq
from zmq.utils import z85

from common.errors import UserError
from common.files import write_whole

SECRET, ALLOWED, PRODUCER = "secret.key", "allowed", "producer.key"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")          # the z85 alphabet


def generate(folder: Path) -> str:
    """Make this box's key pair; returns the public key (z85, 40 characters).  UserError where there is one already."""
    folder.mkdir(parents=True, exist_ok=True)
    public, secret = zmq.curve_keypair()
    try:
        fd = os.open(folder / SECRET, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{folder / SECRET} exists; remove it first if you mean to replace it") from None
    with os.fdopen(fd, "wb") as file:
        file.write(secret + b"\n")
        file.flush()
        os.fsync(file.fileno())
    return public.decode()


def public_key(folder: Path) -> str:
    return zmq.curve_public(_secret(folder)).decode()


def allow(folder: Path, key: str, comment: str = "") -> bool:
    """Let the trainer with this public key connect; a running producer sees it at once.  False where it was there."""
    if check(key) in _allowed(folder):
        return False
    path = folder / ALLOWED
    old = _read(path) if path.exists() else ""
    write_whole(path, (old + ("\n" if old and not old.endswith("\n") else "") + f"{key} {' '.join(comment.split())}".rstrip() + "\n").encode())
    return True


def set_producer(folder: Path, key: str) -> None:
    """On the trainer: the one producer that this box trusts."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / PRODUCER, (check(key) + "\n").encode())


def check(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise UserError(f"{key!r} is not a public key: 40 characters as `keygen` prints them")
    try:
        z85.decode(key)
    except Exception:                                                    # 5 characters can exceed 32 bits
        raise UserError(f"{key!r} is not a public key: 40 characters as `keygen` prints them") from None
    return key


class ProducerKeys:
    """Raises UserError where the folder has no usable secret key."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._keys = folder, None, frozenset()
        self.secret = _secret(folder)
        self.allowed()

    def allowed(self) -> frozenset[str]:
        """The list as it stands now; a missing list allows nobody.  Raises UserError, OSError where it cannot be read."""
        path = self._folder / ALLOWED
        stamp = (path.stat().st_mtime_ns, path.stat().st_size, path.stat().st_ino) if path.exists() else None
        if stamp != self._seen:
            self._keys, self._seen = _allowed(self._folder), stamp
        return self._keys

    def still_allowed(self, key: str) -> bool:
        """For a key that was let in.  While the list cannot be read (half written, a bad line) its last good form holds: nobody new is
        let in then, and nobody is put out."""
        try:
            return key in self.allowed()
        except (UserError, OSError):
            return key in self._keys


class TrainerKeys:
    """Raises UserError where a key is missing."""

    def __init__(self, folder: Path) -> None:
        self.secret = _secret(folder)
        self.public = zmq.curve_public(self.secret)
        try:
            self.producer = check(_read(folder / PRODUCER).strip()).encode()
        except FileNotFoundError:
            raise UserError(f"{folder / PRODUCER} is missing: it holds the producer's public key, as `hsprod keygen` printed it") from None


def zap_reply(request: list[bytes], allowed: frozenset[str]) -> tuple[list[bytes], str | None]:
    """Answer to libzmq's question about one new connection -> (frames, the key refused or None)."""
    version, request_id, *_ = (*request, b"", b"")
    key = None
    if len(request) == 7 and version == b"1.0" and request[5] == b"CURVE" and len(request[6]) == 32:
        key = z85.encode(request[6]).decode()
    if key in allowed:
        return [b"1.0", request_id, b"200", b"", key.encode(), b""], None
    return [b"1.0", request_id, b"400", b"key not allowed", b"", b""], key or "(none)"


def _secret(folder: Path) -> bytes:
    path = folder / SECRET
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        raise UserError(f"{path} is missing: make a key with keygen") from None
    if mode & 0o077:
        raise UserError(f"{path} can be read by others (mode {mode:o}): chmod 600 {shlex.quote(str(path))}, or make a new key")
    try:
        return check(_read(path).strip()).encode()
    except UserError:                                                    # says what it read, which here is nobody's to see
        raise UserError(f"{path} holds no secret key: remove it and make a new one with keygen") from None


def _allowed(folder: Path) -> frozenset[str]:
    path = folder / ALLOWED
    lines = _read(path).splitlines() if path.exists() else []
    return frozenset(check(line.split()[0]) for line in lines if line.strip() and not line.startswith("# "))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is no text in UTF-8: write it anew, or make a new key") from None
