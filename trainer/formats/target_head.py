"""Rows of the target's output head, which formats with a draft vocabulary carry: from its GGUF, or from its folder."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from common.errors import UserError
from trainer.formats import gguf as files

HEADS = ("lm_head.weight", "model.language_model.embed_tokens.weight", "model.embed_tokens.weight")      # tied ones have no lm_head


def rows(target: Path, ids: Tensor, vocab_size: int, hidden_size: int) -> Tensor:
    """target: a GGUF or a folder; ids [K] -> [K, H].  UserError where there is no head of V rows and H columns."""
    head, size = _of_folder(target, ids) if target.is_dir() else _of_gguf(target, ids)
    if (size, head.shape[1]) != (vocab_size, hidden_size):
        raise UserError(f"--target {target}: its output head is {size} x {head.shape[1]}, the drafter's target's {vocab_size} x {hidden_size}")
    return head


def _of_gguf(path: Path, ids: Tensor) -> tuple[Tensor, int]:
    from gguf.quants import dequantize
    found = {tensor.name: tensor for tensor in files.open_file(path).tensors}
    tensor = found.get("output.weight", found.get("token_embd.weight"))
    if tensor is None:
        raise UserError(f"--target {path}: no output.weight and no token_embd.weight")
    rows = np.array(dequantize(tensor.data[ids.numpy()], tensor.tensor_type), np.float32)
    return torch.from_numpy(rows), int(tensor.shape[-1])


def _of_folder(folder: Path, ids: Tensor) -> tuple[Tensor, int]:
    for name in HEADS:
        for path in _files_with(folder, name):
            with safe_open(path, "pt") as file:
                part = file.get_slice(name)
                return torch.cat([part[i:i + 1] for i in ids.tolist()]), part.get_shape()[0]
    raise UserError(f"--target {folder}: none of {', '.join(HEADS)} in its safetensors files")


def _files_with(folder: Path, name: str) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / file for key, file in json.loads(index.read_text())["weight_map"].items() if key == name]
    path = folder / "model.safetensors"
    if not path.exists():
        raise UserError(f"--target {folder}: no model.safetensors")
    with safe_open(path, "pt") as file:
        return [path] if name in file.keys() else []
