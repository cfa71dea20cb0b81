"""Which stored sample a run reads next: a pure function of the position in the run, so that every arm reads the same
samples in the same order, a resumed run goes on where it was, and nothing depends on when a sample arrived.

Every ASIDE-th sample of the store is never trained on: offline.py judges drafters on it.  The others are counted by
themselves (0, 1, ... without a hole, "number"); `index_of` says where in the store each lies, and only it does.

A run's visits go fresh, old, old, ..., fresh, old, old, ...: each new sample is followed by `replay` re-reads of earlier
ones, the newer the likelier.  Were they drawn evenly, the first of n samples would be read ln n times more than the last;
so each is re-read 2 x `replay` times at most, falling to none for the last.  A run that gets ahead of the stream waits; how
long is shown.  Once the stream has ended ("closed" at n samples; the run writes that number down before it uses it) all
further visits are re-reads, drawn evenly.
"""
from __future__ import annotations

import hashlib
import math

ASIDE = 32                   # of each so many samples of a store, the last is held aside
RULE = f"the last of each {ASIDE} samples of the store is never trained on"         # part of what a run is


def sample_at(position: int, *, replay: int, closed: int | None) -> int:
    """Index (from the store's first sample) of the sample to read at `position` (0, 1, ...) of the run; never one held aside.

    replay  re-reads per fresh sample, 0 or more
    closed  number of samples in the finished stream, those held aside among them; None while it may grow
    """
    return index_of(visit(position, replay=replay, closed=None if closed is None else trainable(closed)))


def index_of(number: int) -> int:
    """Number of a sample among those that are trained on -> its index in the store."""
    return number + number // (ASIDE - 1)


def aside_index(number: int) -> int:
    """Number of a sample among those held aside (0, 1, ...) -> its index in the store."""
    return number * ASIDE + ASIDE - 1


def trainable(samples: int) -> int:
    """How many of a store's first `samples` are trained on."""
    return samples - aside(samples)


def aside(samples: int) -> int:
    """How many of a store's first `samples` are held aside."""
    return samples // ASIDE


def reached(position: int, *, replay: int, closed: int | None) -> int:
    """Samples of the store that the visits before `position` are drawn from: all of a finished stream, else up to the newest read.

    So what is judged at a step does not depend on what has arrived by then."""
    if closed is not None:
        return closed
    fresh = -(-position // (replay + 1))
    return index_of(fresh - 1) + 1 if fresh else 0


def visit(position: int, *, replay: int, closed: int | None) -> int:
    """As sample_at, in numbers of samples that are trained on; closed, too."""
    fresh, old = divmod(position, replay + 1)
    if old == 0 and (closed is None or fresh < closed):
        return fresh
    drawn = _share(position)
    if closed is not None and fresh >= closed:
        return int(closed * drawn)
    return int((fresh + 1) * math.sqrt(drawn))


def _share(position: int) -> float:
    """A number in [0, 1) that depends on nothing else: 53 bits of a hash, as many as a float holds."""
    return (int.from_bytes(hashlib.blake2b(position.to_bytes(8, "big"), digest_size=8).digest(), "big") >> 11) / 2 ** 53
