"""A file of the producer's store rots before a trainer has it: it is made again from its own prompt, and the stream goes on by itself."""
import pytest

from tests.daemons.processes import RUN, SERVE, free_port, some_prompts, stored

pytestmark = pytest.mark.processes


def test_what_rots_in_the_producers_store_is_made_again_when_a_trainer_needs_it(tmp_path, start):
    path, split = some_prompts(tmp_path)
    address, count = f"tcp://127.0.0.1:{free_port()}", len(split.train)
    producer = start("hsprod", "serve", *SERVE, "--prompts", path, "--bind", address, "--state-dir", tmp_path / "p", log="p")
    producer.until(lambda: len(stored(tmp_path / "p")) == count, "it has answered all prompts")
    [store] = (tmp_path / "p" / "streams").glob("*/samples")
    files = [store / f"{seq:012d}.hs" for seq in range(count)]
    before = [file.read_bytes() for file in files]
    files[7].write_bytes(before[7][:-100])
    files[8].write_bytes(before[8][:900] + bytes([before[8][900] ^ 4]) + before[8][901:])
    trainer = start("hstrain", "run", *RUN, "--producer", address, "--steps", 30, "--eval-every", 30, "--state-dir", tmp_path / "t", log="t")
    trainer.until(lambda: len(stored(tmp_path / "t")) == count, "it has the stream")
    assert [(tmp_path / "t" / "store" / file.name).read_bytes() for file in files] == before
    assert [file.read_bytes() for file in files] == before and not list(store.glob("*.corrupt"))
    for seq in (7, 8):
        assert f"sample {seq} was damaged here and is made again" in producer.text
    assert trainer.ended() == 0, trainer.text
