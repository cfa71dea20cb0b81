"""A trainer that never comes back is named with what it holds up; `hsprod forget` releases it, and nothing else does."""
import time

import pytest

from common.errors import UserError
from common.status import Board
from producer import forgetting
from protocol.producer_link import ProducerLink
from protocol.standing import Connected, sole, standing
from protocol.subscribers import FORGET, Subscribers
from tests.daemons.processes import free_port
from tests.protocol.ends import CONTRACT


class Store:
    stream, first, next = "s1", 0, 10

    def bytes_between(self, first: int, end: int) -> int:
        return 100 * max(0, end - first)


@pytest.fixture
def state(tmp_path):
    """A producer's state folder in which two trainers are known, one of them far behind."""
    folder = tmp_path / "streams" / "abc"
    known = Subscribers(folder / "subscribers.json", "s1")
    known.join("old", 2, 0.0)
    known.join("box", 8, 0.0)
    return tmp_path


def link(state, address=None):
    folder = state / "streams" / "abc"
    return ProducerLink(address or f"tcp://127.0.0.1:{free_port()}", Store(), CONTRACT.to_dict(), {}, cursors=folder / "subscribers.json",
                        inbox_dir=folder / "checkpoints")


def until(condition) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_only_one_trainer_lacks():
    assert sole({}, 10) == {} and sole({"a": 4}, 10) == {"a": (5, 10)}
    assert sole({"a": 4, "b": 7, "c": 9}, 10) == {"a": (5, 8)}
    first, end = sole({"a": 4, "b": 4}, 10)["a"]
    assert first == end, "two that are equally far behind hold up nothing alone"


def test_the_standing_of_each():
    found = standing({"old": 2, "box": 8}, {"old": 1000.0}, {"box": Connected(5, 0.25, {"samples": 3}), "arm": Connected(0, 0.1, {})}, 10,
                     Store().bytes_between, 1060.0)
    assert {k: found["old"][k] for k in ("connected", "lag", "lag_bytes", "sole_bytes", "away_s")} == {
        "connected": False, "lag": 7, "lag_bytes": 700, "sole_bytes": 600, "away_s": 60.0}
    assert (found["box"]["lag"], found["box"]["sole_bytes"], found["box"]["away_s"], found["box"]["samples"]) == (1, 0, None, 3)
    assert found["arm"]["follower"] and found["arm"]["lag"] == 0


def test_a_running_producer_forgets_at_once_and_a_restart_remembers_that_it_did(state):
    with link(state) as producer:
        Board(state / "status.json").show({"trainers": producer.snapshot()["peers"]}, time.time())
        assert producer.lowest_acked() == 2 and producer.snapshot()["peers"]["old"]["sole_bytes"] == 600
        assert forgetting.forget(state, "old", patience=30.0) == "old is forgotten: no sample is kept for it any more"
        assert producer.lowest_acked() == 8 and set(producer.snapshot()["peers"]) == {"box"}
        until(lambda: not any((state / "streams" / "abc" / FORGET).iterdir()))
        assert producer.snapshot()["counters"]["forgotten"] == 1
    assert link(state).lowest_acked() == 8


def test_a_producer_that_does_not_run_forgets_when_it_starts(state):
    assert "hsprod serve does not run; old will be forgotten" in forgetting.forget(state, "old")
    assert Subscribers(state / "streams" / "abc" / "subscribers.json", "s1").lowest() == 2, "until then nothing has changed"
    with link(state) as producer:
        until(lambda: producer.lowest_acked() == 8)


def test_nobody_by_mistake(state):
    with pytest.raises(UserError, match="no trainer 'odl' is known.*known: box, old"):
        forgetting.forget(state, "odl")
    with pytest.raises(UserError, match="no trainer '../../x'"):
        forgetting.forget(state, "../../x")
    Board(state / "status.json").show({"trainers": {"box": {"connected": True}}}, time.time())
    with pytest.raises(UserError, match="box is connected"):
        forgetting.forget(state, "box")
    assert not (state / "streams" / "abc" / FORGET).exists()


def test_a_request_stays_until_the_cursors_are_on_disk(state, monkeypatch):
    import protocol.subscribers as cursors
    real, broken = cursors.write_whole, [True]
    def write(path, parts):
        if broken[0]:
            raise OSError(28, "No space left on device")
        real(path, parts)
    monkeypatch.setattr(cursors, "write_whole", write)
    (state / "streams" / "abc" / FORGET).mkdir()
    request = state / "streams" / "abc" / FORGET / "old"
    request.touch()
    with link(state) as producer:
        until(lambda: producer.snapshot()["counters"]["unsaved_cursors"] > 0)
        assert request.exists()
        broken[0] = False
        until(lambda: not request.exists())
    assert link(state).lowest_acked() == 8


def test_nothing_else_lets_go(state):
    """Not a restart."""
    for _ in range(3):
        with link(state) as producer:
            time.sleep(0.1)
            assert producer.lowest_acked() == 2
