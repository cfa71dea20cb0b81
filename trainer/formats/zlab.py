"""z-lab's folder (dflash-facts 5a), which is our checkpoints' own: read by z-lab's code, vLLM, SGLang and llama.cpp's converter.

Both layouts are read, today's and the preview's of April 2026 (block_size and rope_theta at the top).  The common reader takes
what a network needs and passes over the rest; here the rest is known by name, or refused."""
from __future__ import annotations

from pathlib import Path

from common.drafter import checkpoint
from common.drafter.config import FIXED, FULL, NEUTRAL, PLAIN, SLIDING, DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError
from trainer.formats import Found, cast

READ = {*PLAIN, *FIXED, *NEUTRAL, "layer_types", "sliding_window", "use_sliding_window", "is_causal", "block_size", "rope_theta",
        "rope_parameters", "dflash_config", "dtype", "torch_dtype"}
# What transformers writes for itself and for loaders; no drafter's maths depends on it.
BESIDE = {"auto_map", "transformers_version", "initializer_range", "max_window_layers", "use_cache", "bos_token_id", "eos_token_id",
          "pad_token_id", "return_dict", "output_hidden_states", "output_attentions", "chunk_size_feed_forward", "is_encoder_decoder",
          "id2label", "label2id", "problem_type", "_name_or_path", "name_or_path"}


def read(folder: Path) -> Found:
    """CorruptError names the key or the tensor that is wrong."""
    data = checkpoint.read_json(folder / checkpoint.CONFIG)
    if unknown := sorted(set(data) - READ - BESIDE):
        raise CorruptError(f"drafter config: {unknown[0]} is not known ({len(unknown)} in all)")
    config = DrafterConfig.from_json(data)
    if inner := sorted(set(data.get("rope_parameters") or {}) - {"rope_theta", "rope_type"} - set(NEUTRAL)):
        raise CorruptError(f"drafter config: rope_parameters.{inner[0]} is not known")
    shapes = {name: tuple(value.shape) for name, value in Drafter(config).state_dict().items()}
    stored = checkpoint.check_header(checkpoint.read_header(folder / checkpoint.WEIGHTS), shapes)
    for key in ("dtype", "torch_dtype"):
        if (said := data.get(key)) not in (None, checkpoint.NAMES[stored]):
            raise CorruptError(f"drafter config: {key} is {said!r}, {checkpoint.WEIGHTS} holds {checkpoint.NAMES[stored]}")
    drafter, _, record = checkpoint.load(folder, "cpu", stored)
    return Found(drafter.requires_grad_(False), record, tuple(_said(data, config)))


def _said(data: dict, config: DrafterConfig) -> list[str]:
    april = "block_size" not in data["dflash_config"]
    said = [f"z-lab layout, {'preview of April 2026 or SpecForge: block_size' if april else 'current: block_size in dflash_config'}"
            f"{' at the top' if april else ''}; taps as they stand"]
    if "is_causal" not in data:
        said.append("no is_causal: sliding layers are causal inside the block, full layers are not (the released rule, our 'mixed')")
        if april and SLIDING in config.layer_types:
            said.append("WARNING: z-lab's code of April 2026 ignored windows and ran every layer bidirectional; if the drafter was trained there, "
                        "set is_causal to false in its config.json first")
    return said


def write(folder: Path, drafter: Drafter, record: dict, quant: str) -> list[str]:
    """-> what was changed.  A list of draftable tokens stays behind: the format has none."""
    tensors, said = cast(drafter.state_dict(), quant)
    bare = Drafter(drafter.config)
    bare.load_state_dict(tensors, assign=True)
    if drafter.shortlist is not None:
        said.append(f"WARNING: the format knows no draft vocabulary: this drafter was trained to draft {len(drafter.shortlist):,} tokens, engines "
                    "will draft from all of them; the rest were never trained and may come first")
        record = {name: value for name, value in record.items() if name != "shortlist"}
    checkpoint.save(folder, bare, record, tensors["fc.weight"].dtype)
    return said


def notes(config: DrafterConfig, out: Path, target: str) -> list[str]:
    """What each engine makes of the folder, and how it is run."""
    most, both = config.block_size - 1, {SLIDING, FULL} <= set(config.layer_types)
    said = ["z-lab dflash 0.1.0 honours all of it (from_pretrained; tested here). Its code before August 2026 ignores windows and is_causal",
            "vLLM honours layer types, window and " + ("the released mask rule" if config.attention == "mixed" else "is_causal") +
            ("; sliding and full layers together need its V2 model runner" if both else "") + " (not run here):",
            f"    {'VLLM_USE_V2_MODEL_RUNNER=1 ' if both else ''}vllm serve {target} --attention-backend flash_attn --speculative-config "
            f"'{{\"method\":\"dflash\",\"model\":\"{out}\",\"num_speculative_tokens\":{most}}}'",
            "SGLang honours layer types and window" + ("" if config.attention == "mixed" else "; is_causal since its pull request 34524, older builds "
                                                       "run sliding layers causal, full ones not") + " (not run here):",
            f"    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH --speculative-draft-model-path {out} "
            f"--speculative-num-draft-tokens {config.block_size}",
            "llama.cpp: export with --format gguf"]
    return said
