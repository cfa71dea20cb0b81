"""pytest takes test modules of one name in two folders for each other, in a fresh clone and not here."""
from collections import Counter
from pathlib import Path


def test_no_two_test_modules_have_one_name():
    counts = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1]
