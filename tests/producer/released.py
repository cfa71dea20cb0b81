"""The user's target in small, saved as Qwen releases it: text, vision tower and mtp head in one sharded checkpoint, a nested config.

Experts lie as in the released files, one fused tensor a layer (`released`), or one by one, as transformers writes them
and as the fp8 files have them (`by expert`).
"""
from __future__ import annotations

import json
from pathlib import Path

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

LAYOUTS = ("released", "by expert")
SPARE = 12                   # rows of the embedding after the tokenizer's ids
VISION = dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=4, num_position_embeddings=16)


def model(dtype: torch.dtype = torch.float32, *, experts: int = 8, width: int = 32) -> Qwen3_5MoeForConditionalGeneration:
    """tiny.hybrid's weights as far as shapes agree, so that its text is not constant; the rest random.  width: of an expert."""
    text = tiny.hybrid(experts=experts).model
    config = text.config.to_dict() | {"vocab_size": text.config.vocab_size + SPARE, "moe_intermediate_size": width}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        whole = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=config, vision_config=VISION, tie_word_embeddings=False))
    own = {**whole.model.language_model.state_dict(prefix="model."), **whole.lm_head.state_dict(prefix="lm_head.")}
    with torch.no_grad():
        for name, value in text.state_dict().items():
            if own[name].shape[1:] == value.shape[1:]:
                own[name][:len(value)] = value
        own["lm_head.weight"][-SPARE:] = 0
    return whole.to(dtype).eval()


def weights(whole: Qwen3_5MoeForConditionalGeneration, layout: str, scratch: Path) -> dict[str, Tensor]:
    """Every tensor by its name in the files: text, then vision, then mtp."""
    if layout == "released":
        found = {name: value.contiguous() for name, value in whole.state_dict().items()}
    else:
        whole.save_pretrained(scratch)
        found = load_file(scratch / "model.safetensors")
    found = dict(sorted(found.items(), key=lambda item: item[0].startswith("model.visual.")))
    generator = torch.Generator().manual_seed(2)
    mtp = {"mtp.fc.weight": (64, 128), "mtp.layers.0.mlp.experts.gate_up_proj": (8, 64, 64),
           "mtp.layers.0.mlp.experts.0.gate_proj.weight": (32, 64), "mtp.layers.0.self_attn.q_proj.weight": (256, 64),
           "mtp.norm.weight": (64,)}
    return found | {name: torch.randn(shape, generator=generator).to(whole.dtype) for name, shape in mtp.items()}


def write(folder: Path, whole: Qwen3_5MoeForConditionalGeneration, found: dict[str, Tensor], shard: int = 100_000) -> dict[str, list[str]]:
    """The folder as a download leaves it; shard: bytes of one at most, or a single tensor.  -> file -> its weights' names"""
    files: list[list[str]] = [[]]
    for name in found:
        if files[-1] and sum(found[n].nbytes for n in files[-1]) + found[name].nbytes > shard:
            files.append([])
        files[-1].append(name)
    named = {f"model-{i + 1:05d}-of-{len(files):05d}.safetensors": names for i, names in enumerate(files)}
    folder.mkdir(exist_ok=True)
    for file, names in named.items():
        save_file({name: found[name] for name in names}, folder / file, {"format": "pt"})
    index = {"metadata": {"total_size": sum(value.nbytes for value in found.values())},
             "weight_map": {name: file for file, names in named.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole.config.architectures = ["Qwen3_5MoeForConditionalGeneration"]
    whole.config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[tiny.EOS, tiny.PAD], pad_token_id=tiny.PAD).save_pretrained(folder)
    tiny.tokenizer(tiny.CHATML).save_pretrained(folder)
    return named


def needless(named: dict[str, list[str]]) -> list[str]:
    """The files with nothing of the text model in them."""
    return [file for file, names in named.items() if all(name.startswith(("model.visual.", "mtp.")) for name in names)]
