"""Real sockets on loopback: samples flow and resume, faults of a peer stay with it, keys decide who may connect."""
import queue
import random
import subprocess
import sys
import time

import msgpack
import pytest

from common.errors import UserError
from protocol import events as e, keys as key_files
from protocol.events import Cursor, LinkDown, LinkUp, Refused, ReportArrived
from protocol.frames import CHUNK, VERSION, encode
from protocol.offers import Fetch
from protocol.store import DiskFull, SampleStore
from protocol.trainer_link import TrainerLink
from protocol.transfer import describe, offer_id
from protocol.wire import VIEWED, is_local
from tests.protocol import samples
from tests.protocol.ends import CONTRACT, OTHER
from tests.protocol.links import TIMING, Box, Store, news, wait_for


def test_samples_assets_and_a_checkpoint_cross_and_come_back(serve, address, tmp_path):
    (tmp_path / "emb").write_bytes(random.Random(0).randbytes(5 * CHUNK + 3))
    (tmp_path / "empty").write_bytes(b"")
    store = Store(20)
    producer = serve(store, assets={"embedding": tmp_path / "emb", "tokenizer": tmp_path / "empty"}, evaluation={"prompts": "abc"})
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(random.Random(1).randbytes(2 * CHUNK + 1))
    box = Box(address, tmp_path)
    with box.link as link:
        assert link.wait_ready(20) and link.welcome.evaluation == {"prompts": "abc"} and link.contract == CONTRACT
        assert {n: p.read_bytes() for n, p in link.assets().items()} == {"embedding": (tmp_path / "emb").read_bytes(), "tokenizer": b""}
        store.append(20, b"late")
        producer.samples_ready()
        producer.set_ended(True)
        wait_for(lambda: link.complete, link, producer)
        assert box.samples == list(store.data.items())
        wait_for(lambda: producer.lowest_acked() == 20, link, producer)
        offered = link.offer(folder, run="ce-s0", step=7, record={"tokens": 5})
        ready = producer.inbox.get(timeout=20)
        assert (ready.peer, ready.run, ready.step, ready.record, ready.offer) == ("box", "ce-s0", 7, {"tokens": 5}, offered)
        assert {p.name: p.read_bytes() for p in ready.folder.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}
        producer.report(ready, result={"tau": 2.5})
        assert news(link, ReportArrived) == ReportArrived(offered, "ce-s0", 7, {"tau": 2.5}, None)
        link.offer(folder, run="ce-s0", step=7, record={"tokens": 5})         # again: answered from memory
        assert news(link, ReportArrived).result == {"tau": 2.5} and not ready.folder.exists()
        peer = producer.snapshot()["peers"]["box"]
        assert peer["connected"] and peer["acked"] == 20 and peer["lag"] == 0 and peer["samples"] == 21
        assert producer.snapshot()["counters"]["reports"] == 1


def test_a_producer_that_is_gone_and_comes_back_goes_on_where_it_was(serve, address, tmp_path):
    store, box = Store(5), Box(address, tmp_path)
    with box.link as link:                                          # nobody listens yet
        first = serve(store)
        wait_for(lambda: len(box.samples) == 5, link, first)
        first.close()
        assert "stops" in news(link, LinkDown).reason and not link.up
        for seq in range(5, 12):
            store.append(seq, b"x" * seq)
        second = serve(store)
        news(link, LinkUp)
        wait_for(lambda: len(box.samples) == 12 and second.lowest_acked() == 11, link, second)
        assert box.samples == list(store.data.items()) and first.snapshot()["peers"]["box"]["acked"] == 4
    wait_for(lambda: not second.snapshot()["peers"]["box"]["connected"], second)
    assert second.lowest_acked() == 11                              # known, though away
    assert second.forget("box") and second.lowest_acked() is None and not second.forget("box")


