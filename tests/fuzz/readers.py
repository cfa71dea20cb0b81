"""One small function for each reader of a peer's or a disk's bytes: bytes -> whether they were taken.

It raises only on a defect: the reader's own named error is caught here, anything else is not.  Whoever calls it watches time and
memory.  What is taken must also be what it seems: written again, it reads the same."""
from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from common import status
from common.drafter import checkpoint
from common.errors import CorruptError, PeerError, UserError
from producer import forgetting
from producer import seen as producer_seen
from protocol import codec, keys as key_files
from protocol import frames as wire
from protocol.store import SampleStore
from protocol.subscribers import Subscribers
from tests.fuzz.shapes import split
from trainer import imported
from trainer import seen as trainer_seen

MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty one, in memory where the system has such a place."""
    with tempfile.TemporaryDirectory(prefix="hsdraft-fuzz-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as made:
        yield Path(made)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The links' log lines are made, and go nowhere: one that cannot be made, has no bound or is several is a defect too."""
    log = logging.getLogger("link")
    handler, before = _Formatted(), (log.level, log.propagate)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


class _Formatted(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        assert len(line) < 20_000, "a log line without a bound"
        assert line.isprintable(), f"a log line that forges others: {line!r}"


def frames(data: bytes) -> bool:
    """protocol/frames.py: what comes out of a socket as one message.  Parts: header, buffer."""
    try:
        message = wire.decode(split(data))
    except PeerError:
        return False
    assert repr(wire.decode(wire.encode(message))) == repr(message)          # repr: NaN in a status is unequal to itself
    return True


def sample(data: bytes) -> bool:
    """protocol/codec.py: one sample, by all four ways to read it."""
    try:
        codec.read_text(io.BytesIO(data), len(data))
    except CorruptError:
        pass
    try:
        header = codec.verify(data)
    except CorruptError:
        with contextlib.suppress(CorruptError):
            codec.decode(data)
            raise AssertionError("decode takes what verify refuses")
        return False
    assert header == codec.read_header(data)
    found = codec.decode(data)
    ids, mask = codec.read_text(io.BytesIO(data), len(data))
    assert np.array_equal(ids, found.capture.ids) and np.array_equal(mask, found.capture.loss_mask)
    again = codec.decode(codec.encode(found.capture, stream=found.stream, seq=found.seq, contract=found.contract))
    assert np.array_equal(again.capture.taps, found.capture.taps) and np.array_equal(again.capture.final, found.capture.final)
    return True


def store(data: bytes) -> bool:
    """protocol/store.py: a folder somebody else wrote into.  Parts: meta.json, samples 0, 1, .. and one to append."""
    meta, *samples = split(data) or [b""]
    with folder() as path:
        (path / "meta.json").write_bytes(meta)
        for seq, sample_ in enumerate(samples[:-1]):
            (path / f"{seq:012d}.hs").write_bytes(sample_)
        try:
            opened = SampleStore(path)
        except UserError:
            return False
        with opened:
            good = all([_read(opened, seq) for seq in range(opened.first, min(opened.next, opened.first + 8))])
            if samples and opened.stream:
                with contextlib.suppress(CorruptError):
                    opened.append(opened.next, samples[-1])
                    good &= _read(opened, opened.next - 1)
            return good and opened.corrupt == 0


def _read(opened: SampleStore, seq: int) -> bool:
    for read in (opened.text, opened.read, opened.sample):
        try:
            read(seq)
        except CorruptError:
            return False
    return True


def cursors(data: bytes) -> bool:
    """protocol/subscribers.py: who has what, beside the store."""
    with folder() as path, quiet():
        (path / "subscribers.json").write_bytes(data)
        with contextlib.suppress(UserError):
            assert all(type(seq) is int for seq in forgetting.known(path / "subscribers.json").values())
        try:
            found = Subscribers(path / "subscribers.json", "s1")
        except UserError:
            return False
        assert all(-1 <= seq <= wire.MAX_SEQ for seq in found.all().values())
        found.join("box", 5, 0.0)
        assert Subscribers(path / "subscribers.json", "s1").all() == found.all()
        return len(found.all()) > 1


def keys(data: bytes) -> bool:
    """protocol/keys.py.  Parts: secret.key, allowed, producer.key."""
    found = (split(data) + [b""] * 3)[:3]
    with folder() as path:
        for name, text in zip((key_files.SECRET, key_files.ALLOWED, key_files.PRODUCER), found):
            (path / name).write_bytes(text)
            (path / name).chmod(0o600)
        taken = True
        for read in (key_files.ProducerKeys, key_files.TrainerKeys):
            try:
                read(path)
            except UserError:
                taken = False
        return taken


def state(data: bytes) -> bool:
    """common/status.py and what both daemons show of it: status.json, which is not durable and so may be anything after a power cut."""
    taken = True
    with folder() as path:
        (path / "status.json").write_bytes(data)
        assert isinstance(forgetting.said(path / "status.json"), dict)
        for command, rows in (("hsprod serve", producer_seen.rows), ("hstrain run", trainer_seen.rows)):
            try:
                status.screen([path / "status.json"], command, rows, 1000.0)
            except UserError:
                taken = False
    return taken


def tensors(data: bytes) -> bool:
    """common/drafter/checkpoint.py: the header of a safetensors file, and the tensors that it announces."""
    with folder() as path:
        (path / "model.safetensors").write_bytes(data)
        try:
            header = checkpoint.read_header(path / "model.safetensors")
            found = checkpoint.read_tensors(path / "model.safetensors")
        except CorruptError:
            return False
        assert set(header) == set(found)
        return True


def drafter(data: bytes) -> bool:
    """A drafter's folder, ours, z-lab's or speculators': as the producer takes it off the wire, and as `hstrain import` does.

    Parts: config.json, record.json, model.safetensors, shortlist.safetensors (left out where it is empty)."""
    config, record, weights, shortlist = (split(data) + [b""] * 4)[:4]
    taken = False
    with folder() as path:
        names = (checkpoint.CONFIG, checkpoint.RECORD, checkpoint.WEIGHTS, checkpoint.SHORTLIST)
        for name, content in zip(names, (config, record, weights, shortlist)):
            if content or name != checkpoint.SHORTLIST:
                (path / name).write_bytes(content)
        with contextlib.suppress(CorruptError):
            checkpoint.load(path, "cpu", checkpoint.torch.float32)
            taken = True
        with contextlib.suppress(UserError):
            _kept(imported.read(path), path / "again")
            taken = True
    return taken


def gguf(data: bytes) -> bool:
    """trainer/formats/gguf.py: a drafter in llama.cpp's file."""
    with folder() as path:
        (path / "d.gguf").write_bytes(data)
        try:
            found = imported.read(path / "d.gguf")
        except UserError:
            return False
        _kept(found, path / "again")
        return True


def _kept(found: imported.Found, path: Path) -> None:
    """What was imported is a checkpoint of ours."""
    checkpoint.save(path, found.drafter, found.record, found.drafter.fc.weight.dtype)
    checkpoint.load(path, "cpu", checkpoint.torch.float32)
