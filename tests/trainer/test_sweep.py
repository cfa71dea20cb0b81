"""A sweep is its runs: killed and given again it ends as if it had not been; one that fails does not stop the others."""
import dataclasses
import json
import os
import re
from pathlib import Path

import pytest

from common import service
from common.drafter.checkpoint import checkpoint_hash
from common.errors import UserError
from tests.daemons.processes import Daemon
from tests.trainer.small import append, captures, stored
from trainer import cli, config, daemon, sweep, sweep_screen
from protocol.store import SampleStore

RUN = ["--layers", 1, "--sequences", 2, "--anchors", 4, "--threads", 1, "--device", "cpu", "--name", "box"]
ARMS, SEEDS = ("ce_causal", "kl_mixed_uniform"), (0, 1)
STEPS, EVERY = 120, 30


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> Path:
    return stored(tmp_path_factory.mktemp("box") / "state", captures(70))


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(*words: object) -> Daemon:
        started.append(Daemon("hstrain", *map(str, words), log=tmp_path / "sweep.log"))
        return started[-1]
    yield begin
    for made in started:
        made.kill()


def last(run: Path) -> str:
    return checkpoint_hash(sorted((run / "checkpoints").iterdir())[-1])


def alone(process: Daemon, folder: Path) -> None:
    """Until no run of a killed sweep is at work any more."""
    from common.files import held
    for run in (folder / "runs").iterdir():
        with held(run, "run", patience=60):
            pass


@pytest.mark.processes
def test_a_sweep_killed_and_stopped_in_the_middle_ends_as_if_it_had_not_been(tmp_path, box, start):
    folder = tmp_path / "sweep"
    line = ["sweep", "--arms", ",".join(ARMS), "--seeds", "0,1", "--jobs", 2, "--sweep-dir", folder, "--from", box, "--steps", STEPS,
            "--eval-every", EVERY, *RUN]
    runs = {f"{arm}-s{seed}": folder / "runs" / f"{arm}-s{seed}" for seed in SEEDS for arm in ARMS}

    first = start(*line)
    first.until(lambda: any((run / "resume").exists() for run in runs.values()), "a run has saved its state")
    first.kill()
    alone(first, folder)
    assert not all(sweep.trained(run) for run in runs.values()), "killed too late to be in the middle"

    second = start(*line)
    second.until(lambda: (runs["ce_causal-s1"] / "run.json").exists(), "the second seed has begun")
    assert second.stop() == 0, second.text
    assert "stopped; the same line goes on" in second.text
    assert not all(sweep.trained(run) for run in runs.values()), "stopped too late to be in the middle"

    third = start(*line)
    assert third.ended() == 0, third.text
    assert third.text.splitlines()[-1] == f"hstrain report {folder}" and "4 checkpoints without real acceptance" in third.text
    assert sorted(run.name for run in (folder / "runs").iterdir()) == sorted(runs)
    for arm in ARMS:
        for seed in SEEDS:
            calm = tmp_path / "calm" / f"{arm}-s{seed}"
            daemon.run(config.Run(arm=arm, seed=seed, stored=box, state_dir=tmp_path / "calm", run_dir=calm, steps=STEPS, eval_every=EVERY, layers=1,
                                  sequences=2, anchors=4, threads=1, device="cpu"), service.Stop())
            assert last(calm) == last(runs[calm.name]), calm.name
    assert len({last(run) for run in runs.values()}) == 4

    said = {log.name: log.read_bytes() for log in (folder / "logs").iterdir()}
    with SampleStore(box / "store") as store:                              # what comes later is not this sweep's
        append(store, captures(3, seed=9))
    assert start(*line).ended() == 0
    assert {log.name: log.read_bytes() for log in (folder / "logs").iterdir()} == said, "finished runs are not started again"
    other = start(*line, "--lr", 0.5)
    assert other.ended() == 2 and "options.lr: None -> 0.5" in other.text and "--sweep-dir" in other.text


@pytest.mark.processes
def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path, box, start):
    folder = tmp_path / "sweep"
    spoilt = folder / "runs" / "ce_causal-s0"
    spoilt.mkdir(parents=True)
    (spoilt / "run.json").write_text(json.dumps({"seed": 5}))
    made = start("sweep", "--arms", "ce_causal,ce_bidi", "--seeds", "0", "--sweep-dir", folder, "--from", box, "--steps", 4, *RUN)
    assert made.ended() == 1, made.text
    assert re.search(r"ce_causal-s0 failed \(exit code 2\): error: .*holds another run .*seed: 5 -> 0", made.text)
    assert sweep.trained(folder / "runs" / "ce_bidi-s0") and "the same line goes on with what is not done" in made.text


@pytest.mark.parametrize("words, says", [
    (dict(arms="ce_causal,nobody"), "unknown arm 'nobody'"), (dict(arms=","), "name at least one"), (dict(arms="ce_causal,ce_causal"), "each once"),
    (dict(seeds="0,one"), "whole numbers"), (dict(seeds="1,1"), "each once")])
def test_what_a_sweep_is_not(words, says):
    with pytest.raises(UserError, match=says):
        sweep.parsed(config.Sweep(**words))


@pytest.mark.parametrize("words, says", [
    (["--arm", "ce_bidi"], "--arm: a sweep gives"), (["--seed", "1"], "--seed: "), (["--run-dir", "x"], "--run-dir: ")])
