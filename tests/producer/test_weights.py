"""A released checkpoint is read as its text model: every weight once, only the files that hold one, one copy in memory."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import released
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration

from common.errors import UserError
from producer import weights
from producer.target import layer_count, load

IDS = np.random.default_rng(0).integers(tiny.MASK + 1, 300, 70).astype(np.int32)


@pytest.fixture(scope="module", params=released.LAYOUTS)
def checkpoint(request, tmp_path_factory):
    """(the model that was saved, its folder, file -> names)"""
    scratch = tmp_path_factory.mktemp("scratch")
    whole = released.model()
    return whole, scratch / "folder", released.write(scratch / "folder", whole, released.weights(whole, request.param, scratch / "saved"))


@pytest.fixture
def copy(checkpoint, tmp_path):
    """The folder again, to be damaged."""
    for path in checkpoint[1].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def change(folder: Path, name: str, to: dict[str, torch.Tensor]) -> None:
    """Put the weights `to` in the place of weight `name`, in its file and in the index."""
    index = json.loads((folder / weights.INDEX).read_text())
    file = index["weight_map"].pop(name)
    held = load_file(folder / file)
    del held[name]
    save_file(held | to, folder / file)
    index["weight_map"] |= dict.fromkeys(to, file)
    (folder / weights.INDEX).write_text(json.dumps(index))


def test_the_text_model_of_a_released_checkpoint(checkpoint):
    whole, folder, named = checkpoint
    assert len(named) > 5 and released.needless(named)
    target = load(str(folder), device="cpu")
    assert type(target.model) is Qwen3_5MoeForCausalLM and target.is_hybrid and target.dtype == torch.float32
    ids = torch.from_numpy(IDS).long()[None]
    out = target.forward(ids, taps=tuple(range(7)), logits_to_keep=0)
    with torch.inference_mode():
        theirs = whole(input_ids=ids, output_hidden_states=True)
    assert torch.equal(out.logits, theirs.logits) and len(out.logits[0].argmax(-1).unique()) > 10
    for i in range(7):
        assert torch.equal(out.taps[i], theirs.hidden_states[i + 1]), i
    text = whole.model.language_model.state_dict(prefix="model.") | {"lm_head.weight": whole.lm_head.weight}
    ours = target.model.state_dict()
    assert ours.keys() == text.keys() and all(torch.equal(ours[name], text[name]) for name in text)


def test_what_both_boxes_must_know_comes_from_the_nested_config(checkpoint):
    whole, folder, _ = checkpoint
    target, tokens = load(str(folder), device="cpu"), len(tiny.tokenizer())
    assert layer_count(str(folder)) == target.n_layers == 8
    assert target.mask_token_id == tokens and target.vocab_size == tokens + released.SPARE and target.eos_ids == {tiny.EOS, tiny.PAD}
    contract = target.contract((1, 3, 5), None)
    assert (contract.n_layers, contract.hidden_size) == (8, 64)
    assert (contract.vocab_size, contract.mask_token_id) == (tokens + released.SPARE, tokens)
    capture = target.capture(IDS, np.ones(70, bool), (1, 3, 5))
    assert capture.taps.shape == (3, 70, 64) and capture.loss_mask.all()
    assert load(str(folder), device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_both_layouts_are_the_same_target(tmp_path):
    whole, prints = released.model(torch.bfloat16), []
    for layout in released.LAYOUTS:
        released.write(tmp_path / layout, whole, released.weights(whole, layout, tmp_path / f"saved {layout}"))
        prints.append(load(str(tmp_path / layout), device="cpu", dtype="bfloat16").fingerprint)
    assert prints[0] == prints[1]
    back = Qwen3_5MoeForConditionalGeneration.from_pretrained(tmp_path / "released")
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), whole.state_dict().values(), strict=True))


def test_files_without_a_text_weight_are_not_opened(checkpoint, copy):
    _, folder, named = checkpoint
    for file in released.needless(named):
        (copy / file).write_bytes(b"not a safetensors file")
    one, *more = released.needless(named)
    (copy / one).unlink()
    assert load(str(copy), device="cpu").fingerprint == load(str(folder), device="cpu").fingerprint
    needed = next(file for file in named if file not in (one, *more))
    (copy / needed).write_bytes((copy / needed).read_bytes()[:-8])
    with pytest.raises(UserError, match="fetch the file again"):
        load(str(copy), device="cpu")
    (copy / needed).unlink()
    with pytest.raises(UserError, match=needed):
        load(str(copy), device="cpu")


def test_shards():
    where = {"model.language_model.norm.weight": "a", "model.visual.x": "a", "mtp.fc.weight": "b", "lm_head.weight": "c",
             "model.visual.y": "b"}
    assert weights.shards(where, (r"^mtp.*", r"^model.visual.*")) == {"a": ["model.language_model.norm.weight"], "c": ["lm_head.weight"]}
    assert weights.shards(where, ()).keys() == {"a", "b", "c"}


NORM = "model.language_model.layers.1.post_attention_layernorm.weight"


@pytest.mark.parametrize("to, words", [
    ({}, "lacks 1 weights, model.layers.1.post_attention_layernorm.weight first"),
    ({NORM: torch.zeros(64), "model.language_model.layers.1.extra": torch.zeros(3)}, r"holds 1 weights that .* model.layers.1.extra first"),
    ({NORM: torch.zeros(63)}, r"model.layers.1.post_attention_layernorm.weight")])
def test_every_weight_and_no_other(copy, to, words):
    change(copy, NORM, to)
    with pytest.raises(UserError, match=words):
        load(str(copy), device="cpu")


def test_an_expert_too_few(copy):
    names = json.loads((copy / weights.INDEX).read_text())["weight_map"]
    name = next(name for name in names if "layers.2.mlp.experts" in name and "gate" in name)
    change(copy, name, {})
    with pytest.raises(UserError, match=r"layers.2.mlp.experts.(gate_up_proj|\*.gate_proj.weight)"):
        load(str(copy), device="cpu")


def test_an_index_that_lies(copy):
    index = json.loads((copy / weights.INDEX).read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"][NORM])
    index["weight_map"][NORM] = other
    (copy / weights.INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"{other} lacks 1 weights that the index places there, {NORM}"):
        load(str(copy), device="cpu")
    (copy / weights.INDEX).write_text("{}")
    with pytest.raises(UserError, match="no index of weights"):
        load(str(copy), device="cpu")
    (copy / weights.INDEX).unlink()
    with pytest.raises(UserError, match="only safetensors are read"):
        load(str(copy), device="cpu")


PEAK = """
import sys, pathlib, torch
from producer import weights
torch.set_num_threads(1)
def status(key): return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
warm, folder, dtype = sys.argv[1:]
weights.read(pathlib.Path(warm), torch.bfloat16)            # imports and first allocations are not the load's
open("/proc/self/clear_refs", "w").write("5")               # VmHWM begins again
before = status("VmRSS")
model = weights.read(pathlib.Path(folder), getattr(torch, dtype))
print(status("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.parametrize("layout, dtype", [("released", torch.bfloat16), ("by expert", torch.bfloat16), ("released", torch.float32)])
def test_memory_peaks_at_one_copy_and_a_shard(tmp_path, layout, dtype):
    """Weights of 51 MB (bf16), saved in bf16; two copies would be twice that.  8 MB of room for Python's own.

    Experts one by one: transformers stacks a layer's, and for a moment holds them up to three times."""
    for name, whole, shard in (("warm", released.model(torch.bfloat16), 100_000),
                               ("folder", released.model(torch.bfloat16, experts=32, width=512), 8_000_000)):
        released.write(tmp_path / name, whole, released.weights(whole, layout, tmp_path / f"saved {name}"), shard)
    out = subprocess.run([sys.executable, "-c", PEAK, tmp_path / "warm", tmp_path / "folder", str(dtype).removeprefix("torch.")],
                         check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    peak, held = map(int, out.split())
    room = 8e6 + 8e6 + (2 * held / 8 if layout == "by expert" else 0)
    assert held > 45e6 and peak < held + room < 1.6 * held, (peak, held)


def test_a_weight_is_read_as_the_safetensors_library_reads_it(tmp_path):
    values = {"a": torch.randn(3, 5).bfloat16(), "empty": torch.zeros(0, 4), "b": torch.arange(7), "scalar": torch.tensor(2.5),
              "c": torch.randn(300, 7)}
    save_file(values, tmp_path / "x.safetensors", {"format": "pt"})
    held = weights.contents(tmp_path / "x.safetensors")
    assert held.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(held[name][...], value) and held[name][...].dtype == value.dtype and held[name].nbytes == value.nbytes, name
    held["c"][...].zero_()
    assert torch.equal(held["c"][...], values["c"])                  # the file is not what was written to


@pytest.mark.parametrize("damage", [lambda b: b[:5], lambda b: b[:40], lambda b: b[:-1], lambda b: b + b"x", lambda b: b"\xff" * 8 + b[8:],
                                    lambda b: b.replace(b"F32", b"F33"), lambda b: b.replace(b"[4]", b"[5]"),
                                    lambda b: b"\x02" + bytes(7) + b"{}"])
def test_a_damaged_file_is_named(tmp_path, damage):
    save_file({"a": torch.randn(4)}, tmp_path / "x.safetensors")
    path = tmp_path / "y.safetensors"
    path.write_bytes(damage((tmp_path / "x.safetensors").read_bytes()))
    with pytest.raises(UserError, match="y.safetensors cannot be read as safetensors"):
        weights.contents(path)
