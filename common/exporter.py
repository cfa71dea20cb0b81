"""What `status` shows, for Prometheus: the same numbers out of the same Board, on a port of this box alone.

A number is named once, in its package's seen.py.  Left out: histograms, and anything that is not on the Board."""
from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from common.errors import UserError
from common.status import Board

log = logging.getLogger("metrics")
HOST = "127.0.0.1"           # for a Prometheus on this box, or behind an ssh tunnel: the page has no lock of its own


@dataclass(frozen=True)
class Number:
    """One of a Board's "numbers", or of each entry of one of its groups; exported as PREFIX_NAME, a counter with _total behind it."""

    name: str
    help: str
    kind: Literal["gauge", "counter"] = "gauge"


@dataclass(frozen=True)
class Seen:
    """What a daemon exports: labels, fields of the Board that every number carries; numbers; groups, of a Board's field of that
    name, {entry: {number: value}}, exported with the label `label`; counted, {kind: in words}, of the Board's "counters"."""

    prefix: str
    labels: tuple[str, ...]
    numbers: tuple[Number, ...]
    groups: dict[str, tuple[str, tuple[Number, ...]]]
    counted: dict[str, str]


@dataclass(frozen=True)
class Family:
    number: Number
    name: str
    labels: tuple[str, ...]
    values: list[tuple[tuple[str, ...], float]]


COMMON = (Number("last_turn_seconds", "When the daemon last wrote its status, seconds since 1970; behind by minutes: at one long piece of work, or stuck"),
          Number("unwritten_status", "Writes of the status file that failed", "counter"))


def families(values: dict, seen: Seen) -> Iterator[Family]:
    """A Board's values -> what Prometheus is told.  Pure.  A number that the daemon does not have yet has no line."""
    base = tuple(str(values.get(label, "")) for label in seen.labels)
    own = values.get("numbers", {}) | {"last_turn_seconds": values.get("written_at"), "unwritten_status": values.get("unwritten_status")}
    for number in (*seen.numbers, *COMMON):
        known = own.get(number.name) is not None
        yield Family(number, f"{seen.prefix}_{number.name}", seen.labels, [(base, own[number.name])] if known else [])
    for field, (label, numbers) in seen.groups.items():
        for number in numbers:
            found = [((*base, name), entry[number.name]) for name, entry in values.get(field, {}).items() if entry.get(number.name) is not None]
            yield Family(number, f"{seen.prefix}_{label}_{number.name}", (*seen.labels, label), found)
    happened = values.get("counters", {})
    yield Family(Number("events", "Since this start, by kind. " + "; ".join(f"{kind}: {says}" for kind, says in seen.counted.items()), "counter"),
                 f"{seen.prefix}_events", (*seen.labels, "event"), [((*base, kind), happened.get(kind, 0)) for kind in seen.counted if happened])
    yield Family(Number("troubles", "Warnings and errors logged since this start", "counter"), f"{seen.prefix}_troubles",
                 (*seen.labels, "level"), [((*base, level), values["troubles"].get(level, 0)) for level in ("warning", "error") if "troubles" in values])


class Collector:
    """Reads the Board when Prometheus asks."""

    def __init__(self, board: Board, seen: Seen) -> None:
        self._board, self._seen = board, seen

    def collect(self) -> Iterator[object]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        for family in families(self._board.values, self._seen):
            kind = CounterMetricFamily if family.number.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.number.help, labels=family.labels)
            for labels, value in family.values:
                metric.add_metric(labels, float(value))
            yield metric


def serve(port: int, board: Board, seen: Seen) -> None:
    """Answer http://127.0.0.1:port/metrics on a thread of its own until the process ends; 0: do not.  UserError: no library, port taken."""
    if not port:
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise UserError("--metrics-port needs prometheus_client: pip install 'hsdraft[metrics]', or leave the option out") from None
    registry = CollectorRegistry()
    registry.register(Collector(board, seen))
    try:
        start_http_server(port, addr=HOST, registry=registry)
    except OSError as error:
        raise UserError(f"--metrics-port {port}: {error.strerror}; choose another port") from None
    log.info("metrics on http://%s:%d/metrics", HOST, port)
