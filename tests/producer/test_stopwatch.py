"""Calls in turns: the order moves on each round, the first round does not count."""
from __future__ import annotations

import torch

from producer import pairs, stopwatch


def test_turns(monkeypatch):
    done, clock = [], iter(range(100))
    seconds = {"a": [100, 1, 5, 3], "b": [100, 7, 9, 8]}

    def took(name):
        return lambda: done.append(name) or seconds[name].pop(0)
    monkeypatch.setattr(stopwatch, "clocked", lambda device, call: (None, call()))
    assert stopwatch.medians({"a": took("a"), "b": took("b")}, torch.device("cpu"), 3) == {"a": 3, "b": 8}
    assert "".join(done) == "abba" "abba"
    monkeypatch.undo()
    monkeypatch.setattr(pairs.time, "perf_counter", lambda: float(next(clock)))
    assert stopwatch.medians({"a": lambda: None}, torch.device("cpu"), 3) == {"a": 1.0}
