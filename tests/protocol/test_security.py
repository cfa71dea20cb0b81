"""Keys on real sockets: who has none, or a wrong one, gets no byte of a sample; a name belongs to its key; a list that changes is obeyed."""
import random
import socket
from contextlib import contextmanager

import zmq

from protocol import events as e, keys as key_files
from protocol.events import LinkDown, LinkUp, Refused
from protocol.frames import encode
from tests.protocol.ends import CONTRACT
from tests.protocol.links import Box, Store, free_address, news, wait_for
from tests.protocol.relay import Relay

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32)
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def disallow(keys, name: str) -> None:
    path = keys.folder / key_files.ALLOWED
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if keys.public[name] not in line))


def secret_store(count: int) -> Store:
    """Samples in which no eight bytes are like any others."""
    store, rng = Store(), random.Random(0)
    for seq in range(count):
        store.append(seq, rng.randbytes(3000))
    return store


def holds_of(store: Store, got: bytes) -> bool:
    return any(data[at:at + 8] in got for data in store.data.values() for at in range(0, len(data), 8))


@contextmanager
def dialled(address: str, kind: int, *, keys: key_files.TrainerKeys | None = None, plain: bool = False, name: str = "box"):
    """A client of libzmq that asks for everything."""
    with zmq.Context() as context, context.socket(kind) as one:
        one.linger = 0
        if keys is not None:
            one.curve_serverkey, one.curve_publickey, one.curve_secretkey = keys.producer, keys.public, keys.secret
        if plain:
            one.plain_username, one.plain_password = b"trainer", b"guess"
        if kind == zmq.SUB:
            one.subscribe(b"")
        one.connect(address)
        if kind == zmq.DEALER:
            for message in (e.Hello(name, None, 0, None, True), e.Credit(1 << 40)):
                one.send_multipart(encode(message))
        yield one


@contextmanager
def raw_socket(address: str, say: bytes):
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as one:
        one.sendall(say)
        one.settimeout(0.2)
        yield one


def everything(one: socket.socket) -> bytes:
    got = b""
    try:
        while data := one.recv(65536):
            got += data
    except OSError:                                                      # no more for now, or cut
        pass
    return got


def test_strangers_get_no_byte_of_a_sample_and_the_trainer_beside_them_goes_on(serve, address, tmp_path, keys):
    store = secret_store(10)
    known, unknown = keys("box"), keys("stranger", allow=False)
    producer, relay = serve(store, keys=keys.producer), Relay(address)
    box = Box(relay.address, tmp_path, keys=known)
    says = [b"GET / HTTP/1.1\r\nHost: producer\r\n\r\n", GREETING + READY, GREETING[:20], random.Random(1).randbytes(300), b""]
    with (dialled(address, zmq.DEALER, keys=unknown) as a, dialled(address, zmq.SUB, keys=unknown) as b, dialled(address, zmq.DEALER) as c,
          dialled(address, zmq.SUB) as d, dialled(address, zmq.DEALER, plain=True) as f, box.link as link,
          raw_socket(address, says[0]) as g, raw_socket(address, says[1]) as h, raw_socket(address, says[2]) as i,
          raw_socket(address, says[3]) as j, raw_socket(address, says[4]) as k):
        wait_for(lambda: producer.snapshot()["counters"].get("refused_keys", 0) >= 2 and len(box.samples) == 10, link, producer)
        for seq in range(10, 20):
            store.append(seq, random.Random(seq).randbytes(3000))
            producer.samples_ready()
        wait_for(lambda: len(box.samples) == 20, link, producer)
        assert [one.poll(50) for one in (a, b, c, d, f)] == [0] * 5
        got = [everything(one) for one in (g, h, i, j, k)]
        assert not any(holds_of(store, said) for said in got) and max(map(len, got)) <= 128, "a greeting of 64 bytes, and no more than an error"
    assert set(producer.snapshot()["peers"]) == {"box"} and producer.snapshot()["counters"].get("strangers", 0) == 0
    assert len(relay.down.passed) > 20 * 3000 and not holds_of(store, bytes(relay.down.passed)), "what the trainer gets is encrypted"
    relay.close()


def test_the_search_for_samples_finds_them_where_nothing_is_encrypted(serve, address, tmp_path):
    store, relay = secret_store(3), Relay(address)
    serve(store)
    box = Box(relay.address, tmp_path)
    with box.link as link:
        wait_for(lambda: len(box.samples) == 3, link)
    assert holds_of(store, bytes(relay.down.passed))
    relay.close()


