"""Which faults strike when: a pure function of a seed.  What each does to two running daemons is run.py's.

    kill -9          of one or both; each comes back after `seconds`, as systemd would bring it
    stand still      kill -STOP, then -CONT
    cut, loss, delay of the cable
    full disk        nothing can be written on that side until it is over
    sample spoiled   a bit is flipped in one of that side's newest samples, or its end is gone
"""
from __future__ import annotations

import random
from dataclasses import dataclass

# kind: shortest and longest, seconds.  A link is given up after 15 s of silence: what lasts 14 s passes that only where two meet.
KINDS = {"kill producer": (0.1, 3.0), "kill trainer": (0.1, 3.0), "kill both": (0.1, 3.0), "producer stands still": (0.5, 14.0),
         "trainer stands still": (0.5, 14.0), "cut": (0.3, 14.0), "loss": (2.0, 8.0), "delay": (2.0, 8.0), "producer's disk full": (1.0, 6.0),
         "trainer's disk full": (1.0, 6.0), "producer's sample spoiled": (0.0, 0.0), "trainer's sample spoiled": (0.0, 0.0)}


MOST = 4                     # faults in a burst


@dataclass(frozen=True)
class Fault:
    """at: seconds from the burst's start; strength: share of packets lost, seconds of delay, or (0 to 1) what is spoiled, and where."""

    at: float
    kind: str
    seconds: float
    strength: float = 0.0


def schedule(seed: int, count: int) -> list[list[Fault]]:
    """count faults in bursts of one to MOST, within a few seconds of each other: some begin while others last.  Every kind comes before
    any comes again.  Between bursts samples must flow."""
    rng, made, left = random.Random(seed), [], []
    while count:
        size, at, burst = min(count, rng.randint(1, MOST)), 0.0, []
        for _ in range(size):
            left = left or rng.sample(sorted(KINDS), len(KINDS))
            kind = left.pop()
            at += rng.uniform(0.0, 4.0)
            strength = {"loss": rng.uniform(0.02, 0.3), "delay": rng.uniform(0.005, 0.1)}.get(kind, rng.random())
            burst.append(Fault(at, kind, rng.uniform(*KINDS[kind]), strength))
        made.append(burst)
        count -= size
    return made
