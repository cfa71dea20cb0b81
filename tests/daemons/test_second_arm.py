"""A day of two arms on one box: a producer that is not there, that talks nonsense, that stops and comes back; one arm
receives, the other follows and takes over; each stop is clean and each start goes on where it was."""
import json
import re
import signal
import socket

import pytest
import zmq

from protocol.store import SampleStore
from tests.daemons.processes import RUN, SERVE, free_port, rows, some_prompts, stored
from trainer.order import sample_at

pytestmark = pytest.mark.processes
STEPS = 120                  # the stream's 54 samples that are trained on are 108 of them
HALF = 12                    # samples after which the producer goes away


def talk_nonsense(address: str, trainer) -> None:
    """Stands for a producer that answers Hello with bytes that are no message."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(address)
        trainer.until(lambda: router.poll(50), "it says Hello")
        router.send_multipart([router.recv_multipart()[0], b"\xc1 nonsense"])
        trainer.says("connecting again")


def disturb(address: str) -> None:
    """A peer that sends what is no message, and one that does not even speak ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 1000
        dealer.connect(address)
        dealer.send_multipart([b"\xc1 nonsense", b"x" * 1000])
        assert dealer.poll(60_000), "it is told why"
    host, port = address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)


def test_two_arms_one_box_and_a_producer_that_comes_and_goes(tmp_path, start):
    path, split = some_prompts(tmp_path)
    address, box = f"tcp://127.0.0.1:{free_port()}", tmp_path / "t"
    serve = ["serve", *SERVE, "--prompts", path, "--bind", address, "--state-dir", tmp_path / "p"]
    run = ["run", *RUN, "--producer", address, "--state-dir", box, "--name", "box", "--steps", STEPS, "--eval-every", 40, "--arm"]
    folders = {arm: box / "runs" / f"{arm}.block-4-s0" for arm in ("ce_causal", "ce_bidi")}

    first = start("hstrain", *run, "ce_causal", log="ce_causal")
    talk_nonsense(address, first)
    producer, second = start("hsprod", *serve, log="p"), start("hstrain", *run, "ce_bidi", log="ce_bidi")
    second.says("following its files")
    first.until(lambda: len(stored(box)) >= HALF, f"{HALF} samples are here")
    second.until(lambda: rows(folders["ce_bidi"]), "the second arm trains on them")
    disturb(address)
    producer.says("link dropped")
    assert producer.stop() == 0, producer.text
    here = stored(box)
    assert here == stored(tmp_path / "p") and len(here) < len(split.train), "nothing is lost, and it was in the middle"

    first.says("the producer said: the producer stops; connecting again")
    assert first.stop() == 0, first.text
    stopped = int(re.search(r"stopped: step (\d+)/", first.text)[1])
    second.says("receiving for this box from here on")
    assert second.process.poll() is None and len(stored(box)) == len(here)
    producer, first = start("hsprod", *serve, log="p"), start("hstrain", *run, "ce_causal", log="ce_causal")
    producer.says(f"holds {len(here)} samples")
    first.says("resumed at step")
    assert int(re.search(r"resumed at step (\d+)", first.text)[1]) == stopped > 0
    assert "following its files" in first.text

    assert (first.ended(), second.ended()) == (0, 0), first.text + second.text
    assert producer.stop(signal.SIGINT) == 0, producer.text
    with SampleStore(box / "store", readonly=True) as store:
        samples = [store.sample(seq).capture for seq in stored(box)]
    assert sorted(c.prompt for c in samples) == sorted(p.id for p in split.train)
    read = [samples[sample_at(k, replay=3, closed=len(samples))].tokens for k in range(2 * STEPS)]
    expected = {step: sum(read[:2 * step]) for step in range(10, STEPS + 1, 10)}
    for folder in folders.values():
        assert rows(folder) == expected, "from the first stored sample, in the order that sample_at() gives"
        assert json.loads((folder / "closed.json").read_text()) == {"samples": len(samples)}
