"""The only file with a socket: a ROUTER or DEALER with every limit set, its CURVE side, and the thread that owns it.

No message is understood here; producer_link.py and trainer_link.py do that."""
from __future__ import annotations

import logging
import queue
import re
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

import zmq

from common import service
from common.errors import UserError
from protocol.frames import MAX_FROM_PRODUCER, MAX_FROM_TRAINER
from protocol.keys import ProducerKeys, TrainerKeys, zap_reply
from protocol.unended import Unended

log = logging.getLogger("link")
QUEUED = 64                  # messages libzmq may hold per peer and direction
QUEUED_BYTES = 32 << 20      # of buffers to one peer: a cable of 2.5 Gb/s is busy with them for 100 ms, and this thread is back in 5
VIEWED = 256 << 10           # bytes: from here on a frame from the producer is not copied
BATCH = 64                   # messages taken before anything else is looked at
# What one peer can make the producer hold, whatever it does, reads or does not read, and acknowledges:
#   to it     QUEUED_BYTES, or one larger sample alone; QUEUED messages that pyzmq copies, of COPIED at most; and what waits for room: one
#             sample, one that it asked for again, one chunk, and reports of 1 MiB, at most 48 (producer_link makes no more before they are gone)
#   from it   QUEUED messages of two frames of MAX_FROM_TRAINER, BATCH more of them taken, one message that is not whole, of UNENDED
# That is 32 + 4 + 1 + 48 MiB and two samples; 128 + 128 + 256 MiB.  The kernel has 4 to 6 MiB a socket beside it.  A peer that does not end its
# handshake is cut by libzmq after 30 s and holds one frame until then.
UNENDED = 256 << 20          # bytes that may come on a connection without a whole message: honest queues hold 128 MiB, the kernel some more
SEALED = 64                  # bytes, 33 of them used: what CURVE makes a frame longer, and the limit is held against it as it comes
COPIED = zmq.COPY_THRESHOLD  # bytes: shorter frames are copied, longer ones lent to libzmq until they are sent


class Doorbell:
    """Lets another thread end a poll."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def ring(self) -> None:
        try:
            self._writer.send(b"\0")
        except (BlockingIOError, OSError):           # full: it rings already; closed: nobody is left to hear it
            pass

    def hush(self) -> None:
        try:
            while self.reader.recv(4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()


class Worker:
    """One thread; its fault is kept and raised where the main thread asks.  Orders from other threads go through `do`.

    Each obey() is a turn of its loop: without one for long, service withholds the watchdog's beat."""

    def __init__(self, name: str, body: Callable[[], None]) -> None:
        self._body, self.bell = body, Doorbell()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._turn = f"{name} {id(self):x}"                              # a box may have two links for a moment

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self.bell.ring()
        if self._thread.ident is not None:
            self._thread.join()
        self.bell.close()

    def do(self, order: Callable[[], None]) -> None:
        """Have order() run on the worker's thread, soon."""
        self._orders.put(order)
        self.bell.ring()

    def wait(self, seconds: float) -> None:
        """On the worker's thread: sleep, or until rung."""
        select.select([self.bell.reader], [], [], seconds)

    def obey(self) -> None:
        """On the worker's thread: run what was ordered."""
        service.threads.turned(self._turn, time.monotonic())
        self.bell.hush()
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            order()

    def raise_if_failed(self) -> None:
        """In the main thread, now and then.  Raises what ended the worker: a bug of ours, or a UserError."""
        if self._failure is not None:
            raise self._failure

    def _main(self) -> None:
        try:
            self._body()
        except BaseException as error:
            if not isinstance(error, UserError):
                log.exception("the link's thread failed")
            self._failure = error
        finally:
            service.threads.ended(self._turn)


