"""What a person can get wrong is one line that says what and how to mend it, and exit code 2.

Most of it runs in this process, through the commands' own entry points: the same lines, without seconds of imports."""
from __future__ import annotations

import functools
import json
import logging
import shutil
import socket
import sys
import time

import pytest

import producer.cli
import trainer.cli
import trainer.inbox
from common import files, logs, service
from common.errors import EXIT_USER
from producer import assets
from protocol import codec, keys
from protocol.producer_link import ProducerLink
from protocol.rules import Timing
from protocol.store import SampleStore
from protocol.trainer_link import TrainerLink
from tests.daemons.processes import free_port
from tests.producer import tiny
from trainer.arms import ARMS

MAIN = {"hsprod": producer.cli.main, "hstrain": trainer.cli.main}
TRAIN = ["--sequences", "1", "--anchors", "2", "--layers", "1", "--block-size", "4", "--steps", "2"]
SAMPLES = 4
PATIENCE = 60.0


class Stop(service.Stop):
    """Leaves pytest's signals alone and ends a daemon that should have ended itself, or once `enough` is true."""

    enough = staticmethod(lambda: False)

    def __init__(self) -> None:
        super().__init__()
        self._end = time.monotonic() + PATIENCE

    def __bool__(self) -> bool:
        return super().__bool__() or time.monotonic() > self._end or self.enough()

    def on_signals(self) -> None:
        """pytest's."""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch, tmp_path):
    monkeypatch.setattr(service, "Stop", Stop)
    monkeypatch.setattr(logs, "setup", lambda level: None)
    for name in ("HSPROD_STATE_DIR", "HSTRAIN_STATE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def call(monkeypatch, capsys):
    """call(command, *words) -> (exit code, stderr)."""
    def run(command: str, *words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [command, *map(str, words)])
        with pytest.raises(SystemExit) as end:
            MAIN[command]()
        return end.value.code or 0, capsys.readouterr().err
    return run


@pytest.fixture
def complain(call):
    """complain(command, *words) -> the one line."""
    def run(command: str, *words: object) -> str:
        code, err = call(command, *words)
        said = err.splitlines()
        assert code == EXIT_USER and len(said) == 1 and said[0].startswith("error: "), err
        return said[0]
    return run


@pytest.fixture(scope="module")
def boxes(tmp_path_factory):
    """State folders of two trainers that have received a stream: of the same target, with other taps."""
    target, made = tiny.hybrid(template=tiny.CHATML), {}
    for name, taps in (("one", (1, 3)), ("other", (2, 4))):
        state = tmp_path_factory.mktemp(name)
        contract = target.contract(taps, None)
        with SampleStore(state / "store") as store:
            store.begin("5eed" * 8, contract.to_dict(), 0)
            for seq in range(SAMPLES):
                ids = target.tokenizer(f"def f{seq}(x): return x + {seq} and so on, for {seq} more of them").input_ids
                capture = target.capture(ids, [True] * len(ids), taps, f"{seq:064x}")
                store.append(seq, codec.encode(capture, stream=store.stream, seq=seq, contract=contract.hash))
        written = assets.write(target, state / "written")
        (state / "assets").mkdir()
        sums = {asset: files.sha256_file(path) for asset, path in written.items()}
        for asset, path in written.items():
            shutil.copy(path, state / "assets" / sums[asset])
        (state / "assets" / f"{contract.hash}.json").write_text(json.dumps(sums))
        made[name] = state
    return made


@pytest.mark.parametrize("layers, says", [
    ("99", "99 is out of range; this target has 8 layers, legal taps are 0 to 6"), ("7", "7 is out of range"), ("-1", "-1 is out of range"),
    ("1,3,3", "list each layer once, in ascending order"), ("3,1", "list each layer once, in ascending order"),
    ("1,two", "layer ids are integers"), ("1.5", "layer ids are integers"), ("", "layer ids are integers"),
    ("auto:9", "can place 1 to 5 taps"), ("auto:x", "write auto, auto:8 or a list")])
def test_layers(complain, layers, says):
    said = complain("hsprod", "serve", "--target", "embedded", "--layers", layers)
    assert "--layers" in said and says in said


def test_a_target_that_is_not_there(complain, tmp_path):
    from huggingface_hub import constants
    assert constants.HF_HUB_CACHE in complain("hsprod", "serve", "--target", "nobody/no-such-model")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in complain("hsprod", "serve", "--target", tmp_path / "empty")
    for config, says in (("{", "not a valid JSON file"), ('{"model_type": "nope"}', "`nope`")):
        (tmp_path / "empty" / "config.json").write_text(config)
        assert says in complain("hsprod", "serve", "--target", tmp_path / "empty")


@pytest.mark.parametrize("lines, says", [
    (['{"prompt": "a"}', "", '{"prompt": 3}'], "prompts.jsonl, line 3:"), (['{"prompt": "a"}', "{"], "prompts.jsonl, line 2:"),
    (['{"messages": [{"role": "nobody", "content": ""}]}'], "line 1: message 0: role 'nobody' is none of"), ([], "no prompts in it"),
    (['{"prompt": "a"}'] * 5, "add prompts or change the fraction")])
def test_prompts(complain, tmp_path, lines, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    assert says in complain("hsprod", "serve", "--target", "embedded", "--prompts", path)


def test_no_prompts_file_and_none_held_out(complain, tmp_path):
    assert str(tmp_path / "absent") in complain("hsprod", "serve", "--target", "embedded", "--prompts", tmp_path / "absent")
    assert "leave none to hold out" in complain("hsprod", "serve", "--target", "embedded", "--held-out", 0)


def test_a_port_in_use(complain):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        said = complain("hsprod", "serve", "--target", "embedded", "--bind", address)
    assert f"{address} is in use" in said and "--bind" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "192.0.2.7"])
