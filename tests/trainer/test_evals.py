"""Which checkpoint is offered, when the producer is slower than the checkpoints come, and when the link is lost."""
import pytest

from common import metrics
from common.drafter.checkpoint import checkpoint_hash
from tests.trainer.small import captures, loop
from trainer.evals import Evals, step_of


class Link:
    """Stands for the inbox: what was offered, in order."""

    def __init__(self) -> None:
        self.up, self.hopeless, self.offers = True, False, []

    def offer(self, folder, *, step, record) -> None:
        assert record["step"] == step == step_of(folder)
        self.offers.append(step)


@pytest.fixture
def made(tmp_path):
    """A run, its evaluations, a link, and write(step): a checkpoint."""
    run, link = loop(tmp_path / "run", steps=20, samples=captures(4)).run, Link()

    def write(step: int) -> None:
        run.step = step
        run.checkpoint()
        evals.offer()

    evals = Evals(run, link, dtype="float32")
    return run, evals, link, write


def result(run, step: int) -> dict:
    return {"checkpoint": checkpoint_hash(run.folder / "checkpoints" / f"step-{step:08d}"), "tau": 1.5, "tau_simulated": 1.5, "tau_interval": [1.0, 2.0],
            "eta": 1.0, "identical": 1, "prompts": 1}


def test_a_slow_producer_measures_what_it_has_then_the_newest_and_the_rest_is_counted(made):
    run, evals, link, write = made
    for step in (5, 10, 15, 20):
        write(step)
    assert link.offers == [5] and evals.skipped == 0
    evals.arrived(5, result(run, 5), None)
    assert link.offers == [5, 20] and step_of(evals.waiting) == 20
    evals.arrived(20, result(run, 20), None)
    assert link.offers == [5, 20] and evals.waiting is None and evals.skipped == 2
    assert [row["step"] for row in metrics.read(run.folder / "metrics.jsonl", "eval")] == [5, 20]
    assert Evals(run, link, dtype="float32").waiting is None


def test_a_lost_link_asks_again_with_the_newest(made):
    run, evals, link, write = made
    write(5)
    evals.link_lost()
    link.up = False
    write(10)
    assert link.offers == [5]
    link.up = True
    evals.offer()
    evals.offer()
    assert link.offers == [5, 10]


def test_with_every_none_is_skipped_and_the_oldest_comes_first(made):
    run, _, link, _ = made
    evals = Evals(run, link, dtype="float32", every=True)
    for step in (5, 10, 15):
        run.step = step
        run.checkpoint()
        evals.offer()
    for step in (5, 10, 15):
        assert link.offers[-1] == step == step_of(evals.waiting)
        evals.arrived(step, result(run, step), None)
    assert link.offers == [5, 10, 15] and evals.waiting is None and evals.skipped == 0


def test_what_was_passed_over_is_measured_when_it_is_asked_for_later(made):
    run, evals, link, write = made
    for step in (5, 10, 15):
        write(step)
    evals.arrived(5, result(run, 5), None)
    evals.arrived(15, result(run, 15), None)
    again = Evals(run, link, dtype="float32", every=True)
    assert [step_of(folder) for folder in again.queue] == [10] and Evals(run, link, dtype="float32").queue == [] and evals.skipped == 1
    again.offer()
    again.arrived(10, result(run, 10), None)
    assert again.last["step"] == 15, "the last is of the latest checkpoint, not the latest result"


def test_an_alarm_is_logged_counted_shown_and_found_again(made, caplog):
    run, evals, link, write = made
    for step, simulated, offline, alarms in ((5, 1.5, 1.6, 0), (10, 1.5, 3.0, 1), (15, 2.5, 1.6, 2), (20, 1.5, None, 2)):
        run.step = step
        if offline:
            run.metrics.write("offline", step, tau=offline, tau_interval=[offline - 0.1, offline + 0.1])
        write(step)
        evals.arrived(step, result(run, step) | {"tau_interval": [1.4, 1.6], "tau_simulated": simulated}, None)
        assert evals.alarms == alarms == caplog.text.count("training and decoding part")
        assert ("ALARM" in evals.line()) == (step in (10, 15))
    rows = metrics.read(run.folder / "metrics.jsonl", "alarm")
    assert [row["step"] for row in rows] == [10, 15] and "held aside" in rows[0]["reasons"][0] and "same texts" in rows[1]["reasons"][0]
    assert Evals(run, link, dtype="float32").alarms == 2


def test_what_waits_is_said(made):
    run, evals, _, write = made
    write(5)
    assert evals.line() == "not measured yet; 1 checkpoint waits for the producer"


def test_a_report_about_another_checkpoint_and_a_refused_one_are_loud(made):
    run, evals, _, write = made
    write(5)
    with pytest.raises(RuntimeError, match="another checkpoint"):
        evals.arrived(5, result(run, 5) | {"checkpoint": "0" * 64}, None)
    with pytest.raises(RuntimeError, match="step-00000005: no space"):
        evals.arrived(5, {}, "no space")
