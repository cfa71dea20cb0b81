"""A full disk holds a run up and loses nothing of it (pitfall D4)."""
from __future__ import annotations

import errno
import json

import pytest
from safetensors import SafetensorError

from common import files
from common.metrics import Metrics
from tests.trainer.small import captures, loop
from trainer import loop as module

FULL = OSError(errno.ENOSPC, "No space left on device")
AS_SAFETENSORS_SAYS_IT = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_full_disk_is_told_from_other_faults():
    assert files.no_room(FULL) and files.no_room(AS_SAFETENSORS_SAYS_IT) and files.no_room(OSError(errno.EDQUOT, "quota"))
    assert not files.no_room(OSError(errno.EIO, "broken")) and not files.no_room(ValueError("28"))


class Disk:
    """A file on a disk that is full now and then, once in the middle of a row."""

    def __init__(self, file, room: list[int]) -> None:
        self._file, self._room = file, room

    def write(self, data: bytes) -> int:
        room = self._room.pop(0) if self._room else len(data)
        if not room:
            raise FULL
        return self._file.write(data[:room])


def test_rows_wait_for_room_and_each_comes_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = Metrics(path)
    rows._file = Disk(rows._file, [100, 0, 7, 0, 0])
    for step in range(5):
        rows.write("step", step, loss=step / 8)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(5))
    rows._file = Disk(rows._file, [])
    rows._file.write = lambda _data: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
    with pytest.raises(OSError, match="broken"):
        rows.write("step", 5)


@pytest.mark.parametrize("error", [FULL, AS_SAFETENSORS_SAYS_IT], ids=["disk", "safetensors"])
def test_a_save_waits_for_room(tmp_path, monkeypatch, error):
    monkeypatch.setattr(module, "FULL_S", 0.0)
    tried = []
    made = loop(tmp_path / "run", steps=2, samples=captures(8))

    def write() -> None:
        tried.append(1)
        if len(tried) < 4:
            raise error
    made._written(write)
    assert len(tried) == 4
    with pytest.raises(ZeroDivisionError):
        made._written(lambda: 1 / 0)
    made.stop = True
    with pytest.raises(type(error)):
        made._written(lambda: (_ for _ in ()).throw(error))


def test_rows_that_find_no_room_to_the_end_are_counted(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    rows = Metrics(path)
    real, rows._file = rows._file, Disk(rows._file, [0, 0, 0])
    rows._file.close = real.close
    rows.write("step", 1)
    rows.write("step", 2)
    rows.close()
    assert caplog.messages[-1].endswith("2 rows are lost") and path.read_text() == ""
