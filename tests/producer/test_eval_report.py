"""`hsprod eval`: the figures are those of hsprod serve's evaluation, taken apart by file and category; what cannot be right is an exit code."""
from __future__ import annotations

import json

import pytest
import tiny
import torch
from drafters import BLOCK, TAPS, trained
from typer.testing import CliRunner

from common.drafter import checkpoint
from common.errors import UserError
from producer import cli, eval_report, evaluate, fitting, prompt_sets, prompts
from producer.config import Eval, Serve
from producer.eval_report import Asked, alarms, groups
from producer.prompts import SALT, SHIPPED, Prompt, judges, split
from producer.speculate import Limit

NEW = 14
ROWS = [{"prompt": f"f{i}(x) number {i}", "category": ("code", "talk", None)[i % 3]} for i in range(6)]


@pytest.fixture(scope="module")
def target():
    return tiny.dense(layers=8, template=tiny.CHATML)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A drafter that is right now and then, saved with this target's contract."""
    path = tmp_path_factory.mktemp("d") / "step-1"
    asked = [ids(target, row["prompt"]) for row in ROWS]
    record = {"contract": target.contract(TAPS, None).hash, "target": target.name}
    checkpoint.save(path, trained(target, asked, NEW, steps=60), record, torch.float32)
    return path


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def hsprod(target, monkeypatch):
    monkeypatch.setattr(fitting, "load", lambda *_args, **_kwargs: target)
    monkeypatch.setattr(fitting, "sizes", lambda _name: target)
    return lambda *args: CliRunner().invoke(cli.app, ["eval", "--new-tokens", str(NEW), *map(str, args)])


def ids(target, text: str) -> list[int]:
    return prompts.render(target.tokenizer, Prompt(({"role": "user", "content": text},)), None)


def tau(texts: list[dict]) -> float:
    blocks = [n for text in texts for n in text["accepted"]]
    return 1 + sum(blocks) / len(blocks)


def test_the_report_is_the_daemons_taken_apart(hsprod, target, folder, file, tmp_path):
    got = hsprod("--drafter", folder, "--prompts", file, "--json", tmp_path / "r.json")
    assert got.exit_code == 0, got.output
    made = json.loads((tmp_path / "r.json").read_text())
    drafter = checkpoint.load(folder, "cpu", torch.float32)[0]
    chosen = judges(prompt_sets.read(file).prompts, Serve.eval_prompts)
    expected = evaluate.evaluate(target, drafter, [(p.id, prompts.render(target.tokenizer, p, None)) for p in chosen],
                                 evaluate.PlainTexts(target, Limit(NEW, target.eos_ids), TAPS), seed=0)
    timeless = [key for key in expected if not key.endswith(("_s", "seconds")) and not key.startswith("eta")]
    assert {key: made["all"][key] for key in timeless} == {key: expected[key] for key in timeless}
    assert made["identity"]["drafter"]["sha256"] == checkpoint.checkpoint_hash(folder) and made["identity"]["contract"] == target.contract(TAPS, None).hash
    assert made["identity"]["prompts"] == {"sha256": prompts.prompts_hash(chosen), "count": 6} and not made["alarms"]

    accepted = {text["prompt"]: text for text in expected["texts"]}
    assert [row["name"] for row in made["rows"]] == ["no category", "code", "talk"]
    for row, category in zip(made["rows"], ("", "code", "talk")):
        own = [accepted[p.id] for p in chosen if p.category == category]
        assert (row["prompts"], row["identical"], row["verifies"]) == (2, 2, sum(len(text["accepted"]) for text in own))
        assert row["tau"] == pytest.approx(tau(own)) == pytest.approx(row["tau_simulated"]) and row["tau_interval"][0] <= row["tau"] <= row["tau_interval"][1]
        assert row["eta"] == pytest.approx(row["spec_tokens_per_s"] * made["all"]["step_seconds"])
    seen = " ".join(got.stdout.split())
    for words in (f"all 6 {made['all']['tau']:.2f} (", "6 of 6 texts are identical", f"blocks of {BLOCK}", "up to here", "given those before"):
        assert words in seen, words
    assert f'{file}: 6 prompts (6 with "prompt")' in got.stderr and "6 prompts to measure on, of 16 asked for" in got.stderr


