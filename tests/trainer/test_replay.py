"""A stored stream trains as the live one did: read only, with the end it had, with or without somebody to measure the result."""
import os
import socket
import threading
from pathlib import Path

import pytest

from common import metrics, service
from common.drafter import checkpoint
from common.errors import UserError
from protocol.producer_link import ProducerLink
from protocol.store import SampleStore
from tests.trainer.small import CONTRACT, append, captures, stored
from trainer import config, daemon, replay
from trainer.loop import Loop
from trainer.order import RULE, aside_index

SHORT = dict(steps=12, eval_every=4, sequences=2, anchors=4, layers=1, block_size=4, replay=1, threads=1, device="cpu", name="box")
SAMPLES = captures(70)


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> Path:
    return stored(tmp_path_factory.mktemp("box") / "state", SAMPLES)


def train(state: Path, source: Path, stop: service.Stop | None = None, **over) -> Path:
    """One run of the daemon, in this process; its folder."""
    daemon.run(config.Run(**SHORT | dict(stored=source, state_dir=state) | over), service.Stop() if stop is None else stop)
    return next((state / "runs").iterdir())


def last(run: Path) -> str:
    return checkpoint.checkpoint_hash(sorted((run / "checkpoints").iterdir())[-1])


def listing(folder: Path) -> list[tuple]:
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_a_store_or_its_state_folder_give_the_same_bits_and_are_only_read(tmp_path, box):
    with SampleStore(box / "store"):                                       # a receiver at work does not hinder it
        before = listing(box)
        runs = [train(tmp_path / name, source) for name, source in (("a", box), ("b", box / "store"))]
        assert listing(box) == before
    assert last(runs[0]) == last(runs[1])
    rows = metrics.read(runs[0] / "metrics.jsonl", "offline")
    assert [row["step"] for row in rows] == [4, 8, 12] and {row["texts"] for row in rows} == {2}


def test_samples_that_come_later_change_nothing(tmp_path):
    box = stored(tmp_path / "box", SAMPLES[:40])
    expected = last(train(tmp_path / "whole", box, steps=60, eval_every=30))

    class StopLate(service.Stop):
        asked = 0
        def __bool__(self) -> bool:
            self.asked += 1
            return self.asked > 30
    stopped = train(tmp_path / "run", box, StopLate(), steps=60, eval_every=30)
    assert (stopped / "resume").exists() and not (stopped / "checkpoints").exists(), "stopped before the first checkpoint, in the middle"
    with SampleStore(box / "store") as store:
        append(store, SAMPLES[40:])
    assert last(train(tmp_path / "run", box, steps=60, eval_every=30)) == expected
    assert last(train(tmp_path / "asked", box, steps=60, eval_every=30, samples=40)) == expected
    assert last(train(tmp_path / "all", box, steps=60, eval_every=30)) != expected


def test_without_a_producer_it_ends_and_says_what_was_not_measured(tmp_path, box, caplog):
    run = train(tmp_path, box)
    assert "real acceptance of step-00000012 was not measured: no producer was named" in caplog.text
    train(tmp_path, box, eval_all=True)
    assert "step-00000004, step-00000008, step-00000012 was not measured" in caplog.text
    assert not metrics.read(run / "metrics.jsonl", "eval")


def test_a_producer_that_is_not_there_is_not_waited_for_without_end(tmp_path, box, caplog, monkeypatch):
    monkeypatch.setattr(replay, "UNREACHED_S", 0.3)
    train(tmp_path, box, producer=f"tcp://127.0.0.1:{free_port()}")
    assert "step-00000012 was not measured: no producer answered" in caplog.text


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Producer:
    """A producer of the same contract and another stream, which answers each checkpoint with its step as tau."""

    def __init__(self, folder: Path, **over) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        contract = CONTRACT.to_dict() | over
        self._store = SampleStore(folder / "samples", contract=contract)
        self.link = ProducerLink(self.address, self._store, contract, {}, cursors=folder / "cursors.json", inbox_dir=folder / "inbox")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._answer)

    def __enter__(self):
        self.link.start()
        self._thread.start()
        return self

    def _answer(self) -> None:
        while not self._done.wait(0.02):
            while not self.link.inbox.empty():
                ready = self.link.inbox.get()
                self.link.report(ready, result={
                    "checkpoint": checkpoint.checkpoint_hash(ready.folder), "tau": float(ready.step), "tau_simulated": float(ready.step),
                    "tau_interval": [1.0, 20.0], "eta": 1.0, "identical": 1, "prompts": 1})

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()
        self.link.close()
        self._store.close()


@pytest.mark.parametrize("every, steps", [(False, [12]), (True, [4, 8, 12])])
def test_the_same_run_with_a_producer_has_what_waits_measured(tmp_path, box, every, steps):
    run = train(tmp_path, box)
    before = last(run)
    with Producer(tmp_path / "p") as producer:
        train(tmp_path, box, producer=producer.address, eval_all=every)
    assert [row["step"] for row in metrics.read(run / "metrics.jsonl", "eval")] == steps
    assert last(run) == before


def test_a_producer_of_another_contract_is_refused_by_field(tmp_path, box):
    with Producer(tmp_path / "p", target="another") as producer, pytest.raises(UserError, match="target"):
        train(tmp_path, box, producer=producer.address)


def test_what_is_no_stored_stream_is_said_in_one_line(tmp_path, box):
    with pytest.raises(UserError, match="no stored stream here"):
        train(tmp_path, tmp_path)
    with pytest.raises(UserError, match="holds 70 samples, 71 are asked for"):
        train(tmp_path, box, samples=71)
    with pytest.raises(UserError, match="--samples goes with --from"):
        train(tmp_path, None, samples=3)
    bare = stored(tmp_path / "bare", SAMPLES[:4])
    next((bare / "assets").glob("*.json")).unlink()
    with pytest.raises(UserError, match="embedding, head and tokenizer belong here"):
        train(tmp_path, bare)


def test_a_run_of_another_stream_another_end_or_another_rule_is_refused(tmp_path, box):
    run = train(tmp_path / "t", box)
    with pytest.raises(UserError, match="stream: s+ -> o+"):
        train(tmp_path / "t", stored(tmp_path / "other", SAMPLES, stream="o" * 32))
    with pytest.raises(UserError, match="samples: 70 -> 60"):
        train(tmp_path / "t", box, samples=60)
    path = run / "run.json"
    path.write_text(path.read_text().replace(f' "held_aside": "{RULE}",\n', ""))
    with pytest.raises(UserError, match="held_aside: None -> the last of each 32"):
        train(tmp_path / "t", box)


def test_one_process_at_a_time_works_in_a_run_folder(tmp_path, box, monkeypatch):
    from common import files
    monkeypatch.setattr(daemon, "LOCK_PATIENCE_S", 0.0)
    with files.held(tmp_path / "runs" / "ce_causal.block-4-s0", "--run-dir"), pytest.raises(UserError, match=f"process {os.getpid()} is at work"):
        train(tmp_path, box, run_dir=tmp_path / "runs" / "ce_causal.block-4-s0")


def test_what_is_held_aside_is_read_for_judging_alone(tmp_path, box, monkeypatch):
    from trainer.batch import Samples
    asked = []
    real = Samples.__getitem__
    monkeypatch.setattr(Samples, "__getitem__", lambda self, i: asked.append(i) or real(self, i))
    monkeypatch.setattr(Loop, "_checkpoint", lambda self: None)
    train(tmp_path, box, steps=80)
    assert {aside_index(0), aside_index(1)}.isdisjoint(asked) and len(set(asked)) > 60
