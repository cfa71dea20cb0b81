"""A cable between two network namespaces: a TUN device in each, and this process between them, which loses, delays, reorders and
cuts as it is told.  The kernel's own netem would do; many kernels come without it.

    python -m tests.chaos.cable PID-A PID-B SEED      the namespaces of two processes; one JSON object a line on standard input

Started by run.py, with the rights of root in a namespace of users.  Ends with standard input; prints what it passed and lost."""
from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import selectors
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, replace

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
NAME, MTU = b"cable", 9000
ADDRESSES = ("10.9.0.1", "10.9.0.2")


@dataclass(frozen=True)
class Weather:
    """loss: share of packets; delay: seconds on average, each packet's own, so that some overtake others; cut: none passes."""

    loss: float = 0.0
    delay: float = 0.0
    cut: bool = False


def plug(pid: int, address: str, other: str) -> int:
    """A TUN device in the network namespace of `pid`, up, with its address -> its file.  This process stays in that namespace."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", NAME, IFF_TUN | IFF_NO_PI))
    for words in (f"addr add {address} peer {other} dev {NAME.decode()}", f"link set {NAME.decode()} mtu {MTU} up", "link set lo up"):
        subprocess.run(["ip", *words.split()], check=True)
    return file


def main(first: int, second: int, seed: int) -> None:
    ends = (plug(first, *ADDRESSES), plug(second, *ADDRESSES[::-1]))
    across, rng, weather = dict(zip(ends, ends[::-1])), random.Random(seed), Weather()
    waiting: list[tuple[float, int, int, bytes]] = []                      # due, number, to, packet
    counts = {"passed": 0, "lost": 0, "refused": 0}
    watched = selectors.DefaultSelector()
    for file in (*ends, 0):
        watched.register(file, selectors.EVENT_READ)
    print("up", flush=True)
    number = 0
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for key, _ in watched.select(patience):
            if key.fd == 0:
                if not (line := sys.stdin.readline()):
                    print(json.dumps(counts), flush=True)
                    return
                weather = replace(Weather(), **json.loads(line))
                continue
            packet, number = os.read(key.fd, 65536), number + 1
            if weather.cut or rng.random() < weather.loss:
                counts["lost"] += 1
            else:
                heapq.heappush(waiting, (time.monotonic() + rng.uniform(0, 2 * weather.delay), number, across[key.fd], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            try:
                os.write(to, packet)
                counts["passed"] += 1
            except OSError:                                                # its queue is full: so a real cable's far end drops
                counts["refused"] += 1


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