def test_an_address_that_the_network_can_reach_needs_keys_or_a_word(complain, host):
    serve = ["serve", "--target", "embedded", "--bind", f"tcp://{host}:{free_port()}"]
    said = complain("hsprod", *serve)
    assert "can be reached from the network: give --keys (see hsprod keygen), or --insecure if you trust all of it" in said
    if host == "0.0.0.0":                                    # with that word it goes on, here to the next mistake
        assert "99 is out of range" in complain("hsprod", *serve, "--insecure", "--layers", "99")


@pytest.mark.parametrize("command", [["hsprod", "serve", "--target", "embedded"], ["hstrain", "run"]])
def test_a_private_key_that_others_can_read(complain, tmp_path, command):
    keys.generate(tmp_path)
    (tmp_path / keys.SECRET).chmod(0o644)
    said = complain(*command, "--keys", tmp_path)
    assert f"{tmp_path / keys.SECRET} can be read by others (mode 644): chmod 600 {tmp_path / keys.SECRET}" in said


def test_an_unknown_arm_a_bad_address_and_a_bad_run_dir(complain, tmp_path):
    said = complain("hstrain", "run", "--arm", "nope")
    assert "'nope'" in said and all(name in said for name in ARMS)
    assert "nonsense" in complain("hstrain", "run", "--producer", "nonsense")
    assert "--run-dir" in complain("hstrain", "run", "--run-dir", tmp_path / "a b")


def test_a_run_directory_of_another_run(call, complain, boxes, monkeypatch, tmp_path):
    """Another arm, seed, contract or code version: each is named, with both values."""
    folder, nobody = tmp_path / "run", f"tcp://127.0.0.1:{free_port()}"
    run = ["run", "--producer", nobody, *TRAIN, "--run-dir", folder, "--state-dir"]
    with monkeypatch.context() as once:
        once.setattr(Stop, "enough", lambda _self: (folder / "checkpoints").exists())
        assert call("hstrain", *run, boxes["one"]) == (0, "")
    there = (folder / "run.json").read_bytes()
    said = complain("hstrain", *run, boxes["one"], "--arm", "ce_bidi")
    assert f"{folder} holds another run" in said and "--run-dir" in said
    assert "arm.name: ce_causal.block-4 -> ce_bidi.block-4; " in said and "arm.attention: causal -> bidi; " in said and "arm.loss" not in said
    assert "(seed: 0 -> 7)" in complain("hstrain", *run, boxes["one"], "--seed", 7)
    assert "contract: " in complain("hstrain", *run, boxes["other"])
    (folder / "run.json").write_text(json.dumps(json.loads(there) | {"commit": "0" * 12}))
    assert "commit: 000000000000 -> " in complain("hstrain", *run, boxes["one"])


