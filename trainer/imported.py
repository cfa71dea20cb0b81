"""Somebody's drafter, whatever format it is in: read, kept as one of our checkpoints, or taken as the start of an arm.

`hstrain import` writes a folder that hsprod and hstrain take as their own.  It has no contract, since nobody says on whose states
it was trained, unless the file was one of our exports."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from common import files
from common.drafter import checkpoint
from common.drafter.config import DrafterConfig
from common.drafter.model import Drafter
from common.errors import CorruptError, UserError
from trainer.config import Import
from trainer.formats import Found, gguf, speculators, zlab

# What weights are bound to: another value makes other tensors, or the same ones mean something else.
BOUND = ("hidden_size", "vocab_size", "num_target_layers", "taps", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
         "intermediate_size", "rms_norm_eps", "rope_theta")
FREE = ("layer_types", "sliding_window", "block_size", "mask_token_id", "max_position_embeddings", "attention")


def read(path: Path, target_layers: int | None = None) -> Found:
    """A folder of z-lab's (ours among them) or speculators', or a GGUF file.  UserError is one line that names what is wrong."""
    try:
        if path.is_file():
            return gguf.read(path, target_layers)
        if not (path / checkpoint.CONFIG).is_file():
            raise UserError(f"{path}: neither a GGUF file nor a folder with {checkpoint.CONFIG}")
        if speculators.MARK in checkpoint.read_json(path / checkpoint.CONFIG):
            return speculators.read(path, target_layers)
        return zlab.read(path)
    except CorruptError as error:
        raise UserError(f"{path}: {error}") from None


def run(settings: Import) -> None:
    """`hstrain import`."""
    if settings.out.exists():
        raise UserError(f"--out {settings.out} is there already; give another name, or remove it")
    found = read(settings.path, settings.target_layers)
    settings.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    record = found.record | {"imported": {"path": str(settings.path.absolute()), "sha256": fingerprint(settings.path)}}
    checkpoint.save(settings.out, found.drafter, record, found.drafter.fc.weight.dtype)
    for line in found.said:
        print(line)
    shape = found.drafter.config
    print(f"{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, blocks of {shape.block_size}, {shape.attention} inside the block, taps "
          f"{','.join(map(str, shape.taps))} of {shape.num_target_layers} layers" +
          (f", drafts {len(found.drafter.shortlist):,} of {shape.vocab_size:,} tokens" if found.drafter.shortlist is not None else ""))
    print(f"written: {settings.out}  (hsprod generate --drafter, hsprod bench --drafter, hstrain run --init)")


def fingerprint(path: Path) -> str:
    """sha256 hex of what decides a draft."""
    return files.sha256_file(path) if path.is_file() else checkpoint.checkpoint_hash(path)


# --- the start of an arm ---------------------------------------------------------------------------------------------------

def shape_fields(start: DrafterConfig) -> dict:
    """Of a run that begins with these weights: fields of DrafterConfig in place of the defaults for the target's size.

    Not attention, which is the arm's, nor what the stream's contract says (sizes of the target, taps, mask token)."""
    theirs = {"hidden_size", "vocab_size", "num_target_layers", "taps", "mask_token_id", "attention"}
    return {field.name: getattr(start, field.name) for field in dataclasses.fields(start) if field.name not in theirs}


def check(start: DrafterConfig, shape: DrafterConfig, path: Path) -> list[str]:
    """UserError where a run of this shape cannot begin with these weights, naming every field -> those that differ and may."""
    differ = {name: f"{name} {getattr(start, name)}, here {getattr(shape, name)}" for name in (*BOUND, *FREE)
              if getattr(start, name) != getattr(shape, name)}
    if wrong := [words for name, words in differ.items() if name in BOUND]:
        raise UserError(f"--init {path} does not fit this run: {'; '.join(wrong)}")
    return [words for name, words in differ.items() if name in FREE]


def begin(drafter: Drafter, start: Drafter) -> None:
    """The start's weights into a run's fp32 drafter, in place."""
    with torch.no_grad():
        for ours, theirs in zip(drafter.parameters(), start.parameters(), strict=True):
            ours.copy_(theirs)
