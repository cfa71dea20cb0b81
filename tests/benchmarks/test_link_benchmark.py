"""What the link's benchmark says is what it does: the whole path ends with the same bytes stored, ratios are of speeds, encoding is bounded."""
from __future__ import annotations

from argparse import Namespace
from concurrent.futures import Executor, Future

import pytest

from benchmarks import link
from protocol.store import SampleStore


@pytest.fixture(scope="module")
def load():
    return link.load_of(Namespace(store=None, tokens=8, samples=6))


@pytest.mark.parametrize("way", [link.OURS, link.BARE, link.OURS + link.CURVE])
def test_the_whole_path_ends_with_the_same_bytes_stored_at_the_trainer(load, tmp_path, way):
    seconds, cpu = link.ways_of(load)[way](tmp_path)
    with SampleStore(tmp_path / "trainer" / "store", readonly=True) as kept:
        assert [kept.read(seq) for seq in range(kept.first, kept.next)] == load.encoded
    assert seconds > 0 and cpu > 0


def test_the_rival_sends_and_stores_every_frame(load, tmp_path):
    assert link.ways_of(load)[link.STORED](tmp_path)[0] > 0
    assert [path.read_bytes() for path in sorted(tmp_path.iterdir())] == load.encoded


def test_a_ratio_is_of_speeds_round_by_round():
    found = {"a": [(1.0, 0.0), (2.0, 0.0), (4.0, 0.0)], "b": [(2.0, 0.0), (2.0, 0.0), (2.0, 0.0)]}
    assert link.over(found, "a", "b") == "1.00 (0.50 to 2.00)" and link.over(found, "b", "a").startswith("1.00 (0.50")
    assert link.over(found, "a", "c") == ""


class AtOnce(Executor):
    def submit(self, call, *args):
        future = Future()
        future.set_result(call(*args))
        return future


def test_encoding_runs_ahead_by_a_few_samples_only_and_keeps_the_order(monkeypatch):
    many, asked = link.Load(None, [], [b"%d" % seq for seq in range(20)]), []
    monkeypatch.setattr(link.Load, "encode", lambda self, seq: asked.append(seq) or self.encoded[seq])
    made = link.encoded_ahead(many, AtOnce())
    first = next(made)
    assert len(asked) == link.AHEAD + 1 and [first, *made] == many.encoded
