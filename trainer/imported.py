"""Somebody's drafter, whatever format it is in: read, and kept as one of our checkpoints.

`hstrain import` writes a folder that hsprod and hstrain take as their own.  It has no contract, since nobody says on whose states
it was trained, unless the file was one of our exports."""
from __future__ import annotations

from pathlib import Path

from common import files
from common.drafter import checkpoint
from common.errors import CorruptError, UserError
from trainer.config import Import
from trainer.formats import Found, gguf, speculators, zlab


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
    print(f"written: {settings.out}  (hsprod eval --drafter, hsprod generate --drafter, hstrain run --init)")


def fingerprint(path: Path) -> str:
    """sha256 hex of what decides a draft."""
    return files.sha256_file(path) if path.is_file() else checkpoint.checkpoint_hash(path)
