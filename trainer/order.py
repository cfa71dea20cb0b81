"""Which stored sample a run reads next: a pure function of the position in the run, so that every arm reads the same
samples in the same order, a resumed run goes on where it was, and nothing depends on when a sample arrived.

A run's visits go fresh, old, old, ..., fresh, old, old, ...: each new sample is followed by `replay` re-reads of earlier
ones, the newer the likelier.  Were they drawn evenly, the first of n samples would be read ln n times more than the last;
so each is re-read 2 x `replay` times at most, falling to none for the last.  A run that gets ahead of the stream waits; how
long is shown.  Once the stream has ended ("closed" at n samples; the run writes that number down before it uses it) all
further visits are re-reads, drawn evenly.
"""
from __future__ import annotations

import hashlib
import math


def visit(position: int, *, replay: int, closed: int | None) -> int:
    """Index (from the store's first sample) of the sample to read at `position` (0, 1, ...) of the run.

    replay  re-reads per fresh sample, 0 or more
    closed  number of samples in the finished stream, None while it may grow
    """
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