def test_the_real_stores_hold_the_same_bytes_after_restarts_of_both_ends(serve, address, tmp_path):
    """As the daemons do it: SampleStore at both ends, the trainer's made at its first Welcome.  A large sample comes as a view, uncopied."""
    made, came = [samples.sample(seq, tokens=6000 if seq in (2, 7) else 12) for seq in range(9)], []
    sent = SampleStore(tmp_path / "producer")
    sent.begin(samples.STREAM, samples.CONTRACT.to_dict(), 0)
    for upto in (4, 9):
        for seq in range(sent.next, upto):
            sent.append(seq, made[seq])
        producer = serve(sent, contract=samples.CONTRACT)
        kept = SampleStore(tmp_path / "trainer")
        def welcomed(welcome, contract):
            if not kept.stream:
                kept.begin(welcome.stream, welcome.contract, welcome.first_seq)
        def arrived(seq, data):
            came.append(type(data))
            kept.append(seq, data)
        with TrainerLink(address, "box", cursor=lambda: Cursor(kept.stream or None, kept.next, samples.CONTRACT if kept.stream else None),
                         on_welcome=welcomed, on_sample=arrived, assets_dir=tmp_path / "assets", timing=TIMING) as link:
            wait_for(lambda: producer.lowest_acked() == upto - 1, link, producer)
        producer.close()
        kept.close()
    kept = SampleStore(tmp_path / "trainer", readonly=True)
    assert [kept.read(seq) for seq in range(kept.first, kept.next)] == made and kept.duplicates == 0
    assert came == [memoryview if len(data) >= VIEWED else bytes for data in made] and memoryview in came
    sent.close()


