"""The two state machines: every sample once and in order whatever is cut, credit kept, cursors and contracts judged, transfers resumed."""
import dataclasses
import hashlib
import random
from collections import Counter

import pytest
from ends import CONTRACT, OTHER, TIMING, Ends
from hypothesis import given, settings, strategies as st

from common.errors import CorruptError, PeerError
from protocol import events as e, rules
from protocol.frames import CHUNK
from protocol.peer_session import judge
from protocol.rules import MAX_IN_FLIGHT, MOVES, State, backoff, may_send, move
from protocol.transfer import OUTSTANDING, PartFile, Pull, offer_id

SHA = "ab" * 32


def sample(n: int, size: int) -> bytes:
    return (b"%d:" % n).ljust(size, b".")


# ---- samples

ACTIONS = st.lists(st.sampled_from(["say", "up", "down", "down", "make", "cut", "trainer restarts", "producer restarts", "pause", "resume"]), max_size=120)


@given(ACTIONS, st.lists(st.integers(3, 400), min_size=30, max_size=30), st.sampled_from([50, 300, 5000]), st.integers(0, 3))
@settings(max_examples=120)
def test_every_sample_arrives_once_and_in_order_whatever_is_cut(actions, sizes, window, first):
    made = iter([sample(n, size) for n, size in enumerate(sizes)])
    ends = Ends([next(made) for _ in range(first + 2)], window=window, first=first)
    for action in actions:
        match action:
            case "say": ends.say()
            case "up": ends.hear_up()
            case "down": ends.hear_down()
            case "make": ends.samples += [s for s in [next(made, None)] if s]
            case "pause": ends.trainer.receiving(False)
            case "resume": ends.trainer.receiving(True)
            case _: ends.connect()                        # what was on the cable is lost; both stores stay
        on_the_way = sum(len(parts[1]) for parts in ends.down if b"SampleData" in parts[0])
        samples_there = sum(b"SampleData" in parts[0] for parts in ends.down)
        assert on_the_way <= window or samples_there == 1
        assert ends.stored == ends.samples[first:first + len(ends.stored)]
    ends.connect()
    ends.flow()
    assert ends.stored == ends.samples[first:] and ends.start == first
    assert ends.producer.acked == len(ends.samples) - 1


def test_a_paused_trainer_gets_what_was_granted_and_no_more():
    ends = Ends([sample(n, 100) for n in range(40)], window=1000)
    for _ in range(4):                                    # Hello, Welcome, credit, first samples
        ends.say(), ends.hear_up(), ends.hear_down()
    ends.trainer.receiving(False)
    granted = len(ends.stored) * 100 + ends.trainer.credit
    ends.flow()
    assert len(ends.stored) * 100 == granted < 4000 and ends.trainer.credit == 0
    ends.trainer.receiving(True)
    ends.flow()
    assert len(ends.stored) == 40


def test_a_sample_larger_than_the_window_passes_alone():
    ends = Ends([sample(0, 10), sample(1, 5000), sample(2, 5000), sample(3, 10)], window=100)
    ends.flow()
    assert ends.stored == ends.samples


@pytest.mark.parametrize("credit, size, in_flight, may", [
    (10, 10, 5, True), (9, 10, 5, False), (9, 10, 0, True), (1, 10, 0, True), (0, 10, 0, False), (0, 1, 0, False), (-5, 1, 0, False), (10, 11, 1, False)])
def test_credit(credit, size, in_flight, may):
    assert may_send(credit, size, in_flight) is may


def test_a_peer_that_grants_everything_and_acknowledges_nothing_holds_a_bounded_amount(monkeypatch):
    monkeypatch.setattr("protocol.peer_session.MAX_IN_FLIGHT", 1000)
    ends = Ends([sample(n, 300) for n in range(40)])
    ends.say(), ends.hear_up(), ends.say()
    ends.producer.receive(e.Credit(1 << 50), 0.0)
    sent = [m for _ in range(50) for m in ends.producer.to_send(0.0) if isinstance(m, e.SampleData)]
    assert [m.seq for m in sent] == [0, 1, 2] and MAX_IN_FLIGHT < 1 << 30
    ends.producer.receive(e.Ack(1), 0.0)
    assert [m.seq for _ in range(50) for m in ends.producer.to_send(0.0) if isinstance(m, e.SampleData)] == [3, 4]


# ---- joining

def answer(ends: Ends, **changes):
    ends.connect(**changes)
    ends.flow()
    return [x for x in ends.events if isinstance(x, (e.Refused, e.Joined, e.Welcomed))]


@pytest.mark.parametrize("next_seq, words", [(1, "samples 1 to 2 are gone here; this stream holds 3 to 9"),
                                             (2, "samples 2 to 2 are gone here; this stream holds 3 to 9"),
                                             (11, "samples 10 to 10 were never made here; this stream holds 3 to 9")])
