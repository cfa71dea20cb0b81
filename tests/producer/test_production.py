"""Samples from prompts to the store: nothing is dropped without a count, and nothing twice (pitfalls D2, D4)."""
import pytest
import tiny

from common.errors import CaptureError, CorruptError
from common.service import Stop, Stopped
from producer import schedule
from producer.config import Serve
from producer.production import Production
from producer.prompts import Prompt
from producer.schedule import Progress
from producer.target import Target
from protocol.store import DiskFull, SampleStore

TAPS = (1, 3)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.dense(template=tiny.CHATML)


PROMPTS = [Prompt(({"role": "user", "content": f"f{n}(x)"},), f"return x + {n}") for n in range(9)]


class Box:
    """One producer's disk; `open` is a start of the daemon on it."""

    def __init__(self, folder, target: Target, **settings) -> None:
        self.folder, self.target = folder, target
        self.settings = Serve(**{"mode": "prefill", "batch": 4, "max_tokens": 60} | settings)
        self.contract = target.contract(TAPS, None)

    def open(self, stop: Stop | None = None) -> Production:
        self.store = SampleStore(self.folder / "samples", contract=self.contract.to_dict())
        return Production(self.target, self.contract, PROMPTS, self.settings, self.store,
                          Progress(self.folder / "progress.json", "prompts", self.store.next), Stop() if stop is None else stop)

    def prompts(self) -> list[str]:
        return [self.store.sample(seq).capture.prompt for seq in range(self.store.next)]


def test_what_gives_no_sample_is_counted_named_and_leaves_no_gap(tmp_path, target, monkeypatch, caplog):
    wrong, real = PROMPTS[5].id, target.capture
    def capture(ids, mask, taps, prompt):
        if prompt == wrong:
            raise CaptureError("tap 3, row 7: all zero")
        return real(ids, mask, taps, prompt)
    monkeypatch.setattr(target, "capture", capture)
    long = Prompt(({"role": "user", "content": "a long one"},), "x + 1 " * 60)
    box = Box(tmp_path, target)
    monkeypatch.setitem(globals(), "PROMPTS", [*PROMPTS, long])
    production = box.open()
    while not production.ended:
        production.step()
    assert production.counters["refused"] == 1 and production.counters["too_long"] == 1 and production.counters["samples"] == 8
    assert box.store.next == 8 and sorted(box.prompts()) == sorted(p.id for p in PROMPTS if p.id not in (wrong, long.id))
    assert f"{wrong[:12]}: capture refused: tap 3, row 7: all zero" in caplog.text and f"{long.id[:12]}: " in caplog.text


def test_a_full_disk_keeps_the_batch_and_goes_on_where_it_was(tmp_path, target, monkeypatch):
    box = Box(tmp_path, target)
    production, real, left = box.open(), box.store.append, [2]
    def append(seq, data):
        if left[0] == 0:
            raise DiskFull("no space")
        left[0] -= 1
        return real(seq, data)
    monkeypatch.setattr(box.store, "append", append)
    for _ in range(3):
        with pytest.raises(DiskFull):
            production.step()
    assert box.store.next == 2 and not production.ended
    left[0] = 99
    while not production.ended:
        production.step()
    assert sorted(box.prompts()) == sorted(p.id for p in PROMPTS) and box.store.duplicates == 0
    assert production.counters["samples"] == len(PROMPTS)


def spoil(store: SampleStore, seq: int) -> None:
    """As a disk does; found by the next reading."""
    data = store.path(seq).read_bytes()
    store.path(seq).write_bytes(data[:-7])
    with pytest.raises(CorruptError):
        store.read(seq)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_damaged_sample_is_made_again_from_its_own_prompt(tmp_path, target, monkeypatch, restarted):
    """In the middle, under its number, to the bit; also where production has long ended."""
    box = Box(tmp_path, target)
    production = box.open()
    while not production.ended:
        production.step()
    before, prompts = box.store.read(3), box.prompts()
    spoil(box.store, 3)
    if restarted:
        box.store.close()
        production = box.open()
        assert production.ended and box.store.next == len(PROMPTS)
    real, full = box.store.restore, [True]
    def restore(seq, data):
        if full.pop():
            raise DiskFull("no space")
        return real(seq, data)
    monkeypatch.setattr(box.store, "restore", restore)
    with pytest.raises(DiskFull):
        production.mend(3)
    full.append(False)
    monkeypatch.setattr(target, "capture", None)                     # it is made already
    assert production.mend(3) and production.counters["made_again"] == 1
    assert box.store.read(3) == before and box.prompts() == prompts and not list(box.store.folder.glob("*.corrupt"))


def test_one_whose_prompt_is_not_known_any_more_is_lost_and_said(tmp_path, target, caplog):
    box = Box(tmp_path, target)
    production = box.open()
    while not production.ended:
        production.step()
    spoil(box.store, 1)
    box.store.close()
    (tmp_path / "progress.json").unlink()                            # as with another list of prompts
    production = box.open()
    assert not production.mend(1) and "sample 1 cannot be made again: which prompt it was made of is not known any more" in caplog.text
    assert production.counters["made_again"] == 0


def test_no_room_for_the_progress_file_is_a_full_disk_too(tmp_path, target, monkeypatch):
    """Not a crash: the batch is kept, counted once, and goes on when there is room."""
    box = Box(tmp_path, target)
    production, real = box.open(), schedule.write_whole
    def full(_path, _data):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(schedule, "write_whole", full)
    for _ in range(2):
        with pytest.raises(DiskFull, match="progress.json: no space"):
            production.step()
    assert box.store.next == 0 and not production.ended
    monkeypatch.setattr(schedule, "write_whole", real)
    while not production.ended:
        production.step()
    assert sorted(box.prompts()) == sorted(p.id for p in PROMPTS) and production.counters["samples"] == len(PROMPTS)


def test_a_stop_in_a_batch_gives_it_up_and_the_next_start_makes_it_again(tmp_path, target, monkeypatch):
    box, stop, real, done = Box(tmp_path, target), Stop(), target.capture, []
    def capture(*words):
        done.append(1)
        if len(done) == 6:
            stop.set()
        return real(*words)
    monkeypatch.setattr(target, "capture", capture)
    production = box.open(stop)
    production.step()
    with pytest.raises(Stopped):
        production.step()
    assert box.store.next == 4
    box.store.close()
    monkeypatch.undo()
    production = box.open()
    while not production.ended:
        production.step()
    assert sorted(box.prompts()) == sorted(p.id for p in PROMPTS)


def test_answers_of_the_target_itself_carry_the_loss_mask_of_the_answer_alone(tmp_path, target):
    box = Box(tmp_path, target, mode="generate", max_new_tokens=6)
    production = box.open()
    production.step()
    for seq in range(box.store.next):
        capture = box.store.sample(seq).capture
        answer = capture.ids[capture.loss_mask]
        assert 1 <= len(answer) <= 6 and capture.loss_mask[-len(answer):].all() and not capture.loss_mask[:-len(answer)].any()
        text = target.tokenizer.decode(capture.ids[~capture.loss_mask])
        assert text.endswith("<|im_start|>assistant\n")
