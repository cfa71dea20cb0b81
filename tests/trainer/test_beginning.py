"""A run that begins with a drafter draws what that drafter drew, says where it began, and is no other run's (A3, C1)."""
from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from common import service
from common.drafter import checkpoint
from common.drafter.config import FULL, SLIDING, DrafterConfig
from common.errors import UserError
from tests.trainer.small import CONTRACT, HIDDEN, TAPS, captures, stored
from trainer import beginning, config, daemon, imported
from trainer.formats import speculators, zlab
from trainer.loop import Loop
from trainer.run import Run

SHORT = dict(steps=4, eval_every=4, sequences=2, anchors=4, block_size=4, replay=1, threads=1, device="cpu", name="box")


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> Path:
    return stored(tmp_path_factory.mktemp("box") / "state", captures(40))


@pytest.fixture(scope="module")
def first(box, tmp_path_factory) -> Path:
    """A run of another shape than the default for this target."""
    return train(tmp_path_factory.mktemp("first"), box, layers=3, window=8, seed=5)


@pytest.fixture
def begun(monkeypatch) -> list[Run]:
    """Every run as it stands when its loop begins; no step is taken."""
    seen: list[Run] = []
    monkeypatch.setattr(Loop, "go", lambda loop: seen.append(loop.run))
    return seen


def train(state: Path, source: Path, **over) -> Path:
    """One run of the daemon, in this process; its folder."""
    made = config.Run(**SHORT | dict(stored=source, state_dir=state, run_dir=state / "run") | over)
    daemon.run(made, service.Stop())
    return made.run_dir


def newest(run: Path) -> Path:
    return sorted((run / "checkpoints").iterdir())[-1]


