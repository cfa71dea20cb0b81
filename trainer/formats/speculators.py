"""The folder of speculators 0.9 (dflash-facts 5b), which vLLM serves by itself.

Taps are counted from 1 there (id a is the input of layer a, our tap a-1).  A list of draftable tokens is d2t (offsets), t2d and
the target's rows of the output head, which our drafters take from the target itself.  A config holds only what differs from
Qwen3Config's defaults, so those stand here."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from common.drafter import checkpoint, vocab
from common.drafter.config import FULL, MOST, SLIDING, DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError, UserError
from common.files import whole_folder
from trainer.formats import Found, blocks, cast, filled, masks_changed

VERSION = "0.9.0"
MARK = "speculators_model_type"                 # the key that only these folders have
# transformers' Qwen3Config, as far as a drafter reads it (a test holds them equal).
DEFAULTS = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
            "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "use_sliding_window": False}
BESIDE = {"initializer_range", "max_window_layers", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version",
          "dtype", "torch_dtype", "architectures", "_attn_implementation"}         # in transformer_layer_config, without effect
LAYERS = {*DEFAULTS, *BESIDE, "model_type", "layer_types", "sliding_window", "rope_parameters", "rope_theta", "rope_scaling"}
TOP = {MARK, "speculators_version", "speculators_config", "architectures", "transformer_layer_config", "draft_vocab_size", "block_size",
       "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id", "sliding_window_non_causal", "sample_from_anchor",
       "tie_word_embeddings", "auto_map", "dtype", "torch_dtype", "transformers_version"}
FIXED = {MARK: "dflash", "sample_from_anchor": False, "tie_word_embeddings": False}


def read(folder: Path, target_layers: int | None) -> Found:
    """target_layers: the target's layers, which the format does not say; None: as in our own record beside it.
    CorruptError names the key or tensor that is wrong, UserError asks for --target-layers."""
    data = checkpoint.read_json(folder / checkpoint.CONFIG)
    record = checkpoint.read_json(folder / checkpoint.RECORD) if (folder / checkpoint.RECORD).exists() else {}
    config, size = config_of(data, target_layers or record.get("num_target_layers"))
    shapes = {name: tuple(value.shape) for name, value in Drafter(config).state_dict().items()}
    header = checkpoint.read_header(folder / checkpoint.WEIGHTS)
    if size is not None:
        extra = {"d2t": ("I64", [size]), "t2d": ("BOOL", [config.vocab_size]), "lm_head.weight": (None, [size, config.hidden_size])}
        for name, (kind, shape) in extra.items():
            entry = header.pop(name, None)
            if entry is None:
                raise CorruptError(f"speculators: {name} is missing, config.json says draft_vocab_size {size}")
            if entry["shape"] != shape or kind not in (None, entry["dtype"]):
                raise CorruptError(f"speculators: {name} is {entry['dtype']} {entry['shape']}, expected {kind or 'floats'} {shape}")
    checkpoint.check_header(header, shapes)
    tensors = checkpoint.read_tensors(folder / checkpoint.WEIGHTS)
    shortlist = None if size is None else _shortlist(tensors, config.vocab_size)
    said = [f"speculators {data.get('speculators_version', 'of no version')}: taps {list(config.taps)} of aux_hidden_state_layer_ids "
            f"{data['aux_hidden_state_layer_ids']}; inside the block {config.attention}"]
    if SLIDING in config.layer_types:
        said.append("note: speculators trains sliding layers on context from anchor - W on, for every slot; here, as in vLLM, slot j sees from "
                    "anchor + j - W + 1 on")
    if size is not None:
        said.append(f"lm_head.weight ({size:,} rows) is left behind: ours takes these rows from the target's own head")
    return Found(filled(config, {name: tensors[name] for name in shapes}, shortlist), record, tuple(said))


def config_of(data: dict, target_layers: Any) -> tuple[DrafterConfig, int | None]:
    """config.json -> our config, and how many tokens may be drafted (None: all)."""
    layers = data.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise CorruptError("speculators: transformer_layer_config is missing or not a table")
    for where, table, known in (("", data, TOP), ("transformer_layer_config.", layers, LAYERS)):
        if unknown := sorted(set(table) - known):
            raise CorruptError(f"speculators: {where}{unknown[0]} is not known ({len(unknown)} in all)")
    for name, value in FIXED.items():
        if data.get(name, value) != value:
            raise CorruptError(f"speculators: {name} is {data[name]!r}, this code knows {value!r} only")
    ids, size, wide = (data.get(name) for name in ("aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size"))
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise CorruptError(f"speculators: aux_hidden_state_layer_ids is {ids!r}, expected a list of int")
    if type(target_layers) is not int:
        raise UserError("speculators' format does not say how many layers the target has: give --target-layers N")
    layers = DEFAULTS | layers
    count, kinds = layers["num_hidden_layers"], layers.get("layer_types")
    if type(count) is not int or not 0 < count <= MOST["num_hidden_layers"]:
        raise CorruptError(f"speculators: num_hidden_layers is {count!r}, expected 1 to {MOST['num_hidden_layers']}")
    if not (kinds is None or isinstance(kinds, list) and all(type(kind) is str for kind in kinds)):
        raise CorruptError(f"speculators: layer_types is {kinds!r}, expected a list of str")
    layers.setdefault("layer_types", [FULL] * count if layers["use_sliding_window"] is not True else None)
    config = DrafterConfig.from_json({name: value for name, value in layers.items() if name not in BESIDE} | _attention(data, layers) | {
        "num_target_layers": target_layers,
        "dflash_config": {"block_size": data.get("block_size"), "mask_token_id": data.get("mask_token_id"),
                          "target_layer_ids": [i - 1 for i in ids]}})
    if wide not in (None, config.hidden_size):
        raise CorruptError(f"speculators: target_hidden_size is {wide}, hidden_size {config.hidden_size}")
    if type(size) is not int or not 1 <= size <= config.vocab_size:
        raise CorruptError(f"speculators: draft_vocab_size is {size!r}, expected 1 to {config.vocab_size}")
    return config, None if size == config.vocab_size else size


def _attention(data: dict, layers: dict) -> dict:
    """Full layers are bidirectional there, always; sliding ones causal unless sliding_window_non_causal -> is_causal, or none of it."""
    non_causal = data.get("sliding_window_non_causal", False)
    if type(non_causal) is not bool:
        raise CorruptError(f"speculators: sliding_window_non_causal is {non_causal!r}, expected bool")
    kinds = set(layers["layer_types"] or ())
    if non_causal or SLIDING not in kinds:
        return {"is_causal": False}
    return {} if FULL in kinds else {"is_causal": True}


def _shortlist(tensors: dict[str, Tensor], vocab_size: int) -> Tensor:
    ids = vocab.from_d2t(tensors["d2t"])
    try:
        vocab.check(ids, vocab_size)
    except ValueError as error:
        raise CorruptError(f"speculators: d2t: {error}") from None
    if not torch.equal(tensors["t2d"], vocab.to_t2d(ids, vocab_size)):
        raise CorruptError("speculators: t2d names other tokens than d2t")
    return ids


def write(folder: Path, drafter: Drafter, record: dict, quant: str, *, head: Tensor | None, target: str | None) -> list[str]:
    """head: the target's rows [K, H] of the drafter's shortlist, where it has one.  target: name or folder of the target, for
    loaders that fetch its embedding.  -> what was changed."""
    tensors, said = cast(drafter.state_dict() | ({} if head is None else {"lm_head.weight": head}), quant)
    config, ids = drafter.config, drafter.shortlist
    if ids is not None:
        tensors |= {"d2t": vocab.to_d2t(ids), "t2d": vocab.to_t2d(ids, config.vocab_size)}
    with whole_folder(folder) as temporary:
        safetensors.torch.save_file(tensors, temporary / checkpoint.WEIGHTS, metadata={"format": "pt"})
        for name, data in ((checkpoint.CONFIG, config_json(config, None if ids is None else len(ids), target) |
                            {"dtype": checkpoint.NAMES[tensors["fc.weight"].dtype]}),
                           (checkpoint.RECORD, record | {"num_target_layers": config.num_target_layers})):
            (temporary / name).write_text(json.dumps(data, indent=2) + "\n", "utf-8")
    return said


def config_json(config: DrafterConfig, size: int | None, target: str | None) -> dict:
    ours = config.to_json()
    layers = {name: ours[name] for name in (*DEFAULTS, "model_type", "layer_types", "rope_parameters", "sliding_window") if name in ours}
    layers |= {"max_window_layers": config.num_hidden_layers, "use_sliding_window": config.sliding_window is not None}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return FIXED | {
        "speculators_version": VERSION, "architectures": ["DFlashSpeculator"], "transformer_layer_config": layers,
        "draft_vocab_size": size or config.vocab_size, "block_size": config.block_size, "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps], "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": non_causal(config),
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [proposal], "default_proposal_method": "greedy",
                               "verifier": {"name_or_path": target, "architectures": []}}}


def non_causal(config: DrafterConfig) -> bool:
    """Their one switch, for sliding layers: any of ours bidirectional."""
    return any(kind == SLIDING and not causal for kind, causal in zip(config.layer_types, blocks(config), strict=True))


def notes(config: DrafterConfig, out: Path, target: str) -> list[str]:
    """What each engine makes of the folder, and how it is run."""
    both = {SLIDING, FULL} <= set(config.layer_types)
    runs = [kind == SLIDING and not non_causal(config) for kind in config.layer_types]
    said = [f"speculators {VERSION} honours layer types, window, taps and draft vocabulary; past the window its training mask shows a slot up to "
            "B more rows than vLLM's (loaded and compared here)",
            *masks_changed(config, runs, "speculators, and vLLM by this config,"),
            "vLLM honours layer types, window and draft vocabulary" + ("; sliding and full layers together need its V2 model runner" if both else "") +
            ("; builds that do not know sliding_window_non_causal run sliding layers causal" if non_causal(config) else "") +
            " (not run here):",
            f"    {'VLLM_USE_V2_MODEL_RUNNER=1 ' if both else ''}vllm serve {target} --attention-backend flash_attn --speculative-config "
            f"'{{\"method\":\"dflash\",\"model\":\"{out}\",\"num_speculative_tokens\":{config.block_size - 1}}}'"]
    return said
