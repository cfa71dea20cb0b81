"""The GGUF to the key and the byte, without llama.cpp (test_llamacpp.py runs it)."""
from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import torch
from drafters_small import LAYERS, LISTED, MODES, TAPS, B, H, V, W, fresh, noise, same
from gguf import GGMLQuantizationType as T
from gguf import GGUFReader, GGUFWriter
from gguf import GGUFValueType as K

from common.drafter.config import FULL, SLIDING
from common.errors import UserError
from producer import smollm2
from trainer import imported
from trainer.formats import gguf as files
from trainer.formats import target_head, tokenizer_keys

HEAD = noise(V, H, seed=5)
KEYS = [("tokenizer.ggml.model", "gpt2", K.STRING, None), ("tokenizer.ggml.tokens", [f"t{i}" for i in range(V)], K.ARRAY, K.STRING),
        ("tokenizer.ggml.mask_token_id", 77, K.UINT32, None), ("tokenizer.ggml.eos_token_id", 1, K.UINT32, None)]
# llama.cpp's masks: one causality for all layers
EXPRESSIBLE = {"bidi": fresh("bidi"), "causal": fresh("causal"), "full": fresh("bidi", layer_types=(FULL,) * 3, sliding_window=None)}


def export(path, drafter, quant="bf16"):
    head = None if drafter.shortlist is None else HEAD[drafter.shortlist]
    files.write(path, drafter, {"step": 1}, quant, keys=KEYS, head=head)
    return path


def test_keys_and_names_as_llama_cpp_reads_them(tmp_path):
    reader = GGUFReader(export(tmp_path / "d.gguf", fresh("bidi", listed=True)))
    said = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert said.pop("hsdraft.record") == '{"step": 1}' and said.pop("tokenizer.ggml.tokens")[5] == "t5"
    assert said.pop("dflash.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert said == {
        "general.architecture": "dflash", "general.name": "d", "general.file_type": 32, "general.quantization_version": 2,
        "dflash.block_count": 3, "dflash.context_length": 128, "dflash.embedding_length": H, "dflash.feed_forward_length": 64,
        "dflash.attention.head_count": 4, "dflash.attention.head_count_kv": 2, "dflash.attention.key_length": 8, "dflash.attention.value_length": 8,
        "dflash.rope.freq_base": 10000.0, "dflash.vocab_size": V, "dflash.block_size": B, "dflash.attention.causal": False,
        "dflash.target_layers": [tap + 1 for tap in TAPS], "dflash.attention.sliding_window": W,
        "dflash.attention.sliding_window_pattern": [True, False, True], "hsdraft.num_target_layers": LAYERS, "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.mask_token_id": 2}
    found = {t.name: ([int(n) for n in reversed(t.shape)], t.tensor_type) for t in reader.tensors}
    layer = {"attn_norm": [H], "ffn_norm": [H], "attn_q": [32, H], "attn_k": [16, H], "attn_v": [16, H], "attn_output": [H, 32],
             "attn_q_norm": [8], "attn_k_norm": [8], "ffn_gate": [64, H], "ffn_up": [64, H], "ffn_down": [H, 64]}
    want = {f"blk.{i}.{name}.weight": size for i in range(3) for name, size in layer.items()} | {
        "fc.weight": [H, 2 * H], "enc.output_norm.weight": [H], "output_norm.weight": [H], "output.weight": [10, H], "d2t": [10]}
    assert {name: size for name, (size, _) in found.items()} == want
    assert {name: kind for name, (size, kind) in found.items() if kind != T.BF16} == {
        name: T.I64 if name == "d2t" else T.F32 for name, size in want.items() if len(size) == 1}
    assert reader.tensors[[t.name for t in reader.tensors].index("d2t")].data.tolist() == list(LISTED)       # absolute, not offsets


@pytest.mark.parametrize("quant", ["bf16", "f16"])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("mode", EXPRESSIBLE)
def test_round_trip_is_bit_equal(tmp_path, mode, listed, quant):
    drafter = EXPRESSIBLE[mode].to({"bf16": torch.bfloat16, "f16": torch.float16}[quant])
    drafter.shortlist = torch.tensor(LISTED) if listed else None
    found = imported.read(export(tmp_path / "a.gguf", drafter, quant))
    same(found.drafter, drafter)
    assert found.drafter.config == drafter.config and found.record == {"step": 1}
    (tmp_path / "b").mkdir()
    assert export(tmp_path / "b" / "a.gguf", found.drafter, quant).read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_q8_0_is_near_and_read_as_it_stands(tmp_path):
    drafter = fresh()
    found = imported.read(export(tmp_path / "a.gguf", drafter, "q8_0"))
    for (name, ours), theirs in zip(drafter.state_dict().items(), found.drafter.state_dict().values(), strict=True):
        assert theirs.dtype == torch.float32 and (ours.float() - theirs).abs().max() <= ours.float().abs().max() / 200, name
    export(tmp_path / "b.gguf", found.drafter, "q8_0")
    same(imported.read(tmp_path / "b.gguf").drafter, found.drafter)
    with pytest.raises(UserError, match=r"rows of blk\.0\.attn_output\.weight are 24 long"):
        export(tmp_path / "c.gguf", fresh(num_attention_heads=3, num_key_value_heads=1), "q8_0")
    assert not list(tmp_path.glob("*c.gguf*"))


