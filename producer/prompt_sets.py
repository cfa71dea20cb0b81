"""Prompts out of files in the shapes in which they are usually shipped.  A row says by its keys what it is, and nothing is guessed:

    prompt                            one turn of the user
    messages                          "role" and "content" each, as chat APIs take them
    conversations                     ShareGPT's: "from" (human, gpt, system) and "value" each
    task_id, prompt, entry_point      HumanEval's, as its package ships it (HumanEval.jsonl.gz)
    turns, or a list as "prompt"      MT-Bench's: question.jsonl, and the hub's copy of it

"answer" gives an answer where it is there, "category" or "kind" the row of a report's table.  A file holds JSON lines or one JSON
array; named .txt, one prompt a line.  gzip is known by its first bytes.  Parquet files and data sets of the hub are read by the
package `datasets`, an extra; their rows have the same shapes.

Several turns: the last turn of the user is asked, after the file's own earlier turns; an assistant's turn at the end is the answer.
MT-Bench ships no answers, and its later turns are about the target's own first one, so its first turns are asked and the later
ones counted.  What is passed over is counted by its reason; any other row is an error that names the line and its keys."""
from __future__ import annotations

import gzip
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import jsons
from common.errors import UserError
from producer.prompts import ROLES, Prompt

HUB = "hub:"
INSTALL = "pip install 'hsdraft[datasets]'"
KNOWN = "prompt; messages; conversations (ShareGPT); turns (MT-Bench)"
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}     # ShareGPT's
# As z-lab's own benchmark asks it (dflash 0.1.0, benchmark.py), so that figures can stand beside theirs.
HUMANEVAL = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
Row = tuple[str, object]                 # where it stands ("line 3"), what it says


@dataclass
class PromptSet:
    """prompts in the file's order; shapes: rows by what they were; passed: what was not read, by reason."""

    source: str
    prompts: list[Prompt] = field(default_factory=list)
    shapes: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """What was read and what was not, for a person."""
        return f"{self.source}: {len(self.prompts):,} prompts ({', '.join(f'{count:,} {name}' for name, count in self.shapes.items())})" + (
            f"; not read: {counted(self.passed)}" if self.passed else "")


def counted(passed: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in passed.items())


def read(source: Path | str) -> PromptSet:
    """source: a file, - (standard input), or hub:OWNER/NAME[:split].

    Raises UserError, which names the line (of an array or a table, the row) and what is wrong with it."""
    found = PromptSet(str(source))
    for where, row in rows(str(source), found.passed):
        try:
            shape, prompt, passed = parse(row)
        except ValueError as error:
            raise UserError(f"{source}, {where}: {error}") from None
        found.passed.update(passed)
        if prompt is not None:
            found.shapes[shape] += 1
            found.prompts.append(prompt)
    if not found.prompts:
        raise UserError(f"{source}: no prompts in it" + (f" ({counted(found.passed)})" if found.passed else "") +
                        "; write one JSON object a line, like {\"prompt\": \"...\"}")
    return found


# --- what a row says --------------------------------------------------------------------------------------------------------

def parse(row: object) -> tuple[str, Prompt | None, list[str]]:
    """-> its shape, its prompt (None: it has none), and what of it is passed over.  Raises ValueError that says what is wrong."""
    if isinstance(row, str):
        return "lines of plain text", Prompt(_user(row)), []
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found a {type(row).__name__}")
    row = {key: value for key, value in row.items() if value is not None}           # a table has every column in every row
    marks = [key for key in SHAPES if key in row]
    if set(marks) == {"prompt", "messages"} and _repeats(row):
        marks = ["messages"]
    if len(marks) != 1:
        raise ValueError(f"its keys are {', '.join(map(repr, row)) or 'none'}; exactly one must be of a shape that is read here: {KNOWN}")
    shape, messages, passed = SHAPES[marks[0]](row)
    answer = row.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f'"answer" is a {type(answer).__name__}, expected text')
    if messages and messages[-1]["role"] == "assistant":
        if answer is not None:
            raise ValueError('both "answer" and an assistant message at the end')
        *messages, last = messages
        answer = last["content"]
        if not messages:
            raise ValueError("nothing before the assistant's message")
    category = row.get("category", row.get("kind", ""))
    return shape, Prompt(tuple(messages), answer, category if isinstance(category, str) else str(category)) if messages else None, passed


def _prompt(row: dict) -> tuple[str, list[dict[str, str]], list[str]]:
    if isinstance(row["prompt"], list):
        return _turns(row | {"turns": row["prompt"]})
    if "task_id" in row and "entry_point" in row:
        return "HumanEval tasks", list(_user(HUMANEVAL.format(prompt=_text(row["prompt"], '"prompt"')))), []
    return 'with "prompt"', list(_user(row["prompt"])), []


def _messages(row: dict) -> tuple[str, list[dict[str, str]], list[str]]:
    given = row["messages"]
    if not isinstance(given, list) or not given:
        raise ValueError('"messages" must be a list, and not empty')
    made = []
    for place, message in enumerate(given):
        said = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
        if set(said) != {"role", "content"} or not isinstance(said["content"], str):
            raise ValueError(f'message {place}: expected {{"role": ..., "content": text}} and nothing else')
        if said["role"] not in ROLES:
            raise ValueError(f'message {place}: role {said["role"]!r} is none of {", ".join(ROLES)}')
        made.append({"role": said["role"], "content": _text(said["content"], f"message {place}", empty=True)})
    return 'with "messages"', made, []


