"""Pitfalls D3 and D4: whatever the disk or a kill does, a sample is whole or absent, and nothing goes missing unsaid."""
import dataclasses
import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import CorruptError, PeerError, UserError
from protocol import codec
from protocol.store import DiskFull, SampleStore, StoreLocked, should_pause
from tests.protocol.samples import CONTRACT, STREAM, capture, sample

SAMPLES = [sample(seq) for seq in range(6)]


@pytest.fixture
def store(tmp_path):
    with SampleStore(tmp_path) as store:
        store.begin(STREAM, CONTRACT.to_dict(), 0)
        yield store


def filled(store: SampleStore, count: int) -> SampleStore:
    assert all([store.append(seq, SAMPLES[seq]) for seq in range(count)])
    return store


def names(store: SampleStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir() if path.name not in ("lock", "meta.json"))


def sample_of(store: SampleStore, seq: int) -> bytes:
    return codec.encode(capture(tokens=1 + seq % 5, seed=seq), stream=store.stream, seq=seq, contract=CONTRACT.hash)


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_what_was_appended_is_read_and_survives_reopening(store):
    filled(store, 3)
    assert (store.first, store.next, store.bytes_used) == (0, 3, sum(map(len, SAMPLES[:3])))
    assert names(store) == ["000000000000.hs", "000000000001.hs", "000000000002.hs"]
    store.close()
    with SampleStore(store.folder, contract=CONTRACT.to_dict()) as again:
        assert (again.stream, again.first, again.next, again.bytes_used) == (STREAM, 0, 3, store.bytes_used)
        assert [again.read(seq) for seq in range(3)] == SAMPLES[:3]
        assert again.sample(2).seq == 2 and (again.sample(2).capture.final == capture(seed=2).final).all()


def test_a_damaged_newest_sample_is_nobodys(store):
    """Its digest would say that this is another stream, and the link would be refused for good instead of mending it."""
    assert store.newest() is None
    filled(store, 2)
    assert store.newest() == hashlib.sha256(SAMPLES[1]).hexdigest()
    flip(store.path(1))
    assert store.newest() is None and store.path(1).exists() and store.corrupt == 0


