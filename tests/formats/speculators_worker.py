"""speculators' own code, in its own Python (benchmarks/rivals.py): loads an export, drafts with it, saves it again."""
from __future__ import annotations

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModelConfig
from speculators.models.dflash.core import DFlashDraftModel
from transformers import Qwen3Config

from benchmarks import rivals


def model_of(folder: str) -> tuple[DFlashDraftModel, dict]:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model, info = DFlashDraftModel.from_pretrained(folder, config=config, output_loading_info=True, dtype=torch.float32)
    return model.eval(), {name: sorted(map(str, info[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}


@torch.no_grad()
def draft(folder: str, inputs: str, out: str) -> dict:
    """inputs: taps (T, K*H), ids (T,), anchor (), embedding (V, H), head (V, H).  logits of the block at the anchor into `out`."""
    model, info = model_of(folder)
    data = load_file(inputs)
    model.embed_tokens.weight.copy_(data["embedding"])
    for part in (model.verifier_lm_head, *([] if model.use_draft_vocab else [model.lm_head])):
        part.weight.copy_(data["head"][:part.weight.shape[0]])
    ids, anchor = data["ids"][None], int(data["anchor"])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, anchor] = True                                   # the one place where an anchor may be drawn
    _, logits, _, _, where = model._backbone_forward(data["taps"][None], ids, mask, torch.zeros(1, ids.shape[1], model.hidden_size),
                                                     torch.zeros_like(ids), max_anchors=1)
    save_file({"logits": logits[0].contiguous(), "where": where.contiguous()}, out)
    config = model.config
    return info | {"taps": config.aux_hidden_state_layer_ids, "block": config.block_size, "mask": config.mask_token_id,
                   "drafted": config.draft_vocab_size}


def again(folder: str, out: str) -> dict:
    model, _ = model_of(folder)
    model.save_pretrained(out)
    return {}


def defaults() -> dict:
    config = Qwen3Config()
    return {name: value for name, value in vars(config).items() if isinstance(value, (int, float, str, bool))} | {
        "attention_bias": config.attention_bias}


if __name__ == "__main__":
    rivals.serve({"draft": draft, "again": again, "defaults": defaults})
