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


def test_a_report_about_another_checkpoint_and_a_refused_one_are_loud(made):
    run, evals, _, write = made
    write(5)
    with pytest.raises(RuntimeError, match="another checkpoint"):
        evals.arrived(5, result(run, 5) | {"checkpoint": "0" * 64}, None)
    with pytest.raises(RuntimeError, match="step-00000005: no space"):
        evals.arrived(5, {}, "no space")
