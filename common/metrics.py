"""Rows of measured values, one JSON object a line, appended and flushed: what report and status read back.

TensorBoard gets the same rows where it is installed; nothing else here knows it."""
from __future__ import annotations

import json
import logging
from pathlib import Path

from common.files import no_room

log = logging.getLogger("metrics")


class Metrics:
    """Append-only JSONL.  A row is {"kind": ..., name: value, ...}; units are part of the name (seconds, tokens).

    On a full disk rows wait in memory, and go with the next one that finds room."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        cut_torn_line(path)
        self._file, self._waiting, self._path = path.open("ab", buffering=0), b"", path
        try:
            from torch.utils.tensorboard import SummaryWriter
            self._board = SummaryWriter(str(path.parent / "tensorboard"))
        except ImportError:
            self._board = None

    def write(self, kind: str, step: int, **values: object) -> None:
        self._waiting += (json.dumps({"kind": kind, "step": step} | values) + "\n").encode()
        self._write()
        if self._board:
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self._board.add_scalar(f"{kind}/{name}", value, step)

    def _write(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting):]
        except OSError as error:
            if not no_room(error):
                raise
            log.warning("%s: %s; %d rows wait for room", self._path, error.strerror, self._waiting.count(b"\n"))

    def close(self) -> None:
        """Rows that find no room now, either, are lost; how many is in the log."""
        self._write()
        if self._waiting:
            log.error("%s: closed on a full disk: %d rows are lost", self._path, self._waiting.count(b"\n"))
        self._file.close()
        if self._board:
            self._board.close()


def cut_torn_line(path: Path) -> None:
    """A kill can leave half a last line: cut it, so that the next row does not grow out of it."""
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        path.write_bytes(data[:data.rfind(b"\n") + 1])


def read(path: Path, kind: str | None = None) -> list[dict]:
    """Whole rows, in order; after a resume the later row of the same kind and step stands (the steps were redone)."""
    rows: dict[tuple, dict] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue                                             # the torn last line of a live file
            if kind in (None, row["kind"]):
                rows[row["kind"], row["step"]] = row
    return list(rows.values())