def test_a_clock_that_jumps_days_in_the_middle_changes_nothing(serve, address, tmp_path, monkeypatch):
    """The wall's; time.monotonic alone decides."""
    store, box, real = Store(3), Box(address, tmp_path), time.time
    producer, offset = serve(store), [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    with box.link as link:
        wait_for(lambda: len(box.samples) == 3, link, producer)
        news(link, LinkUp)
        for jump in (3 * 86400.0, -9 * 86400.0, 60.0, -60.0, -real()):         # the last: a box whose clock starts in 1970
            offset[0] += jump
            store.append(store.next, b"%d" % store.next)
            producer.samples_ready()
            wait_for(lambda: len(box.samples) == store.next and producer.lowest_acked() == store.next - 1, link, producer)
        time.sleep(2 * TIMING.interval)
        assert link.up and link.inbox.empty() and producer.snapshot()["peers"]["box"]["connected"], "no link was lost on the way"
    assert [seq for seq, _ in box.samples] == list(range(8)) and not link.counters.get("malformed")


def test_what_all_have_is_dropped_and_a_trainer_from_before_is_refused_by_range(serve, address, tmp_path):
    store, box = Store(6), Box(address, tmp_path)
    producer = serve(store)
    with box.link as link:
        wait_for(lambda: producer.lowest_acked() == 5, link, producer)
    producer.drop_acked()
    assert (store.first, store.next) == (6, 6)
    store.append(6, b"new")
    late, behind = Box(address, tmp_path, "late"), Box(address, tmp_path, "behind", contract=CONTRACT)
    with late.link, behind.link:
        wait_for(lambda: late.samples == [(6, b"new")], late.link, producer)
        assert "samples 0 to 5 are gone here" in news(behind.link, Refused).reason
    assert set(producer.snapshot()["peers"]) == {"box", "late"} and producer.snapshot()["counters"]["refused"] >= 1


def test_another_contract_is_refused_by_name(serve, address, tmp_path):
    serve(Store(1))
    box = Box(address, tmp_path, contract=OTHER)
    with box.link as link:
        assert [f.split(":")[0] for f in news(link, Refused).fields] == ["target", "taps"]
        assert not box.samples and not link.up and not link.wait_ready(0.0)


def test_a_follower_gets_reports_and_no_samples_and_holds_nothing_back(serve, address, tmp_path):
    store = Store(3)
    (tmp_path / "emb").write_bytes(b"weights")
    producer = serve(store, assets={"embedding": tmp_path / "emb"})
    arm = Box(address, tmp_path, "box:arm", follower=True, contract=CONTRACT)
    with arm.link as link:
        news(link, LinkUp)
        producer.set_ended(True)
        wait_for(lambda: link.complete, link, producer)
        assert not link.assets_ready() and not (tmp_path / "box:arm-assets").exists()          # the process that fills the store does that
        assert producer.lowest_acked() is None and producer.snapshot()["peers"]["box:arm"]["follower"] and not arm.samples


def test_a_second_link_of_one_name_takes_the_firsts_place(serve, address, tmp_path):
    store = Store(3)
    producer, one, two = serve(store), Box(address, tmp_path), Box(address, tmp_path)
    with one.link:
        wait_for(lambda: len(one.samples) == 3, one.link)
        with two.link:
            wait_for(lambda: len(two.samples) == 3, two.link)
            assert "connected again" in news(one.link, LinkDown).reason
    assert producer.snapshot()["counters"]["replaced_links"] >= 1


def test_a_full_disk_loses_nothing_and_other_errors_of_ours_are_loud(serve, address, tmp_path):
    store, box = Store(4), Box(address, tmp_path)
    producer = serve(store)
    box.fail = DiskFull("no space")
    with box.link as link:
        assert "no space" in news(link, LinkDown).reason and link.snapshot()["counters"]["disk_errors"] >= 1
        box.fail = OSError(5, "Input/output error")
        wait_for(lambda: link.snapshot()["counters"]["disk_errors"] >= 2, link)
        box.fail = None
        wait_for(lambda: box.samples == list(store.data.items()), link, producer)
        box.fail = ZeroDivisionError("a bug")
        store.append(4, b"x")
        producer.samples_ready()
        with pytest.raises(ZeroDivisionError, match="a bug"):
            wait_for(lambda: False, link)
    producer.raise_if_failed()


def test_a_paused_trainer_takes_at_most_what_was_granted(serve, address, tmp_path):
    store, box = Store(0), Box(address, tmp_path, window=1000)
    producer = serve(store)
    with box.link as link:
        news(link, LinkUp)
        link.pause(True)
        wait_for(lambda: "paused" in link.snapshot()["state"], link)
        for seq in range(50):
            store.append(seq, b"x" * 100)
        producer.samples_ready()
        wait_for(lambda: link.snapshot()["credit"] == 0, link, producer)
        assert len(box.samples) == 10
        link.pause(False)
        wait_for(lambda: len(box.samples) == 50, link, producer)


# ---- peers that misbehave

def test_garbage_is_counted_and_others_go_on(serve, address, tmp_path, raw):
    store, box = Store(2), Box(address, tmp_path)
    producer = serve(store)
    rng = random.Random(0)
    with box.link as link:
        wait_for(lambda: len(box.samples) == 2, link)
        for n in range(20):
            assert isinstance(raw.say(*[rng.randbytes(rng.randint(0, 50)) for _ in range(rng.randint(1, 4))]), e.Bye)
        assert raw.say(*encode(e.Ack(3))) == e.Bye("say Hello first")
        store.append(2, b"more")
        producer.samples_ready()
        wait_for(lambda: len(box.samples) == 3, link, producer)
        counters = producer.snapshot()["counters"]
        assert counters["malformed"] == 20 and counters["strangers"] == 1
        assert link.snapshot()["counters"].get("malformed", 0) == 0 and box.link.up


def test_a_peer_that_breaks_the_rules_loses_its_session(serve, raw):
    producer = serve(Store(2))
    assert isinstance(raw.say(*encode(e.Hello("rude", None, 0, None, True))), e.Welcome)
    assert isinstance(raw.say(*encode(e.Credit(0))), e.StreamHeartbeat)
    raw._dealer.send_multipart(encode(e.Ack(7)))
    while not isinstance(said := raw.hear(), e.Bye):
        pass
    assert "newest sent" in said.reason
    assert raw.say(*encode(e.Heartbeat({}))) == e.Bye("say Hello first")
    assert producer.snapshot()["counters"]["malformed"] == 1


def test_another_version_is_refused_and_told_which(serve, raw):
    producer = serve(Store(1))
    answer = raw.say(msgpack.packb([VERSION + 1, "Hello", {"new": "fields"}]))
    assert answer == e.Refuse("protocol", (f"version: {VERSION} -> {VERSION + 1}",))
    assert producer.snapshot()["counters"]["refused"] == 1 and not producer.snapshot()["peers"]


def test_a_frame_beyond_the_limit_never_reaches_us(serve, address, tmp_path, raw):
    store, box = Store(1), Box(address, tmp_path)
    producer = serve(store)
    raw._dealer.send_multipart([b"x" * (8 << 20)])
    with box.link as link:
        wait_for(lambda: len(box.samples) == 1, link, producer)
    assert producer.snapshot()["counters"].get("malformed", 0) == 0


def test_a_peer_that_asks_and_does_not_read_costs_a_bounded_amount(serve, tmp_path, raw, monkeypatch):
    (tmp_path / "emb").write_bytes(bytes(CHUNK))
    (info,) = describe({"embedding": tmp_path / "emb"})
    producer, served = serve(Store(0), assets={"embedding": tmp_path / "emb"}), []
    read = producer._serving.read
    monkeypatch.setattr(producer._serving, "read", lambda *a: served.append(a) or read(*a))
    raw.say(*encode(e.Hello("greedy", None, 0, None, True)))
    ask = encode(e.AssetGet(info.sha256, 0, CHUNK))
    while len(served) < 1000:
        before, end = len(served), time.monotonic() + 0.5
        raw._dealer.send_multipart(ask)
        while len(served) == before and time.monotonic() < end:
            time.sleep(0.001)
        if len(served) == before:
            break                                                   # the queue is full: nothing more is read for this peer
    for _ in range(6):
        raw._dealer.send_multipart(ask)
    wait_for(lambda: producer.snapshot()["counters"].get("malformed") == 1, producer)
    assert 1 < len(served) < 1000 // 2                              # queues at both ends and the kernel's, each bounded


def test_a_silent_peer_is_dropped_and_its_cursor_kept(serve, raw):
    producer = serve(Store(2))
    raw.say(*encode(e.Hello("silent", None, 0, None, True)))
    wait_for(lambda: not producer.snapshot()["peers"]["silent"]["connected"], producer)
    assert producer.lowest_acked() == -1


def test_a_sample_that_cannot_be_read_is_told_and_the_link_lives(serve, address, tmp_path):
    store, box = Store(4), Box(address, tmp_path)
    del store.data[2]
    store.data[9] = b"keeps next at 4"
    producer = serve(store)
    with box.link as link:
        assert "sample 2 is not here" in news(link, LinkDown).reason
        assert [seq for seq, _ in box.samples] == [0, 1] and producer.snapshot()["counters"]["unreadable"] == 1
        assert producer.needed() == [2]
        store.data[2] = b"repaired"
        del store.data[9]
        producer.made_again(2)
        wait_for(lambda: len(box.samples) == 4, link, producer)
        assert producer.needed() == []


def test_what_was_lost_is_said_and_what_nobody_can_need_any_more_is_not_asked_for(serve, address, tmp_path):
    store, box = Store(4), Box(address, tmp_path)
    del store.data[2]
    store.data[9] = b"keeps next at 4"
    producer = serve(store)
    with box.link as link:
        wait_for(lambda: producer.needed() == [2], link, producer)
        producer.lost(2)
        before = producer.snapshot()["counters"]["unreadable"]
        wait_for(lambda: producer.snapshot()["counters"]["unreadable"] > before, link, producer)
        assert producer.needed() == [] and len(box.samples) == 2, "said at each try, and made by nobody"
    producer._needed.add(1)
    assert producer.needed() == [1]
    store.drop_below(2)
    assert producer.needed() == []


# ---- offers on disk

def test_a_fetch_resumes_and_newer_offers_clear_older_folders(tmp_path):
    source = tmp_path / "ck"
    source.mkdir()
    blob = random.Random(2).randbytes(3000)
    (source / "model.safetensors").write_bytes(blob)
    files = describe({"model.safetensors": source / "model.safetensors"})
    def made(step: int, **changes):
        return e.CheckpointOffer(**{"offer": offer_id("r", step, files), "run": "r", "step": step, "contract_hash": "0" * 64, "files": files,
                                    "record": {}} | changes)
    fetch = Fetch(tmp_path / "in", "box", made(1))
    fetch.write("model.safetensors", 0, blob[:1000], False)
    fetch.close()
    again = Fetch(tmp_path / "in", "box", made(1))
    assert again.have == {"model.safetensors": 1000} and not again.complete
    again.write("model.safetensors", 1000, blob[1000:], True)
    assert again.complete and Fetch(tmp_path / "in", "box", made(1)).complete
    with pytest.raises(Exception, match="not the id"):
        Fetch(tmp_path / "in", "box", made(1, offer="0" * 32))


def test_a_checkpoint_that_waits_is_replaced_by_a_newer_one_and_counted(serve, address, tmp_path):
    producer, box = serve(Store(0)), Box(address, tmp_path)
    folder = tmp_path / "ck"
    folder.mkdir()
    with box.link as link:
        news(link, LinkUp)
        for step in (1, 2, 3):
            (folder / "config.json").write_text(f"step {step}")
            link.offer(folder, run="r", step=step, record={})
            wait_for(lambda: producer.snapshot()["counters"].get("checkpoints") == step, link, producer)
        ready = producer.inbox.get_nowait()
        assert ready.step == 3 and (ready.folder / "config.json").read_text() == "step 3" and producer.snapshot()["counters"]["replaced_checkpoints"] == 2
        with pytest.raises(queue.Empty):
            producer.inbox.get_nowait()
        assert list(ready.folder.parent.iterdir()) == [ready.folder]
        producer.report(ready, error="no use")
        assert news(link, ReportArrived).error == "no use"
        with pytest.raises(e.LocalError, match="Report"):
            producer.report(ready, result={"x": "y" * (2 << 20)})


# ---- opening

def test_a_taken_port_and_an_open_address_are_the_persons_to_mend(serve, address, tmp_path):
    serve(Store(0))
    with pytest.raises(UserError, match=f"{address} is in use"):
        serve(Store(0))
    with pytest.raises(UserError, match="--insecure"):
        serve(Store(0), at="tcp://0.0.0.0:5799")
    with pytest.raises(UserError, match="cannot listen on nonsense"):
        serve(Store(0), at="nonsense", insecure=True)
    with pytest.raises(UserError, match="--name"):
        Box(address, tmp_path, "no/slash")


@pytest.mark.parametrize("where, local", [("tcp://127.0.0.1:1", True), ("tcp://localhost:1", True), ("tcp://[::1]:1", True), ("ipc:///tmp/x", True),
                                          ("tcp://*:1", False), ("tcp://0.0.0.0:1", False), ("tcp://192.168.1.2:1", False), ("tcp://127.evil.com:1", False)])
def test_loopback(where, local):
    assert is_local(where) is local


def test_an_allowed_key_connects_and_an_unknown_one_is_counted_until_it_is_allowed(serve, address, tmp_path):
    (known, stranger, mine) = (key_files.generate(tmp_path / n) for n in ("known", "stranger", "producer"))
    key_files.allow(tmp_path / "producer", known)
    for name in ("known", "stranger"):
        key_files.set_producer(tmp_path / name, mine)
    producer = serve(Store(3), keys=key_files.ProducerKeys(tmp_path / "producer"))
    boxes = {name: Box(address, tmp_path, name, keys=key_files.TrainerKeys(tmp_path / name)) for name in ("known", "stranger")}
    plain = Box(address, tmp_path, "plain")
    with boxes["known"].link as link, boxes["stranger"].link as other, plain.link:
        wait_for(lambda: len(boxes["known"].samples) == 3, link, producer)
        wait_for(lambda: producer.snapshot()["counters"].get("refused_keys", 0) >= 1, other, producer)
        assert set(producer.snapshot()["peers"]) == {"known"} and not boxes["stranger"].samples
        key_files.allow(tmp_path / "producer", stranger)
        wait_for(lambda: len(boxes["stranger"].samples) == 3, other, producer)
        assert not plain.samples


def test_importing_the_links_leaves_torch_unloaded():
    code = "import sys, protocol.producer_link, protocol.trainer_link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
