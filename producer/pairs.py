"""Every prompt decoded both ways, one right after the other, with a clock around each: the runs that the bench's tables read.

The clock here knows nothing of the loop's own (Decoded.seconds): it starts before anything is made and stops when the device
is idle again, so what the loop's parts leave out is seen as a remainder and not taken for granted.  Which way goes first
changes from prompt to prompt; what first use costs is neither's.  Left out: what the numbers mean (rates, pieces, speedup)."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from common.errors import UserError
from producer.speculate import Decoded

Way = Callable[[list[int], int | None], Decoded]        # (prompt, tokens at most; None: the settings' own) -> text
Progress = Callable[[int, int], None]                   # (done, of)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Timed:
    """wall: seconds of the whole call; the parts of decoded.seconds lie within."""

    decoded: Decoded
    wall: float

    @property
    def new(self) -> int:
        """Tokens after the first, which the prefill gives."""
        return len(self.decoded.tokens) - 1

    @property
    def decoding(self) -> float:
        """Seconds of everything but the prefill."""
        return self.wall - self.decoded.seconds["prefill"]


@dataclass(frozen=True)
class Pair:
    prompt: str                 # its id
    ids: list[int]
    plain: Timed
    spec: Timed

    @property
    def counts(self) -> bool:
        """Both texts have a second token: else there is no rate."""
        return self.plain.new > 0 and self.spec.new > 0


def clocked(device: torch.device, call: Callable[[], Result]) -> tuple[Result, float]:
    """-> result, seconds from an idle device to an idle device."""
    idle(device)
    began = time.perf_counter()
    result = call()
    idle(device)
    return result, time.perf_counter() - began


def idle(device: torch.device) -> None:
    if device.type == "cuda":                                        # ROCm's name too
        torch.cuda.synchronize(device)


def decode(device: torch.device, plain: Way, spec: Way, prompts: Sequence[tuple[str, list[int]]],
           progress: Progress = lambda done, of: None) -> list[Pair]:
    """prompts: (id, token ids).  UserError where no text has two tokens both ways, for then there is nothing to measure."""
    for way in (plain, spec):
        way(prompts[0][1], 8)
    pairs = []
    for i, (prompt, ids) in enumerate(prompts):
        progress(i, len(prompts))
        done = {}
        for way in (plain, spec) if i % 2 == 0 else (spec, plain):
            done[way] = Timed(*clocked(device, lambda way=way, ids=ids: way(ids, None)))
        pairs.append(Pair(prompt, ids, done[plain], done[spec]))
    progress(len(prompts), len(prompts))
    if not any(pair.counts for pair in pairs):
        raise UserError(f"none of {len(prompts)} prompts gives a text of two tokens: there is nothing to measure")
    return pairs
