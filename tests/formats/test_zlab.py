"""z-lab's own code on our export, and we on theirs; both layouts; every key read or refused by name."""
from __future__ import annotations

import json

import pytest
import torch
from drafters_small import LAYERS, MODES, TAPS, B, H, V, W, drafted, fresh, noise, same

from common.drafter import checkpoint
from common.errors import CorruptError, UserError
from trainer import imported
from trainer.formats import zlab

dflash = pytest.importorskip("dflash.model", reason="not installed: pip install --no-deps dflash==0.1.0 (make test does)")


def theirs(folder):
    model, info = dflash.DFlashDraftModel.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def run(model, taps, block):
    positions = torch.arange(len(taps) + len(block))[None]
    with torch.no_grad():
        return model(target_hidden=taps[None], noise_embedding=block[None], position_ids=positions)[0]


@pytest.mark.parametrize("context", [3, W, 3 * W])
@pytest.mark.parametrize("attention", MODES)
def test_their_code_loads_our_export_and_agrees(tmp_path, attention, context):
    drafter = fresh(attention)
    assert zlab.write(tmp_path / "d", drafter, {}, "bf16") == []
    model = theirs(tmp_path / "d")
    taps, block = noise(context, len(TAPS) * H), noise(B, H, seed=1)
    assert (model.block_size, list(model.target_layer_ids), model.mask_token_id) == (B, list(TAPS), 2)
    head = torch.nn.Linear(H, V, bias=False)
    torch.testing.assert_close(model.compute_logits(run(model, taps, block), head), head(drafted(drafter, taps, block)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", MODES)
def test_we_load_what_their_code_saves_and_agree(tmp_path, attention):
    zlab.write(tmp_path / "d", fresh(attention), {}, "bf16")
    model = theirs(tmp_path / "d")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    model.save_pretrained(tmp_path / "theirs")
    found = imported.read(tmp_path / "theirs")
    taps, block = noise(3 * W, len(TAPS) * H), noise(B, H, seed=1)
    torch.testing.assert_close(run(model, taps, block), drafted(found.drafter, taps, block), rtol=1e-4, atol=1e-4)
    for name, value in model.state_dict().items():
        assert torch.equal(found.drafter.state_dict()[name], value)


@pytest.mark.parametrize("quant, dtype", [("bf16", torch.bfloat16), ("f16", torch.float16)])
@pytest.mark.parametrize("attention", MODES)
def test_round_trip_is_bit_equal(tmp_path, attention, quant, dtype):
    drafter, record = fresh(attention, dtype=dtype), {"contract": "c", "step": 3}
    zlab.write(tmp_path / "a", drafter, record, quant)
    found = imported.read(tmp_path / "a")
    same(found.drafter, drafter)
    assert found.record == record and found.drafter.config == drafter.config
    zlab.write(tmp_path / "b", found.drafter, found.record, quant)
    for name in (checkpoint.CONFIG, checkpoint.WEIGHTS, checkpoint.RECORD):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_a_narrower_type_rounds_is_counted_and_what_it_cannot_hold_is_refused(tmp_path):
    drafter = fresh(dtype=torch.float32)
    drafter.norm.weight[:3] = torch.tensor([1 + 2 ** -9, 1.0, 1.0])
    assert any("bf16 rounded 1 of " in line for line in zlab.write(tmp_path / "a", drafter, {}, "bf16"))
    assert zlab.write(tmp_path / "b", drafter, {}, "f16") == []
    drafter.fc.weight[0, 0] = 1e5
    with pytest.raises(UserError, match=r"fc\.weight holds 1e\+05"):
        zlab.write(tmp_path / "c", drafter, {}, "f16")
    assert not (tmp_path / "c").exists()


def test_a_draft_vocabulary_stays_behind_and_that_is_said(tmp_path):
    said = zlab.write(tmp_path / "d", fresh(listed=True), {"shortlist": 10}, "bf16")
    assert "trained to draft 10 tokens" in said[0] and not (tmp_path / "d" / checkpoint.SHORTLIST).exists()
    assert imported.read(tmp_path / "d").drafter.shortlist is None


# --- what is not ours to the byte -------------------------------------------------------------------------------------------

def export(tmp_path, **changes):
    """An export whose config.json has these keys changed (None: taken out)."""
    zlab.write(tmp_path / "d", fresh("mixed"), {}, "bf16")
    path = tmp_path / "d" / checkpoint.CONFIG
    data = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if value is not None}
    path.write_text(json.dumps(data))
    return tmp_path / "d"


INSIDE = {"block_size": B, "mask_token_id": 2, "target_layer_ids": list(TAPS)}


@pytest.mark.parametrize("changes", [
    {"block_size": None, "rope_theta": None, "sample_from_anchor": None, "auto_map": None, "dtype": None},           # as released in June 2026
    {"rope_parameters": None, "dflash_config": {name: INSIDE[name] for name in ("mask_token_id", "target_layer_ids")}, "dtype": None,
     "torch_dtype": "bfloat16", "use_cache": True, "max_window_layers": 3, "transformers_version": "4.57.1"}])       # as in April
def test_both_layouts(tmp_path, changes):
    found = imported.read(export(tmp_path, **changes))
    same(found.drafter, fresh("mixed"))
    assert found.drafter.config == fresh("mixed").config
    assert ("April" in found.said[0]) == ("rope_parameters" in changes)


@pytest.mark.parametrize("changes, says", [
    ({"surprise": 1}, "surprise is not known"), ({"dflash_config": INSIDE | {"novelty": 1}}, "dflash_config.novelty is not known"),
    ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "rope_parameters.factor is not known"), ({"hidden_size": "32"}, "hidden_size is '32'"),
    ({"is_causal": 1}, "is_causal is 1"), ({"num_target_layers": None}, "num_target_layers is missing"), ({"num_target_layers": LAYERS - 3}, "taps"),
    ({"torch_dtype": "float16"}, "torch_dtype is 'float16'"), ({"rope_theta": 1e6}, "rope_theta is 10000.0 in one place"),
    ({"num_hidden_layers": 2}, "layer_types"), ({"hidden_size": 64}, "fc.weight has shape"), ({"use_sliding_window": False}, "use_sliding_window"),
    ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"), ({"attention_bias": True}, "attention_bias is True")])
def test_each_wrong_key_is_named(tmp_path, changes, says):
    with pytest.raises(UserError, match="(?s)^[^\n]*" + says.replace(".", r"\.").replace("[", r"\[")):
        imported.read(export(tmp_path, **changes))


def rewrite(path, change):
    from safetensors.torch import load_file, save_file
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("change, says", [
    (lambda t: t.pop("norm.weight"), "norm.weight is missing"),
    (lambda t: t.update({"layers.0.mlp.gate.weight": t.pop("layers.0.mlp.gate_proj.weight")}), "layers.0.mlp.gate_proj.weight is missing"),
    (lambda t: t.update({"extra.weight": torch.zeros(1)}), "extra.weight is not part"),
    (lambda t: t.update({"fc.weight": t["fc.weight"].half()}), "is F16"), (lambda t: t.update({"fc.weight": t["fc.weight"].int()}), "fc.weight is I32"),
    (lambda t: t.update({"norm.weight": torch.full((H,), float("nan")).bfloat16()}), "norm.weight is not finite")])
def test_each_wrong_tensor_is_named(tmp_path, change, says):
    folder = export(tmp_path)
    rewrite(folder / checkpoint.WEIGHTS, change)
    with pytest.raises(UserError, match=says.replace(".", r"\.")):
        imported.read(folder)


def test_a_truncated_file_and_a_longer_one(tmp_path):
    path = export(tmp_path) / checkpoint.WEIGHTS
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole[:100], whole + b"\0"):
        path.write_bytes(wrong)
        with pytest.raises(CorruptError, match=r"model\.safetensors"):
            zlab.read(path.parent)
