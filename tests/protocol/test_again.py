"""A sample that was damaged after it was acknowledged: on the trainer's disk it comes again; on the producer's it is made again, and
what both ends then have is held against each other."""
import hashlib

import pytest

from common import service
from common.errors import CorruptError, PeerError, UserError
from protocol import events as e
from protocol.events import Cursor, LinkDown, LinkUp, Refused
from protocol.peer_session import judge
from protocol.rules import State
from protocol.store import SampleStore
from protocol.trainer_link import TrainerLink
from tests.protocol import samples
from tests.protocol.ends import CONTRACT, Ends
from tests.protocol.links import TIMING, Box, Store, news, wait_for

DATA = [b"%d" % n * 40 for n in range(6)]


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def streaming(first: int = 0) -> Ends:
    ends = Ends(DATA[:5], first=first)
    ends.flow()
    return ends


# ---- the trainer's disk

def test_a_sample_that_came_before_comes_once_more_and_changes_nothing_else():
    ends = streaming()
    credit, acked = ends.trainer.credit, ends.producer.acked
    assert ends.trainer.again(2) and not ends.trainer.again(3), "one at a time"
    ends.flow()
    assert ends.events[-1] == e.AgainArrived(2, DATA[2]) and ends.stored == DATA[:5]
    assert (ends.trainer.credit, ends.producer.acked, ends.producer.counters["again"]) == (credit, acked, 1)
    assert ends.trainer.again(3)
    ends.samples.append(DATA[5])
    ends.flow()
    assert e.AgainArrived(3, DATA[3]) in ends.events and ends.stored == DATA, "the stream goes on beside it"


@pytest.mark.parametrize("seq, first", [(1, 2), (5, 0), (9, 0)])
def test_what_the_producer_does_not_have_is_said(seq, first):
    ends = streaming(first)
    ends.trainer.again(seq)
    ends.flow()
    assert ends.events[-1] == e.AgainArrived(seq, b"") and ends.producer.counters["again"] == 0


@pytest.mark.parametrize("lost", [False, True])
def test_one_that_the_producer_cannot_read_either_waits_until_it_is_made_again_or_lost(lost):
    ends = streaming()
    read = ends.producer._read_sample
    def broken(seq: int) -> bytes:
        raise CorruptError(f"sample {seq} was put aside")
    ends.producer._read_sample = broken
    before = len(ends.events)
    ends.trainer.again(2)
    ends.flow()
    assert len(ends.events) == before and ends.producer.unread == 2 and ends.producer.state is State.STREAMING
    ends.producer.lost(3)
    if lost:
        ends.producer.lost(2)
    else:
        ends.producer._read_sample = read
    ends.flow()
    assert ends.events[before:] == [e.AgainArrived(2, b"" if lost else DATA[2])]
    assert ends.trainer.again(1), "the question is answered: another may be asked"


def test_what_neither_end_may_say():
    ends = streaming()
    with pytest.raises(PeerError, match="sample 2 again, which was not asked for"):
        ends.trainer.receive(e.SampleAgain(2, b"x"), 0.0)
    ends.producer.receive(e.SampleGet(1), 0.0)
    with pytest.raises(PeerError, match="asks for sample 2 again while 1 is asked"):
        ends.producer.receive(e.SampleGet(2), 0.0)


@pytest.fixture
def kept(tmp_path):
    with SampleStore(tmp_path / "kept") as store:
        store.begin(samples.STREAM, samples.CONTRACT.to_dict(), 0)
        for seq in range(4):
            store.append(seq, samples.sample(seq))
        yield store


