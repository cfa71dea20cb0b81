"""llama.cpp's file (dflash-facts 5d): architecture `dflash`, taps counted from 1, norms in F32, one causality for all layers.

Embedding and head come from the target that llama.cpp runs beside it; a drafter of few tokens carries those rows of the head
(output.weight) and their ids (d2t, absolute).  What the format has no key for stands under `hsdraft.`, which llama.cpp passes
over: the target's layers, our record.  Left out: M-RoPE sections, which only images would need."""
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from common import jsons
from common.drafter import vocab
from common.drafter.config import FULL, MOST, SLIDING, DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError, UserError
from common.files import publish_file
from trainer.formats import Found, blocks, cast, filled, gguf_bounds, masks_changed

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCH = "dflash"
INSTALL = "pip install 'hsdraft[export]'"
U32, F32, BOOL, STRING = "UINT32", "FLOAT32", "BOOL", "STRING"
SHAPE = {"block_count": ("num_hidden_layers", U32), "context_length": ("max_position_embeddings", U32), "embedding_length": ("hidden_size", U32),
         "feed_forward_length": ("intermediate_size", U32), "attention.head_count": ("num_attention_heads", U32),
         "attention.head_count_kv": ("num_key_value_heads", U32), "attention.key_length": ("head_dim", U32),
         "attention.layer_norm_rms_epsilon": ("rms_norm_eps", F32), "rope.freq_base": ("rope_theta", F32), "vocab_size": ("vocab_size", U32),
         "block_size": ("block_size", U32)}
OTHER = {"attention.value_length": U32, "attention.sliding_window": U32, "attention.causal": BOOL, "rope.dimension_count": U32}
ARRAYS = {"target_layers": ("INT32", "UINT32"), "attention.sliding_window_pattern": (BOOL,), "rope.dimension_sections": ("INT32", "UINT32")}
# Legal there and another network here, unless they say what is the default anyway.
NEUTRAL = {"logit_scale": (0.0, 1.0), "final_logit_softcapping": (0.0,), "embedding_scale": (1.0,), "sample_from_anchor": (False,),
           "has_confidence_head": (False,), "conv_kernel_size": (0,), "conv_group_size": (0,), "selector_rank": (0,), "selector_top_k": (0,)}
MASK = "tokenizer.ggml.mask_token_id"
LAYERS, RECORD = "hsdraft.num_target_layers", "hsdraft.record"
NAMES = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
LAYER_NAMES = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
               "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
               "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