class Listener:
    """ROUTER bound to address, in a context of its own.  counters: refused_keys, key_list_errors, unended."""

    def __init__(self, address: str, keys: ProducerKeys | None, *, insecure: bool, bell: Doorbell) -> None:
        """Raises UserError: port taken, address wrong, or open to a network without keys."""
        if not re.fullmatch(r"(tcp://.+:\d+|ipc://.+)", address):
            raise UserError(f"cannot listen on {address}: write tcp://HOST:PORT with an address of this box")
        if keys is None and not insecure and not is_local(address):
            raise UserError(f"{address} can be reached from the network: give --keys (see hsprod keygen), or --insecure if you trust all of it")
        self.counters: Counter[str] = Counter()
        self._keys, self._context = keys, zmq.Context()
        self._lent: dict[bytes, deque[tuple[int, zmq.MessageTracker]]] = {}             # by peer: buffers that libzmq holds
        self._router, self._zap = self._context.socket(zmq.ROUTER), None
        self._unended = Unended(self._router, UNENDED)
        _limit(self._router, MAX_FROM_TRAINER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)                 # a peer that is gone is an error, not silence
        try:
            if keys is not None:
                self._zap = self._context.socket(zmq.ROUTER)
                self._zap.bind("inproc://zeromq.zap.01")
                self._router.setsockopt(zmq.CURVE_SERVER, 1)
                self._router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
                self._router.setsockopt(zmq.ZAP_DOMAIN, b"hsdraft")
            self._router.bind(address)
        except zmq.ZMQError as error:
            self.close()
            if error.errno == zmq.EADDRINUSE:
                raise UserError(f"{address} is in use, perhaps by another hsprod: stop it, or choose another port with --bind") from None
            raise UserError(f"cannot listen on {address}: {error.strerror}; write tcp://HOST:PORT with an address of this box") from None
        self._poller = zmq.Poller()
        for one in filter(None, (self._router, self._zap, bell.reader)):
            self._poller.register(one, zmq.POLLIN)

    def receive(self, seconds: float) -> list[tuple[bytes, str | None, list[bytes]]]:
        """(peer, its key, frames) that came; waits up to seconds where none is there.  The key is None where none is needed."""
        ready = dict(self._poller.poll(seconds * 1000))
        if self._zap in ready:
            self._answer_zap()
        taken = _take(self._router) if self._router in ready else []
        for parts in taken:
            self._unended.whole(parts[-1])
        if shut := self._unended.shut():
            self.counters["unended"] += shut
            log.warning("%d MiB came without the end of a message: connection closed", UNENDED >> 20)
        keyed = self._keys is not None
        return [(parts[0].bytes, parts[0].get("User-Id") if keyed else None, [part.bytes for part in parts[1:]]) for parts in taken]

    def send(self, peer: bytes, parts: list[bytes]) -> bool | None:
        """True: queued.  False: the peer's queue is full, try later.  None: the peer is gone."""
        size = sum(len(part) for part in parts if len(part) >= COPIED)
        if size and (held := self.held(peer)) and held + size > QUEUED_BYTES:
            return False
        try:
            tracker = self._router.send_multipart([peer, *parts], zmq.NOBLOCK, copy=False, track=bool(size))
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._lent.pop(peer, None)
            return None
        if size:
            self._lent.setdefault(peer, deque()).append((size, tracker))
        return True

    def held(self, peer: bytes) -> int:
        """Bytes of buffers to this peer that have not gone to the kernel."""
        lent = self._lent.get(peer, deque())
        while lent and lent[0][1].done:
            lent.popleft()
        if not lent:
            self._lent.pop(peer, None)
        return sum(size for size, _ in lent)

    def still_allowed(self, key: str | None) -> bool:
        """Whether a peer with this key may go on; always where no keys are needed."""
        return self._keys is None or (key is not None and self._keys.still_allowed(key))

    def close(self) -> None:
        self._unended.close()
        for one in filter(None, (self._router, self._zap)):
            one.close(linger=200)                                        # ms, for a last Bye
        self._context.term()

    def _answer_zap(self) -> None:
        envelope, empty, *request = self._zap.recv_multipart()
        try:
            allowed = self._keys.allowed()
        except (UserError, OSError) as error:
            self.counters["key_list_errors"] += 1
            log.error("list of allowed keys: %s; nobody new is let in", error)
            allowed = frozenset()
        reply, refused = zap_reply(request, allowed)
        if refused:
            self.counters["refused_keys"] += 1
            log.warning("refused a connection from %s: key %s is not allowed (hsprod allow '%s')",
                        request[3].decode("ascii", "replace") if len(request) > 3 else "?", refused, refused)
        self._zap.send_multipart([envelope, empty, *reply])


def check_address(address: str, keys: ProducerKeys | None, *, insecure: bool) -> None:
    """Raises the UserError that a Listener would, before minutes are spent on loading a target."""
    bell = Doorbell()
    try:
        Listener(address, keys, insecure=insecure, bell=bell).close()
    finally:
        bell.close()


class Dialer:
    """DEALER connected to address, for one session: a new session takes a new one, so that nothing of the old is left in it."""

    def __init__(self, context: zmq.Context, address: str, keys: TrainerKeys | None, bell: Doorbell) -> None:
        """Raises UserError on an address that is none."""
        self._dealer = context.socket(zmq.DEALER)
        _limit(self._dealer, MAX_FROM_PRODUCER)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 100)                  # ms: while no producer listens
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            if keys is not None:
                self._dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.producer)
                self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
                self._dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._dealer.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise UserError(f"cannot connect to {address}: {error.strerror}; write tcp://HOST:PORT") from None
        self._bell, self._poller = bell, zmq.Poller()
        self._poller.register(bell.reader, zmq.POLLIN)

    def receive(self, seconds: float, *, until_writable: bool) -> list[list[bytes | memoryview]]:
        """Frames that came; waits up to seconds, or until the socket takes messages again.

        A large one is a view of libzmq's own memory: a copy of a sample costs a page fault for each 4 KiB of it."""
        self._poller.register(self._dealer, zmq.POLLIN | (zmq.POLLOUT if until_writable else 0))
        ready = dict(self._poller.poll(seconds * 1000))
        taken = _take(self._dealer) if ready.get(self._dealer, 0) & zmq.POLLIN else []
        return [[part.bytes if len(part) < VIEWED else part.buffer for part in parts] for parts in taken]

    def send(self, parts: list[bytes]) -> bool:
        """False: the queue is full, try later."""
        try:
            self._dealer.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._dealer.close(linger=200)


def is_local(address: str) -> bool:
    """Whether only this box can reach what is bound there."""
    scheme, _, rest = address.partition("://")
    host = rest.rsplit(":", 1)[0].strip("[]")
    return scheme in ("ipc", "inproc") or host in ("localhost", "::1") or (host.startswith("127.") and host.replace(".", "").isdigit())


def _limit(one: zmq.Socket, most: int) -> None:
    one.setsockopt(zmq.MAXMSGSIZE, most + SEALED)        # of one frame: libzmq drops the connection before it allocates more
    one.setsockopt(zmq.SNDHWM, QUEUED)
    one.setsockopt(zmq.RCVHWM, QUEUED)
    one.setsockopt(zmq.LINGER, 0)


def _take(one: zmq.Socket) -> list[list[zmq.Frame]]:
    """Messages that are here."""
    found = []
    try:
        while len(found) < BATCH:
            found.append(one.recv_multipart(zmq.NOBLOCK, copy=False))
    except zmq.Again:
        pass
    return found
