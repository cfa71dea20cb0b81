"""Bytes on both disks stay within their budgets: production pauses and goes on, receiving pauses, the states say so, and nothing is lost."""
import logging
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from common import service
from common.status import Board, size
from producer import daemon, forgetting, seen
from protocol import codec
from protocol.producer_link import ProducerLink
from protocol.store import SampleStore
from tests.protocol.links import Box, free_address, wait_for
from tests.protocol.samples import CONTRACT, capture, sample
from trainer import inbox
from trainer.config import Run

SIZE = len(sample(0, tokens=200))


class Production:
    """Stands for the target: one sample a step, `left` of them."""

    def __init__(self, store: SampleStore, left: int) -> None:
        self.store, self.left, self.counters = store, left, Counter()

    @property
    def ended(self) -> bool:
        return not self.left

    def step(self) -> int:
        self.left -= 1
        return int(self.store.append(self.store.next, data(self.store, self.store.next)))


def data(store: SampleStore, seq: int, tokens: int = 200) -> bytes:
    return codec.encode(capture(seed=seq, tokens=tokens), stream=store.stream, seq=seq, contract=CONTRACT.hash)


@pytest.fixture
def producer(tmp_path):
    """The daemon's own loop over a store of ten samples' budget; step() is one turn of it: True where something was made."""
    folder, address = tmp_path / "p" / "streams" / "abc", free_address()
    with SampleStore(folder / "samples", contract=CONTRACT.to_dict()) as store:
        link = ProducerLink(address, store, CONTRACT.to_dict(), {}, cursors=folder / "subscribers.json", inbox_dir=folder / "checkpoints")
        settings = SimpleNamespace(disk_budget=10 * SIZE / 1e9, bind=address)
        with link:
            loop = daemon.Loop(settings, service.Stop(), store, link, Production(store, 60), None, Board(tmp_path / "p" / "status.json"))
            loop.began, loop.paused, loop.last_report, loop._disk_full = time.monotonic(), False, "", False
            loop.address, loop.state = address, tmp_path / "p"
            yield loop
    link.raise_if_failed()


def until_paused(loop: daemon.Loop) -> None:
    budget = int(loop.settings.disk_budget * 1e9)
    while loop.produce():
        assert loop.store.bytes_used < budget + 2 * SIZE
    assert loop.paused and loop.store.bytes_used >= budget * 0.9


def test_production_pauses_for_a_first_trainer_and_goes_on_once_it_has_the_samples(producer, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    until_paused(producer)
    assert producer.why_paused() == "disk budget used up; waiting for a first trainer" and "disk budget: paused at" in caplog.text
    made = producer.store.next
    assert not producer.produce() and producer.store.next == made == len(list(producer.store.folder.glob("*.hs"))), "nothing is dropped for nobody"
    box = Box(producer.address, tmp_path)
    with box.link as link:
        wait_for(lambda: producer.link.lowest_acked() == made - 1, link, producer.link)
        assert producer.produce() and not producer.paused and "disk budget: going on at" in caplog.text
        while not producer.production.ended:
            producer.produce() or time.sleep(0.01)
        wait_for(lambda: len(box.samples) == 60, link, producer.link)
    assert [seq for seq, _ in box.samples] == list(range(60))


def test_a_trainer_that_never_comes_back_is_named_with_its_bytes_and_let_go_by_forget_alone(producer, tmp_path):
    old = Box(producer.address, tmp_path, "old")
    with old.link as link:
        for _ in range(3):
            producer.produce()
        wait_for(lambda: producer.link.lowest_acked() == 2, link, producer.link)
    box = Box(producer.address, tmp_path)
    with box.link as link:
        until_paused(producer)
        wait_for(lambda: producer.link.snapshot()["peers"]["box"]["acked"] == producer.store.next - 1, link, producer.link)
        for _ in range(5):
            assert not producer.produce(), "however often it is tried"
        assert producer.why_paused() == "disk budget used up; waiting for old (at 2)"
        peers = producer.link.snapshot()["peers"]
        kept = producer.store.bytes_between(3, producer.store.next)
        assert peers["old"]["lag_bytes"] == peers["old"]["sole_bytes"] == kept and peers["box"]["lag_bytes"] == 0
        producer.board.show({"doing": "paused", "trainers": peers, "counters": {}}, time.time(), force=True)
        assert f"{size(kept)} are kept" in (line := seen.trainer("old", peers["old"] | {"away_s": 1e6}, True)) and "hsprod forget old" in line
        assert "is forgotten" in forgetting.forget(producer.state, "old", patience=20.0)
        assert producer.produce() and producer.store.first > 3
        while not producer.production.ended:
            producer.produce() or time.sleep(0.01)
        wait_for(lambda: len(box.samples) == 60, link, producer.link)
    assert [seq for seq, _ in box.samples] == list(range(60))


def test_a_trainers_store_stops_at_its_budget_and_takes_the_rest_with_a_larger_one(tmp_path, caplog):
    """Samples of 0.2 MB; a budget of 1 MB, a window of 1 MB."""
    address = free_address()
    with SampleStore(tmp_path / "samples", contract=CONTRACT.to_dict()) as store:
        one = len(data(store, 0, 2000))
        for seq in range(20):
            store.append(seq, data(store, seq, 2000))
        def box(budget: float) -> inbox.Inbox:
            return inbox.Inbox(Run(producer=address, state_dir=tmp_path / "t", disk_budget=budget, credit=1), "r", service.Stop())
        with ProducerLink(address, store, CONTRACT.to_dict(), {}, cursors=tmp_path / "subscribers.json", inbox_dir=tmp_path / "inbox") as link:
            with box(0.001) as here:
                def stopped() -> bool:
                    here.news()
                    return "paused: no credit" in here.line() and here.link.snapshot()["credit"] <= 0
                wait_for(stopped, link)
                held = here.store.next
                assert 1e6 <= here.store.bytes_used <= 2e6 + 2 * one and held < 20
                assert "disk budget: receiving paused at" in caplog.text and "a larger --disk-budget has the rest sent" in caplog.text
            with box(0.001) as here:                                      # again: not a byte beyond it is granted
                wait_for(lambda: here.news() is not None and here.up and "paused" in here.line(), link)
                assert here.link.snapshot()["credit"] == 0 and here.store.next == held
            with box(1.0) as here:
                wait_for(lambda: here.news() is not None and here.store.next == 20, link)
                assert [here.store.read(seq) for seq in range(20)] == [store.read(seq) for seq in range(20)]
