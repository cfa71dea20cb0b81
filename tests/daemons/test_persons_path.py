"""A person's path: a drafter is trained on a stream, exported, measured, imported elsewhere, measured again: it is the same drafter.

The daemons are processes; the commands after them run in this one, through their own entry points, which saves seconds of imports."""
from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import producer.cli
import trainer.cli
from common import logs, metrics
from producer.prompts import SHIPPED
from tests.daemons.processes import SERVE, free_port

pytestmark = pytest.mark.processes
STEPS, PROMPTS, HELD_OUT, COUNT, NEW = 60, 24, 0.2, 2, 12          # little of everything: seconds
MAIN = {"hsprod": producer.cli.main, "hstrain": trainer.cli.main}


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """call(command, *words) -> (exit code, all that it said)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(logs, "setup", lambda level: None)

    def run(command: str, *words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [command, *map(str, words)])
        with pytest.raises(SystemExit) as end:
            MAIN[command]()
        return end.value.code or 0, "".join(capsys.readouterr())
    return run


def test_train_export_evaluate_import_evaluate(tmp_path, start, call):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(SHIPPED.read_text("utf-8").splitlines(keepends=True)[:PROMPTS]), "utf-8")
    address, box = f"tcp://127.0.0.1:{free_port()}", tmp_path / "t"
    served = start("hsprod", "serve", *SERVE, "--experts", "eager", "--eval-prompts", COUNT, "--eval-new-tokens", NEW, "--prompts", prompts,
                   "--held-out", HELD_OUT, "--bind", address, "--state-dir", tmp_path / "p", log="p")
    trained = start("hstrain", "run", "--producer", address, "--state-dir", box, "--arm", "ce_bidi", "--sequences", 2, "--anchors", 8, "--layers", 1,
                    "--block-size", 4, "--threads", 1, "--steps", STEPS, "--eval-every", STEPS, log="t")
    assert trained.ended() == 0, trained.text
    assert served.stop() == 0, served.text
    [run] = (box / "runs").iterdir()
    [real] = metrics.read(run / "metrics.jsonl", "eval")
    assert real["tau"] > 1.05, "some drafts stand, so that another drafter could be told from it"

    def evaluated(drafter: Path) -> dict:
        code, said = call("hsprod", "eval", "--target", "embedded", "--drafter", drafter, "--prompts", prompts, "--held-out", HELD_OUT, "--count", COUNT,
                          "--new-tokens", NEW, "--experts", "eager", "--threads", 1, "--json", tmp_path / "eval.json")
        assert code == 0 and f"{COUNT} of {COUNT} texts are identical" in said, said
        return json.loads((tmp_path / "eval.json").read_text())

    code, said = call("hstrain", "export", run, "--format", "z-lab", "--out", tmp_path / "z")
    assert code == 0 and f"written: {tmp_path / 'z'}" in said, said
    code, said = call("hstrain", "import", tmp_path / "z", "--out", tmp_path / "elsewhere" / "d")
    assert code == 0, said
    first, second = evaluated(tmp_path / "z"), evaluated(tmp_path / "elsewhere" / "d")
    for made in (first, second):
        assert made["all"]["tau"] == real["tau"] and made["all"]["texts"] == real["texts"], "what the producer measured as it trained"
        assert made["all"]["acceptance_by_slot"] == real["acceptance_by_slot"] and not made["alarms"]
        assert made["identity"]["prompts"]["sha256"] == real["prompts_hash"] and made["identity"]["drafter"]["sha256"] == real["checkpoint"]
    assert [row["name"] for row in first["rows"]] == [row["name"] for row in second["rows"]] and sum(row["prompts"] for row in first["rows"]) == COUNT
