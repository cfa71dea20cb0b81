"""Where each trainer stands in the stream, and what it holds up: numbers for people, from numbers.  No lock, clock or socket."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Connected:
    """A trainer whose link stands.  credit in bytes; quiet: seconds since its last message; sent: samples and bytes, this connection."""

    credit: int
    quiet: float
    sent: Mapping[str, int]


def standing(acked: dict[str, int], seen: dict[str, float], live: dict[str, Connected], end: int,
             bytes_between: Callable[[int, int], int], wall: float) -> dict[str, dict]:
    """{name: {...}} of every trainer that is known or connected.

    acked: the last sample that each has; of a follower, which takes none, nothing.  seen: wall seconds.  The stream ends before `end`.
    lag: samples that it lacks, lag_bytes of them; sole_bytes: those of them that only it lacks, so what forgetting it would free.
    last_seen_s: seconds since its last message; away_s: since it left.  None where it is away, or here, or where that is not known.
    """
    alone, found = sole(acked, end), {}
    for name in sorted(acked.keys() | live.keys()):
        peer, has = live.get(name), acked.get(name, end - 1)
        found[name] = {"connected": peer is not None, "follower": name not in acked, "acked": has, "lag": end - 1 - has,
                       "lag_bytes": bytes_between(has + 1, end), "sole_bytes": bytes_between(*alone[name]) if name in alone else 0,
                       "credit": peer.credit if peer else 0, "last_seen_s": round(peer.quiet, 1) if peer else None,
                       "away_s": round(max(0.0, wall - seen[name]), 1) if not peer and name in seen else None} | dict(peer.sent if peer else {})
    return found


def sole(acked: dict[str, int], end: int) -> dict[str, tuple[int, int]]:
    """{trainer: (first, end) of the samples that it alone lacks}: of the one furthest behind, up to the next one's cursor.

    Two that are equally far behind hold up nothing alone.
    """
    if not acked:
        return {}
    last, *others = sorted(acked, key=lambda name: acked[name])
    return {last: (acked[last] + 1, acked[others[0]] + 1 if others else end)}
