"""kill -9 of both ends while samples flow and a drafter trains: every sample arrives once, and the run is the run that was
never disturbed, bit for bit."""
import re
import shutil
import signal

import pytest

from common.drafter.checkpoint import checkpoint_hash
from protocol.store import SampleStore
from tests.daemons.processes import RUN, SERVE, free_port, rows, some_prompts, stored

pytestmark = pytest.mark.processes
STEPS, EVERY = 130, 25       # 55 samples and 3 re-reads of each are 110 steps of 2: the run sees the stream's end


def checkpoints(run) -> dict[str, str]:
    return {folder.name: checkpoint_hash(folder) for folder in (run / "checkpoints").iterdir()}


def test_a_kill_of_each_end_loses_nothing_repeats_nothing_and_changes_no_bit(tmp_path, start):
    path, split = some_prompts(tmp_path)
    address = f"tcp://127.0.0.1:{free_port()}"
    serve = ["serve", *SERVE, "--prompts", path, "--bind", address, "--state-dir", tmp_path / "p"]
    run = ["run", *RUN, "--producer", address, "--steps", STEPS, "--eval-every", EVERY]
    box, folder = tmp_path / "t", tmp_path / "t" / "runs" / "ce_causal.block-4-s0"

    producer, trainer = start("hsprod", *serve, log="p"), start("hstrain", *run, "--state-dir", box, "--name", "box", log="t")
    trainer.until(lambda: len(stored(box)) >= 8, "8 samples are here")
    producer.kill()
    assert len(stored(tmp_path / "p")) < len(split.train), "killed too late to be in the middle"

    producer = start("hsprod", *serve, log="p")
    trainer.until(lambda: max(rows(folder), default=0) > EVERY, "it has trained past a saved step")
    trainer.kill()
    assert max(rows(folder)) < STEPS and len(stored(box)) < len(split.train), "killed too late to be in the middle"

    trainer = start("hstrain", *run, "--state-dir", box, "--name", "box", log="t")
    assert trainer.ended() == 0, trainer.text
    assert int(re.search(r"resumed at step (\d+)", trainer.text)[1]) in range(EVERY, STEPS, EVERY)      # the last one that it saved

    with SampleStore(box / "store", readonly=True) as store:
        samples = [store.sample(seq) for seq in stored(box)]
        assert [sample.seq for sample in samples] == list(range(len(split.train)))
        assert {sample.stream for sample in samples} == {store.stream}
    came = [sample.capture.prompt for sample in samples]
    assert sorted(came) == sorted(prompt.id for prompt in split.train)
    assert not {prompt.id for prompt in split.held_out} & set(came)
    sent = next((tmp_path / "p" / "streams").glob("*/samples"))
    assert all((sent / f"{seq:012d}.hs").read_bytes() == (box / "store" / f"{seq:012d}.hs").read_bytes() for seq in stored(box))

    calm = tmp_path / "calm"
    for name in ("store", "assets"):
        shutil.copytree(box / name, calm / name)
    undisturbed = start("hstrain", *run, "--state-dir", calm, "--name", "calm", log="calm")
    assert undisturbed.ended() == 0, undisturbed.text
    assert checkpoints(calm / "runs" / folder.name) == checkpoints(folder)
    assert rows(calm / "runs" / folder.name) == rows(folder)
    assert producer.stop(signal.SIGINT) == 0, producer.text


def test_a_producer_that_stands_still_is_noticed_and_followed_again(tmp_path, start):
    """Pitfall D1: neither data's end nor a wait for ever; it is said within the link's limit, and goes on by itself."""
    path, split = some_prompts(tmp_path)
    address = f"tcp://127.0.0.1:{free_port()}"
    producer = start("hsprod", "serve", *SERVE, "--prompts", path, "--bind", address, "--state-dir", tmp_path / "p", log="p")
    trainer = start("hstrain", "run", *RUN, "--producer", address, "--steps", 120, "--eval-every", 120, "--state-dir", tmp_path / "t", log="t")
    trainer.until(lambda: len(stored(tmp_path / "t")) >= 8, "8 samples are here")
    producer.process.send_signal(signal.SIGSTOP)
    try:
        trainer.says("nothing heard for")
        assert len(stored(tmp_path / "t")) < len(split.train), "stopped too late to be in the middle"
    finally:
        producer.process.send_signal(signal.SIGCONT)
    assert trainer.ended() == 0, trainer.text
    assert stored(tmp_path / "t") == list(range(len(split.train)))