QUANTS = {"f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7)}          # GGML type of matrices, general.file_type
SENSIBLE = 7                    # most drafts a block on Strix Halo's Vulkan: verifies above 8 tokens fall off a cliff (strix-halo-facts)


def tensor_name(name: str) -> str:
    """Ours -> llama.cpp's."""
    stem = name.removesuffix(".weight")
    if stem in NAMES:
        return f"{NAMES[stem]}.weight"
    _, layer, rest = stem.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def flag(config: DrafterConfig) -> bool:
    """dflash.attention.causal: true where every layer is, as llama.cpp's own converter has it for a mixed drafter."""
    return all(blocks(config))


# --- writing --------------------------------------------------------------------------------------------------------------

def write(path: Path, drafter: Drafter, record: dict, quant: str, *, keys: list, head: Tensor | None) -> list[str]:
    """keys: the target's tokenizer, (key, value, GGUFValueType, element type or None) each.  head: the target's rows [K, H] of the
    drafter's shortlist, where it has one.  -> what was changed.  UserError where it cannot be written."""
    from gguf import GGUFValueType, GGUFWriter
    config = drafter.config
    tensors, said = _arrays(drafter, quant, head)
    temporary = path.with_name(f".{path.name}.tmp")
    writer = GGUFWriter(temporary, ARCH)
    writer.add_string("general.name", path.stem)
    writer.add_file_type(QUANTS[quant][1])
    writer.add_quantization_version(2)
    for key, (field, kind) in SHAPE.items():
        (writer.add_float32 if kind == F32 else writer.add_uint32)(f"{ARCH}.{key}", getattr(config, field))
    writer.add_uint32(f"{ARCH}.attention.value_length", config.head_dim)
    writer.add_bool(f"{ARCH}.attention.causal", flag(config))
    writer.add_array(f"{ARCH}.target_layers", [tap + 1 for tap in config.taps])
    if config.sliding_window is not None:
        writer.add_uint32(f"{ARCH}.attention.sliding_window", config.sliding_window)
        writer.add_array(f"{ARCH}.attention.sliding_window_pattern", [kind == SLIDING for kind in config.layer_types])
    writer.add_uint32(LAYERS, config.num_target_layers)
    writer.add_string(RECORD, json.dumps(record))
    for key, value, kind, element in keys:
        if key != MASK:
            writer.add_key_value(key, value, kind, element)
    writer.add_key_value(MASK, config.mask_token_id, GGUFValueType.UINT32)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        publish_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return said


def _arrays(drafter: Drafter, quant: str, head: Tensor | None) -> tuple[dict[str, tuple[np.ndarray, Any]], list[str]]:
    """{name: (array, GGML type)}: matrices as asked for, norms in F32."""
    from gguf import GGMLQuantizationType, quants
    kind = GGMLQuantizationType[QUANTS[quant][0]]
    matrices = {tensor_name(name): value for name, value in drafter.state_dict().items() if value.ndim == 2}
    matrices |= {} if head is None else {"output.weight": head}
    if quant == "q8_0":
        if odd := [name for name, value in matrices.items() if value.shape[1] % 32]:
            raise UserError(f"--quant q8_0: rows of {odd[0]} are {matrices[odd[0]].shape[1]} long, not a multiple of 32; use f16 or bf16")
        said = ["note: q8_0 keeps 8 bits of each weight and a scale for 32 of them"]
    else:
        matrices, said = cast(matrices, quant)
    out = {name: (quants.quantize(value.detach().cpu().float().numpy(), kind), kind) for name, value in matrices.items()}
    out |= {tensor_name(name): (value.detach().cpu().float().numpy(), GGMLQuantizationType.F32)
            for name, value in drafter.state_dict().items() if value.ndim == 1}
    if drafter.shortlist is not None:
        out["d2t"] = (drafter.shortlist.cpu().numpy(), GGMLQuantizationType.I64)
    return out, said


# --- reading --------------------------------------------------------------------------------------------------------------

def read(path: Path, target_layers: int | None) -> Found:
    """target_layers: the target's layers, which only our own files say.  CorruptError names the key or tensor that is wrong,
    UserError asks for --target-layers."""
    reader = open_file(path)
    values = {name: (field, [kind.name for kind in field.types]) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    config = _config(values, target_layers)
    shapes = {tensor_name(name): (name, tuple(value.shape)) for name, value in Drafter(config).state_dict().items()}
    tensors = _tensors(reader, path, {name: shape for name, (_, shape) in shapes.items()}, config)
    ids, head = tensors.pop("d2t", None), tensors.pop("output.weight", None)
    shortlist = None if ids is None else torch.from_numpy(ids)
    if shortlist is not None:
        try:
            vocab.check(shortlist, config.vocab_size)
        except ValueError as error:
            raise CorruptError(f"gguf: d2t: {error}") from None
    dtype = _narrowest(reader, tensors)
    said = [f"GGUF: taps {list(config.taps)} of dflash.target_layers {[tap + 1 for tap in config.taps]}; inside the block every layer is "
            f"{'causal' if config.attention == 'causal' else 'bidirectional'}, as llama.cpp runs it; weights kept as {str(dtype).removeprefix('torch.')}"]
    if head is not None:
        said.append(f"output.weight ({len(head):,} rows) is left behind: ours takes these rows from the target's own head")
    return Found(filled(config, {shapes[name][0]: torch.from_numpy(value).to(dtype) for name, value in tensors.items()}, shortlist),
                 _record(values), tuple(said))


def open_file(path: Path) -> GGUFReader:
    """UserError without the gguf package; CorruptError for what is no whole GGUF file."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"GGUF files need the package gguf; run: {INSTALL}") from None
    try:
        gguf_bounds.check(path)
        with np.errstate(over="raise"):                                 # offsets that wrap around
            reader = GGUFReader(path)
    except CorruptError:
        raise
    except OSError as error:
        raise CorruptError(f"gguf: {error.strerror or error}") from None
    except Exception as error:                                       # the package's parser raises what numpy does on bytes that lie
        raise CorruptError(f"gguf: no whole GGUF file ({type(error).__name__}: {error})") from None
    end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
    if not end <= path.stat().st_size < end + reader.alignment:
        raise CorruptError(f"gguf: {path.stat().st_size} bytes, its header says {end}")
    return reader


def _config(values: dict, target_layers: int | None) -> DrafterConfig:
    if _value(values, "general.architecture", STRING) != ARCH:
        raise CorruptError(f"gguf: general.architecture is {_value(values, 'general.architecture', STRING)!r}, expected {ARCH!r}")
    known = {f"{ARCH}.{key}" for key in (*SHAPE, *OTHER, *ARRAYS, *NEUTRAL)} | {LAYERS, RECORD}
    if unknown := sorted(name for name in values if name not in known and not name.startswith(("general.", "tokenizer."))):
        raise CorruptError(f"gguf: {unknown[0]} is not known ({len(unknown)} in all)")
    for key, neutral in NEUTRAL.items():
        if (name := f"{ARCH}.{key}") in values and (said := _contents(name, values[name][0])) not in neutral:
            raise CorruptError(f"gguf: {name} = {said!r} is not supported")
    shape = {field: _value(values, f"{ARCH}.{key}", kind) for key, (field, kind) in SHAPE.items() if key != "vocab_size"}
    if f"{ARCH}.vocab_size" in values:
        shape["vocab_size"] = _value(values, f"{ARCH}.vocab_size", U32)
    else:
        shape["vocab_size"] = len(_list(values, "tokenizer.ggml.tokens", (STRING,)))
    for key, wanted in (("attention.value_length", shape["head_dim"]), ("rope.dimension_count", shape["head_dim"])):
        if (name := f"{ARCH}.{key}") in values and (said := _value(values, name, U32)) != wanted:
            raise CorruptError(f"gguf: {name} is {said}, attention.key_length {wanted}")
    sections = _list(values, f"{ARCH}.rope.dimension_sections", ARRAYS["rope.dimension_sections"]) if f"{ARCH}.rope.dimension_sections" in values else None
    if sections not in (None, [shape["head_dim"] // 2, 0, 0, 0]):
        raise CorruptError(f"gguf: {ARCH}.rope.dimension_sections is {sections}: positions of several kinds are not supported")
    if LAYERS in values:
        target_layers = target_layers or _value(values, LAYERS, U32)
    if target_layers is None:
        raise UserError("a GGUF does not say how many layers the target has: give --target-layers N")
    causal = _value(values, f"{ARCH}.attention.causal", BOOL) if f"{ARCH}.attention.causal" in values else False
    try:
        return DrafterConfig(**shape, **_windows(values, shape["num_hidden_layers"]), attention="causal" if causal else "bidi",
                             taps=tuple(i - 1 for i in _list(values, f"{ARCH}.target_layers", ARRAYS["target_layers"])),
                             mask_token_id=_value(values, MASK, U32), num_target_layers=target_layers)
    except ValueError as error:
        raise CorruptError(f"gguf: {error}") from None


def _windows(values: dict, layers: int) -> dict:
    window, pattern = f"{ARCH}.attention.sliding_window", f"{ARCH}.attention.sliding_window_pattern"
    if window not in values:
        return {"layer_types": (FULL,) * min(layers, 1 + MOST["num_hidden_layers"]), "sliding_window": None}
    kinds = tuple(SLIDING if slides else FULL for slides in _list(values, pattern, (BOOL,)))
    return {"layer_types": kinds, "sliding_window": _value(values, window, U32) if SLIDING in kinds else None}


def _value(values: dict, name: str, kind: str) -> Any:
    if name not in values:
        raise CorruptError(f"gguf: {name} is missing")
    field, kinds = values[name]
    if kinds != [kind]:
        raise CorruptError(f"gguf: {name} is {' of '.join(kinds)}, expected {kind}")
    value = _contents(name, field)
    return float(str(np.float32(value))) if kind == F32 else value              # 1e-06, as it was before it became an F32


def _contents(name: str, field: Any) -> Any:
    try:
        return field.contents()
    except ValueError:
        raise CorruptError(f"gguf: {name} is no text in UTF-8") from None


def _list(values: dict, name: str, kinds: tuple[str, ...]) -> list:
    if name not in values:
        raise CorruptError(f"gguf: {name} is missing")
    field, found = values[name]
    if found[0] != "ARRAY" or (len(found) > 1 and found[1] not in kinds) or not _contents(name, field):
        raise CorruptError(f"gguf: {name} is {' of '.join(found)}, expected an array of {kinds[0]}")
    return [bool(v) if kinds[0] == BOOL else v for v in field.contents()]


def _tensors(reader: GGUFReader, path: Path, shapes: dict[str, tuple[int, ...]], config: DrafterConfig) -> dict[str, np.ndarray]:
    """Exactly these, and the two of a restricted vocabulary together; float32, d2t int64."""
    from gguf.quants import dequantize
    found = {tensor.name: tensor for tensor in reader.tensors}
    if ("d2t" in found) != ("output.weight" in found):
        raise CorruptError(f"gguf: {'d2t' if 'd2t' in found else 'output.weight'} stands without {'output.weight' if 'd2t' in found else 'd2t'}")
    if "d2t" in found:
        size = int(found["d2t"].shape[0])
        shapes = shapes | {"d2t": (size,), "output.weight": (size, config.hidden_size)}
    for word, names in (("is missing", set(shapes) - set(found)), ("is not part of this drafter", set(found) - set(shapes))):
        if names:
            raise CorruptError(f"gguf: {min(names)} {word} ({len(names)} in all)")
    out = {}
    for name, shape in shapes.items():
        tensor, stands = found[name], tuple(int(n) for n in reversed(found[name].shape))
        if stands != shape:
            raise CorruptError(f"gguf: {name} has shape {list(stands)}, expected {list(shape)}")
        if (tensor.tensor_type.name == "I64") != (name == "d2t") or tensor.tensor_type.name in ("I8", "I16", "I32", "F64"):
            raise CorruptError(f"gguf: {name} is {tensor.tensor_type.name}")
        out[name] = np.array(tensor.data, np.int64) if name == "d2t" else np.array(dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(shape)
        if not np.isfinite(out[name]).all():
            raise CorruptError(f"gguf: {name} is not finite")
    return out


def _narrowest(reader: GGUFReader, tensors: dict[str, np.ndarray]) -> torch.dtype:
    """The type that the matrices are in, if all are in one and the norms fit it exactly; else float32, which holds everything."""
    kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) == 2}
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kinds.pop()) if len(kinds) == 1 else None
    exact = dtype is not None and all(torch.equal(t.to(dtype).float(), t) for t in map(torch.from_numpy, tensors.values()))
    return dtype if exact else torch.float32


def _record(values: dict) -> dict:
    if RECORD not in values:
        return {}
    try:
        record = jsons.loads(_value(values, RECORD, STRING))
    except ValueError:
        raise CorruptError(f"gguf: {RECORD} is no JSON") from None
    if not isinstance(record, dict):
        raise CorruptError(f"gguf: {RECORD} is no table")
    return record


def notes(config: DrafterConfig, out: Path, target: str) -> list[str]:
    """What llama.cpp makes of the file, and how it is run."""
    most = min(SENSIBLE, config.block_size - 1)
    said = ["llama.cpp (28 June 2026 or later) honours window, taps, draft vocabulary and block size; it has one causality for all layers",
            *masks_changed(config, [flag(config)] * config.num_hidden_layers, "llama.cpp"),
            f"--spec-draft-n-max is 3 unless given, {config.block_size - 1} at most here; on Strix Halo with Vulkan {most} is the sensible most (a verify of "
            "more than 8 tokens falls off a cliff on many-expert models)" +
            ("; a block is n-max + 1 slots, so a bidirectional layer sees fewer masks than in training where it is lower than "
             f"{config.block_size - 1}" if not flag(config) and most < config.block_size - 1 else ""),
            "text only: with images, positions of an M-RoPE target are not these",
            f"    llama-server -m {target} -md {out} --spec-type draft-dflash --spec-draft-n-max {most} --spec-draft-p-min 0 -ngl 99 -ngld 99 -fa on"]
    return said
