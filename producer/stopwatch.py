"""How long short calls take, side by side: in turns, so that whatever else the box does meets all of them alike."""
from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

from producer.pairs import clocked


def medians(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int) -> dict[str, float]:
    """Each call `rounds` times, the order turning by one each round, after one untimed round -> median seconds of each.

    On a GPU each call is waited for before and after, so its launch counts, too."""
    names, seconds = list(calls), {name: [] for name in calls}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = clocked(device, calls[name])[1]
            if turn:
                seconds[name].append(taken)
    return {name: statistics.median(taken) for name, taken in seconds.items()}
