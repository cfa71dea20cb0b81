"""The second axis of table 2: of each part of a cycle, how much passes inside torch's operators and how much around them.

A short run of the same loop is profiled.  Where one part ends and the next begins is seen from outside, through what the loop
calls anyway (the proposer, the sampler, on_tokens), so the loop itself knows nothing of this.

    on a CPU   inside: the operators that the part calls, from entry to return; what they cost before they compute (dispatch,
               allocation) is in it.  outside: Python, transformers' and ours.  The profiler slows both, not by the same factor,
               so only the share is taken from it and laid on the seconds of the timed run: good to a few points.
    on a GPU   inside: the seconds of the kernels that the part launched.  outside: the rest of its span in the timed run, that
               is launches that the device waited for, and idle time.  A kernel is not slowed, so its seconds are taken as they are.

`slowdown` says how much longer the profiled cycles took, and so how far the shares may be trusted.  Left out: which operator."""
from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import profiler

from common.drafter.model import Drafter
from producer.sampling import GREEDY, Sampler
from producer.speculate import PARTS, Decoded, Limit, Network, decode, plain
from producer.target import Target

CYCLES = 6                  # profiled, about, and as many plain steps: the profiler keeps every operator, thousands a cycle
os.environ.setdefault("KINETO_LOG_LEVEL", "6")     # read when the first profile begins: it would print that it does
MARK = "hsdraft: "          # before a part's name, among the profiler's events


class Ranges:
    """One open range at a time; `enter` closes the last one."""

    def __init__(self) -> None:
        self._open: profiler.record_function | None = None

    def enter(self, part: str | None) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._open = profiler.record_function(MARK + part) if part else None
        if self._open is not None:
            self._open.__enter__()


class MarkedProposer:
    """The loop's proposer: propose is the draft, and the verify follows it; extend is the context, once the prefill is over."""

    def __init__(self, inner: Network, ranges: Ranges) -> None:
        self._inner, self._ranges, self._drafted = inner, ranges, False

    def extend(self, taps: Tensor) -> None:
        if self._drafted:
            self._ranges.enter("context")
        self._inner.extend(taps)
        self._ranges.enter(None)

    def propose(self, last: Tensor, slots: int, keep: int) -> tuple[Tensor, Tensor | None]:
        self._ranges.enter("draft")
        self._drafted = True
        drafted = self._inner.propose(last, slots, keep)
        self._ranges.enter("verify")
        return drafted


class MarkedSampler:
    """The loop's sampler: judge ends the verify, and the loop's own part follows it."""

    def __init__(self, inner: Sampler, ranges: Ranges) -> None:
        self._inner, self._ranges = inner, ranges

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._inner.choose(logits)

    def judge(self, logits: Tensor, draft: Tensor, q: Tensor | None) -> Tensor:
        self._ranges.enter("judge")
        said = self._inner.judge(logits, draft, q)
        self._ranges.enter("loop")
        return said


def profiled(target: Target, drafter: Drafter, ids: list[int], limit: Limit, block_size: int) -> tuple[Decoded, list]:
    """One text under the profiler -> its tokens and parts, the profiler's events."""
    ranges, on_gpu, first = Ranges(), target.device.type == "cuda", []

    def on_tokens(_new: list[int]) -> None:                          # after the prefill, then at the end of each loop part
        ranges.enter("rollback" if first else None)
        first.append(True)
    proposer = MarkedProposer(Network(drafter, target, len(ids) + limit.max_new_tokens), ranges)
    with profiler.profile(use_device="cuda" if on_gpu else None, use_kineto=on_gpu) as profile:
        decoded = decode(target, proposer, drafter.config.taps, ids, limit, block_size, sampler=MarkedSampler(Sampler(GREEDY), ranges),
                         on_tokens=on_tokens)
        ranges.enter(None)
    return decoded, profile.function_events


