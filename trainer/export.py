"""`hstrain export`: a drafter as another engine's file, with what that engine will make of it and how to run it."""
from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from torch import Tensor

from common.drafter.model import Drafter
from common.errors import UserError
from common.version import versions
from trainer import imported
from trainer.config import Export
from trainer.formats import gguf, speculators, target_head, tokenizer_keys, zlab


def run(settings: Export) -> None:
    for line in export(settings):
        print(line, flush=True)


def export(settings: Export) -> list[str]:
    """Write it -> what a person should know.  UserError where it cannot be done; nothing is left behind then."""
    if settings.out.exists():
        raise UserError(f"--out {settings.out} is there already; give another name, or remove it")
    if settings.quant == "q8_0" and settings.format != "gguf":
        raise UserError(f"--quant q8_0 is a GGUF's; {settings.format} takes bf16 or f16")
    folder = checkpoint_of(settings.run)
    found = imported.read(folder)
    record = found.record | {"exported": {"format": settings.format, "quant": settings.quant} | versions()}
    settings.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    said = [f"{folder} as {settings.format}, {settings.quant}"]
    said += {"z-lab": _zlab, "speculators": _speculators, "gguf": _gguf}[settings.format](settings, found.drafter, record)
    return said


def _zlab(settings: Export, drafter: Drafter, record: dict) -> list[str]:
    said = zlab.write(settings.out, drafter, record, settings.quant)
    return [*said, *zlab.notes(drafter.config, settings.out, name_of(settings, record) or "TARGET"), f"written: {settings.out}"]


def _speculators(settings: Export, drafter: Drafter, record: dict) -> list[str]:
    name = name_of(settings, record)
    said = speculators.write(settings.out, drafter, record, settings.quant, head=_head(settings, drafter), target=name)
    if name is None:
        said.append("note: the config names no target, so loaders must be told of it; --target FOLDER writes one")
    return [*said, *speculators.notes(drafter.config, settings.out, name or "TARGET"), f"written: {settings.out}"]


def _gguf(settings: Export, drafter: Drafter, record: dict) -> list[str]:
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"--format gguf needs a package that is not installed here; run: {gguf.INSTALL}")
    if settings.target is None:
        raise UserError("--format gguf needs the target's tokenizer: give --target, its GGUF or its folder")
    keys, said = tokenizer_keys.keys(settings.target, drafter.config.vocab_size)
    said += gguf.write(settings.out, drafter, record, settings.quant, keys=keys, head=_head(settings, drafter))
    target = "TARGET.gguf" if settings.target.is_dir() else str(settings.target)
    return [*said, *gguf.notes(drafter.config, settings.out, target), f"written: {settings.out}"]


def _head(settings: Export, drafter: Drafter) -> Tensor | None:
    if drafter.shortlist is None:
        return None
    if settings.target is None:
        raise UserError(f"this drafter drafts {len(drafter.shortlist):,} tokens only, and {settings.format} wants the target's output head for them: "
                        "give --target, its GGUF or its folder")
    return target_head.rows(settings.target, drafter.shortlist.cpu(), drafter.config.vocab_size, drafter.config.hidden_size)


def name_of(settings: Export, record: dict) -> str | None:
    """What a loader would find the target by: --target's folder, or the name in the record where it is one of a hub's."""
    if settings.target is not None and settings.target.is_dir():
        return str(settings.target.absolute())
    name = record.get("target")
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) else None


def checkpoint_of(path: Path) -> Path:
    """A run's newest checkpoint; any other path is a drafter itself."""
    if not (path / "run.json").exists():
        return path
    found = sorted((path / "checkpoints").glob("step-*"))
    if not found:
        raise UserError(f"{path}: this run has no checkpoint yet")
    return found[-1]
