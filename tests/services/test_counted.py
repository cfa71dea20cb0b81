"""Pitfall D2: nothing is dropped without a count that a person sees.

Each counter's name is read off the sources, so that a new one without words fails here.  What this cannot see is a drop without any
counter; those are the other tests' (tests/README.md has the list)."""
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from common import exporter, status
from producer import daemon, seen as producer_seen
from trainer import seen as trainer_seen

ROOT = Path(__file__).parents[2]
COUNTER = re.compile(r'counters\["(\w+)"\] \+=|_count\("(\w+)"')
# Which side's counters each file's are; plain totals, which the status says in better words; the rest of a link's own session, which is
# in `status --json` under its trainer and says what a link did, not what was lost: every such message is answered, or asked for again.
PRODUCER = ("protocol/producer_link.py", "protocol/offers.py", "protocol/wire.py", "producer/production.py")
TRAINER = ("protocol/trainer_link.py", "protocol/trainer_session.py")
TOTALS = {"samples", "tokens", "raw_bytes", "bytes"}
SESSION = {"protocol/peer_session.py": {"again", "stale_chunks"}}


def named(file: str) -> set[str]:
    return {a or b for a, b in COUNTER.findall((ROOT / file).read_text("utf-8"))} - TOTALS


def test_every_counter_has_words():
    made = {f"captures_{name}" if file == "producer/production.py" else name for file in PRODUCER for name in named(file)}
    assert len(made) > 10 and made <= set(producer_seen.COUNTED), made - set(producer_seen.COUNTED)
    made = {name for file in TRAINER for name in named(file)}
    assert len(made) > 4 and made <= set(trainer_seen.COUNTED), made - set(trainer_seen.COUNTED)


def test_no_file_counts_unseen():
    """A file with counters that this test does not know would be one whose counters nobody has to look at."""
    found = {str(path.relative_to(ROOT)) for folder in ("common", "protocol", "producer", "trainer") for path in (ROOT / folder).rglob("*.py")
             if COUNTER.search(path.read_text("utf-8"))}
    assert found == {*PRODUCER, *TRAINER, *SESSION}
    assert all(named(file) == names for file, names in SESSION.items())


def test_a_capture_that_is_refused_is_not_hidden_by_a_connection_that_is():
    """Both were counted as `refused` once, and the link's took the other's place."""
    loop = SimpleNamespace(production=SimpleNamespace(counters=Counter(refused=3, too_long=1, made_again=4)), store=SimpleNamespace(corrupt=2))
    counts = daemon.Loop.counters(loop, {"refused": 5})
    assert counts == {"refused": 5, "captures_refused": 3, "captures_too_long": 1, "captures_made_again": 4, "corrupt": 2} and set(counts) <= set(producer_seen.COUNTED)


@pytest.mark.parametrize("seen", [producer_seen.SEEN, trainer_seen.SEEN])
def test_each_is_on_the_screen_and_for_prometheus_under_its_own_name(seen):
    counters = {kind: number for number, kind in enumerate(seen.counted, 1)}
    [(_, text)] = status.counted({"counters": counters}, seen.counted)
    assert text.splitlines() == [f"{counters[kind]:,} {says}" for kind, says in seen.counted.items()] and len(set(seen.counted.values())) == len(counters)
    [events] = [family for family in exporter.families({"counters": counters}, seen) if family.name == f"{seen.prefix}_events"]
    assert {labels[-1]: count for labels, count in events.values} == counters
    assert all(f"{kind}: {says}" in events.number.help for kind, says in seen.counted.items())