def test_several_files_count_a_prompt_once_and_keep_their_rows(hsprod, folder, file, tmp_path):
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:3]))
    other = tmp_path / "o.txt"
    other.write_text(f"{ROWS[0]['prompt']}\n{ROWS[0]['prompt']}\nfresh\n")
    got = hsprod("--drafter", folder, "--prompts", file, "--prompts", other, "--json", tmp_path / "r.json")
    assert got.exit_code == 0 and f"{other}: 2 prompts stand there or in an earlier file already" in got.stderr, got.output
    rows = {row["name"]: row["prompts"] for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert rows == {"p.jsonl": 3, "p.jsonl: no category": 1, "p.jsonl: code": 1, "p.jsonl: talk": 1, "o.txt": 1}


def test_rows_are_there_only_where_they_tell_something_apart():
    def asked(source: str, *categories: str) -> list[Asked]:
        return [Asked(source, Prompt(({"role": "user", "content": f"{source}{i}"},), None, category), [i]) for i, category in enumerate(categories)]
    assert groups(asked("a", "", "")) == {}
    assert {name: len(members) for name, members in groups(asked("a", "x", "", "x")).items()} == {"no category": 1, "x": 2}
    assert list(groups(asked("a", "x") + asked("b", ""))) == ["a", "a: x", "b"]


def test_the_prompts_are_those_that_serve_holds_out(tmp_path):
    [(name, chosen)] = eval_report.choose(Eval(drafter=tmp_path, count=5))
    held_out = split(prompt_sets.read(SHIPPED).prompts, Serve.held_out, SALT).held_out
    assert name == "shipped prompts" and chosen == judges(held_out, 5) and len(chosen) == 5
    assert eval_report.choose(Eval(drafter=tmp_path, prompts=[SHIPPED], held_out=Serve.held_out, count=5))[0][1] == chosen
    assert eval_report.choose(Eval(drafter=tmp_path, prompts=[SHIPPED], count=5))[0][1] != chosen      # all of a file's, unless told otherwise


def test_what_cannot_be_right_is_said_and_the_exit_code(hsprod, monkeypatch, folder, file):
    """Falsified: the simulation has one draft more in each block than the loop accepted, and texts are said to differ."""
    real = evaluate.simulate
    monkeypatch.setattr(evaluate, "simulate", lambda *args: [n + 1 for n in real(*args)])
    monkeypatch.setattr(evaluate, "first_divergence", lambda own, spec: 3)
    got = hsprod("--drafter", folder, "--prompts", file, "--count", 2)
    assert got.exit_code == 1 and "ALARM: real tau" in got.stdout and "simulated on the same texts differ by more than 2%" in got.stdout
    assert "ALARM: 2 of 2 texts are not plain decoding's" in got.stdout
    assert "0 of 2 texts are identical" in got.stdout and got.stdout.count("differs first at new token 3, where") == 2


@pytest.mark.parametrize("dtype, differ, simulated, says", [
    (torch.float32, 1, 2.0, "1 of 3 texts are not plain decoding's"), (torch.bfloat16, 1, 2.0, None), (torch.float32, 0, 2.0, None),
    (torch.float32, 0, 2.1, "more than 2%"), (torch.bfloat16, 0, 2.1, None), (torch.bfloat16, 0, 2.3, "more than 10%")])
def test_alarms(dtype, differ, simulated, says):
    found = alarms({"tau": 2.0, "tau_simulated": simulated, "prompts": 3, "divergences": [{}] * differ}, dtype)
    assert len(found) == (says is not None) and (not says or says in found[0])


def test_prompts_without_room_are_left_out_and_counted(hsprod, target, folder, tmp_path):
    drafter, config, record = checkpoint.load(folder, "cpu", torch.float32)
    short, long = ("a", "a b c d e f g h i j k l")
    path, room = tmp_path / "d", len(ids(target, long)) + NEW - 1
    checkpoint.save(path, drafter, record, torch.float32)
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | {"max_position_embeddings": room}))
    (tmp_path / "p.txt").write_text(f"{short}\n{long}\n")
    got = hsprod("--drafter", path, "--prompts", tmp_path / "p.txt")
    assert got.exit_code == 0 and f"1 of 2 prompts are longer than the {room - NEW} tokens" in got.stderr and "1 of 1 texts" in got.stdout
    (tmp_path / "p.txt").write_text(f"{long}\n")
    got = hsprod("--drafter", path, "--prompts", tmp_path / "p.txt")
    assert isinstance(got.exception, UserError) and "no prompt is left" in str(got.exception)


def test_a_group_of_texts_of_one_token_has_no_figures(hsprod, monkeypatch, target, folder, file, tmp_path):
    """The talk prompts are ended by their first token: those texts have no block."""
    real, talk = evaluate.measure, {p.id for p in prompt_sets.read(file).prompts if p.category == "talk"}

    def short(*args, **how):
        return [one if one.prompt not in talk else type(one)(one.prompt, one.ids, one.plain, type(one.spec)(one.spec.tokens[:1], seconds=one.spec.seconds), [], None)
                for one in real(*args, **how)]
    monkeypatch.setattr(evaluate, "measure", short)
    hsprod("--drafter", folder, "--prompts", file, "--json", tmp_path / "r.json")
    rows = {row["name"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert rows["talk"]["tau"] is rows["talk"]["eta"] is None and rows["talk"]["prompts"] == 2 and rows["code"]["tau"] > 1


@pytest.mark.parametrize("args, says", [
    (("--drafter", "/nowhere"), "/nowhere"), (("--drafter", "x", "--prompts", "/nowhere"), "/nowhere"),
    (("--drafter", "x", "--block-size", 1), "nothing would be drafted"), (("--drafter", "x", "--json", "."), "--json .: give the name of a file"),
    (("--drafter", "x", "--json", "/nowhere/r.json"), "in a folder that is there")])
def test_mistakes_are_one_line_before_the_target_is_read(hsprod, monkeypatch, args, says):
    monkeypatch.setattr(fitting, "load", None)
    got = hsprod(*args)
    assert isinstance(got.exception, UserError) and says in str(got.exception) and "\n" not in str(got.exception)
