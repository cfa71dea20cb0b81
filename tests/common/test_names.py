"""Names of tests: what pytest and tests/README.md take them for."""
import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_modules_have_one_name():
    """pytest takes one for the other, in a fresh clone and not here."""
    counts = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert not [name for name, count in counts.items() if count > 1]


def test_the_list_of_faults_names_tests_that_are_there():
    there = set(re.findall(r"^def (test_\w+)", "\n".join(path.read_text("utf-8") for path in TESTS.rglob("test_*.py")), re.M))
    rows = [line for line in (TESTS / "README.md").read_text("utf-8").splitlines() if re.match(r"\| [A-Z]\d ", line)]
    named = [set(re.findall(r"`(test_\w+)`", row)) for row in rows]
    assert len(rows) == 28 and all(named) and not set.union(*named) - there, set.union(*named) - there
