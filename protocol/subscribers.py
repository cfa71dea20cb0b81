"""Which trainers follow the stream, and what each has durably: the producer keeps a sample until all of them have it.

A small JSON beside the store, so that a restart forgets nobody.  Saved at once when a trainer joins or is forgotten, at most
once a second when one acknowledges: an older number than the truth only keeps samples longer.  Nothing but `forget` lets go of a
trainer: one that never comes back is named, with when it was last heard of (`seen`, wall seconds; for people alone).

A name belongs to the key that first joined under it, as long as that key is allowed: else one trainer could acknowledge what
another lacks.  Whoever replaces a box's keys takes the old one out of the list, and the name is free for the new one."""
from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from common import jsons
from common.errors import UserError, one_line
from common.files import write_whole
from protocol.frames import MAX_SEQ, integer, text

log = logging.getLogger("link")
SEQ_OR_NONE = integer(-1, MAX_SEQ)
KEY = text(40)
FORGET = "forget"            # folder beside the cursors: an empty file NAME in it asks that the trainer of that name be forgotten
EVERY = 1.0                  # seconds between saves of mere progress
MOST = 256                   # names; a home has a few


class Subscribers:
    """{name: last seq durable there, -1 for none}.  Safe from any thread; `lock` also spans what must not interleave with a join."""

    def __init__(self, path: Path, stream: str) -> None:
        """UserError where the file is not ours to read."""
        self.lock = threading.RLock()
        self._path, self._stream, self._dirty, self._saved_at = path, stream, False, 0.0
        self._acked: dict[str, int] = {}
        self._seen: dict[str, float] = {}
        self._keys: dict[str, str] = {}                      # CURVE public keys, z85; of those that joined with one
        self.failures = 0                                    # saves that failed; each is logged
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            try:
                found = jsons.loads(path.read_text("utf-8"))
                if found["stream"] == stream:
                    self._acked = {name: SEQ_OR_NONE(seq) for name, seq in found["acked"].items()}
                    self._seen = {name: _wall(at) for name, at in found.get("seen", {}).items()}
                    self._keys = {name: KEY(key) for name, key in found.get("keys", {}).items()}
                else:
                    log.warning("%s is of stream %s; this is %s: starting with no known trainer", path, one_line(found["stream"]), stream)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(f"{path} is damaged: remove it; trainers are known again once they connect") from None

    def all(self) -> dict[str, int]:
        with self.lock:
            return dict(self._acked)

    def lowest(self) -> int | None:
        with self.lock:
            return min(self._acked.values(), default=None)

    def seen(self) -> dict[str, float]:
        """Wall seconds when each was last heard of; missing where an older version wrote the file."""
        with self.lock:
            return dict(self._seen)

    @property
    def saved(self) -> bool:
        """Whether the file says what stands here."""
        return not self._dirty

    def highest(self) -> int:
        """The last sample that any trainer has; -1: none."""
        with self.lock:
            return max(self._acked.values(), default=-1)

    def key_of(self, name: str) -> str | None:
        with self.lock:
            return self._keys.get(name)

    def full(self, name: str) -> bool:
        """Whether there is no room for this name."""
        with self.lock:
            return name not in self._acked and len(self._acked) >= MOST

    def join(self, name: str, acked: int, now: float, key: str | None = None) -> None:
        with self.lock:
            news = self._acked.get(name) != acked or key not in (None, self._keys.get(name))
            self._acked[name], self._seen[name] = acked, time.time()
            if key is not None:
                self._keys[name] = key
            self._dirty = True
            self.save(now, force=news)

    def acknowledge(self, name: str, acked: int) -> None:
        with self.lock:
            if name in self._acked:                          # else it was forgotten meanwhile
                self._acked[name], self._seen[name] = acked, time.time()
                self._dirty = True

    def left(self, name: str) -> None:
        """Its link has ended now."""
        with self.lock:
            if name in self._acked:
                self._seen[name] = time.time()
                self._dirty = True

    def forget(self, name: str, now: float) -> bool:
        with self.lock:
            if self._acked.pop(name, None) is None:
                return False
            self._seen.pop(name, None)
            self._keys.pop(name, None)
            self._dirty = True
            self.save(now, force=True)
            return True

    def forget_asked(self, connected: set[str], now: float) -> list[str]:
        """Do what `hsprod forget` asked for: those forgotten now.  A request goes once the cursors without that trainer are on disk."""
        done = []
        for request in sorted((self._path.parent / FORGET).glob("*")):
            if request.name in connected:
                log.warning("%s is not forgotten, as it is connected: stop it first", request.name)
            elif self.forget(request.name, now):
                done.append(request.name)
            if self.saved:
                request.unlink(missing_ok=True)
        return done

    def save(self, now: float, *, force: bool = False) -> None:
        """A failure is logged and tried again: nothing is dropped on the strength of a number that is not here."""
        with self.lock:
            if not self._dirty or (not force and now - self._saved_at < EVERY):
                return
            self._saved_at = now
            try:
                state = {"stream": self._stream, "acked": self._acked, "seen": self._seen, "keys": self._keys}
                write_whole(self._path, json.dumps(state, indent=1).encode())
                self._dirty = False
            except OSError as error:
                self.failures += 1
                log.error("%s: %s; trying again", self._path, error)


def _wall(at: object) -> float:
    if type(at) not in (int, float) or not 0 <= at < 1e12:
        raise ValueError("no time")
    return float(at)
