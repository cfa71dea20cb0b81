"""A cable with a person at it: it passes the bytes of connections on, keeps them, and holds or cuts where it is told."""
from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Way:
    """One direction.  passed: all bytes so far, of all connections.  The limits count from the connection's first byte."""

    passed: bytearray = field(default_factory=bytearray)
    hold_at: int | None = None                # no byte beyond it passes, and the connection stays
    cut_at: int | None = None                 # the connection ends there; once


class Relay:
    """address: where to connect to instead of `to` (tcp://...).  up: towards it; down: back."""

    def __init__(self, to: str) -> None:
        self._to = to.removeprefix("tcp://").rsplit(":", 1)
        self.up, self.down, self.connections = Way(), Way(), 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = None
                with suppress(OSError):
                    far = socket.create_connection((self._to[0], int(self._to[1])))
                if far is None:                       # nobody listens there now
                    near.close()
                    continue
                self.connections += 1
                self._open += [near, far]
                for source, sink, way in ((near, far, self.up), (far, near, self.down)):
                    threading.Thread(target=self._pass, args=(source, sink, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: Way) -> None:
        here = 0
        with suppress(OSError):
            while way.hold_at is None or here < way.hold_at:
                most = min(65536, *(limit - here for limit in (way.hold_at, way.cut_at) if limit is not None and limit > here), 65536)
                data = source.recv(most)
                if not data:
                    break
                sink.sendall(data)
                way.passed += data
                here += len(data)
                if way.cut_at is not None and here >= way.cut_at:
                    way.cut_at = None
                    break
            else:
                return                                # held: both ends stay open
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End every connection that there is."""
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
        for one in self._open:
            one.close()
