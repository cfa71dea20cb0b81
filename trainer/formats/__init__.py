"""Drafters as other programs keep them: one file a format, each with `read`, `write` and `notes`.

    zlab          a folder: z-lab's own code, vLLM, SGLang, llama.cpp's converter; our checkpoints are in it
    speculators   a folder: speculators 0.9, vLLM
    gguf          a file: llama.cpp

Between them stands our Drafter, in the dtype of the file.  Every key is read or refused by name.  What a format counts or names
otherwise than we do (taps from 1, absolute ids, one causality for all layers) is turned here and nowhere else.
Left out: other networks that share these formats (DFlash2, DSpark, Domino)."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from common.drafter.config import DrafterConfig
from common.drafter.geometry import layer_rule
from common.drafter.model import Drafter
from common.errors import UserError

FLOATS = {"f16": torch.float16, "bf16": torch.bfloat16}         # what --quant says; q8_0, too, in a GGUF


@dataclass(frozen=True)
class Found:
    """drafter on the CPU, in the dtype that the file has, its shortlist set; record: what came with it, {} if nothing did;
    said: what was turned or left behind, in words."""

    drafter: Drafter
    record: dict
    said: tuple[str, ...] = ()


def filled(config: DrafterConfig, tensors: dict[str, Tensor], shortlist: Tensor | None) -> Drafter:
    """A drafter of these tensors, as they are.  Names and shapes were checked by the reader."""
    drafter = Drafter(config)
    drafter.load_state_dict(tensors, strict=True, assign=True)
    drafter.shortlist = shortlist
    return drafter.requires_grad_(False)


def blocks(config: DrafterConfig) -> list[bool]:
    """Of each layer: causal inside the block?"""
    return [layer_rule(config, layer)[0] for layer in range(config.num_hidden_layers)]


def masks_changed(config: DrafterConfig, runs: Iterable[bool], engine: str) -> list[str]:
    """runs: of each layer, whether the engine runs it causal -> a warning that names the layers it runs otherwise than trained."""
    said = []
    for runs_causal in (False, True):
        layers = [i for i, (ours, theirs) in enumerate(zip(blocks(config), runs, strict=True)) if ours != theirs == runs_causal]
        if layers:
            kinds = ", ".join(f"{i} ({config.layer_types[i].removesuffix('_attention')})" for i in layers)
            said.append(f"WARNING: {engine} runs layer{'s' * (len(layers) > 1)} {kinds} {'causal' if runs_causal else 'bidirectional'} inside the "
                        f"block; {'they were' if len(layers) > 1 else 'it was'} trained {'bidirectional' if runs_causal else 'causal'}: fewer drafts "
                        "will stand than in hsprod (the text stays the target's)")
    return said


def cast(tensors: dict[str, Tensor], quant: str) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors in another float type, and what that changed.  UserError names a tensor with values beyond the type's range."""
    dtype, changed, total, worst = FLOATS[quant], 0, 0, 0.0
    out = {name: value.detach().to("cpu", dtype).contiguous() for name, value in tensors.items()}
    for name, value in tensors.items():
        old, new = value.detach().double(), out[name].double()
        if not bool(new.isfinite().all()):
            raise UserError(f"--quant {quant}: {name} holds {float(old.abs().max()):.3g}, more than {quant} can; use bf16")
        differ = old != new
        changed, total = changed + int(differ.sum()), total + value.numel()
        if bool(differ.any()):
            worst = max(worst, float((new - old).abs().max()))
    return out, [f"note: {quant} rounded {changed:,} of {total:,} weights, by {worst:.1e} at most"] if changed else []