def spoil(store: SampleStore, seq: int) -> None:
    data = bytearray(store.path(seq).read_bytes())
    data[len(data) // 2] ^= 4
    store.path(seq).write_bytes(data)


@pytest.mark.parametrize("readonly", [False, True])
def test_a_store_takes_a_damaged_sample_back_and_nothing_else(kept, readonly):
    spoil(kept, 1)
    store = SampleStore(kept.folder, readonly=True) if readonly else kept
    with pytest.raises(CorruptError):
        store.read(1)
    for wrong in (samples.sample(2), samples.sample(1)[:-1], b""):
        with pytest.raises(CorruptError):
            store.restore(1, wrong)
    with pytest.raises(KeyError, match="4"):
        store.restore(4, samples.sample(4))
    store.restore(1, samples.sample(1))
    assert store.read(1) == samples.sample(1) and (store.first, store.next) == (0, 4)
    assert sorted(p.name for p in kept.folder.glob("*.hs*")) == [f"{seq:012d}.hs" for seq in range(4)]
    assert store.bytes_used == sum(len(samples.sample(seq)) for seq in range(4))


def test_over_real_sockets_a_follower_may_ask_too(serve, address, tmp_path):
    store = Store(5)
    producer = serve(store)
    box, arm = Box(address, tmp_path), Box(address, tmp_path, "box.arm", follower=True, contract=CONTRACT)
    assert box.link.again(2, 0.0) is None
    with box.link, arm.link:
        wait_for(lambda: len(box.samples) == 5, box.link, producer)
        news(arm.link, LinkUp)
        assert box.link.again(2, 20.0) == store.data[2] and arm.link.again(4, 20.0) == store.data[4]
        assert box.link.again(7, 20.0) == b"" and len(box.samples) == 5


def test_the_answer_to_a_question_that_was_given_up_is_not_taken_for_this_one(address, tmp_path, monkeypatch):
    link = Box(address, tmp_path).link
    monkeypatch.setattr(link._worker, "do", lambda _order: [link._answer.put(e.AgainArrived(*said)) for said in ((2, b""), (4, b"four"))])
    assert link.again(4, 5.0) == b"four"


@pytest.mark.parametrize("stops", [False, True])
def test_a_trainers_inbox_mends_its_store_waits_or_says_what_to_do(serve, address, tmp_path, kept, monkeypatch, caplog, stops):
    from trainer import inbox
    from trainer.config import Run
    producer = serve(kept, contract=samples.CONTRACT)
    monkeypatch.setattr(inbox, "TrainerLink", _quick(inbox.TrainerLink))
    stop = service.Stop()
    with inbox.Inbox(Run(producer=address, state_dir=tmp_path / "t"), "r", stop) as box:
        wait_for(lambda: box.store.next == 4, box.link, producer)
        spoil(box.store, 2)
        with pytest.raises(CorruptError) as found:
            box.store.sample(2)
        box.mend(2, found.value)
        assert box.store.read(2) == samples.sample(2) and "sample 2 came again and is whole" in caplog.text and box.counters()["mended"] == 1
        kept.drop_below(2)
        with pytest.raises(UserError, match="sample 1 of .* is damaged, and the producer does not have it any more: .*--samples 1, or move"):
            box.mend(1, found.value)
        producer.close()
        monkeypatch.setattr(inbox, "MEND_S", 0.1)
        spoil(box.store, 3)
        turns = []
        def turn() -> None:
            """The producer is away for three turns of the wait; then it is back, or this trainer is to stop."""
            turns.append(1)
            if len(turns) == 3:
                assert f"sample 3 is damaged here, and {address} does not answer; waiting" in caplog.text
                if stops:
                    stop.set()
                else:
                    serve(kept, contract=samples.CONTRACT)
        stop.turn = turn
        if stops:
            with pytest.raises(service.Stopped):
                box.mend(3, found.value)
        else:
            box.mend(3, found.value)
            assert box.store.read(3) == samples.sample(3) and box.mended == 2 and len(turns) >= 3
            assert [type(item) for item in box.news()][-2:] == [LinkDown, LinkUp], "what the link said during the wait is not lost"


def _quick(link):
    return lambda *words, **options: link(*words, **options, timing=TIMING)


# ---- the producer's disk

def hello(next_seq: int, newest: bytes | None) -> Cursor:
    return Cursor("s1", next_seq, CONTRACT, newest and sha(newest))


@pytest.mark.parametrize("next_seq, made, welcome", [(6, 6, False), (6, 7, False), (5, 6, True), (7, 6, None)])
def test_a_trainer_that_has_what_is_made_again_comes_back_later(next_seq, made, welcome):
    """The stream ends before 5; samples below `made` were acknowledged once.  None: refused for good."""
    facts = Ends([]).facts
    said = judge(e.Hello("a", "s1", next_seq, CONTRACT.to_dict(), True), facts, 0, 5, made)
    assert type(said) is {True: type(None), False: e.Bye, None: e.Refuse}[welcome]
    if welcome is False:
        assert f"samples 5 to {next_seq - 1} were damaged here and are made again" in said.reason


def test_it_is_told_so_and_joins_once_they_are_there():
    ends = Ends(DATA[:4])
    ends.stored, ends.stream = DATA[:5], "s1"
    ends.producer.stream_is(0, 4, False, 5)
    ends.connect(cursor=hello(5, DATA[4]))
    ends.producer.stream_is(0, 4, False, 5)
    [greeting] = ends.trainer.to_send(0.0)
    assert isinstance(ends.producer.receive(greeting, 0.0)[0], e.Refused)
    [said] = ends.producer.to_send(0.0)
    assert isinstance(said, e.Bye) and isinstance(ends.trainer.receive(said, 0.0)[0], e.LinkLost)
    ends.samples.append(DATA[4])
    ends.connect(cursor=hello(5, DATA[4]))
    ends.samples.append(DATA[5])
    ends.flow()
    assert ends.stored == DATA and ends.trainer.state is State.STREAMING


@pytest.mark.parametrize("next_seq, newest, refused", [
    (3, DATA[2], False), (3, DATA[1], True), (5, DATA[4], False), (5, b"another", True), (0, None, False), (3, None, False),
    (2, DATA[0], False)])                                                 # sample 1 is gone from the producer: nobody can tell
def test_two_ends_that_differ_in_the_newest_sample_are_not_one_stream(next_seq, newest, refused):
    ends = Ends(DATA[:5], first=0 if next_seq != 2 else 2)
    ends.connect(cursor=hello(next_seq, newest))
    ends.flow()
    said = [x for x in ends.events if isinstance(x, e.Refused)]
    assert bool(said) is refused and len(ends.stored) == (0 if refused else 5 - next_seq)
    if refused:
        assert f"store/{next_seq - 1:012d}.hs" in said[0].reason and not said[0].fields


def test_a_newest_sample_that_rots_on_the_producer_is_made_again_and_the_trainer_goes_on(serve, address, tmp_path, kept):
    box = SampleStore(tmp_path / "box")
    def run(producer, until):
        def cursor() -> Cursor:
            return Cursor(box.stream or None, box.next, samples.CONTRACT if box.stream else None, box.newest())
        link = TrainerLink(address, "box", cursor=cursor, on_welcome=lambda w, c: box.stream or box.begin(w.stream, w.contract, w.first_seq),
                           on_sample=box.append, assets_dir=tmp_path / "a", timing=TIMING)
        with link:
            return until(link)
    producer = serve(kept, contract=samples.CONTRACT)
    run(producer, lambda link: wait_for(lambda: producer.lowest_acked() == 3, link, producer))
    producer.close()
    spoil(kept, 3)
    kept.close()
    with SampleStore(kept.folder) as again:
        assert again.next == 3
        producer = serve(again, contract=samples.CONTRACT)
        def goes_on(link):
            wait_for(lambda: "samples 3 to 3 were damaged here and are made again" in link.snapshot()["state"], link, producer)
            again.append(3, samples.sample(3))
            again.append(4, samples.sample(4))
            producer.samples_ready()
            wait_for(lambda: box.next == 5, link, producer)
        run(producer, goes_on)
        assert [box.read(seq) for seq in range(5)] == [samples.sample(seq) for seq in range(5)] and box.duplicates == 0
        producer.close()
    spoil(again, 4)
    with SampleStore(again.folder) as other:
        other.append(4, samples.sample(4, tokens=5))                      # made again, and otherwise
        producer = serve(other, contract=samples.CONTRACT)
        assert "sample 4 of the trainer is not sample 4 of this stream" in run(producer, lambda link: news(link, Refused)).reason
    box.close()