def test_what_the_sweep_gives_each_run_is_not_to_be_given(words, says):
    with pytest.raises(UserError, match=says):
        cli.run_settings(words)


def test_each_run_is_the_line_of_a_person(tmp_path, box):
    words = ["--from", str(box), "--steps", "7", "--weights", "uniform"]
    each = cli.run_settings(words)
    assert each == config.Run(stored=box, steps=7, weights="uniform")
    made = sweep.open_sweep(config.Sweep(arms="ce_causal,ce_bidi", seeds="3", sweep_dir=tmp_path), each, words)
    assert [m.name for m in made.members] == ["ce_causal.w-uniform-s3", "ce_bidi.w-uniform-s3"]
    back = cli.config.Run(**parse(made.command(made.members[1])[4:]))
    assert back == dataclasses.replace(each, arm="ce_bidi", seed=3, run_dir=made.members[1].folder, state_dir=tmp_path,
                                       samples=made.samples, threads=os.cpu_count() or 1)
    with pytest.raises(UserError, match="not all different"):
        same = ["--from", str(box), "--attention", "bidi"]
        sweep.open_sweep(config.Sweep(arms="ce_causal,ce_bidi", seeds="3", sweep_dir=tmp_path), cli.run_settings(same), same)


def test_runs_at_once_have_a_metrics_port_each_and_a_place_keeps_its_own(tmp_path, box, monkeypatch):
    """A port that another run holds would end it; one after the other they share, so that Prometheus has few places to look."""
    words = ["--from", str(box), "--metrics-port", "9700"]
    made = sweep.open_sweep(config.Sweep(arms="ce_causal,ce_bidi", seeds="0,1", jobs=2, sweep_dir=tmp_path), cli.run_settings(words), words)
    started = []

    def start(member: sweep.Member) -> None:
        started.append((member.name, parse(made.command(member)[4:])["metrics_port"]))
        member.state = "running"
    monkeypatch.setattr(made, "_start", start)
    monkeypatch.setattr(made, "_look", lambda _member: None)
    made._turn()
    made._turn()
    assert started == [("ce_causal-s0", 9700), ("ce_bidi-s0", 9701)]
    made.members[1].state = "done"
    made._turn()
    assert started[2:] == [("ce_causal-s1", 9701)]
    made.members[0].state = "failed"
    made._turn()
    assert started[3:] == [("ce_bidi-s1", 9700)]
    (tmp_path / "n").mkdir()
    none = sweep.open_sweep(config.Sweep(arms="ce_causal", seeds="0", jobs=2, sweep_dir=tmp_path / "n"), cli.run_settings(words[:2]), words[:2])
    assert "--metrics-port" not in none.command(none.members[0])
    with pytest.raises(UserError, match="--metrics-port 65535: 2 runs at once"):
        sweep.open_sweep(config.Sweep(arms="ce_causal", seeds="0", jobs=2, sweep_dir=tmp_path / "m"), config.Run(metrics_port=65535), [])


def parse(words: list[str]) -> dict:
    import typer
    return typer.main.get_command(cli.app).commands["run"].make_context("hstrain run", list(words)).params


def test_what_a_person_sees_of_a_run(tmp_path):
    member = sweep.Member("a", 0, tmp_path / "a-s0", tmp_path / "log", state="running", since=(100.0, 20),
                          told={"step": 60, "steps": 100, "loss": 1.5, "offline": 2.0, "real": None, "alarms": 0})
    assert sweep_screen.cells(member, 180.0) == ("60/100", "1.500", "2.00", "", "0:01:20")
    assert sweep_screen.line(member, 180.0) == "a-s0: running, step 60/100, loss 1.500, simulated tau 2.00, time left 0:01:20"
    member.told |= {"real": 1.5, "alarms": 2}
    member.state = "done"
    assert sweep_screen.cells(member, 180.0)[3:] == ("1.50 (2 alarms)", "")
    assert sweep_screen.left(dataclasses.replace(member, state="running", told={"step": 20, "steps": 100}), 180.0) == "", "no step yet: no rate"


def test_only_what_is_measured_as_asked_is_skipped(tmp_path):
    """trained but unmeasured: with a producer it is given another start, without one it is not."""
    from safetensors.numpy import save_file
    import numpy as np
    run = tmp_path / "runs" / "ce_causal-s0"
    (run / "resume").mkdir(parents=True)
    for step in (5, 10):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"plan": {"steps": 10}}))
    member = sweep.Member("ce_causal", 0, run, tmp_path / "log")

    def finished(**over) -> bool:
        return sweep.Sweep(tmp_path, [member], [], config.Run(**over), 70, 1)._finished(member)
    for step in (9, 10):
        save_file({"x": np.zeros(1)}, run / "resume" / "state.safetensors", metadata={"step": str(step), "tokens": "1"})
        assert finished(stored=tmp_path) == (step == 10)
    assert not finished() and not finished(stored=tmp_path, producer="tcp://x:1")
    with (run / "metrics.jsonl").open("w") as file:
        print(json.dumps({"kind": "eval", "step": 10, "tau": 1.0}), file=file)
    assert finished() and not finished(eval_all=True) and finished(stored=tmp_path, eval_all=True)
