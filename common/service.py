"""A daemon's life: signals set a flag, systemd is told, faults become exit codes.  No daemon logic here.

The watchdog's beat comes from the main loop itself, and is withheld while a thread that the daemon cannot do without stands
still: what hangs is killed by systemd and started again (systemd/README.md has the limits, each with its reason)."""
from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

from common import logs
from common.errors import EXIT_USER, UserError

log = logging.getLogger("service")
BEAT_EVERY = 1.0             # seconds; decoding loops ask for a beat at every token
COMES_AGAIN = {"STATUS", "WATCHDOG"}       # said anew within a second or so, so that one may be lost
STILL = 120.0                # seconds without a turn, and a thread is taken to hang: a sample's fsync on a busy disk takes a few


class Stopped(Exception):
    """The daemon is to stop: what is in hand is given up, and made again after the next start."""


class Stop:
    """Set by the first SIGINT or SIGTERM; a second one ends the process at once, as uvicorn does.

    The first one does, too, until `begin()`: while modules and a target of 70 GB are read, nothing is in hand and no loop looks.
    turn: what a daemon wants done at each `check()`, such as its status written.
    """

    def __init__(self) -> None:
        self._event, self._begun = threading.Event(), False
        self.turn: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """From here on there is something to finish, and a loop that looks at this."""
        self._begun = True

    def __bool__(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def set(self) -> None:
        self._event.set()

    def check(self) -> None:
        """Between pieces of long work, as often as you like: tells systemd that the loop lives; raises Stopped where it is to end."""
        beat()
        self.turn()
        if self:
            raise Stopped

    def on_signals(self) -> None:
        faulthandler.enable()                                # a watchdog's SIGABRT leaves the stack of every thread in the log
        def handle(number: int, _frame: object) -> None:
            if self:
                os._exit(128 + number)
            if not self._begun:
                log.info("%s: nothing is in hand yet", signal.Signals(number).name)
                os._exit(0)
            log.info("%s: finishing what is in hand; once more to stop at once", signal.Signals(number).name)
            self.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handle)


class Threads:
    """When each thread that the daemon needs last went round its loop.  Seconds are monotonic, passed in."""

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}
        self._said: list[str] = []

    def turned(self, name: str, now: float) -> None:
        """Called by the thread at each turn."""
        self._turns[name] = now

    def ended(self, name: str) -> None:
        """It is not needed any more."""
        self._turns.pop(name, None)

    def still(self, now: float) -> list[str]:
        """Those that have stood for more than STILL seconds."""
        return [name for name, turn in list(self._turns.items()) if now - turn > STILL]

    def alive(self, now: float) -> bool:
        """Whether none stands still.  What does is logged once, not at each beat that is withheld."""
        still = self.still(now)
        if still and still != self._said:
            log.error("%s: no turn for more than %.0f s; systemd's watchdog gets no beat", ", ".join(still), STILL)
        self._said = still
        return not still


threads = Threads()          # a process has one watchdog, and so one of these
_beaten = 0.0


def beat() -> None:
    """WATCHDOG=1, at most once a second."""
    global _beaten
    now = time.monotonic()
    if now - _beaten >= BEAT_EVERY:
        _beaten = now
        notify(WATCHDOG="1")


def starting(doing: str, seconds: float) -> None:
    """Before READY: what is being done, and how long systemd is to wait for it at most."""
    log.info("%s", doing)
    notify(STATUS=doing, EXTEND_TIMEOUT_USEC=str(int(seconds * 1e6)))


def notify(**fields: str) -> None:
    """sd_notify(3): READY=1, STATUS=..., WATCHDOG=1, STOPPING=1; nothing happens outside systemd.

    WATCHDOG is left out while a thread of `threads` stands still.  A failure is logged: it does not end a daemon.  A line that comes again
    in a second is not waited for where systemd does not read: its queue holds ten, and a full one would stop the loop that speaks."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if "WATCHDOG" in fields and not threads.alive(time.monotonic()):
        del fields["WATCHDOG"]
        if not fields:
            return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.connect("\0" + address[1:] if address.startswith("@") else address)
            sock.send("\n".join(f"{k}={' '.join(v.splitlines())}" for k, v in fields.items()).encode(),
                      socket.MSG_DONTWAIT if fields.keys() <= COMES_AGAIN else 0)
    except OSError as error:
        log.warning("systemd's socket %s: %s", address, error)


def run(main: Callable[[], None]) -> None:
    """Call main; a UserError is one line on stderr and exit code 2, anything else keeps its traceback."""
    try:
        main()
    except UserError as error:
        print(f"{logs.prefix(logging.ERROR)}error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)