def test_a_text_is_read_without_the_states(store):
    """What it gives is the sample's own; a flip in the states passes unseen, one in the text does not, and nothing is put aside."""
    filled(store, 3)
    want = capture(seed=1)
    whole = store.path(1).read_bytes()
    flip(store.path(1))
    with pytest.raises(CorruptError):
        codec.verify(store.path(1).read_bytes())
    ids, mask = store.text(1)
    assert (ids == want.ids).all() and (mask == want.loss_mask).all() and (ids.dtype, mask.dtype) == (want.ids.dtype, want.loss_mask.dtype)
    header = codec.read_header(whole)
    spoilt = bytearray(whole)
    spoilt[len(whole) - header.body_bytes - header.side_bytes // 2] ^= 4
    for data in (bytes(spoilt), whole[:-1], whole[:20], b""):
        store.path(1).write_bytes(data)
        with pytest.raises(CorruptError, match="000000000001.hs: sample"):
            store.text(1)
    assert store.corrupt == 0 and store.path(1).exists()
    with pytest.raises(KeyError, match="3"):
        store.text(3)


def test_a_memoryview_is_stored_as_its_bytes(store):
    store.append(0, memoryview(SAMPLES[0]))
    assert store.path(0).read_bytes() == SAMPLES[0]


def test_a_producers_store_begins_its_own_stream(tmp_path):
    with SampleStore(tmp_path / "a" / "b", contract=CONTRACT.to_dict()) as one, SampleStore(tmp_path / "c", contract=CONTRACT.to_dict()) as two:
        assert len(one.stream) == 32 and one.stream != two.stream and one.contract_hash == CONTRACT.hash


def test_a_trainers_store_waits_for_its_stream(tmp_path):
    with SampleStore(tmp_path) as store:
        assert (store.stream, store.contract, store.first, store.next) == ("", None, 0, 0)
        follower = SampleStore(tmp_path, readonly=True)
        store.begin(STREAM, CONTRACT.to_dict(), 4)
        assert store.append(4, SAMPLES[4]) and (store.first, store.next) == (4, 5)
        assert follower.refresh() == [4] and follower.stream == STREAM
        with pytest.raises(UserError, match="already holds"):
            store.begin("other", CONTRACT.to_dict(), 0)


def test_another_contract_is_refused_by_the_fields_that_differ(store):
    store.close()
    other = dataclasses.replace(CONTRACT, taps=(1, 4), weights="c" * 64).to_dict()
    with pytest.raises(UserError, match=r"weights: .*; taps: \[1, 3\] -> \[1, 4\]"):
        SampleStore(store.folder, contract=other)
    SampleStore(store.folder).close()                               # and the lock was given back


def test_damaged_meta_is_one_line_for_a_person(store):
    store.close()
    (store.folder / "meta.json").write_text("{")
    with pytest.raises(UserError, match="meta.json is damaged"):
        SampleStore(store.folder)


def test_duplicates_are_counted_and_ignored(store):
    filled(store, 2)
    assert not store.append(0, SAMPLES[5]) and not store.append(1, SAMPLES[1])
    assert store.duplicates == 2 and store.read(0) == SAMPLES[0]


def test_a_gap_is_refused_by_its_range(store):
    filled(store, 1)
    with pytest.raises(PeerError, match="samples 1 to 3 are missing"):
        store.append(4, SAMPLES[4])
    assert store.next == 1 and names(store) == ["000000000000.hs"]
    assert store.append(1, SAMPLES[1])


def test_a_sample_in_anothers_place_is_refused(store):
    other_stream = codec.encode(capture(), stream="fedcba9876543210", seq=0, contract=CONTRACT.hash)
    other_contract = codec.encode(capture(), stream=STREAM, seq=0, contract="0" * 64)
    for data, says in ((SAMPLES[1], "sample 1, expected 0"), (other_stream, "stream fedc"), (other_contract, "contract 0000"),
                       (SAMPLES[0][:-1], "bytes, the header says"), (b"", "less than a prefix")):
        with pytest.raises(CorruptError, match=says):
            store.append(0, data)
    assert names(store) == [] and store.next == 0


@pytest.mark.parametrize("spoil", [flip, lambda path: path.write_bytes(path.read_bytes()[:-7]), lambda path: path.write_bytes(b""),
                                   lambda path: path.write_bytes(SAMPLES[0])])
@pytest.mark.parametrize("read", [SampleStore.read, SampleStore.sample])
def test_a_spoilt_file_is_put_aside_counted_and_named(store, spoil, read):
    filled(store, 4)
    spoil(store.path(2))
    for _ in range(2):                                              # the second time it is not there any more
        with pytest.raises(CorruptError, match="000000000002.hs"):
            read(store, 2)
    assert store.corrupt == 1 and "000000000002.hs.corrupt" in names(store) and "000000000002.hs" not in names(store)
    assert (store.first, store.next) == (0, 4) and store.read(3) == SAMPLES[3]
    store.close()
    with SampleStore(store.folder) as again:                        # the hole is remembered, and what follows it is there
        assert again.next == 4 and again.read(3) == SAMPLES[3]
        with pytest.raises(CorruptError, match="put aside"):
            again.read(2)


def test_a_spoilt_newest_file_is_found_at_opening_and_its_number_comes_again(store):
    filled(store, 3).close()
    flip(store.path(2))
    with SampleStore(store.folder) as again:
        assert again.corrupt == 1 and again.next == 2
    with SampleStore(store.folder) as again:                        # still, after another restart
        assert again.next == 2 and again.append(2, SAMPLES[2]) and again.append(3, SAMPLES[3])
    with SampleStore(store.folder) as again:
        assert again.next == 4 and again.read(2) == SAMPLES[2]


def test_all_that_is_spoilt_at_the_end_comes_again_and_is_said(store, caplog):
    """A power cut can tear more than one.  What was put aside before them, in the middle then, is at the end now."""
    filled(store, 6)
    flip(store.path(3))
    with pytest.raises(CorruptError):
        store.read(3)
    store.close()
    for seq in (4, 5):
        flip(store.path(seq))
    with SampleStore(store.folder) as again:
        assert again.next == 3 and again.corrupt == 2
        assert "000000000005.hs" in caplog.text and "it is put aside, and sample 4 comes again" in caplog.text
        assert all(again.append(seq, SAMPLES[seq]) for seq in (3, 4, 5))
    for seq in range(6):
        flip(store.path(seq))
    with SampleStore(store.folder) as again:
        assert again.next == 0 and again.append(0, SAMPLES[0])


def test_numbers_outside_the_store_are_a_bug_not_corruption(store):
    filled(store, 1)
    for seq in (1, 7):
        with pytest.raises(KeyError):
            store.read(seq)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


class FullAfterHalf:
    """A file on a disk that is full half-way through a write."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, data):
        self.file.write(data[:len(data) // 2])
        no_space()


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_full_disk_leaves_no_half_file_and_the_append_can_be_repeated(store, call, monkeypatch):
    filled(store, 1)
    opened = Path.open
    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", no_space)
        else:
            patch.setattr(Path, "open", lambda path, mode: FullAfterHalf(opened(path, mode)))
        with pytest.raises(DiskFull, match="no space for 000000000001.hs"):
            store.append(1, SAMPLES[1])
    assert names(store) == ["000000000000.hs"] and store.next == 1
    assert store.append(1, SAMPLES[1]) and store.read(1) == SAMPLES[1]


def test_another_fault_of_the_disk_is_not_taken_for_a_full_one(store, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        store.append(0, SAMPLES[0])


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_sector_that_the_disk_cannot_read_is_a_damaged_sample_and_nothing_else_is(store, monkeypatch, number):
    filled(store, 3)
    real = Path.open
    def sick(self, *words, **named):
        if self == store.path(1) and "r" in (*words, "r")[0]:
            raise OSError(number, os.strerror(number))
        return real(self, *words, **named)
    with monkeypatch.context() as disk:
        disk.setattr(Path, "open", sick)
        for ask in (store.text, store.sample):
            with pytest.raises(CorruptError if number == errno.EIO else OSError, match=os.strerror(number)) as found:
                ask(1)
            assert isinstance(found.value, CorruptError) is (number == errno.EIO)
    assert store.corrupt == (number == errno.EIO)
    if store.corrupt:
        assert names(store) == ["000000000000.hs", "000000000001.hs.corrupt", "000000000002.hs"]
        store.restore(1, SAMPLES[1])
    assert store.read(1) == SAMPLES[1]


@pytest.mark.processes
@pytest.mark.parametrize("moment, left", [("fsync", 2), ("replace", 2), ("fsync_dir", 3)])
def test_a_kill_leaves_a_whole_sample_or_none(store, moment, left):
    """SIGKILL before the data is synced, before the rename, after it: temporary files are cleared, numbers go on."""
    filled(store, 2).close()
    code = textwrap.dedent(f"""
        import os, pathlib, signal, sys
        import common.files
        from protocol.store import SampleStore
        store = SampleStore(pathlib.Path(sys.argv[1]))
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        if {moment!r} == "fsync": os.fsync = die
        if {moment!r} == "replace": pathlib.Path.replace = die
        if {moment!r} == "fsync_dir": common.files.fsync_dir = die
        store.append(2, sys.stdin.buffer.read())
    """)
    done = subprocess.run([sys.executable, "-c", code, str(store.folder)], input=SAMPLES[2])
    assert done.returncode == -signal.SIGKILL
    assert any(name.endswith(".tmp") for name in names(store)) == (moment != "fsync_dir")
    follower = SampleStore(store.folder, readonly=True)
    assert follower.next == left
    with SampleStore(store.folder) as again:
        assert again.next == left and names(again) == [f"{seq:012d}.hs" for seq in range(left)]
        assert again.append(left, SAMPLES[left])


def test_a_second_writer_is_refused_by_the_firsts_pid(store):
    with pytest.raises(StoreLocked, match=f"{store.folder} is written by process {os.getpid()}"):
        SampleStore(store.folder)
    store.close()
    SampleStore(store.folder).close()


def test_a_follower_sees_new_samples_in_order_and_what_was_dropped(store):
    follower = SampleStore(store.folder, readonly=True)
    assert follower.refresh() == [] and follower.next == 0
    filled(store, 3)
    assert follower.refresh() == [0, 1, 2] and follower.refresh() == [] and follower.read(2) == SAMPLES[2]
    store.append(3, SAMPLES[3])
    store.drop_below(2)
    with pytest.raises(KeyError, match="gone"):
        follower.read(1)
    assert follower.refresh() == [3] and (follower.first, follower.next) == (2, 4) and follower.bytes_used == store.bytes_used
    for forbidden in (lambda: follower.append(4, SAMPLES[4]), lambda: follower.drop_below(3), lambda: follower.begin("x", {}, 0)):
        with pytest.raises(UserError, match="reading only"):
            forbidden()


def test_a_follower_stops_before_a_file_that_its_listing_missed(store):
    filled(store, 4)
    hidden = store.path(1).rename(store.folder / "elsewhere")
    follower = SampleStore(store.folder, readonly=True)
    assert follower.next == 1
    hidden.rename(store.path(1))
    assert follower.refresh() == [1, 2, 3]


def test_a_follower_puts_nothing_aside(store):
    filled(store, 2)
    flip(store.path(0))
    follower = SampleStore(store.folder, readonly=True)
    with pytest.raises(CorruptError):
        follower.read(0)
    assert follower.corrupt == 1 and store.path(0).exists()


def test_dropping_frees_bytes_once_and_is_durable(store):
    filled(store, 4)
    assert store.drop_below(2) == len(SAMPLES[0]) + len(SAMPLES[1]) and store.drop_below(2) == store.drop_below(1) == 0
    assert (store.first, store.next) == (2, 4) and names(store) == ["000000000002.hs", "000000000003.hs"]
    assert not store.append(0, SAMPLES[0])                          # dropped is not missing
    store.drop_below(99)
    assert (store.first, store.next, store.bytes_used) == (4, 4, 0)
    store.close()
    with SampleStore(store.folder) as again:
        assert (again.first, again.next) == (4, 4) and again.append(4, SAMPLES[4])


@given(seed=st.integers(0, 2 ** 32))
@settings(max_examples=25)
def test_bytes_used_are_those_of_the_files_whatever_happened(seed):
    """By the writer's count and by a follower's, which finds out later what it cannot read."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, SampleStore(folder, contract=CONTRACT.to_dict()) as store:
        follower = SampleStore(folder, readonly=True)
        for _ in range(20):
            here = [seq for seq in range(store.first, store.next) if store.path(seq).exists()]
            match draw.choice(["append", "append", "append", "spoil", "come again", "drop", "follow"]):
                case "append":
                    store.append(store.next, sample_of(store, store.next))
                case "spoil" if here:
                    flip(store.path(spoilt := draw.choice(here)))
                    with pytest.raises(CorruptError):
                        store.read(spoilt)
                case "come again" if store.first < store.next:
                    store.restore(again := draw.randrange(store.first, store.next), sample_of(store, again))
                case "drop":
                    store.drop_below(draw.randint(store.first, store.next))
                case "follow":
                    follower.refresh()
            assert store.bytes_used == sum(path.stat().st_size for path in store.folder.glob("*.hs"))
        followed = SampleStore(folder, readonly=True)
        assert followed.bytes_used == store.bytes_used
        follower.refresh()
        assert follower.bytes_used == sum(size for seq in range(follower.first, follower.next) if (size := follower.bytes_between(seq, seq + 1)))


def test_a_kill_inside_drop_below_leaves_only_files_to_clear(store, monkeypatch):
    filled(store, 3)
    monkeypatch.setattr(store, "_remove", lambda seq: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.drop_below(2)
    store.close()
    assert len(names(store)) == 3
    with SampleStore(store.folder) as again:
        assert (again.first, again.next) == (2, 3) and names(again) == ["000000000002.hs"]


@pytest.mark.parametrize("used, paused, rests", [(0, False, False), (99, False, False), (100, False, True), (101, False, True),
                                                 (101, True, True), (90, True, True), (89, True, False), (0, True, False)])
def test_writing_rests_from_the_budget_until_low_water(used, paused, rests):
    assert should_pause(used, 100, paused, low_water=0.9) is rests
