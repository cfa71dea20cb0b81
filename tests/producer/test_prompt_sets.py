"""Every shape is known by its keys, counted, and read to the letter; what is none is named with its line; what is not read, too."""
from __future__ import annotations

import gzip
import io
import json
import sys

import pytest

from common.errors import UserError
from producer import prompt_sets
from producer.prompt_sets import hub_name, parse, read
from producer.prompts import Prompt


def lines(*rows: object) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"


def written(tmp_path, text: str, name: str = "p.jsonl"):
    path = tmp_path / name
    path.write_text(text, "utf-8", newline="")
    return path


def talk(*turns: str) -> tuple[dict[str, str], ...]:
    return tuple({"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns))


def said(*turns: tuple[str, str]) -> dict:
    return {"id": "x_0", "conversations": [{"from": who, "value": text} for who, text in turns]}


def test_prompts_and_messages(tmp_path):
    rows = [{"prompt": "a\u2028b", "kind": "sql"}, {"prompt": "c", "answer": "d"}, {"messages": list(talk("e", "f", "g")), "source": "x"},
            {"messages": list(talk("e", "f")), "category": 7}]
    found = read(written(tmp_path, lines(*rows).replace("\n", "\n\n")))
    assert found.prompts == [Prompt(talk("a\u2028b"), None, "sql"), Prompt(talk("c"), "d"), Prompt(talk("e", "f", "g")), Prompt(talk("e"), "f", "7")]
    assert found.line() == f'{tmp_path / "p.jsonl"}: 4 prompts (2 with "prompt", 2 with "messages"); not read: blank lines (4)'


def test_a_category_and_an_answer_are_no_part_of_a_prompts_identity():
    assert parse({"prompt": "a", "kind": "x", "answer": "y"})[1].id == parse({"prompt": "a"})[1].id


def test_sharegpt_as_lines_and_as_one_array(tmp_path):
    rows = [said(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")), said(("system", "s"), ("human", "e")),
            said(("system", "s"), ("gpt", "early"), ("user", "f"), ("assistant", "g")), said(), said(("gpt", "only"))]
    for text in (lines(*rows), json.dumps(rows, indent=2)):
        found = read(written(tmp_path, text))
        assert found.prompts == [Prompt(talk("a", "b", "c"), "d"), Prompt(({"role": "system", "content": "s"}, *talk("e"))),
                                 Prompt(({"role": "system", "content": "s"}, *talk("f")), "g")]
        assert found.shapes == {"ShareGPT conversations": 3}
        assert found.passed == {"conversations without a human turn": 2, "gpt turns before the first human one": 1}


def test_humaneval_as_its_package_ships_it(tmp_path):
    code = 'def f(x):\n    """{braces} stay"""\n'
    task = {"task_id": "HumanEval/0", "prompt": code, "entry_point": "f", "canonical_solution": "    return x\n", "test": "def check(f): ..."}
    path = tmp_path / "HumanEval.jsonl.gz"
    path.write_bytes(gzip.compress(lines(task).encode()))
    found = read(path)
    asked = f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```"
    assert found.prompts == [Prompt(talk(asked))] and found.shapes == {"HumanEval tasks": 1} and not found.passed


def test_mt_bench_asks_its_first_turns_and_counts_the_others(tmp_path):
    questions = [{"question_id": 81, "category": "writing", "turns": ["a", "b"]},
                 {"question_id": 101, "category": "reasoning", "turns": ["c", "d"], "reference": ["", "e"]}]
    hub = {"prompt": ["f", "g"], "category": "math", "reference": [], "prompt_id": 1}
    found = read(written(tmp_path, lines(*questions, hub), "question.jsonl"))
    assert found.prompts == [Prompt(talk("a"), None, "writing"), Prompt(talk("c"), None, "reasoning"), Prompt(talk("f"), None, "math")]
    assert found.shapes == {"MT-Bench questions": 3} and list(found.passed.values()) == [3]
    assert "later turns, which ask about the target's own first answer (3)" in found.line()


def test_plain_text_is_known_by_its_name_alone(tmp_path):
    text = "Explain {x}.\r\n\n   \n[1] is a list\nlast"
    found = read(written(tmp_path, text, "p.txt"))
    assert [p.messages for p in found.prompts] == [talk("Explain {x}."), talk("[1] is a list"), talk("last")]
    assert found.shapes == {"lines of plain text": 3} and found.passed == {"blank lines": 2}
    assert read(written(tmp_path, "a\n", "p.txt")).passed == {}                        # the last line's end begins no line
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert read(tmp_path / "p.txt.gz").prompts == found.prompts
    with pytest.raises(UserError, match="first line is a JSON object; name it .jsonl"):
        read(written(tmp_path, '\n{"prompt": "a"}\n', "p.txt"))
    with pytest.raises(UserError, match=r"line 1: Expecting value.*\(plain text, a prompt a line, is read from a file named \.txt\)"):
        read(written(tmp_path, text))


def test_a_first_message_that_is_given_twice_is_one(tmp_path):
    assert parse({"prompt": "a", "prompt_id": "x", "messages": list(talk("a", "b"))})[:2] == ('with "messages"', Prompt(talk("a"), "b"))
    with pytest.raises(ValueError, match="its keys are 'prompt', 'messages'; exactly one"):
        parse({"prompt": "other", "messages": list(talk("a", "b"))})


def test_columns_that_a_table_leaves_empty_are_not_there():
    messages = [{"role": "user", "content": "a", "tool_calls": None}]
    assert parse({"messages": messages, "prompt": None, "answer": None, "category": None})[1] == Prompt(talk("a"))


@pytest.mark.parametrize("line, words", [
    ("{", "Expecting"), ("[1]", "expected an object, found a list"), ("{}", "its keys are none; exactly one must"), ("3", "found a int"),
    ('{"question": "a", "id": 3}', "its keys are 'question', 'id'; exactly one must be of a shape that is read here: prompt; messages; conversations"),
    ('{"prompt": "a", "turns": ["b"]}', "its keys are 'prompt', 'turns'; exactly one"),
    ('{"prompt": 3}', '"prompt" must be text'), ('{"prompt": ""}', '"prompt" must be text, and not empty'), ('{"prompt": []}', '"turns" must be a list'),
    ('{"turns": [3]}', '"prompt" must be text'), ('{"prompt": "a", "answer": 3}', '"answer" is a int'), ('{"prompt": "\\ud83d"}', "half a character"),
    ('{"messages": []}', "not empty"), ('{"messages": [{"role": "user"}]}', "message 0: expected"),
    ('{"messages": [{"role": "bot", "content": "a"}]}', "role 'bot' is none of"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "nothing before"),
    ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "c"}', "both"),
    ('{"conversations": "a"}', '"conversations" is a str'), ('{"conversations": [{"role": "user", "content": "a"}]}', 'turn 0: expected {"from"'),
    ('{"conversations": [{"from": "bing", "value": "a"}]}', "turn 0: \"from\" is 'bing', none of human, user"),
    ('{"conversations": [{"from": "human", "value": 3}]}', "turn 0 must be text"), ("[" * 100_000, "line 2: ")])
def test_a_bad_line_is_named(tmp_path, line, words):
    with pytest.raises(UserError) as caught:
        read(written(tmp_path, '{"prompt": "good"}\n' + line + "\n"))
    assert "p.jsonl, line 2: " in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value)


def test_a_bad_row_of_an_array_and_an_array_that_is_none(tmp_path):
    with pytest.raises(UserError, match="p.jsonl, row 2: its keys are 'a'"):
        read(written(tmp_path, '[{"prompt": "a"},\n {"a": 1}]'))
    with pytest.raises(UserError, match="begins as a JSON array and is none"):
        read(written(tmp_path, '[{"prompt": "a"}'))


@pytest.mark.parametrize("data, words", [(b"", "no prompts in it; write"), (b"\n \n", r"no prompts in it \(blank lines \(2\)\)"), (b"\xff\xfe", "utf-8"),
                                         (b"\x1f\x8b12", "."), (gzip.compress(b"a" * 99)[:-4], "end-of-stream"),
                                         (lines(said()).encode(), "conversations without a human turn")])
def test_a_file_without_prompts_or_text(tmp_path, data, words):
    (tmp_path / "p.jsonl").write_bytes(data)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "p.jsonl")
    for name in ("nowhere.jsonl", "nowhere.parquet"):
        with pytest.raises(UserError, match="nowhere.*: [Nn]o such file"):
            read(tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xef\xbb\xbf" + lines({"prompt": "a"}).encode())
    assert read(tmp_path / "p.jsonl").prompts == [Prompt(talk("a"))]


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(lines({"prompt": "ü"}).encode()))))
    assert read("-").prompts == [Prompt(talk("ü"))]


def test_hub_names():
    assert [hub_name(f"hub:{rest}") for rest in ("a/b", "a/b:train", "a/b:train[:10]")] == [("a/b", None), ("a/b", "train"), ("a/b", "train[:10]")]
    for rest in ("", "a", "a/b/c", "/b", "a/", ":train"):
        with pytest.raises(UserError, match="write hub:OWNER/NAME"):
            hub_name(f"hub:{rest}")


def test_without_the_extra_the_command_that_brings_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    for source in (tmp_path / "p.parquet", "hub:a/b"):
        with pytest.raises(UserError) as caught:
            read(source)
        assert str(caught.value).startswith(f"{source}: ") and str(caught.value).endswith(prompt_sets.INSTALL)


# --- with the extra ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def datasets(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return pytest.importorskip("datasets", reason=f"not installed, 265 MB; {prompt_sets.INSTALL}")


def test_parquet_rows_have_the_same_shapes(datasets, tmp_path):
    rows = [said(("human", "a"), ("gpt", "b")), said(("human", "c"))]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "p.parquet")
    found = read(tmp_path / "p.parquet")
    assert found.prompts == read(written(tmp_path, lines(*rows))).prompts == [Prompt(talk("a"), "b"), Prompt(talk("c"))]
    assert found.shapes == {"ShareGPT conversations": 2}
    datasets.Dataset.from_list([{"messages": list(talk("a")), "answer": "b"}, {"messages": list(talk("c")), "answer": None}]).to_parquet(tmp_path / "q.parquet")
    assert read(tmp_path / "q.parquet").prompts == [Prompt(talk("a"), "b"), Prompt(talk("c"))]
    datasets.Dataset.from_list([{"prompt": "a", "x": 1}, {"prompt": None, "x": 2}]).to_parquet(tmp_path / "r.parquet")
    with pytest.raises(UserError, match="r.parquet, row 2: its keys are 'x'"):
        read(tmp_path / "r.parquet")


def test_a_table_that_is_none_is_one_line(datasets, tmp_path):
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError) as caught:
        read(tmp_path / "p.parquet")
    assert str(caught.value).startswith(f"{tmp_path / 'p.parquet'}: ") and "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_one_line(datasets, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for source in ("hub:nobody/no-such-set", "hub:nobody/no-such-set:train"):
        with pytest.raises(UserError) as caught:
            read(source)
        assert str(caught.value).startswith(f"{source}: ") and "\n" not in str(caught.value) and len(str(caught.value)) < 400
