"""A dropped link costs a transfer what was on the way, and no more: in memory, and over real sockets that are cut in the middle."""
import hashlib
import random
from collections import Counter
from pathlib import Path

import pytest

from protocol import events as e
from protocol.events import LinkDown, LinkUp, ReportArrived
from protocol.frames import CHUNK
from protocol.transfer import OUTSTANDING, Serving, offer_id
from tests.protocol.ends import CONTRACT, Ends
from tests.protocol.links import Box, Store, news, wait_for
from tests.protocol.relay import Relay

LONG = 12                    # chunks


def test_a_checkpoint_resumes_after_each_cut_and_nothing_comes_twice():
    blobs = {"config.json": b"{}", "model.safetensors": random.Random(0).randbytes(LONG * CHUNK + 7)}
    files = tuple(e.FileInfo(name, len(blob), hashlib.sha256(blob).hexdigest()) for name, blob in blobs.items())
    offer = e.CheckpointOffer(offer_id("run", 1, files), "run", 1, CONTRACT.hash, files, {"tokens": 5})
    ends, got, cuts = Ends([]), {name: bytearray() for name in blobs}, 0
    ends.flow()
    while {name: bytes(data) for name, data in got.items()} != blobs:
        ends.offered = {(offer.offer, name): blob for name, blob in blobs.items()}
        ends.trainer.offer(offer)                                         # a new connection, the same offer
        for _ in range(9):
            seen = len(ends.events)
            ends.say(), ends.hear_up(), ends.hear_down()
            for event in ends.events[seen:]:
                if isinstance(event, e.Offered):
                    ends.producer.pull(event.offer, {name: len(data) for name, data in got.items()})
                if isinstance(event, e.Chunk):
                    assert event.offset == len(got[event.key[1]])
                    got[event.key[1]] += event.data
        ends.connect()
        ends.say(), ends.hear_up(), ends.say(), ends.hear_down()           # Hello, Welcome
        cuts += 1
    assert cuts > 2 and sum(len(x.data) for x in ends.events if isinstance(x, e.Chunk)) == sum(map(len, blobs.values()))


@pytest.fixture
def served(monkeypatch) -> Counter:
    """How often each chunk was read to be sent: {(file's key, offset): count}, by either end."""
    counts: Counter = Counter()
    real = Serving.read
    monkeypatch.setattr(Serving, "read", lambda self, key, offset, length: counts.update([(key[-1], offset)]) or real(self, key, offset, length))
    return counts


def in_the_middle(counts: Counter, name: str) -> None:
    """Each chunk was sent; what was sent twice was on the way when the link was cut, and that is at most what may be asked at once."""
    times = [counts[name, chunk * CHUNK] for chunk in range(LONG)]
    assert min(times) >= 1 and sum(times) - LONG <= OUTSTANDING, times


def test_assets_over_a_cable_that_is_cut(serve, address, tmp_path, served):
    content = random.Random(1).randbytes(LONG * CHUNK)
    (tmp_path / "emb").write_bytes(content)
    producer, relay = serve(Store(2), assets={"embedding": tmp_path / "emb"}), Relay(address)
    relay.down.cut_at = 5 * CHUNK + 12345
    box = Box(relay.address, tmp_path)
    with box.link as link:
        news(link, LinkDown)
        [part] = Path(tmp_path / "box-assets").glob("*.part")
        assert part.stat().st_size >= 3 * CHUNK, "what was here stays"
        assert link.wait_ready(20), producer.snapshot()
        assert link.assets()["embedding"].read_bytes() == content and relay.down.cut_at is None
    in_the_middle(served, hashlib.sha256(content).hexdigest())
    relay.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_checkpoint_over_a_cable_that_is_cut(serve, address, tmp_path, served, keys, encrypted):
    """Encrypted, a chunk is longer than a chunk: it has to pass, too."""
    mine = {"keys": keys("box")} if encrypted else {}
    producer, relay = serve(Store(0), **({"keys": keys.producer} if encrypted else {})), Relay(address)
    folder, content = tmp_path / "ck", random.Random(2).randbytes(LONG * CHUNK)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    relay.up.cut_at = 5 * CHUNK + 12345
    with Box(relay.address, tmp_path, **mine).link as link:
        news(link, LinkUp)
        made = link.offer(folder, run="r", step=1, record={"tokens": 3})
        news(link, LinkDown)
        news(link, LinkUp)
        assert link.offer(folder, run="r", step=1, record={"tokens": 3}) == made, "offered again, as hstrain does, it is the same"
        ready = producer.inbox.get(timeout=20)
        assert (ready.folder / "model.safetensors").read_bytes() == content and ready.record == {"tokens": 3} and relay.up.cut_at is None
        producer.report(ready, result={"tau": 2.0})
        assert news(link, ReportArrived).result == {"tau": 2.0}
    in_the_middle(served, "model.safetensors")
    assert producer.snapshot()["counters"]["checkpoints"] == 1
    relay.close()


def test_while_one_is_evaluated_a_newer_one_replaces_an_older_one_that_waits_and_it_is_counted(serve, address, tmp_path):
    producer, folder = serve(Store(0)), tmp_path / "ck"
    folder.mkdir()
    with Box(address, tmp_path).link as link:
        news(link, LinkUp)
        def offered(run: str, step: int) -> None:
            (folder / "config.json").write_text(f"{run} {step}")
            link.offer(folder, run=run, step=step, record={})
            before = producer.snapshot()["counters"].get("checkpoints", 0)
            wait_for(lambda: producer.snapshot()["counters"].get("checkpoints", 0) > before, link, producer)
        offered("a", 1)
        evaluated = producer.inbox.get_nowait()
        for run, step in (("a", 2), ("b", 1), ("a", 3), ("a", 4)):
            offered(run, step)
        assert (evaluated.folder / "config.json").read_text() == "a 1", "what is being evaluated stays"
        producer.report(evaluated, result={"tau": 1.0})
        assert [(w.run, w.step) for w in (producer.inbox.get_nowait(), producer.inbox.get_nowait())] == [("a", 4), ("b", 1)]
        assert producer.inbox.empty() and producer.snapshot()["counters"]["replaced_checkpoints"] == 2


def test_a_run_that_another_process_goes_on_with_is_not_evaluated_twice(serve, address, tmp_path):
    """A follower that becomes its box's receiver has another name, and offers again what was not answered."""
    producer, folder = serve(Store(0)), tmp_path / "ck"
    folder.mkdir()
    (folder / "config.json").write_text("x")
    with Box(address, tmp_path, "box.r", follower=True).link as before:
        news(before, LinkUp)
        before.offer(folder, run="r", step=1, record={})
        ready = producer.inbox.get(timeout=20)
    with Box(address, tmp_path, "box").link as link:
        news(link, LinkUp)
        link.offer(folder, run="r", step=1, record={})
        wait_for(lambda: any(peer.offered for peer in list(producer._peers.values()) if peer.name == "box"), link, producer)
        producer.report(ready, result={"tau": 2.0})
        assert news(link, ReportArrived).result == {"tau": 2.0} and producer.inbox.empty()
        assert producer.snapshot()["counters"]["checkpoints"] == 1
