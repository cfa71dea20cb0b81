"""A run that is stopped, killed or restarted is the run that was not, bit for bit (pitfalls C1, C2)."""
import json

import pytest
import torch

from common import metrics, service
from common.drafter import checkpoint
from common.errors import UserError
from trainer.run import Run
from tests.trainer.small import Listed, captures, loop
from trainer.arms import ARMS
from trainer.batch import make_batch

SAMPLES = captures(12)


def weights(run: Run) -> dict:
    return {name: value.clone() for name, value in run.drafter.state_dict().items()}


def whole(tmp_path, **over) -> dict:
    made = loop(tmp_path / "whole", steps=20, samples=SAMPLES, **over)
    made.go()
    return weights(made.run)


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


class StopAt:
    """Truthy from its n-th question on."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self, _seconds: float) -> bool:
        return bool(self)


@pytest.mark.parametrize("questions", [1, 9, 14])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stop_and_go_on_equals_never_stopped(tmp_path, questions, optimizer):
    plan = {"optimizer": optimizer}
    expected = whole(tmp_path, plan=plan)
    first = loop(tmp_path / "run", steps=20, samples=SAMPLES, stop=StopAt(questions), plan=plan)
    first.go()
    assert 0 < first.run.step < 20
    second = loop(tmp_path / "run", steps=20, samples=SAMPLES, plan=plan)
    assert second.run.resumed and second.run.step == first.run.step
    second.go()
    assert_same(weights(second.run), expected)
    assert second.run.tokens == loop(tmp_path / "whole", steps=20, samples=SAMPLES, plan=plan).run.tokens


def test_a_kill_between_saves_goes_back_to_the_last_one_and_ends_the_same(tmp_path):
    expected = whole(tmp_path)
    first = loop(tmp_path / "run", steps=20, samples=SAMPLES)
    def killed() -> str:
        if first.run.step == 13:
            raise KeyboardInterrupt
        return ""
    first.tick = killed
    with pytest.raises(KeyboardInterrupt):
        first.go()
    second = loop(tmp_path / "run", steps=20, samples=SAMPLES)
    assert second.run.step == 10
    second.go()
    assert_same(weights(second.run), expected)
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl", "step")
    assert [row["step"] for row in rows] == [10, 20]


def test_a_stop_while_a_damaged_sample_is_awaited_keeps_the_steps_taken(tmp_path):
    expected, stop = whole(tmp_path), service.Stop()

    class Awaited(Listed):
        """From the 30th reading on one is damaged, and the producer away: inbox.Inbox.mend waits, and is told to stop."""

        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            if self.reads == 30:
                stop.set()
                stop.check()
            return super().__getitem__(index)
    first = loop(tmp_path / "run", steps=20, samples=Awaited(SAMPLES), stop=stop)
    first.go()
    assert first.run.step % 5, "not a step after which it would have saved anyway"
    second = loop(tmp_path / "run", steps=20, samples=SAMPLES)
    assert second.run.step == first.run.step
    second.go()
    assert_same(weights(second.run), expected)


@pytest.mark.parametrize("arm", ["kl_mixed_uniform", "vp_mixed"])
def test_a_kill_at_any_step_changes_no_bit(tmp_path, arm):
    """Killed as by kill -9 (nothing is saved) and stopped (the state is), after each step; corruption draws fresh noise each step."""
    made = loop(tmp_path / "whole", steps=8, samples=SAMPLES, arm=arm, plan={"eval_every": 3})
    made.go()
    expected = [checkpoint.checkpoint_hash(folder) for folder in made.run.checkpoints()]
    for step in range(1, 8):
        def kill(first, at=step) -> str:
            if first.run.step == at:
                raise KeyboardInterrupt
            return ""
        killed = loop(tmp_path / f"killed{step}", steps=8, samples=SAMPLES, arm=arm, plan={"eval_every": 3})
        killed.tick = lambda first=killed: kill(first)
        with pytest.raises(KeyboardInterrupt):
            killed.go()
        stopped = loop(tmp_path / f"stopped{step}", steps=8, samples=SAMPLES, arm=arm, plan={"eval_every": 3}, stop=StopAt(step))
        stopped.go()
        assert stopped.run.step == step
        for name, at in ((f"killed{step}", step - step % 3), (f"stopped{step}", step)):
            again = loop(tmp_path / name, steps=8, samples=SAMPLES, arm=arm, plan={"eval_every": 3})
            assert again.run.step == at
            again.go()
            assert [checkpoint.checkpoint_hash(folder) for folder in again.run.checkpoints()] == expected


def test_every_arm_sees_the_same_samples_and_anchors(tmp_path, monkeypatch):
    import trainer.loop as module
    seen: dict[str, list] = {}

    def note(captures, config, arm, **words):
        batch = make_batch(captures, config, arm, **words)
        seen.setdefault(arm.name, []).append(([SAMPLES.index(c) for c in captures], batch.anchors.tolist()))
        return batch
    monkeypatch.setattr(module, "make_batch", note)
    for arm in ARMS:
        loop(tmp_path / arm, steps=6, samples=SAMPLES, arm=arm).go()
    first = seen["ce_causal"]
    assert len(seen) == len(ARMS) and all(steps == first for steps in seen.values())
    assert len({str(anchors) for _, anchors in first}) == 6, "drawn anew each step"
    seen.clear()
    loop(tmp_path / "other", steps=6, samples=SAMPLES, seed=1).go()
    assert [samples for samples, _ in seen["ce_causal"]] == [samples for samples, _ in first]
    assert all(a != b for (_, a), (_, b) in zip(seen["ce_causal"], first, strict=True)), "another seed, other anchors"


@pytest.mark.parametrize("stage", ["save_file", "first rename", "second rename", "last rmtree"])
def test_a_kill_at_each_stage_of_a_save_leaves_one_whole_state(tmp_path, monkeypatch, stage):
    import trainer.run as module
    expected = whole(tmp_path)
    first, saves = loop(tmp_path / "run", steps=20, samples=SAMPLES), []

    def dying(real, at):
        calls = []
        def call(*words, **named):
            calls.append(words)
            if len(calls) == at:
                raise KeyboardInterrupt
            return real(*words, **named)
        return call

    def save(self, state, real=Run.save):
        saves.append(1)
        if len(saves) == 2:
            place, name, at = {"save_file": (module, "save_file", 1), "first rename": (module.Path, "rename", 1),
                               "second rename": (module.Path, "rename", 2), "last rmtree": (module.shutil, "rmtree", 3)}[stage]
            monkeypatch.setattr(place, name, dying(getattr(place, name), at))
        real(self, state)
    monkeypatch.setattr(Run, "save", save)
    with pytest.raises(KeyboardInterrupt):
        first.go()
    monkeypatch.undo()
    second = loop(tmp_path / "run", steps=20, samples=SAMPLES)
    assert second.run.step == (10 if stage == "last rmtree" else 5)
    second.go()
    assert_same(weights(second.run), expected)


def test_masters_are_fp32_and_every_tensor_of_the_state_moves(tmp_path):
    """Pitfall C1: bf16 weights with the masters lost freeze what moves slowly, norms above all."""
    made = loop(tmp_path / "run", steps=20, samples=SAMPLES)
    start = weights(made.run)
    made.go()
    assert all(v.dtype == torch.float32 for v in made.run.drafter.parameters())
    assert not [name for name, value in weights(made.run).items() if torch.equal(value, start[name])]


def test_a_missing_or_foreign_tensor_in_the_state_is_named(tmp_path):
    from safetensors.torch import load_file, save_file
    loop(tmp_path / "run", steps=5, samples=SAMPLES).go()
    path = tmp_path / "run" / "resume" / "state.safetensors"
    tensors, meta = load_file(path), {"step": "5", "tokens": "1"}
    for spoil in (lambda t: t.pop("exp_avg.fc.weight"), lambda t: t.update(new=torch.zeros(1)), lambda t: t.pop("master.norm.weight")):
        changed = dict(tensors)
        spoil(changed)
        save_file(changed, path, metadata=meta)
        with pytest.raises(KeyError, match="exp_avg.fc.weight|new|master.norm.weight"):
            loop(tmp_path / "run", steps=5, samples=SAMPLES)


def test_every_parameter_has_one_optimiser_and_its_own_rate(tmp_path):
    """Muon for matrices, AdamW for norms; share 0 moves nothing."""
    made = loop(tmp_path / "run", steps=5, samples=SAMPLES, plan={"optimizer": "muon"})
    kinds = {name: made.run.optimizer.state_of(p)[1] for name, p in made.run.drafter.named_parameters()}
    assert {k for name, k in kinds.items() if "norm" in name} == {("step", "exp_avg", "exp_avg_sq")}
    assert {k for name, k in kinds.items() if "proj" in name or name == "fc.weight"} == {("momentum_buffer",)}
    before = weights(made.run)
    for parameter in made.run.drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.run.optimizer.step(0.0)
    assert_same(weights(made.run), before)


@pytest.mark.parametrize("field, other", [("arm", {"arm": "ce_bidi"}), ("seed", {"seed": 1})])
def test_a_folder_of_another_run_is_refused_by_field(tmp_path, field, other):
    loop(tmp_path / "run", steps=5, samples=SAMPLES)
    with pytest.raises(UserError, match=field):
        loop(tmp_path / "run", steps=5, samples=SAMPLES, **other)


def test_the_same_seed_gives_the_same_checkpoint_and_another_seed_another(tmp_path):
    hashes = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        made = loop(tmp_path / name, steps=5, samples=SAMPLES, seed=seed)
        made.go()
        hashes.append(checkpoint.checkpoint_hash(made.run.checkpoints()[-1]))
    assert hashes[0] == hashes[1] != hashes[2]


def test_it_learns(tmp_path):
    """The texts are determined by what the taps show: a drafter that trains at all must get most slots right."""
    made = loop(tmp_path / "run", steps=300, samples=captures(60), plan={"sequences": 4, "anchors": 12, "optimizer": "muon", "lr": 0.02, "eval_every": 300})
    made.go()
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl", "step")
    assert rows[0]["accuracy"] < 0.3 and rows[-1]["accuracy"] > 0.8


def test_a_stream_that_grows_slowly_gives_the_run_that_had_it_all(tmp_path):
    expected = whole(tmp_path)
    grown = Listed()
    asked = []
    def more() -> str:
        asked.append(1)
        if len(grown) < len(SAMPLES) and len(asked) % 3 == 0:
            grown.append(SAMPLES[len(grown)])
        return ""
    made = loop(tmp_path / "run", steps=20, samples=grown, tick=more)
    made.ended = lambda: len(grown) == len(SAMPLES)
    made.go()
    assert made.waited > 0
    assert_same(weights(made.run), expected)
    assert json.loads((tmp_path / "run" / "closed.json").read_text()) == {"samples": len(SAMPLES)}
