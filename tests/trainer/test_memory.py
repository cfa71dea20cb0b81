"""The arithmetic of a step's memory: exact where it can be, and no constant that the code does not have."""
from __future__ import annotations

import dataclasses
import json

import pytest

from common.drafter import attention, model
from common.drafter.config import shape_for
from common.drafter.model import Drafter
from common.errors import UserError
from trainer import arms, config, head, memory, memory_screen, objectives
from trainer.memory import GIB, Job


def job(**over) -> Job:
    shape = shape_for(2048, 248320, 40, (1, 6, 11, 16, 22, 27, 32, 37), 248077, "causal")
    return dataclasses.replace(Job(shape, "ce", 1, 512, 3072, "adamw", head=248320), **over)


def test_constants_are_those_of_the_code_that_they_speak_of():
    assert (memory.PIECE, memory.RECOMPUTE, memory.SAVED, memory.GROUP) == (head.PIECE_BYTES, model.MOST_SAVED, model.SAVED, attention.GROUP)
    assert memory.TEACHERS == objectives.NEEDS_TEACHER


@pytest.mark.parametrize("hidden, taps, over", [(2048, 8, {}), (576, 5, {}), (128, 3, {"num_hidden_layers": 3}), (1024, 1, {"intermediate_size": 512})])
def test_parameters_are_counted_exactly(hidden, taps, over):
    shape = shape_for(hidden, 1000, 40, tuple(range(taps)), 999, "bidi", **over)
    drafter = Drafter(shape)                                                    # on the meta device
    assert memory.parameters(shape) == tuple(sum(p.numel() for p in drafter.parameters() if (p.ndim == 2) == matrices) for matrices in (True, False))
    if hidden == 2048:
        assert sum(memory.parameters(shape)) == 385_906_176, "the released drafter's (dflash-facts 1.2)"


def test_the_full_step_fits_a_16_gb_card_and_needs_layers_run_again_for_it(monkeypatch):
    assert memory.peak(job()) < 14.5 * GIB and job().recomputes
    monkeypatch.setattr(memory, "RECOMPUTE", 1 << 60)
    assert memory.peak(job()) > 14.5 * GIB


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", ["sequences", "anchors", "tokens"])
def test_more_needs_more(name, gpu):
    for loss in ("ce", "kl"):
        sizes = [memory.peak(job(loss=loss, gpu=gpu, **{name: getattr(job(), name) * n})) for n in (1, 2, 3)]
        assert sizes == sorted(set(sizes))
    assert memory.peak(job(loss="kl", gpu=gpu)) > memory.peak(job(gpu=gpu)) > memory.peak(job(gpu=gpu, tied=True)) > memory.peak(job(gpu=gpu, head=4096, tied=True)) - 2 * GIB


def test_what_is_suggested_fits_and_one_step_more_does_not():
    usable = int(14.5 * GIB)
    for given in (job(), job(sequences=4), job(loss="kl", tokens=30_000)):
        anchors = memory.largest(lambda n: memory.peak(dataclasses.replace(given, anchors=n)) <= usable, memory.STEP, 4096)
        assert memory.peak(dataclasses.replace(given, anchors=anchors)) <= usable < memory.peak(dataclasses.replace(given, anchors=anchors + memory.STEP))
        assert f"--anchors {anchors}" in memory_screen.suggestion(given, usable)
    assert memory.largest(lambda n: False, 16, 64) == 0 and memory.largest(lambda n: True, 16, 70) == 64
    assert "smaller drafter" in memory_screen.suggestion(job(), GIB)


def test_a_targets_config_nested_or_not_and_none(tmp_path, capsys):
    inner = {"hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 5000}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": inner, "tie_word_embeddings": True}))
    assert memory.shape_of(tmp_path) == {"hidden": 1024, "layers": 28, "vocab": 5000, "tied": True}
    (tmp_path / "flat.json").write_text(json.dumps(inner))
    assert memory.shape_of(tmp_path / "flat.json")["tied"] is False
    for text, wrong in (("{}", "hidden_size"), ("[1]", "no target's config.json"), ("{", "no target's")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(UserError, match=wrong):
            memory.shape_of(tmp_path / "bad.json")
    with pytest.raises(UserError, match="No such file"):
        memory.shape_of(tmp_path / "none")
    assert memory_screen.show(config.Memory(target_config=tmp_path, taps=5)) == 0 and "It fits" in capsys.readouterr().out
    assert memory_screen.show(config.Memory(vram=4.0)) == 1
    with pytest.raises(UserError, match="--taps 41"):
        memory_screen.job_of(config.Memory(taps=41))


def test_a_list_of_tokens_needs_less_head():
    whole, few = (memory_screen.job_of(config.Memory(draft_vocab=n, sequences=1)) for n in (None, 32_000))
    assert few.config.vocab_size == whole.config.vocab_size and few.head == 32_000
    assert memory.parts(whole)["embedding and output head, frozen"] - memory.parts(few)["embedding and output head, frozen"] == 2 * 2048 * (248320 - 32_000)
    assert arms.named("ce_causal").draft_vocab is None