def test_a_cursor_out_of_range_is_refused_naming_the_range(next_seq, words):
    ends = Ends([b"x"] * 10, first=3)
    ends.connect(cursor=e.Cursor("s1", next_seq, CONTRACT))
    ends.flow()
    refused = [x for x in ends.events if isinstance(x, e.Refused)]
    assert len(refused) == 2 and {r.reason for r in refused} == {words}          # the producer's shell and the trainer's
    assert ends.trainer.state is ends.producer.state is State.CLOSED and not ends.stored


@pytest.mark.parametrize("next_seq", [3, 10])
def test_a_cursor_at_either_end_of_the_range_is_welcome(next_seq):
    assert judge(e.Hello("a", "s1", next_seq, CONTRACT.to_dict(), True), Ends([]).facts, 3, 10) is None


def test_a_follower_is_judged_by_contract_and_stream_but_not_by_cursor():
    facts = Ends([]).facts
    assert judge(e.Hello("a", "s1", 0, CONTRACT.to_dict(), False), facts, 3, 10) is None
    assert judge(e.Hello("a", "s2", 0, CONTRACT.to_dict(), False), facts, 3, 10).fields == ("stream: s1 -> s2",)


def test_another_contract_or_stream_is_refused_by_the_producer_naming_the_fields():
    refused = answer(Ends([b"x"]), cursor=e.Cursor("s1", 0, OTHER))[0]
    assert [f.split(":")[0] for f in refused.fields] == ["target", "taps"] and "toy" in refused.fields[0] and "another" in refused.fields[0]
    refused = answer(Ends([b"x"]), cursor=e.Cursor("s9", 0, CONTRACT))[0]
    assert refused.fields == ("stream: s1 -> s9",)


def test_the_trainer_judges_the_welcome_itself_and_names_the_fields():
    def welcomed(cursor, contract=CONTRACT, stream="s1", first=0, end=5):
        ends = Ends([])
        ends.connect(cursor=cursor)
        ends.trainer.to_send(0.0)
        return ends.trainer.receive(e.Welcome(contract.to_dict(), stream, first, end, (), {}), 0.0)
    ours = e.Cursor("s1", 2, CONTRACT)
    assert welcomed(ours)[0].start_seq == 2
    assert welcomed(e.Cursor(None, 0, None), first=3)[0].start_seq == 3
    with pytest.raises(e.Differs) as caught:
        welcomed(ours, contract=OTHER)
    assert [f.split(":")[0] for f in caught.value.fields] == ["target", "taps"]
    with pytest.raises(e.Differs, match="stream: s1 -> s2"):
        welcomed(ours, stream="s2")
    with pytest.raises(PeerError, match="needs 2"):
        welcomed(ours, first=3)
    with pytest.raises(CorruptError, match="contract"):
        Ends([]).producer.receive(e.Hello("a", None, 0, {"target": "x"}, True), 0.0)


# ---- what is not allowed

def streaming() -> Ends:
    ends = Ends([sample(n, 10) for n in range(3)])
    ends.flow()
    return ends


@pytest.mark.parametrize("message, words", [
    (e.SampleData(5, b"x"), "samples 3 to 4 are missing"), (e.SampleData(2, b"x"), "sample 2 came again; 3 is next"),
    (e.AssetData(SHA, 0, b"x"), "not asked for"), (e.Welcome({}, "s1", 0, 0, (), {}), "while streaming"), (e.Refuse("x", ()), "while streaming")])
def test_what_the_producer_may_not_say(message, words):
    with pytest.raises(PeerError, match=words):
        streaming().trainer.receive(message, 0.0)


@pytest.mark.parametrize("message, words", [
    (e.Ack(3), "2 is the newest sent"), (e.Ack(1), "2 was last"), (e.Credit(1), "credit went back"), (e.AssetGet(SHA, 0, 1), "on offer"),
    (e.Hello("a", None, 0, None, True), "while streaming"), (e.CheckpointData("0f" * 16, "config.json", 0, b"x"), "not asked for")])
def test_what_the_trainer_may_not_say(message, words):
    with pytest.raises(PeerError, match=words):
        streaming().producer.receive(message, 0.0)


def test_samples_without_credit_are_refused():
    ends = Ends([sample(n, 10) for n in range(3)], window=100)
    ends.flow()
    ends.trainer.receiving(False)
    ends.trainer.receive(e.SampleData(3, b"x" * 100), 0.0)
    with pytest.raises(PeerError, match="without credit"):
        ends.trainer.receive(e.SampleData(4, b"x"), 0.0)