def test_a_trainer_does_not_speak_to_another_producer_than_its_own(serve, tmp_path, keys):
    mine, address = keys("box"), free_address()
    key_files.generate(tmp_path / "impostor")
    key_files.allow(tmp_path / "impostor", keys.public["box"])
    impostor = serve(Store(3), at=address, keys=key_files.ProducerKeys(tmp_path / "impostor"))
    box = Box(address, tmp_path, keys=mine)
    with box.link as link:
        wait_for(lambda: "no answer for" in (said := link.snapshot()["state"]) and f"hsprod allow '{keys.public['box']}'" in said, link, impostor)
    assert not box.samples and not impostor.snapshot()["peers"] and not impostor.snapshot()["counters"].get("refused_keys")


def test_a_key_taken_off_the_list_loses_its_link_and_gets_it_back_with_the_key(serve, address, tmp_path, keys):
    store = secret_store(3)
    mine = keys("box")
    producer, box = serve(store, keys=keys.producer), Box(address, tmp_path, keys=mine)
    with box.link as link, dialled(address, zmq.DEALER, keys=mine, name="raw") as raw:
        wait_for(lambda: len(box.samples) == 3, link, producer)
        assert raw.poll(20_000)                                           # whatever it was told, it is connected
        (keys.folder / key_files.ALLOWED).write_text("half a li")
        assert producer._listener.still_allowed(keys.public["box"]), "a list that cannot be read puts nobody out"
        (keys.folder / key_files.ALLOWED).write_text("# nobody\n")
        wait_for(lambda: producer.snapshot()["counters"].get("revoked", 0) >= 1, producer)
        while "no longer allowed" not in news(link, LinkDown).reason:
            pass
        while raw.poll(0):
            raw.recv_multipart()
        before = producer.snapshot()["counters"]["revoked"]
        raw.send_multipart(encode(e.Hello("raw", None, 0, None, True)))     # over the connection that it still has
        wait_for(lambda: producer.snapshot()["counters"]["revoked"] > before, producer)
        store.append(3, b"not for that key")
        producer.samples_ready()
        assert raw.poll(200) == 0 and not producer.snapshot()["peers"]["box"]["connected"] and len(box.samples) == 3
        key_files.allow(keys.folder, keys.public["box"])
        wait_for(lambda: len(box.samples) == 4, link, producer)


def test_a_name_belongs_to_the_key_that_joined_under_it(serve, address, tmp_path, keys):
    store = secret_store(4)
    owner, other = keys("owner"), keys("other")
    producer, box = serve(store, keys=keys.producer), Box(address, tmp_path, "box", keys=owner)
    def claim(reason: str) -> None:
        thief = Box(address, tmp_path, "box", keys=other)
        with thief.link as link:
            assert reason in news(link, Refused).reason and not thief.samples

    with box.link as link:
        wait_for(lambda: producer.lowest_acked() == 3, link, producer)
        claim("the name box is another key's")
        assert link.up and producer.snapshot()["counters"].get("replaced_links", 0) == 0
    claim("the name box is another key's")                                # its owner is away
    producer.close()
    producer = serve(store, keys=keys.producer)
    claim("take it out of the producer's list")                           # and after a restart
    assert producer.lowest_acked() == 3 and producer.snapshot()["counters"]["refused_names"] >= 1
    disallow(keys, "owner")
    heir = Box(address, tmp_path, "box", keys=other, contract=CONTRACT)   # the same box, with new keys
    heir.samples = list(store.data.items())[:2]
    with heir.link as link:
        wait_for(lambda: heir.samples == list(store.data.items()), link, producer)


def test_a_follower_may_not_take_a_name_either(serve, address, tmp_path, keys):
    store = secret_store(1)
    owner, other = keys("owner"), keys("other")
    producer, arm = serve(store, keys=keys.producer), Box(address, tmp_path, "box.arm", follower=True, contract=CONTRACT, keys=owner)
    with arm.link as link, Box(address, tmp_path, "box.arm", follower=True, contract=CONTRACT, keys=other).link as thief:
        first = link.inbox.get(timeout=20), thief.inbox.get(timeout=20)    # whoever was first has it
        assert {type(one) for one in first} == {LinkUp, Refused}
        wait_for(lambda: producer.snapshot()["counters"].get("refused_names", 0) >= 1, producer)
        assert producer.snapshot()["counters"].get("replaced_links", 0) == 0
