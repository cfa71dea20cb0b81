"""The table of what is fuzzed: reader, valid inputs, how an input is changed, its longest, and its part of the runs."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import readers, seeds, shapes, talks

CASES = Path(__file__).parent / "cases"          # NAME/*: inputs that once were findings


@dataclass(frozen=True)
class Target:
    """read raises on a defect only.  longest: bytes of an input.  share: parts of all runs; the quick ones get more."""

    name: str
    read: Callable[[bytes], bool]
    seeds: Callable[[], list[bytes]]
    change: shapes.Change
    longest: int
    share: int

    def cases(self) -> list[Path]:
        return sorted((CASES / self.name).glob("*"))


TARGETS = {target.name: target for target in (
    Target("frames", readers.frames, seeds.frames, shapes.parts(shapes.header, shapes.json_text), 8 << 10, 24),
    Target("sample", readers.sample, seeds.samples, shapes.sample, 32 << 10, 24),
    Target("store", readers.store, seeds.store, shapes.parts(shapes.json_text, shapes.sample), 16 << 10, 6),
    Target("cursors", readers.cursors, seeds.cursors, shapes.json_text, 4 << 10, 6),
    Target("keys", readers.keys, seeds.keys, shapes.parts(shapes.blind), 4 << 10, 4),
    Target("state", readers.state, seeds.state, shapes.json_text, 8 << 10, 4),
    Target("tensors", readers.tensors, seeds.tensors, shapes.safetensors, 16 << 10, 10),
    Target("drafter", readers.drafter, seeds.drafters, shapes.parts(shapes.json_text, shapes.json_text, shapes.safetensors), 32 << 10, 4),
    Target("gguf", readers.gguf, seeds.ggufs, shapes.blind, 32 << 10, 4),
    Target("trainer_says", talks.trainer_says, seeds.trainers_words, shapes.talk, 16 << 10, 8),
    Target("producer_says", talks.producer_says, seeds.producers_words, shapes.talk, 16 << 10, 6))}
