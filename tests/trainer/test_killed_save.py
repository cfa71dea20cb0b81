"""Pitfall C2: a kill at each stage of a checkpoint's write, then a resume: the same run, to the bit, and nothing half is left.

What kill -9 leaves is what the file system shows at that moment, so the run's folder is copied at every touch of the disk while one step's
checkpoint and state are written, and each copy is gone on with.  (tests/daemons kills real processes, tests/chaos hundreds of times.)"""
import os
import shutil
import sys
from pathlib import Path

import safetensors.torch

import trainer.run
from common.drafter.checkpoint import checkpoint_hash
from tests.trainer.small import captures, loop

STEPS, EVERY, DIES = 3, 1, 2
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
SAMPLES = captures(6)


def train(folder: Path):
    return loop(folder, steps=STEPS, samples=SAMPLES, plan={"eval_every": EVERY})


class Touches:
    """Copies the folder before every change of it and every fsync, while `on`; a file of tensors is copied half written, too."""

    def __init__(self, folder: Path, copies: Path, monkeypatch) -> None:
        self._folder, self._copies, self.on, self.names = folder, copies, False, []
        sys.addaudithook(self._heard)                            # for the process's life; deaf once `on` is false
        fsync, save = os.fsync, safetensors.torch.save_file
        monkeypatch.setattr(os, "fsync", lambda fd: (self._touch("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))[1])
        for place in (safetensors.torch, trainer.run):
            monkeypatch.setattr(place, "save_file", lambda tensors, path, **words: (save(tensors, path, **words), self._half(Path(path)))[0])

    def _heard(self, event: str, words: tuple) -> None:
        if not self.on or not words or not isinstance(words[0], (str, Path)) or not str(words[0]).startswith(str(self._folder)):
            return                                               # rmtree's steps name no folder; that it begins is heard
        if event in CHANGES or event == "open" and words[2] & os.O_ACCMODE != os.O_RDONLY:
            self._touch(f"{event} {Path(words[0]).name}")

    def _half(self, path: Path) -> None:
        if self.on:
            self.on, data = False, path.read_bytes()
            path.write_bytes(data[:len(data) // 2])
            self.on = True
            self._touch(f"half of {path.name}")
            self.on = False
            path.write_bytes(data)
            self.on = True

    def _touch(self, name: str) -> None:
        if self.on:
            self.on = False
            shutil.copytree(self._folder, self._copies / str(len(self.names)))
            self.on = True
            self.names.append(name)


def test_a_kill_at_each_touch_of_the_disk_and_then_a_resume(tmp_path, monkeypatch):
    calm = train(tmp_path / "run")
    touches = Touches(tmp_path / "run", tmp_path / "killed", monkeypatch)

    def tick() -> str:
        touches.on = calm.run.step == DIES - 1
        return ""
    calm.tick = tick
    calm.go()
    touches.on = False
    monkeypatch.undo()
    for name in ("half of model.safetensors", "half of state.safetensors", "open record.json", "fsync state.safetensors", "os.rename resume",
                 "os.rename .resume.tmp", f"os.rename .step-{DIES:08d}.tmp", "fsync checkpoints"):
        assert name in touches.names, (name, touches.names)
    expected = [checkpoint_hash(folder) for folder in calm.run.checkpoints()]
    assert len(expected) == STEPS // EVERY
    went_on = []
    for number, touch in enumerate(touches.names):
        again = train(tmp_path / "killed" / str(number))
        went_on.append(again.run.step)
        again.go()
        assert [checkpoint_hash(folder) for folder in again.run.checkpoints()] == expected, (number, touch)
        left = [path.name for path in (tmp_path / "killed" / str(number)).rglob(".*")]
        assert not left, (number, touch, left)
    assert went_on == sorted(went_on) and set(went_on) == {DIES - EVERY, DIES}, "one moment from which on the new state stands"