def _sharegpt(row: dict) -> tuple[str, list[dict[str, str]], list[str]]:
    given = row["conversations"]
    if not isinstance(given, list):
        raise ValueError(f'"conversations" is a {type(given).__name__}, expected a list')
    made = []
    for place, turn in enumerate(given):
        if not isinstance(turn, dict) or not {"from", "value"} <= set(turn):
            raise ValueError(f'turn {place}: expected {{"from": ..., "value": text}}')
        if turn["from"] not in SPEAKERS:
            raise ValueError(f'turn {place}: "from" is {turn["from"]!r}, none of {", ".join(SPEAKERS)}')
        made.append({"role": SPEAKERS[turn["from"]], "content": _text(turn["value"], f"turn {place}", empty=True)})
    asks = next((i for i, turn in enumerate(made) if turn["role"] == "user"), None)
    if asks is None:
        return "ShareGPT conversations", [], ["conversations without a human turn"]
    early = [turn for turn in made[:asks] if turn["role"] == "assistant"]
    return ("ShareGPT conversations", [turn for turn in made[:asks] if turn["role"] == "system"] + made[asks:],
            ["gpt turns before the first human one"] * len(early))


def _turns(row: dict) -> tuple[str, list[dict[str, str]], list[str]]:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns:
        raise ValueError('"turns" must be a list of texts, and not empty')
    return "MT-Bench questions", list(_user(turns[0])), ["later turns, which ask about the target's own first answer"] * (len(turns) - 1)


SHAPES: dict[str, Callable[[dict], tuple[str, list[dict[str, str]], list[str]]]] = {
    "prompt": _prompt, "messages": _messages, "conversations": _sharegpt, "turns": _turns}


def _user(text: object) -> tuple[dict[str, str]]:
    return ({"role": "user", "content": _text(text, '"prompt"')},)


def _text(value: object, what: str, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{what} must be text" + ("" if empty else ", and not empty"))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} holds half a character (a lone surrogate)") from None
    return value


def _repeats(row: dict) -> bool:
    """Some sets give the user's first message once more, as "prompt"."""
    first = next((m for m in row["messages"] if isinstance(m, dict) and m.get("role") == "user"), {}) if isinstance(row["messages"], list) else {}
    return first.get("content") == row["prompt"]


# --- where rows come from ---------------------------------------------------------------------------------------------------

def rows(source: str, passed: Counter[str]) -> Iterator[Row]:
    """Every row with its place.  Blank lines are counted in `passed`.  UserError for what cannot be read."""
    if source.startswith(HUB) or source.endswith(".parquet"):
        yield from tabled(source)
        return
    text = read_text(source)
    plain = Path(source.removesuffix(".gz")).suffix == ".txt"
    if not plain and text.lstrip()[:1] == "[":
        try:
            yield from ((f"row {number}", row) for number, row in enumerate(jsons.loads(text), 1))
        except ValueError as error:
            raise UserError(f"{source}: it begins as a JSON array and is none: {error}") from None
        return
    lines = text.split("\n")                                           # not splitlines: U+2028 may stand inside a text
    written = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if blank := len(lines) - (lines[-1] == "") - len(written):          # what follows the last line's end is no line
        passed["blank lines"] = blank
    if plain and written and _is_object(written[0][1]):
        raise UserError(f"{source}: named as plain text, and its first line is a JSON object; name it .jsonl")
    yield from ((f"line {number}", line if plain else _json(source, number, line)) for number, line in written)


def _is_object(line: str) -> bool:
    try:
        return isinstance(jsons.loads(line), dict)
    except ValueError:
        return False


def _json(source: str, number: int, line: str) -> object:
    try:
        return jsons.loads(line)
    except ValueError as error:
        hint = "" if line[0] in "{[" else " (plain text, a prompt a line, is read from a file named .txt)"
        raise UserError(f"{source}, line {number}: {error}{hint}") from None


def read_text(source: str) -> str:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{source}: {getattr(error, 'strerror', None) or error}") from None


def tabled(source: str) -> Iterator[Row]:
    """Rows of a parquet file or of a hub's data set, read on as they are asked for."""
    if not source.startswith(HUB) and not Path(source).is_file():
        raise UserError(f"{source}: no such file")
    try:
        import datasets
    except ImportError:
        raise UserError(f"{source}: parquet files and data sets of the hub need a package that is not installed here; run: {INSTALL}") from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if source.startswith(HUB):
            name, split = hub_name(source)
            found = datasets.load_dataset(name, split=split or _only_split(datasets, source, name), streaming=True)
        else:
            found = datasets.load_dataset("parquet", data_files=[source], split="train", streaming=True)
        left = iter(found)
    except UserError:
        raise
    except Exception as error:                                          # the package raises its own, the network's and pyarrow's
        raise _unread(source, error) from None
    number = 0
    while True:
        try:
            row = next(left)
        except StopIteration:
            return
        except Exception as error:
            raise _unread(source, error) from None
        yield f"row {(number := number + 1)}", row


def hub_name(source: str) -> tuple[str, str | None]:
    """hub:OWNER/NAME[:split] -> name, split.  UserError where it is not written so."""
    name, _, split = source.removeprefix(HUB).partition(":")
    if name.count("/") != 1 or not all(name.split("/")):
        raise UserError(f"{source}: write hub:OWNER/NAME or hub:OWNER/NAME:split")
    return name, split or None


def _only_split(datasets, source: str, name: str) -> str:
    names = datasets.get_dataset_split_names(name)
    if len(names) != 1:
        raise UserError(f"{source}: it has the splits {', '.join(names)}; name one, as in {HUB}{name}:{names[0] if names else 'train'}")
    return names[0]


def _unread(source: str, error: Exception) -> UserError:
    said = " ".join(str(error).split())
    return UserError(f"{source}: {said[:300] or type(error).__name__}")
