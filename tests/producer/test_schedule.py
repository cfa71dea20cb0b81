"""Every prompt once a pass, in an order of no memory, whatever moment a kill hits."""
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import schedule
from producer.prompts import Prompt
from producer.schedule import Progress, order

PROMPTS = [Prompt(({"role": "user", "content": f"number {n}"},)) for n in range(40)]
REFUSED = {3, 8, 9, 10, 11, 17}          # items that give no sample; 8 to 11 are a whole batch
BATCH, ITEMS = 4, 22


@dataclass
class Box:
    """What survives a kill: the progress file, and the items whose samples are in the store (index: sequence number)."""

    path: object
    stored: list[int]

    def run(self, killed_after: int | None) -> bool:
        """Batches as production makes them, until the end or so many steps (a file written, a sample stored); True at the end."""
        progress, left = Progress(self.path, "hash", len(self.stored)), killed_after
        while progress.item < ITEMS:
            items = range(progress.item, min(progress.item + BATCH, ITEMS))
            kept = [item for item in items if item not in REFUSED]
            for step in [lambda: progress.begin(len(self.stored), kept, items[-1] + 1), *(lambda k=k: self.stored.append(k) for k in kept)]:
                if left == 0:
                    return False
                step()
                left = left and left - 1
        return True


@pytest.mark.parametrize("between", range(1, 8))
def test_a_kill_at_any_moment_neither_repeats_nor_loses_an_item(tmp_path, between):
    box = Box(tmp_path / "progress.json", [])
    for _ in range(100):
        if box.run(between):
            break
    assert box.run(None) and box.stored == [k for k in range(ITEMS) if k not in REFUSED]


@pytest.mark.parametrize("killed_after", range(1, 25))
@pytest.mark.parametrize("lost", [1, 2, 5])
def test_samples_found_damaged_are_made_again_from_their_own_prompts(tmp_path, killed_after, lost):
    """Also where the batch in hand had only been begun, and where the damage reaches back into batches before it."""
    box = Box(tmp_path / "progress.json", [])
    box.run(killed_after)
    del box.stored[-lost:]                                           # the store puts them aside when it is opened
    assert box.run(None) and box.stored == [k for k in range(ITEMS) if k not in REFUSED]


def test_what_is_remembered_has_an_end_and_no_hole(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "KEPT", 3)
    path = tmp_path / "progress.json"
    progress = Progress(path, "hash", 0)
    for first in range(0, 8, 2):
        progress.begin(first, [10 * first, 10 * first + 10], 10 * first + 20)
    assert [Progress(path, "hash", seq).item for seq in range(2, 9)] == [80, 30, 40, 50, 60, 70, 80]         # 2 is too long ago: what follows
    progress = Progress(path, "hash", 20)                            # the store has more than this file knows
    progress.begin(20, [200], 210)
    assert [Progress(path, "hash", seq).item for seq in (7, 19, 20, 21)] == [210, 210, 200, 210]


@given(st.lists(st.tuples(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 6)), max_size=12))
def test_runs_say_of_each_sample_what_a_list_of_all_would(batches):
    """Each batch: which of its prompts gave a sample, and how many of those were lost again before the next one (a damaged end)."""
    runs, plain, item = [], {}, 0
    for gave, lost in batches:
        items = [item + k for k, given_one in enumerate(gave) if given_one]
        item += len(gave)
        first = max(0, len(plain) - lost)
        plain = {seq: plain[seq] for seq in range(first)} | dict(enumerate(items, first))
        runs = schedule.extended(runs, first, items)
    assert [i + k for _, i, count in runs for k in range(count)] == [plain[seq] for seq in range(len(plain))]
    assert [first for first, _, _ in runs] == [sum(count for _, _, count in runs[:k]) for k in range(len(runs))]


def test_a_month_without_a_refusal_is_one_run(tmp_path):
    progress = Progress(tmp_path / "progress.json", "hash", 0)
    for first in range(0, 4000, 8):
        progress.begin(first, list(range(first, first + 8)), first + 8)
    assert (tmp_path / "progress.json").stat().st_size < 100
    assert [Progress(tmp_path / "progress.json", "hash", seq).item for seq in (0, 1234, 3999, 4000)] == [0, 1234, 3999, 4000]


def test_what_was_written_before_there_were_runs_is_read(tmp_path):
    (tmp_path / "progress.json").write_text('{"prompts": "hash", "first_seq": 3, "items": [5, 6, 9], "after": 12}')
    assert [Progress(tmp_path / "progress.json", "hash", seq).item for seq in range(2, 7)] == [12, 5, 6, 9, 12]


def test_another_list_of_prompts_begins_at_its_first(tmp_path):
    progress = Progress(tmp_path / "progress.json", "hash", 0)
    progress.begin(0, [0, 1], 2)
    assert Progress(tmp_path / "progress.json", "hash", 1).item == 1
    assert Progress(tmp_path / "progress.json", "hash", 2).item == 2
    assert Progress(tmp_path / "progress.json", "other", 2).item == 0


def test_each_pass_has_an_order_of_its_own_that_does_not_depend_on_the_files():
    first, second = order(PROMPTS, 0), order(PROMPTS, 1)
    assert first == order(PROMPTS[::-1], 0) and first != second and first != PROMPTS
    assert {p.id for p in first} == {p.id for p in second} == {p.id for p in PROMPTS}