def drawn(drafter, taps: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return drafter(block[None], torch.tensor([[len(taps)]]), taps[None])


def test_step_0_of_a_run_draws_bit_for_bit_what_its_start_draws(tmp_path, box, first, begun):
    train(tmp_path, box, init=newest(first))
    [run], (start, shape, record) = begun, checkpoint.load(newest(first), "cpu", torch.float32)
    assert run.step == 0 and not run.resumed and run.drafter.fc.weight.dtype == torch.float32
    rng = torch.Generator().manual_seed(0)
    taps, block = torch.randn(20, len(TAPS) * HIDDEN, generator=rng), torch.randn(4, HIDDEN, generator=rng)
    assert torch.equal(drawn(run.drafter, taps, block), drawn(start, taps, block))
    assert run.config == shape and (shape.num_hidden_layers, shape.sliding_window) == (3, 8)
    said = json.loads((tmp_path / "run" / "run.json").read_text())["init"]
    assert said == {"path": str(newest(first)), "sha256": checkpoint.checkpoint_hash(newest(first)), "dtype": "bfloat16", "arm": record["arm"]["name"],
                    "target": "toy", "contract": CONTRACT.hash, "step": 4, "tokens": record["tokens"]}


def test_a_runs_folder_means_its_newest_checkpoint_and_every_format_begins_a_run(tmp_path, box, first, begun):
    found = imported.read(newest(first))
    zlab.write(tmp_path / "z", found.drafter, found.record, "bf16")
    speculators.write(tmp_path / "s", found.drafter, {}, "bf16", head=None, target=None)      # says no target layers: the stream's are taken
    for name, start in (("a", first), ("b", newest(first)), ("c", tmp_path / "z"), ("d", tmp_path / "s")):
        train(tmp_path / name, box, init=start, attention="mixed" if name == "d" else None)
    for run in begun:
        for ours, theirs in zip(run.drafter.parameters(), found.drafter.parameters(), strict=True):
            assert torch.equal(ours, theirs.float())


def test_training_goes_on_from_the_start_and_each_checkpoint_says_so(tmp_path, box, first):
    runs = [train(tmp_path / name, box, init=first, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    hashes = [checkpoint.checkpoint_hash(newest(run)) for run in runs]
    assert hashes[0] == hashes[1] != hashes[2] and checkpoint.checkpoint_hash(newest(first)) not in hashes
    record = json.loads((newest(runs[0]) / "record.json").read_text())
    assert record["init"]["sha256"] == checkpoint.checkpoint_hash(newest(first)) and record["step"] == 4


class Late(service.Stop):
    """Says stop after some steps."""

    asked = 0

    def __bool__(self) -> bool:
        self.asked += 1
        return self.asked > 8


def test_a_run_that_is_resumed_goes_on_from_its_own_state(tmp_path, box, first):
    start = shutil.copytree(newest(first), tmp_path / "start")
    whole, over = train(tmp_path / "whole", box, init=start, steps=8), dict(stored=box, state_dir=tmp_path, run_dir=tmp_path / "run")
    daemon.run(config.Run(**SHORT | over | dict(init=start, steps=8)), Late())
    state = tmp_path / "run" / "resume" / "state.safetensors"
    with safe_open(state, "pt") as file:
        assert 0 < int(file.metadata()["step"]) < 8
    shutil.rmtree(start)                                             # it is no longer needed
    run = train(tmp_path, box, init=start, steps=8)
    assert checkpoint.checkpoint_hash(newest(run)) == checkpoint.checkpoint_hash(newest(whole))


def test_another_beginning_is_another_run(tmp_path, box, first, begun):
    start = shutil.copytree(newest(first), tmp_path / "start")
    train(tmp_path, box, init=start)
    moved = shutil.copytree(start, tmp_path / "moved")
    train(tmp_path, box, init=moved)                                 # the same bits are the same beginning
    with pytest.raises(UserError, match="holds another run.*init.sha256: [0-9a-f.]+ -> None"):
        train(tmp_path, box, layers=3, window=8)
    drafter, _, record = checkpoint.load(start, "cpu", torch.float32)
    drafter.norm.weight.data[0] += 1
    checkpoint.save(start, drafter, record)
    with pytest.raises(UserError, match="holds another run.*init.sha256: [0-9a-f.]+ -> [0-9a-f]+"):
        train(tmp_path, box, init=start)
    shutil.rmtree(moved)
    shutil.rmtree(start)
    with pytest.raises(UserError, match="--init .* is gone, and this run has not saved a state"):
        train(tmp_path, box, init=start)
    with pytest.raises(UserError, match="--init .*moved: no such file or folder"):
        train(tmp_path, box, init=moved)


def test_the_shape_is_the_starts_and_what_the_arm_says_the_arms(tmp_path, box, first, begun, caplog):
    caplog.set_level(logging.WARNING)
    train(tmp_path, box, init=first, arm="dpace_causal_swa", window=6, attention="bidi", block_size=6)
    [run] = begun
    assert run.config.layer_types == (SLIDING,) * 3 and (run.config.sliding_window, run.config.attention, run.config.block_size) == (6, "bidi", 6)
    assert all(f"differs from the start: {words}" in caplog.text for words in (
        f"layer_types {(SLIDING, SLIDING, FULL)}, here ", "sliding_window 8, here 6", "attention causal, here bidi", "block_size 4, here 6"))


def altered(first: Path, path: Path, record: dict | None = None, **shape) -> Path:
    """The first run's drafter, its record or its config.json changed."""
    drafter, made, old = checkpoint.load(newest(first), "cpu", torch.float32)
    drafter.config = dataclasses.replace(made, **shape)
    checkpoint.save(path, drafter, old if record is None else record)
    return path


@pytest.mark.parametrize("shape, says", [
    (dict(taps=(1, 4)), r"taps \(1, 4\), here \(1, 3\)"), (dict(num_target_layers=9), "num_target_layers 9, here 8"),
    (dict(vocab_size=25, taps=(0, 3)), r"vocab_size 25, here 24; taps \(0, 3\), here \(1, 3\)")])
def test_a_start_that_does_not_fit_is_refused_with_every_field(tmp_path, box, first, shape, says):
    with pytest.raises(UserError, match=f"^--init .* does not fit this run: {says}$"):
        train(tmp_path, box, init=altered(first, tmp_path / "d", **shape), init_force=True)
    assert not (tmp_path / "run" / "run.json").exists()


def test_layers_that_are_not_the_starts_are_refused(tmp_path, box, first):
    with pytest.raises(UserError, match="does not fit this run: num_hidden_layers 3, here 2"):
        train(tmp_path, box, init=first, layers=2)


@pytest.mark.parametrize("field, value", [("weights", "f" * 64), ("tokenizer", "f" * 64), ("chat_template", "c" * 64), ("thinking", True)])
def test_another_targets_drafter_is_refused_unless_forced(tmp_path, box, first, begun, field, value, caplog):
    theirs = dataclasses.replace(CONTRACT, **{field: value})
    path = altered(first, tmp_path / "d", {"contract": theirs.hash, "extraction": theirs.to_dict()})
    with pytest.raises(UserError, match=f"trained on other data than this stream's: {field}: [^;]* -> [^;]*; --init-force"):
        train(tmp_path, box, init=path)
    train(tmp_path, box, init=path, init_force=True)
    assert f"trained on other data: {field}: " in caplog.text
    train(tmp_path, box, init=path)                                  # it has begun: what was forced once is not asked again
    assert len(begun) == 2


@pytest.mark.parametrize("change, says", [
    (dict(dtype="bfloat16", weights="f" * 64), "computed in bfloat16, this one in float32, so their weights cannot be compared"),
    (dict(target="elsewhere"), 'computed otherwise: target: "elsewhere" -> "toy"'), (dict(versions={"numpy": "1"}), "versions.numpy"), (None, "nothing vouches")])
def test_what_cannot_be_told_or_moves_bits_only_is_said(tmp_path, box, first, begun, change, says, caplog):
    theirs = dataclasses.replace(CONTRACT, **change or {})
    train(tmp_path, box, init=altered(first, tmp_path / "d", {"contract": theirs.hash, "extraction": theirs.to_dict()} if change else {}))
    assert says in caplog.text and "other data" not in caplog.text and len(begun) == 1


def test_a_list_of_draftable_tokens_stays_behind(tmp_path, box, first, begun, caplog):
    drafter, _, record = checkpoint.load(newest(first), "cpu", torch.float32)
    drafter.shortlist = torch.arange(5)
    checkpoint.save(tmp_path / "d", drafter, record)
    train(tmp_path, box, init=tmp_path / "d")
    assert begun[0].drafter.shortlist is None and "drafted 5 tokens only; its list is left behind" in caplog.text


def test_a_path_that_is_no_drafter_is_said_before_anything_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(daemon, "source", None)
    with pytest.raises(UserError, match="--init .*nowhere: no such file or folder"):
        daemon.run(config.Run(**SHORT, state_dir=tmp_path, init=tmp_path / "nowhere"), service.Stop())


def test_every_field_of_a_shape_is_bound_or_free():
    assert {*beginning.BOUND, *beginning.FREE} == {field.name for field in dataclasses.fields(DrafterConfig)}
