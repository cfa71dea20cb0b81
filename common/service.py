"""A daemon's life: signals set a flag, systemd is told, faults become exit codes.  No daemon logic here."""
from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable

from common.errors import EXIT_USER, UserError

log = logging.getLogger("service")


class Stopped(Exception):
    """The daemon is to stop: what is in hand is given up, and made again after the next start."""


class Stop:
    """Set by the first SIGINT or SIGTERM; a second one ends the process at once, as uvicorn does.

    The first one does, too, until `begin()`: while modules and a target of 70 GB are read, nothing is in hand and no loop looks.
    """

    def __init__(self) -> None:
        self._event, self._begun = threading.Event(), False

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
        """Between pieces of long work: tells systemd that the loop lives; raises Stopped where it is to end."""
        notify(WATCHDOG="1")
        if self:
            raise Stopped

    def on_signals(self) -> None:
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


def notify(**fields: str) -> None:
    """sd_notify(3): READY=1, STATUS=..., WATCHDOG=1, STOPPING=1; nothing happens outside systemd."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall("\n".join(f"{k}={v}" for k, v in fields.items()).encode())


def run(main: Callable[[], None]) -> None:
    """Call main; a UserError is one line on stderr and exit code 2, anything else keeps its traceback."""
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USER)
