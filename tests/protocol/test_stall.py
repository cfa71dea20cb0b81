"""A peer that stalls, floods or asks for what it does not read takes nothing from the trainer beside it, and a bounded piece of memory.

Fairness is counted, not timed: samples in each round of the producer's loop, over queues in memory (benchmarks/stall.py has seconds)."""
import random
import socket
import time
from collections import Counter, deque

import pytest

from common.errors import PeerError
from protocol import events as e, wire
from protocol.frames import CHUNK, decode, encode
from protocol.producer_link import ROUNDS, ProducerLink
from protocol.rules import MAX_OFFERS, Timing
from protocol.transfer import OUTSTANDING
from protocol.wire import BATCH, QUEUED, QUEUED_BYTES
from tests.protocol.ends import CONTRACT, Ends
from tests.protocol.links import Box, Store, wait_for
from tests.protocol.relay import Relay

PATIENT = Timing(interval=0.5, limit=1000.0)


class Sockets:
    """Stands for Listener: what each peer has said waits in `said`, what it was sent in `sent`, QUEUED messages at most."""

    counters: dict = {}

    def __init__(self, *peers: bytes) -> None:
        self.said, self.sent = {peer: deque() for peer in peers}, {peer: deque() for peer in peers}

    def receive(self, _seconds: float) -> list:
        """As ROUTER does: one of each in turn, BATCH in all."""
        found = []
        while len(found) < BATCH and any(self.said.values()):
            found += [(peer, None, encode(said.popleft())) for peer, said in self.said.items() if said]
        return found[:BATCH]

    def send(self, peer: bytes, parts: list[bytes]) -> bool:
        if len(self.sent[peer]) >= QUEUED:
            return False
        self.sent[peer].append(parts)
        return True

    def still_allowed(self, _key: None) -> bool:
        return True


def rounds(tmp_path, ill: str, count: int = 12) -> tuple[list[int], Counter]:
    """Samples that the healthy trainer gets in each round beside one that is ill; and what was read from disk for each number."""
    store, reads = Store(600), Counter()
    read = store.read
    store.read = lambda seq: reads.update([seq]) or read(seq)
    (tmp_path / "emb").write_bytes(bytes(CHUNK))
    link = ProducerLink("tcp://127.0.0.1:1", store, CONTRACT.to_dict(), {"embedding": tmp_path / "emb"}, cursors=tmp_path / "cursors.json",
                        inbox_dir=tmp_path / "inbox", timing=PATIENT)
    link._listener = wires = Sockets(b"ill", b"well") if ill else Sockets(b"well")
    sha = link._facts.assets[0].sha256
    for said in ([e.Hello(peer.decode(), None, 0, None, True) for peer in wires.said], [e.Credit(1 << 40) for _ in wires.said]):
        for peer, message in zip(wires.said, said):
            wires.said[peer].append(message)
        link._turn(0.0)
    wires.sent[b"well"].clear()                                           # Welcome and the first share
    wires.said[b"well"].append(e.Ack(link._peers[b"well"].session.counters["samples"] - 1))
    got = []
    for _ in range(count):
        match ill:
            case "floods":
                wires.said[b"ill"] += [e.Heartbeat({"n": 1}), e.Credit(1 << 40), e.Ack(-1)] * 100
            case "asks":
                wires.said[b"ill"] += [e.AssetGet(sha, 0, CHUNK)] * (OUTSTANDING - len(link._peers[b"ill"].session._c.asked))
            case "asks again":
                wires.said[b"ill"] += [e.SampleGet(0)] * (link._peers[b"ill"].session._again is None)
            case "acknowledges unread":
                wires.said[b"ill"].append(e.Ack(link._peers[b"ill"].session._next - 1))
        link._turn(0.0)
        came = [m for m in map(decode, wires.sent[b"well"]) if isinstance(m, e.SampleData)]
        wires.sent[b"well"].clear()
        if came:
            wires.said[b"well"].append(e.Ack(came[-1].seq))
        got.append(len(came))
    link._worker.close()
    link._serving.close()
    return got, reads


@pytest.mark.parametrize("ill", ["reads nothing", "floods", "asks", "asks again", "acknowledges unread"])
def test_the_healthy_one_gets_its_whole_share_of_every_round(tmp_path, ill):
    alone, _ = rounds(tmp_path, "")
    beside, reads = rounds(tmp_path, ill)
    assert beside == alone == [ROUNDS] * 12
    both = [seq for seq, times in reads.items() if times > 1 and seq]
    assert len(both) <= QUEUED + 1, "a queue, and one read ahead"


def test_answers_that_are_not_read_are_so_many():
    """An offer whose report is in memory is answered with up to a MiB, and costs a few hundred bytes to repeat."""
    ends = Ends([])
    ends.flow()
    offer = e.CheckpointOffer("0f" * 16, "run", 1, CONTRACT.hash, (), {})
    with pytest.raises(PeerError, match=f"leaves {MAX_OFFERS} answers unread"):
        for _ in range(MAX_OFFERS + 1):
            [event] = ends.producer.receive(offer, 0.0)
            ends.producer.report(event.offer.offer, {"tau": 1.0}, None)


# ---- real sockets

def big_store(count: int, size: int = 1 << 20) -> Store:
    store, rng = Store(), random.Random(0)
    for seq in range(count):
        store.append(seq, rng.randbytes(size))
    return store