def inside(events: Sequence, on_gpu: bool) -> dict[str, tuple[float, float]]:
    """The profiler's events -> of one range of each part: seconds in operators (on a GPU: in kernels), seconds in all.

    Medians over the ranges, so that one that the box interrupted does not speak for all."""
    found: dict[str, list[tuple[float, float]]] = {part: [] for part in (*PARTS, "step")}
    for event in events:
        part = event.name.removeprefix(MARK)
        if part != event.name and (not on_gpu or event.device_type == torch.autograd.DeviceType.CPU):
            own = event.device_time_total if on_gpu else event.cpu_time_total - event.self_cpu_time_total
            found[part].append((own / 1e6, event.cpu_time_total / 1e6))
    return {part: tuple(map(statistics.median, zip(*ranges))) if ranges else (0.0, 0.0) for part, ranges in found.items()}


def split(parts: dict[str, float], found: dict[str, tuple[float, float]], on_gpu: bool) -> dict[str, dict[str, float]]:
    """parts: seconds a cycle of the timed run; found: of the profiled one -> seconds a cycle inside and outside operators, which
    add up to the part.  The remainder lies between the parts: nothing of it was profiled, all of it is outside."""
    out = {}
    for part, seconds in parts.items():
        operators, ranges = found.get(part, (0.0, 0.0))
        within = operators if on_gpu else seconds * operators / ranges if ranges else 0.0
        within = min(within, seconds) if seconds > 0 else 0.0
        out[part] = {"inside": within, "outside": seconds - within}
    return out


def steps_inside(target: Target, ids: list[int], limit: Limit) -> tuple[float, float]:
    """Plain decoding under the profiler -> of one step: seconds in operators (kernels), seconds in all."""
    ranges, on_gpu = Ranges(), target.device.type == "cuda"
    with profiler.profile(use_device="cuda" if on_gpu else None, use_kineto=on_gpu) as profile:
        plain(target, ids, limit, on_tokens=lambda _new: ranges.enter("step"))
        ranges.enter(None)
    return inside(profile.function_events, on_gpu)["step"]


def measure(target: Target, drafter: Drafter, ids: list[int], limit: Limit, block_size: int, pieces: dict) -> dict:
    """ids: of one prompt whose texts have more than one token.  pieces: of producer.pieces, the timed run.

    parts: of a cycle, and step: of a plain step, each {inside, outside} in seconds."""
    on_gpu, cycle = target.device.type == "cuda", pieces["cycle"]
    short, shorter = (Limit(min(limit.max_new_tokens, 1 + round(n)), limit.eos_ids) for n in (CYCLES * cycle["tau"], CYCLES))
    decoded, events = profiled(target, drafter, ids, short, block_size)
    cycles = len(decoded.accepted)
    slowdown = decoded.decode_seconds / cycles / (cycle["seconds"] - cycle["parts"]["remainder"])
    return {"parts": split(cycle["parts"], inside(events, on_gpu), on_gpu), "cycles": cycles, "slowdown": slowdown,
            "on_gpu": on_gpu, "step": split({"step": pieces["L_target"]}, {"step": steps_inside(target, ids, shorter)}, on_gpu)["step"]}


def within(measured: dict, seconds: dict[str, float]) -> dict[str, float]:
    """seconds of step, verify and draft, timed alone -> of each, what passes inside operators, by the loop's own share.

    The draft's share is taken with its context's."""
    parts = measured["parts"]
    joined = {"step": [measured["step"]], "verify": [parts["verify"]], "draft": [parts["draft"], parts["context"]]}
    return {name: seconds[name] * sum(p["inside"] for p in found) / sum(p["inside"] + p["outside"] for p in found)
            for name, found in joined.items()}


def note(measured: dict) -> str:
    """What the numbers can and cannot say, in a line under the table."""
    ways = ("seconds of its kernels, and its span without them" if measured["on_gpu"] else
            "shares of a profiled run laid on the timed parts")
    return (f"In operators, and around them (Python, launches): {ways}; the "
            f"{measured['cycles']} profiled cycles took {measured['slowdown']:.2f} times as long, so "
            "these two columns are good to a few points, and that on a box that does nothing else.")