def test_a_producer_whose_contract_differs(complain, boxes, tmp_path):
    address, other = f"tcp://127.0.0.1:{free_port()}", boxes["other"]
    with (SampleStore(other / "store", readonly=True) as store,
          ProducerLink(address, store, store.contract, {}, cursors=tmp_path / "subscribers.json", inbox_dir=tmp_path / "inbox")):
        said = complain("hstrain", "run", "--producer", address, "--state-dir", boxes["one"], "--run-dir", tmp_path / "run", *TRAIN)
    assert "contract differs" in said and "taps: [2, 4] -> [1, 3]. " in said and "--state-dir" in said


def test_an_unreachable_producer_is_said_and_tried_again(call, monkeypatch, caplog):
    monkeypatch.setattr(trainer.inbox, "TrainerLink", functools.partial(TrainerLink, timing=Timing(interval=0.1, limit=0.4)))
    address = f"tcp://127.0.0.1:{free_port()}"
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Stop, "enough", lambda _self: "no answer" in caplog.text)
    assert call("hstrain", "run", "--producer", address) == (0, "")
    assert f"{address}: no answer for" in caplog.text and "connecting again" in caplog.text


def test_a_damaged_sample_waits_for_a_producer_that_is_away(call, boxes, monkeypatch, caplog, tmp_path):
    """No mistake, and so no exit code 2, after which systemd would leave it down: a stop ends it, or the producer's return."""
    monkeypatch.setattr(trainer.inbox, "TrainerLink", functools.partial(TrainerLink, timing=Timing(interval=0.1, limit=0.4)))
    address, state = f"tcp://127.0.0.1:{free_port()}", tmp_path / "state"
    shutil.copytree(boxes["one"], state)
    sample = state / "store" / "000000000000.hs"
    sample.write_bytes(sample.read_bytes()[:-9])
    run = ["run", "--producer", address, "--state-dir", state, "--run-dir", tmp_path / "run", *TRAIN]
    caplog.set_level(logging.INFO)
    def said() -> dict:
        board = state / "status" / "run.json"
        return json.loads(board.read_text()) if board.exists() else {}
    with monkeypatch.context() as once:
        once.setattr(Stop, "enough", lambda _self: said().get("doing") == "waiting for a damaged sample to come again")
        assert call("hstrain", *run) == (0, "")
    assert said()["doing"] == "stopped" and said()["ended"] and "asking the producer for it again" in caplog.text
    shutil.copytree(boxes["one"] / "store", tmp_path / "theirs")
    with (SampleStore(tmp_path / "theirs") as store,
          ProducerLink(address, store, store.contract, {}, cursors=tmp_path / "subscribers.json", inbox_dir=tmp_path / "inbox"), monkeypatch.context() as once):
        once.setattr(Stop, "enough", lambda _self: len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1)
        assert call("hstrain", *run) == (0, "")
    assert "sample 0 came again and is whole" in caplog.text and sample.read_bytes() == (boxes["one"] / "store" / sample.name).read_bytes()


@pytest.mark.parametrize("command", [["hsprod", "serve", "--target", "embedded"], ["hstrain", "run"]])
def test_a_device_and_a_state_folder_that_are_not_there(complain, command, tmp_path):
    assert "--device banana: choose auto, cpu" in complain(*command, "--device", "banana")
    assert "--device cuda:99: this torch sees " in complain(*command, "--device", "cuda:99")
    (tmp_path / "file").touch()
    assert f"--state-dir {tmp_path / 'file' / 'state'}: Not a directory" in complain(*command, "--state-dir", tmp_path / "file" / "state")


@pytest.mark.processes
def test_a_real_process_says_one_line_and_exits_2(start):
    started = [start("hsprod", "serve", "--target", "embedded", "--layers", "99", log="p"), start("hstrain", "run", "--arm", "nope", log="t")]
    for daemon, says in zip(started, ("--layers: 99 is out of range", "unknown arm 'nope'")):
        assert daemon.ended() == EXIT_USER
        assert daemon.text.startswith(f"error: {says}") and daemon.text.count("\n") == 1, daemon.text