def test_one_that_grants_and_acknowledges_everything_and_reads_nothing_holds_what_is_written_down(serve, address, tmp_path, raw):
    store, reads, most = big_store(160), Counter(), 0
    read, producer = store.read, serve(store)
    store.read = lambda seq: reads.update([seq]) or read(seq)
    assert isinstance(raw.say(*encode(e.Hello("blind", None, 0, None, True))), e.Welcome)
    raw._dealer.send_multipart(encode(e.Credit(1 << 40)))
    [identity] = producer._peers
    session, still = producer._peers[identity].session, 0
    while still < 30:                                                     # 0.3 s without another sample read
        before = session._next
        raw._dealer.send_multipart(encode(e.Ack(session._next - 1)))
        time.sleep(0.01)
        still = still + 1 if session._next == before else 0
        most = max(most, producer._listener.held(identity))
    assert QUEUED_BYTES // 2 < most <= QUEUED_BYTES
    here = sum(len(store.data[seq]) for seq in reads)                       # the rest is in the kernel and at the reader
    assert here <= QUEUED_BYTES + (48 << 20) and session._next < 100
    with Box(address, tmp_path).link as link:
        wait_for(lambda: producer.snapshot()["peers"].get("box", {}).get("lag") == 0, link, producer)


@pytest.mark.parametrize("right_key", [True, False])
def test_one_that_stops_in_the_middle_of_a_message_is_dropped_and_the_trainer_beside_it_goes_on(serve, address, tmp_path, keys, right_key):
    """The right key: behind a cable that holds its second half back.  None: half a greeting, and a frame that says it is long."""
    store = big_store(8, 1000)
    mine = {"keys": keys("box")} if right_key else {}
    producer = serve(store, **({"keys": keys.producer} if right_key else {}))
    relay, box = Relay(address), Box(address, tmp_path, **mine)
    relay.up.hold_at = 400_000
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(CHUNK))
    ill = Box(relay.address, tmp_path, "ill", **({"keys": keys("ill")} if right_key else {}))
    with box.link as link, ill.link as other:
        wait_for(lambda: len(ill.samples) == 8 and len(box.samples) == 8, link, other, producer)
        with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) as plain:
            plain.sendall((b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))[:64] + b"\x02" + (1 << 20).to_bytes(8, "big") + b"half")
            other.offer(folder, run="r", step=1, record={})               # a MiB, of which 400 kB arrive
            wait_for(lambda: len(relay.up.passed) >= 400_000, other, producer)
            for seq in range(8, 40):
                store.append(seq, b"x" * 1000)
                producer.samples_ready()
            wait_for(lambda: len(box.samples) == 40, link, producer)
            wait_for(lambda: "nothing heard" in _left(producer, "ill"), link, producer)
            assert link.up and producer.snapshot()["peers"]["ill"]["acked"] == 7, "its cursor stays"
            relay.close()
    assert producer.inbox.empty()


def _left(producer: ProducerLink, name: str) -> str:
    return "nothing heard" if not producer.snapshot()["peers"].get(name, {}).get("connected") else ""


def test_a_message_of_ever_more_frames_is_cut_and_the_trainer_beside_it_goes_on(serve, address, tmp_path, monkeypatch):
    """libzmq would keep every frame until the last one is here.  A long checkpoint, whole message by whole message, is no such thing."""
    monkeypatch.setattr(wire, "UNENDED", 8 << 20)
    store, most = big_store(8, 1000), 64
    producer, box = serve(store), Box(address, tmp_path)
    folder = tmp_path / "ck"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes(24 * CHUNK))
    frame, sent = b"\x03" + CHUNK.to_bytes(8, "big") + bytes(CHUNK), 0    # more to follow, long
    with box.link as link, socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) as plain:
        wait_for(lambda: len(box.samples) == 8, link, producer)
        ready = b"\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
        plain.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\x04" + bytes([len(ready)]) + ready)
        link.offer(folder, run="r", step=1, record={})
        with pytest.raises(OSError):
            while sent < most:
                plain.sendall(frame)
                sent += 1
        assert 8 <= sent < most and producer.snapshot()["counters"]["unended"] == 1
        wait_for(lambda: not producer.inbox.empty(), link, producer)
        for seq in range(8, 40):
            store.append(seq, b"x")
            producer.samples_ready()
        wait_for(lambda: len(box.samples) == 40, link, producer)
        assert link.up and producer.snapshot()["counters"]["unended"] == 1, "nobody else is cut"


def test_a_flood_of_small_messages_is_heard_and_takes_nothing(serve, address, tmp_path, raw):
    store = big_store(20, 1000)
    producer, box = serve(store), Box(address, tmp_path)
    assert isinstance(raw.say(*encode(e.Hello("loud", None, 0, None, False))), e.Welcome)
    beat, sent = encode(e.Heartbeat({"n": 1})), 0
    with box.link as link:
        while sent < 20_000:
            raw._dealer.send_multipart(beat)
            sent += 1
        for seq in range(20, 60):
            store.append(seq, b"x")
            producer.samples_ready()
        wait_for(lambda: len(box.samples) == 60, link, producer)
    assert producer.snapshot()["peers"]["loud"]["connected"] and not producer.snapshot()["counters"].get("malformed")


