"""A message of ever more frames: libzmq bounds each frame and the number of whole messages, but hands on no frame before the last one is
here, and keeps as many as come.  So what has come on each connection since its last whole message is asked of the kernel, and a connection
that is beyond what honest queues can hold is shut down, which frees what it had sent.

TCP on Linux alone (TCP_INFO); elsewhere, and on ipc, nothing is bounded here.  Not for the trainer's end: it connects to the one producer
that it was told of."""
from __future__ import annotations

import contextlib
import socket
import struct

import zmq
from zmq.utils.monitor import recv_monitor_message

RECEIVED_AT = 128            # of tcpi_bytes_received in struct tcp_info (linux/tcp.h, since 4.1), a u64 that counts what libzmq may not have read yet


class Unended:
    """One socket's accepted connections.  most: bytes that may come on one of them without a whole message among them."""

    def __init__(self, accepting: zmq.Socket, most: int) -> None:
        self._accepting, self._most = accepting, most
        self._monitor = accepting.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._since: dict[int, int] = {}                         # descriptor -> bytes received when its last whole message was taken

    def whole(self, frame: zmq.Frame) -> None:
        """A whole message was taken; frame: any of it."""
        fd = frame.get(zmq.SRCFD)
        if fd in self._since:
            self._since[fd] = _received(fd)

    def shut(self) -> int:
        """Shut down the connections that are beyond `most`; how many there were."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._since[int(event["value"])] = 0
            else:
                self._since.pop(int(event["value"]), None)
        beyond = [fd for fd, since in self._since.items() if _received(fd) - since > self._most]
        for fd in beyond:
            del self._since[fd]
            with contextlib.suppress(OSError), socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:      # gone by itself
                connection.shutdown(socket.SHUT_RDWR)
        return len(beyond)

    def close(self) -> None:
        """Before the socket itself; again does nothing."""
        if not self._monitor.closed:
            self._accepting.disable_monitor()
            self._monitor.close(linger=0)


def _received(fd: int) -> int:
    """Bytes since the connection began; 0 where it is none of TCP, or closed by now."""
    try:
        with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVED_AT + 8)
    except (OSError, AttributeError):                            # no TCP_INFO: not Linux
        return 0
    return struct.unpack_from("Q", info, RECEIVED_AT)[0] if len(info) >= RECEIVED_AT + 8 else 0
