"""Which stored sample a run reads next: a pure function of the position in the run, so that every arm reads the same
samples in the same order, a resumed run goes on where it was, and nothing depends on when a sample arrived.

A run's visits go fresh, old, old, ..., fresh, old, old, ...: each new sample is followed by `replay` re-reads of
earlier ones.  A run that gets ahead of the stream waits; how long is shown.  Once the stream has ended ("closed" at n
samples; the run writes that number down before it uses it) all further visits are re-reads.
"""
from __future__ import annotations

import hashlib


def visit(position: int, *, replay: int, closed: int | None) -> int:
    """Index (from the store's first sample) of the sample to read at `position` (0, 1, ...) of the run.

    replay  re-reads per fresh sample, 0 or more
    closed  number of samples in the finished stream, None while it may grow
    """
    fresh, old = divmod(position, replay + 1)
    if old == 0 and (closed is None or fresh < closed):
        return fresh
    pool = fresh + 1 if closed is None else min(fresh + 1, closed)
    return _uniform(position, pool)


def _uniform(position: int, pool: int) -> int:
    """A draw from 0..pool-1 that depends on nothing else (64 hashed bits: the bias is below 2**-40 for any store)."""
    return int.from_bytes(hashlib.blake2b(position.to_bytes(8, "big"), digest_size=8).digest(), "big") % pool
