"""How long short calls take, side by side: in turns, so that whatever else the box does meets all of them alike."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def medians(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Each call `rounds` times, the order turning by one each round, after one untimed round -> median seconds of each.

    On a GPU each call is waited for before and after, so its launch counts, too."""
    names, seconds = list(calls), {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            _wait(device)
            begin = time.perf_counter()
            calls[name]()
            _wait(device)
            if turn:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":                                       # ROCm's name too
        torch.cuda.synchronize(device)
