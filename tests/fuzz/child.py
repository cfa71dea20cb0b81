"""One target under atheris, in a process of its own: libFuzzer ends it at the first finding.  Started by run.py.

    python -m tests.fuzz.child TARGET CORPUS.. -runs=N ...        (the rest is libFuzzer's)

Memory is bounded by the system, too: what asks for much more than an input can need gets a MemoryError, which is a finding even
where the pages would never be touched.  The codec's own bound is made small here, so that breaking it shows."""
from __future__ import annotations

import random
import resource
import sys

import atheris

with atheris.instrument_imports(include=["common", "protocol", "producer", "trainer", "gguf"]):
    from tests.fuzz.targets import TARGETS

from protocol import codec

HEADROOM = 512 << 20         # bytes above what the process has once everything is loaded
DECODED = 4 << 20            # bytes that a sample may decode to, in place of codec.MAX_DECODED


def main() -> None:
    target = TARGETS[sys.argv[1]]
    codec.LIMITS |= {name: DECODED for name in ("escapes", "side_bytes")} | {"body_bytes": 2 * DECODED}
    codec.MAX_DECODED = DECODED
    for seed in target.seeds():                          # everything that is loaded late, or grows once
        target.read(seed)

    def change(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.25:
            return atheris.Mutate(data, most)
        changed = target.change(data, rng)
        return changed if len(changed) <= most else atheris.Mutate(data, most)

    def one(data: bytes) -> None:
        target.read(data)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], one, custom_mutator=change)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM, resource.getrlimit(resource.RLIMIT_AS)[1]))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