@pytest.mark.parametrize("attention", MODES)
@pytest.mark.parametrize("kinds", [(SLIDING, FULL, SLIDING), (SLIDING,) * 3])
def test_a_mask_it_cannot_express_is_said_with_its_layers(tmp_path, attention, kinds):
    config = fresh(attention, layer_types=kinds).config
    said = "\n".join(files.notes(config, tmp_path / "d.gguf", "TARGET"))
    assert files.flag(config) == (attention == "causal" or attention == "mixed" and FULL not in kinds)
    assert ("runs layers 0 (sliding), 2 (sliding) bidirectional" in said) == (attention == "mixed" and FULL in kinds) == ("WARNING" in said)
    assert "--spec-draft-n-max 3" in said and "-md " + str(tmp_path / "d.gguf") in said


def test_fewer_masks_than_trained_are_said():
    def said(attention, block):
        return "\n".join(files.notes(fresh(attention, block_size=block).config, "d.gguf", "T"))
    assert "--spec-draft-n-max 7 " in said("bidi", 16) and "sees fewer masks" in said("bidi", 16)
    assert "fewer masks" not in said("causal", 16) and "fewer masks" not in said("bidi", 8)


# --- the target's side ------------------------------------------------------------------------------------------------------

try:
    SMOL = smollm2.gguf_file()
except UserError:
    SMOL = None
needs_smollm2 = pytest.mark.skipif(SMOL is None, reason=f"not installed: {smollm2.INSTALL}")


@needs_smollm2
def test_a_folders_tokenizer_makes_the_keys_that_its_gguf_has():
    folder = smollm2.folder()
    copied, made = ({name: rest for name, *rest in tokenizer_keys.keys(path, 49152)[0]} for path in (SMOL, folder))
    assert set(copied) - set(made) == {"tokenizer.chat_template", "tokenizer.ggml.add_space_prefix"} and set(made) <= set(copied)
    assert [name for name in made if made[name] != copied[name]] == ["tokenizer.ggml.pre"]                   # a name that llama.cpp gave
    longer = {name: rest[0] for name, *rest in tokenizer_keys.keys(folder, 49155)[0]}
    assert longer["tokenizer.ggml.tokens"][49152:] == ["[PAD49152]", "[PAD49153]", "[PAD49154]"]            # rows behind its ids
    assert longer["tokenizer.ggml.token_type"][49151:] == [1, 5, 5, 5]
    with pytest.raises(UserError, match="token 49151, the drafter's target has 100 rows"):
        tokenizer_keys.keys(folder, 100)


@needs_smollm2
def test_head_rows_are_the_same_from_both():
    ids = torch.tensor([0, 5, 49151])
    one, two = (target_head.rows(path, ids, 49152, 576) for path in (SMOL, smollm2.folder()))
    assert torch.equal(one, two) and one.shape == (3, 576)
    for path in (SMOL, smollm2.folder()):
        with pytest.raises(UserError, match="output head is 49152 x 576, the drafter's target's 49153 x 576"):
            target_head.rows(path, ids, 49153, 576)


def test_a_target_that_is_none(tmp_path):
    for call in (lambda: tokenizer_keys.keys(tmp_path, V), lambda: target_head.rows(tmp_path, torch.tensor([1]), V, H)):
        with pytest.raises(UserError, match="--target"):
            call()
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(UserError, match="no byte-level BPE; give the target's GGUF"):
        tokenizer_keys.keys(tmp_path, V)


# --- what is not ours to the byte -------------------------------------------------------------------------------------------