def test_every_move_outside_the_table_is_an_error_and_ours_a_bug():
    legal = Counter(role for role in MOVES for state in State for kind in MOVES[role][state])
    assert legal == {"trainer": 10, "producer": 11}        # a move added or lost is meant, not slipped in
    for role, kinds in (("trainer", (e.Hello, e.Ack)), ("producer", (e.Welcome, e.SampleData))):
        assert all(move(role, State.CLOSED, kind.__new__(kind)) is None for kind in kinds)
    ends = Ends([])
    ends.trainer.offer(e.CheckpointOffer("0f" * 16, "r", 1, SHA, (), {}))         # before Welcome
    with pytest.raises(e.LocalError, match="CheckpointOffer while greeting"):
        ends.trainer.to_send(0.0)
    with pytest.raises(e.LocalError, match="stored 0"):
        Ends([]).trainer.stored(0)


# ---- time

def test_heartbeats_keep_a_quiet_link_and_silence_ends_it():
    ends = streaming()
    for _ in range(20):
        ends.now += TIMING.interval
        ends.flow()
        assert ends.trainer.tick(ends.now) == ends.producer.tick(ends.now) == []
    ends.now += TIMING.limit
    assert ends.trainer.tick(ends.now) == ends.producer.tick(ends.now) == []
    ends.now += 0.01
    for end in (ends.trainer, ends.producer):
        (lost,) = end.tick(ends.now)
        assert isinstance(lost, e.LinkLost) and "nothing heard" in lost.reason
        assert end.state is State.CLOSED and end.to_send(ends.now) == [] and end.tick(ends.now) == []


def test_an_idle_producer_is_not_a_lost_one_and_its_end_is_told_at_once():
    ends = streaming()
    assert not ends.trainer.ended and ends.trainer.producer_next == 3
    ends.ended = True
    ends.flow()                                           # no time passed
    assert ends.trainer.ended
    ends.samples.append(b"one more")
    ends.ended = False
    ends.flow()
    assert not ends.trainer.ended and ends.trainer.producer_next == 4


def test_bye_is_the_last_word():
    ends = streaming()
    ends.trainer.close("done")
    ends.flow()
    assert ends.events[-1] == e.LinkLost("the trainer said: done") and ends.trainer.state is ends.producer.state is State.CLOSED


def test_backoff_doubles_to_a_cap_with_bounded_jitter():
    for attempt in (*range(1, 12), 10_000):
        waits = [backoff(attempt, random.Random(seed)) for seed in range(50)]
        full = min(8.0, 0.25 * 2 ** (attempt - 1)) if attempt < 100 else 8.0
        assert all(full / 2 <= w <= full for w in waits) and len(set(waits)) > 40
    assert backoff(3, random.Random(1)) == backoff(3, random.Random(1))


# ---- files

@given(st.integers(0, 5 * CHUNK), st.integers(0, 5 * CHUNK))
@settings(max_examples=50)
def test_a_pull_asks_for_each_missing_byte_once_and_is_done_with_the_last(size, have):
    have = min(size, have)
    pull, at, waiting = Pull(size, have), have, []
    while True:
        waiting += pull.asks()
        assert len(waiting) <= OUTSTANDING
        if not waiting:
            break
        offset, length = waiting.pop(0)
        assert offset == at
        at += length
        assert pull.arrived(offset, length) is (at == size)
    assert at == size


def test_a_pull_takes_only_what_was_asked():
    pull = Pull(3 * CHUNK, 0)
    pull.asks()
    for wrong in ((CHUNK, CHUNK), (0, 1), (0, CHUNK + 1)):
        with pytest.raises(PeerError, match="asked next"):
            pull.arrived(*wrong)


def pull_assets(ends: Ends, got: dict[str, bytearray], steps: int) -> None:
    """Fetch every asset as a shell would; stop after `steps` messages."""
    seen = len(ends.events)
    for _ in range(steps):
        ends.say(), ends.hear_up(), ends.hear_down()
        for event in ends.events[seen:]:
            if isinstance(event, e.Welcomed):
                for info in event.welcome.assets:
                    if len(got[info.sha256]) < info.size:
                        ends.trainer.pull(info.sha256, info.size, len(got[info.sha256]))
            if isinstance(event, e.Chunk):
                assert event.offset == len(got[event.key[0]])
                got[event.key[0]] += event.data
                assert event.last == (got[event.key[0]] == ends.blobs[event.key[0]])
        seen = len(ends.events)


