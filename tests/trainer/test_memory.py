"""The arithmetic of a step's memory: exact where it can be, and no constant that the code does not have."""
from __future__ import annotations

import dataclasses
import json
from functools import partial

import pytest
import torch

from common.drafter import attention, geometry, model
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


def test_the_full_step_fits_a_16_gb_card_and_two_sequences_need_layers_run_again_for_it(monkeypatch):
    assert memory.peak(job(sequences=2)) < 14.5 * GIB and job().recomputes
    monkeypatch.setattr(memory, "RECOMPUTE", 1 << 60)
    assert memory.peak(job(sequences=2)) > 14.5 * GIB


SHAPES = {"one group": (1, {}), "three groups": (3, {}), "a narrow window": (3, {"sliding_window": 20, "layer_types": ("sliding_attention",)})}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_and_the_context_keep_what_autograd_saves_to_the_byte(shape, bf16):
    """The storages that a real one saves, its weights' casts and the mask taken off.  Keys are counted for the anchors that there are:
    spread evenly they are the same to the row or two that a window begins at."""
    groups, over = SHAPES[shape]
    anchors = groups * memory.GROUP // 4
    shape_, tokens = shape_for(64, 100, 9, (1, 3), 99, "causal", num_hidden_layers=1, block_size=4, **over), 2 * anchors
    given = Job(shape_, "ce", 1, anchors, tokens, "adamw", head=100, gpu=False, bf16=bf16)
    drafter, where = Drafter(shape_, generator=torch.Generator().manual_seed(0)), torch.arange(anchors)[None] * 2 + 2
    rope = drafter._rope(geometry.block_positions(where, 4).flatten(-2))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        of_context, context = saved_by(lambda: drafter.context(torch.ones(1, tokens, 128, dtype=torch.bfloat16)), drafter)
        seen = partial(attention.ways("grouped", where, 4, tokens, drafter.rules)[drafter.rules[0]], tuple(x.detach() for x in context[0]))
        x = torch.ones(1, given.slots, 64, requires_grad=True)
        of_layer, _ = saved_by(lambda: drafter.layers[0](x, rope, seen), drafter)
    keys = spread = 0
    for first, last in memory._groups(given):
        begin, end = attention.seen_rows(where[:, first:last], tokens, drafter.rules[0][1])
        here, evenly = end - begin + (last - first) * 4, memory._seen(given, first, last, shape_.layer_types[0])
        assert abs(here - evenly) <= 2
        keys, spread = keys + here, spread + evenly
    k, casts = memory.widths(shape_)[1], 2 if bf16 else 0
    others = sum(t.untyped_storage().nbytes() for t in rope) + casts * memory.layer_matrices(shape_) + given.wide * memory.GROUP * keys
    assert of_layer - others == memory.layer_bytes(given)[0] + 2 * given.wide * k * (keys - spread)
    taps = 2 * 128 * tokens if bf16 else 0                                      # the batch's own; in fp32 a copy
    assert of_context - taps - casts * 2 * 64 * k == memory.context_bytes(given)


def saved_by(call, drafter: Drafter) -> tuple[int, object]:
    """-> bytes of the storages that autograd saves in the call, the drafter's own weights left out; and what it gives."""
    own, found, held = {p.untyped_storage().data_ptr() for p in drafter.parameters()}, {}, []

    def pack(tensor):
        held.append(tensor)                                      # so that no storage's address is used twice
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    return sum(size for place, size in found.items() if place not in own), out


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", ["sequences", "anchors", "tokens"])
def test_more_needs_more(name, gpu):
    for loss in ("ce", "kl"):
        sizes = [memory.peak(job(loss=loss, gpu=gpu, **{name: getattr(job(), name) * n})) for n in (1, 2, 3)]
        assert sizes == sorted(set(sizes))
    assert memory.peak(job(loss="kl", gpu=gpu)) >= memory.peak(job(gpu=gpu)) > memory.peak(job(gpu=gpu, tied=True))


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("over", ["num_hidden_layers", "intermediate_size", "vocab_size", "num_target_layers and taps", "block_size"])
def test_a_larger_drafter_or_target_needs_more(over, gpu):
    def need(n: int) -> int:
        change = {"num_hidden_layers": {"num_hidden_layers": 2 + n}, "intermediate_size": {"intermediate_size": 2048 * n},
                  "block_size": {"block_size": 8 * n}}.get(over, {})
        vocab, taps = 100_000 * (n if over == "vocab_size" else 1), 2 * (n if "taps" in over else 1)
        return memory.peak(job(config=shape_for(2048, vocab, 40, tuple(range(taps)), 99, "causal", **change), head=vocab, gpu=gpu))
    assert need(1) < need(2) < need(3)
    assert memory.peak(job(optimizer="muon", gpu=gpu)) < memory.peak(job(gpu=gpu)), "half of the state"


def test_where_layers_begin_to_be_run_again_more_anchors_need_less():
    """So no bisection: with 9.6 GiB, 208 anchors and many more fit where 192 do not."""
    kept, again = (job(anchors=n) for n in (192, 208))
    assert again.recomputes and not kept.recomputes and memory.peak(again) < memory.peak(kept)
    usable = memory.peak(again)
    assert memory.largest(lambda n: memory.peak(job(anchors=n)) <= usable, memory.STEP, 4096) >= 208
    assert memory.largest(lambda n: n in (16, 48), 16, 64) == 48


def test_what_is_suggested_fits_and_one_step_more_does_not():
    usable = int(14.5 * GIB)
    for given in (job(), job(sequences=4), job(loss="kl", tokens=30_000)):
        anchors = memory.largest(lambda n: memory.peak(dataclasses.replace(given, anchors=n)) <= usable, memory.STEP, 4096)
        tokens = memory.largest(lambda n: memory.peak(dataclasses.replace(given, tokens=n)) <= usable, 16 * memory.STEP, 262144)
        for name, most, step in (("anchors", anchors, memory.STEP), ("tokens", tokens, 16 * memory.STEP)):
            assert memory.peak(dataclasses.replace(given, **{name: most + step})) > usable
            assert not most or memory.peak(dataclasses.replace(given, **{name: most})) <= usable
        said = memory_screen.suggestion(given, usable)
        assert (f"--anchors {anchors}" in said) == bool(anchors) and (f"--max-tokens {tokens}" in said) == bool(tokens)
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