def changed(tmp_path, *, gone=(), add=(), tensors=lambda arrays: arrays, drafter=None):
    """The export written again by hand: keys taken out or put in (name, value, type, element), tensors {name: (array, type)} changed."""
    path = export(tmp_path / "a.gguf", drafter or fresh(listed=True))
    reader, out = GGUFReader(path), tmp_path / "b.gguf"
    writer = GGUFWriter(out, "dflash")
    replaced = {*gone, *(name for name, *_ in add), "general.architecture"}
    for name, field in reader.fields.items():
        if name not in replaced and not name.startswith("GGUF."):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None)
    for name, value, kind, *element in add:
        if name == "general.architecture":
            writer.kv_data[0][name] = gguf.gguf_writer.GGUFValue(value, kind)
        else:
            writer.add_key_value(name, value, kind, *element)
    for name, (array, kind) in tensors({t.name: (np.array(t.data), t.tensor_type) for t in reader.tensors}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_the_change_that_changes_nothing(tmp_path):
    same(imported.read(changed(tmp_path)).drafter, fresh(listed=True))
    same(imported.read(changed(tmp_path, gone=["dflash.attention.causal", "dflash.vocab_size", "hsdraft.record", "dflash.attention.value_length"],
                               add=[("dflash.rope.dimension_sections", [4, 0, 0, 0], K.ARRAY, K.INT32), ("dflash.logit_scale", 1.0, K.FLOAT32)])).drafter,
         fresh(listed=True))
    assert imported.read(changed(tmp_path, gone=["hsdraft.num_target_layers"]), LAYERS).drafter.config.num_target_layers == LAYERS


@pytest.mark.parametrize("gone", [
    "dflash.block_count", "dflash.context_length", "dflash.embedding_length", "dflash.feed_forward_length", "dflash.attention.head_count",
    "dflash.attention.head_count_kv", "dflash.attention.key_length", "dflash.attention.layer_norm_rms_epsilon", "dflash.rope.freq_base",
    "dflash.block_size", "dflash.target_layers", "dflash.attention.sliding_window_pattern", "tokenizer.ggml.mask_token_id"])
def test_each_missing_key_is_named(tmp_path, gone):
    with pytest.raises(UserError, match=gone.replace(".", r"\.") + " is missing"):
        imported.read(changed(tmp_path, gone=[gone]))


@pytest.mark.parametrize("name, value, kind, says", [
    ("general.architecture", "llama", K.STRING, "general.architecture is 'llama'"), ("dflash.surprise", 1, K.UINT32, "dflash.surprise is not known"),
    ("llama.block_count", 1, K.UINT32, "llama.block_count is not known"), ("dflash.block_count", 3, K.INT32, "dflash.block_count is INT32"),
    ("dflash.rope.freq_base", 10000, K.UINT32, "dflash.rope.freq_base is UINT32"), ("dflash.attention.causal", 1, K.UINT32, "causal is UINT32"),
    ("dflash.attention.value_length", 16, K.UINT32, "dflash.attention.value_length is 16"), ("dflash.selector_rank", 256, K.UINT32, "selector_rank = 256"),
    ("dflash.sample_from_anchor", True, K.BOOL, "sample_from_anchor = True"), ("dflash.logit_scale", 2.0, K.FLOAT32, "logit_scale = 2.0"),
    ("dflash.block_size", 1, K.UINT32, "block_size is 1"), ("tokenizer.ggml.mask_token_id", V, K.UINT32, f"mask_token_id {V}"),
    ("dflash.embedding_length", 64, K.UINT32, "has shape"), ("hsdraft.num_target_layers", 5, K.UINT32, "taps"),
    ("hsdraft.record", "{", K.STRING, "hsdraft.record is no JSON")])
def test_each_wrong_key_is_named(tmp_path, name, value, kind, says):
    with pytest.raises(UserError) as error:
        imported.read(changed(tmp_path, add=[(name, value, kind)]))
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name, value, element, says", [
    ("dflash.target_layers", [0, 5], K.INT32, "taps (-1, 4)"), ("dflash.target_layers", [2.0, 5.0], K.FLOAT32, "ARRAY of FLOAT32"),
    ("dflash.attention.sliding_window_pattern", [1, 0, 1], K.UINT32, "ARRAY of UINT32"), ("dflash.rope.dimension_sections", [2, 2, 0, 0], K.INT32, "[2, 2, 0, 0]"),
    ("dflash.attention.sliding_window_pattern", [True, False], K.BOOL, "layer_types")])
def test_each_wrong_array_is_named(tmp_path, name, value, element, says):
    with pytest.raises(UserError) as error:
        imported.read(changed(tmp_path, add=[(name, value, K.ARRAY, element)]))
    assert says in str(error.value)


def renamed(old, new):
    return lambda arrays: {new if name == old else name: value for name, value in arrays.items()}


@pytest.mark.parametrize("change, says", [
    (lambda a: {n: v for n, v in a.items() if n != "d2t"}, "output.weight stands without d2t"), (renamed("fc.weight", "fcc.weight"), "fc.weight is missing"),
    (lambda a: a | {"token_embd.weight": (np.zeros((V, H), np.float32), T.F32)}, "token_embd.weight is not part"),
    (lambda a: a | {"fc.weight": (np.zeros((H, H), np.float32), T.F32)}, "fc.weight has shape [32, 32]"),
    (lambda a: a | {"d2t": (np.arange(10, dtype=np.int32), T.I32)}, "d2t is I32"), (lambda a: a | {"d2t": (np.arange(10)[::-1].copy(), T.I64)}, "d2t"),
    (lambda a: a | {"output_norm.weight": (np.full(H, np.inf, np.float32), T.F32)}, "output_norm.weight is not finite")])
def test_each_wrong_tensor_is_named(tmp_path, change, says):
    with pytest.raises(UserError) as error:
        imported.read(changed(tmp_path, tensors=change))
    assert says in str(error.value)


def test_a_truncated_file_a_longer_one_and_what_is_none(tmp_path):
    path = export(tmp_path / "a.gguf", fresh())
    whole = path.read_bytes()
    for wrong in (whole[:-40], whole[:200], whole + bytes(64), b"GGUF", b"", b"no such thing" * 9):
        path.write_bytes(wrong)
        with pytest.raises(UserError, match="gguf: "):
            imported.read(path)