def test_assets_resume_after_each_cut_and_nothing_comes_twice():
    rng = random.Random(0)
    blobs = {hashlib.sha256(b).hexdigest(): b for b in (rng.randbytes(7 * CHUNK + 5), rng.randbytes(CHUNK))}
    ends = Ends([sample(n, 50) for n in range(30)], assets=blobs)
    got = {sha: bytearray() for sha in blobs}
    cuts = 0
    while got != blobs:
        pull_assets(ends, got, 9)
        ends.connect()
        cuts += 1
    assert cuts > 2 and sum(len(x.data) for x in ends.events if isinstance(x, e.Chunk)) == sum(map(len, blobs.values()))


def test_one_chunk_a_call_and_no_more_requests_than_agreed():
    sha = hashlib.sha256(b"y" * 100).hexdigest()
    ends = Ends([], assets={sha: b"y" * 100})
    ends.flow()
    for n in range(OUTSTANDING):
        ends.producer.receive(e.AssetGet(sha, n, 1), 0.0)
    assert [m.offset for m in ends.producer.to_send(0.0)] == [0]
    ends.producer.receive(e.AssetGet(sha, 99, 1), 0.0)
    with pytest.raises(PeerError, match="more than"):
        ends.producer.receive(e.AssetGet(sha, 0, 1), 0.0)
    with pytest.raises(PeerError, match="asks for 99"):
        ends.producer.receive(e.AssetGet(sha, 99, 2), 0.0)


def offer(step: int, blob: bytes, run: str = "run") -> e.CheckpointOffer:
    files = (e.FileInfo("model.safetensors", len(blob), hashlib.sha256(blob).hexdigest()),)
    return e.CheckpointOffer(offer_id(run, step, files), run, step, CONTRACT.hash, files, {})


def test_a_newer_checkpoint_takes_the_place_of_one_under_way():
    ends, (old, new) = streaming(), (b"o" * (9 * CHUNK), b"n" * (2 * CHUNK))
    first, second = offer(1, old), offer(2, new)
    got = bytearray()
    def pump(rounds: int) -> None:
        for _ in range(rounds):
            seen = len(ends.events)
            ends.say(), ends.hear_up(), ends.hear_down()
            for event in ends.events[seen:]:
                if isinstance(event, e.Offered):
                    ends.producer.pull(event.offer, {"model.safetensors": 0})
                if isinstance(event, e.Chunk) and event.key[0] == second.offer:
                    got.extend(event.data)
    ends.offered[first.offer, "model.safetensors"] = old
    assert ends.trainer.offer(first) == []
    pump(6)
    ends.offered[second.offer, "model.safetensors"] = new
    assert ends.trainer.offer(second) == [first.offer]
    pump(40)
    assert bytes(got) == new
    assert ends.trainer.counters["stale_requests"] + ends.producer.counters["stale_chunks"] > 0
    ends.producer.report(second.offer, {"tau": 2.0}, None)
    ends.producer.report(first.offer, {"tau": 1.0}, None)
    ends.flow()
    assert [x for x in ends.events if isinstance(x, e.ReportArrived)] == [e.ReportArrived(second.offer, "run", 2, {"tau": 2.0}, None)]
    assert ends.trainer.counters["stale_reports"] == 1


def test_a_checkpoint_of_another_contract_is_answered_with_the_difference():
    ends = streaming()
    ends.trainer.offer(dataclasses.replace(offer(1, b"x"), contract_hash=SHA))
    ends.flow()
    (report,) = [x for x in ends.events if isinstance(x, e.ReportArrived)]
    assert report.error == f"contract: {CONTRACT.hash[:12]} -> {SHA[:12]}" and not any(isinstance(x, e.Offered) for x in ends.events)


def test_offers_remembered_are_few():
    ends = streaming()
    gone = [o for n in range(rules.MAX_OFFERS + 3) for o in ends.trainer.offer(offer(n, b"x", run=f"run{n}"))]
    assert gone == [offer(n, b"x", run=f"run{n}").offer for n in range(3)]


def test_a_part_file_resumes_and_is_believed_only_with_the_right_sum(tmp_path):
    data = random.Random(1).randbytes(1000)
    info = e.FileInfo("embedding", 1000, hashlib.sha256(data).hexdigest())
    part = PartFile(tmp_path / "a", info)
    part.write(0, data[:400])
    part.close()
    part = PartFile(tmp_path / "a", info)
    assert part.have == 400
    part.write(400, data[400:])
    part.finish()
    assert (tmp_path / "a").read_bytes() == data and [p.name for p in tmp_path.iterdir()] == ["a"]
    part = PartFile(tmp_path / "b", info)
    part.write(0, data[:-1] + b"?" if data[-1:] != b"?" else data[:-1] + b"!")
    with pytest.raises(CorruptError, match="embedding: sha256"):
        part.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    (tmp_path / "c.part").write_bytes(b"z" * 1001)
    assert PartFile(tmp_path / "c", info).have == 0
