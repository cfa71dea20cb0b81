"""Drafter folders as z-lab writes them, in small, through `hsprod generate`: loaded as they are, or refused by name (A1, A4, C4, W2).

The target, too, is a folder as released, with rows behind its tokenizer's ids, the first of which is the drafters' mask token."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import released
import tiny
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from common.drafter import checkpoint
from common.drafter.geometry import layer_rule
from common.errors import UserError
from producer import cli, fitting, writing
from producer.speculate import Limit, plain
from producer.target import Target, load

MASK, ROWS, W = 320, 320 + released.SPARE, 24
SAME = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "max_position_embeddings": 262144,
        "num_target_layers": 8, "tie_word_embeddings": False, "use_cache": True, "vocab_size": ROWS}
CURRENT = SAME | {                               # June 2026: five sliding layers and a full one, no is_causal, block_size inside
    "dtype": "bfloat16", "num_hidden_layers": 6, "num_key_value_heads": 2, "max_window_layers": 6, "transformers_version": "5.15.0",
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": W, "use_sliding_window": True,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "dflash_config": {"block_size": 16, "mask_token_id": MASK, "target_layer_ids": [1, 2, 3, 4, 5]}}
PREVIEW = SAME | {                               # April 2026: eight full layers, block_size and rope_theta at the top
    "torch_dtype": "bfloat16", "num_hidden_layers": 8, "num_key_value_heads": 1, "max_window_layers": 8, "transformers_version": "4.57.1",
    "layer_types": ["full_attention"] * 8, "sliding_window": None, "use_sliding_window": False, "rope_theta": 10000000,
    "rope_scaling": None, "block_size": 16, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]}}
LAYOUTS = {"current": CURRENT, "preview": PREVIEW}


def write(folder: Path, config: dict) -> Path:
    """config.json and model.safetensors, bf16, with the released names and shapes (dflash-facts 1.2)."""
    folder.mkdir()
    wide, inter, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv = dim * config["num_attention_heads"], dim * config["num_key_value_heads"]
    shapes = {"fc.weight": (wide, wide * len(config["dflash_config"]["target_layer_ids"])), "hidden_norm.weight": (wide,), "norm.weight": (wide,)}
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {at + "input_layernorm.weight": (wide,), at + "post_attention_layernorm.weight": (wide,),
                   at + "self_attn.q_proj.weight": (heads, wide), at + "self_attn.k_proj.weight": (kv, wide),
                   at + "self_attn.v_proj.weight": (kv, wide), at + "self_attn.o_proj.weight": (wide, heads),
                   at + "self_attn.q_norm.weight": (dim,), at + "self_attn.k_norm.weight": (dim,), at + "mlp.gate_proj.weight": (inter, wide),
                   at + "mlp.up_proj.weight": (inter, wide), at + "mlp.down_proj.weight": (wide, inter)}
    generator = torch.Generator().manual_seed(0)
    values = {name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).bfloat16() for name, shape in shapes.items()}
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "t"
    whole = released.model()
    released.write(folder, whole, released.weights(whole, "released", folder))
    return folder


@pytest.fixture(scope="module")
def target(target_folder) -> Target:
    return load(str(target_folder), device="cpu")


@pytest.fixture(scope="module", params=LAYOUTS)
def folder(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("drafter") / request.param, LAYOUTS[request.param])


def hsprod(*args):
    return CliRunner().invoke(cli.app, ["generate", *map(str, args)])


def test_a_released_folder_generates_the_targets_text(target_folder, folder):
    bare = hsprod("hello", "--target", target_folder, "--max-new-tokens", 2 * W)
    spec = hsprod("hello", "--target", target_folder, "--max-new-tokens", 2 * W, "--drafter", folder, "--compare")
    assert bare.exit_code == spec.exit_code == 0, (bare.exception, spec.exception)
    assert bare.stdout == spec.stdout and len(bare.stdout) > W
    assert "has no record.json, so nothing vouches" in spec.stderr and "texts identical" in spec.stderr and "drafts accepted" in spec.stderr


@pytest.mark.parametrize("block", [1, 5])
def test_smaller_blocks_down_to_none_drafted(monkeypatch, target, folder, block):
    monkeypatch.setattr(writing, "load", lambda *_args, **_kwargs: target)
    monkeypatch.setattr(fitting, "sizes", lambda _name: target)
    got = hsprod("hello", "--max-new-tokens", 12, "--drafter", folder, "--block-size", block, "--compare")
    assert got.exit_code == 0 and "texts identical" in got.stderr and ("tau 1.00 (0 of 0" in got.stderr) == (block == 1)


def test_each_layouts_masks(folder):
    """A later slot is heard by an earlier one in full layers only (dflash-facts 1.5): silence the full layers, and none is."""
    drafter, config, record = checkpoint.load(folder, "cpu", torch.float32)
    assert record == {} and config.mask_token_id == MASK and config.block_size == 16 and config.rope_theta == 1e7
    assert [layer_rule(config, i) for i in range(config.num_hidden_layers)] == (
        [(True, W)] * 5 + [(False, None)] if folder.name == "current" else [(False, None)] * 8)
    generator = torch.Generator().manual_seed(1)
    taps, block = torch.randn(1, 30, 64 * len(config.taps), generator=generator), torch.randn(1, 16, 64, generator=generator)
    changed = block.clone()
    changed[:, -1] += 1
    where = torch.tensor([[30]])

    def heard() -> bool:
        return not torch.equal(drafter(block, where, taps)[:, :-1], drafter(changed, where, taps)[:, :-1])
    assert heard()
    with torch.no_grad():
        for layer, kind in zip(drafter.layers, config.layer_types, strict=True):
            if kind == "full_attention":
                layer.self_attn.o_proj.weight.zero_()
    assert not heard()


INSIDE = CURRENT["dflash_config"]


@pytest.mark.parametrize("change, says", [
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"), ({"dflash_config": INSIDE | {"conv_kernel_size": 2}}, "conv_kernel_size"),
    ({"dflash_config": INSIDE | {"selector_rank": 256}}, "selector_rank"), ({"dflash_config": INSIDE | {"novelty": 1}}, "novelty is not known"),
    ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    ({"dflash_config": INSIDE | {"sample_from_anchor": True}}, "sample_from_anchor = True is not supported"),
    ({"dflash_config": INSIDE | {"target_layer_ids": [1, 3, 3]}}, "must ascend"),
    ({"dflash_config": INSIDE | {"target_layer_ids": [3, 1]}}, "must ascend"),
    ({"dflash_config": INSIDE | {"target_layer_ids": [-1, 3]}}, "0 to 6"), ({"dflash_config": INSIDE | {"target_layer_ids": [7]}}, "0 to 6"),
    ({"dflash_config": INSIDE | {"target_layer_ids": [8]}}, "0 to 6"), ({"dflash_config": INSIDE | {"block_size": 1}}, "block_size is 1"),
    ({"dflash_config": INSIDE | {"mask_token_id": ROWS}}, f"mask_token_id {ROWS} is no row"), ({"vocab_size": ROWS + 1}, "vocabulary 333"),
    ({"num_target_layers": 9}, "layers 9")])
def test_what_cannot_run_here_is_one_line_that_names_it(monkeypatch, target, tmp_path, change, says):
    monkeypatch.setattr(writing, "load", lambda *_args, **_kwargs: target)
    monkeypatch.setattr(fitting, "sizes", lambda _name: target)
    got = hsprod("hello", "--drafter", write(tmp_path / "d", CURRENT | change))
    assert isinstance(got.exception, UserError) and says in str(got.exception) and "\n" not in str(got.exception) and got.stdout == ""


@pytest.mark.parametrize("mask, noted", [(MASK + 1, None), (tiny.MASK, "'<|mask|>'")])
def test_the_mask_token_is_the_drafters_choice(monkeypatch, target, tmp_path, mask, noted):
    """C4: any row of the embedding will do; one that a text can hold is said to be one."""
    monkeypatch.setattr(writing, "load", lambda *_args, **_kwargs: target)
    monkeypatch.setattr(fitting, "sizes", lambda _name: target)
    got = hsprod("hello", "--max-new-tokens", 2, "--drafter", write(tmp_path / "d", CURRENT | {"dflash_config": INSIDE | {"mask_token_id": mask}}))
    assert got.exit_code == 0 and ("the mask token of" in got.stderr) == bool(noted) and (noted or "") in got.stderr


@pytest.mark.parametrize("extraction", [True, False])
def test_a_stream_with_a_mask_token_of_its_own_is_this_targets_all_the_same(target, tmp_path, capsys, extraction):
    """`hsprod serve --mask-token`: the contract that the drafter was trained under says it, and generate has no such option."""
    served = Target(target.name, target.model, target.tokenizer, mask_token=MASK + 3).contract((1, 2, 3, 4, 5), None)
    drafter = write(tmp_path / "d", CURRENT | {"dflash_config": INSIDE | {"mask_token_id": MASK + 3}})
    record = {"contract": served.hash, "target": served.target} | ({"extraction": served.to_dict()} if extraction else {})
    (drafter / checkpoint.RECORD).write_text(json.dumps(record))
    settings = writing.Generate(prompt="a", drafter=drafter)
    fitting.fit_drafter(settings, fitting.read_drafter(settings), target, None)
    assert capsys.readouterr().err == ""


def test_a_text_may_use_the_drafters_last_position_and_no_more(target, tmp_path):
    drafter = checkpoint.load(write(tmp_path / "d", CURRENT | {"max_position_embeddings": 40}), "cpu", torch.float32)[0]
    def writer(new: int) -> writing.Writer:
        return writing.Writer(target, drafter, Limit(new), writing.Sampling(), None, None)
    assert writer(30).decode(list(range(3, 13)), "").tokens == plain(target, list(range(3, 13)), Limit(30)).tokens
    with pytest.raises(UserError, match="10 tokens and 31 new ones: this drafter knows 40"):
        writer(31).decode(list(range(3, 13)), "")


def test_tiny_has_rows_to_spare(target):
    assert target.vocab_size == ROWS and target.mask_token_id == MASK == len(tiny.tokenizer())
