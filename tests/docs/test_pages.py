"""The pages do not lie: every command in them is one that the real command lines take, every link leads somewhere, and what
troubleshooting.md quotes is what the programs say."""
from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "systemd" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMAND = re.compile(r"`((?:hsprod|hstrain) [a-z][^`]*)`")
QUOTE = re.compile(r'"([^"\n]{6,})"')
PLACEHOLDER = re.compile(r"\.\.\.|\[.*?\]")


def commands(text: str) -> list[str]:
    """Of fenced blocks the lines that are ours, joined where they go on; of the rest, what stands between backticks."""
    fenced = [block.replace("\\\n", " ") for block in re.findall(r"```\w*\n(.*?)```", text, re.S)]
    lines = [line.removeprefix("$ ").strip() for block in fenced for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    return [line.split("  #")[0].strip() for line in [*lines, *COMMAND.findall(prose)] if line.startswith(("hsprod ", "hstrain "))]


def check(line: str) -> None:
    """Raises click's own error for a subcommand or an option that there is not."""
    program, name, *words = shlex.split(PLACEHOLDER.sub("", line))
    from producer import cli as producer
    from trainer import cli as trainer
    group = typer.main.get_command({"hsprod": producer, "hstrain": trainer}[program].app)
    command = group.commands.get(name)
    if command is None:
        raise click.UsageError(f"{program} has no command {name}")
    known = {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    if name == "sweep":                                     # it takes run's options as well
        known |= {word for parameter in group.commands["run"].params for word in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word == "--":
            return
        if word.startswith("--") and word.split("=")[0] not in known:
            raise click.UsageError(f"{program} {name} has no option {word}")


FOUND = sorted({(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in commands(page.read_text("utf-8"))})


@pytest.mark.parametrize("page, line", FOUND)
def test_a_command_is_one_that_there_is(page, line):
    check(line)


def test_what_there_is_not_is_seen():
    assert len(FOUND) > 40 and len({page for page, _ in FOUND}) >= 6
    assert commands("a `hsprod serve --layers 1` b\n```\n$ hstrain run --arm x \\\n  --seed 1   # why\nls\n```\n") == [
        "hstrain run --arm x    --seed 1", "hsprod serve --layers 1"]
    for line, why in (("hsprod fly", "no command fly"), ("hstrain run --wings 2", "no option --wings"), ("hsprod generate --arm ce_causal", "no option --arm")):
        with pytest.raises(click.UsageError, match=why):
            check(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
        assert (page.parent / target).exists(), target


def test_what_is_quoted_is_said():
    """Python joins strings that stand beside each other; so does this, before it looks."""
    code = " ".join(path.read_text("utf-8") for folder in ("producer", "trainer", "protocol", "common") for path in (ROOT / folder).rglob("*.py"))
    code = re.sub(r'"\s+f?"', "", code)
    quotes = QUOTE.findall((ROOT / "docs" / "troubleshooting.md").read_text("utf-8"))
    assert len(quotes) > 15
    missing = [quote for quote in quotes if any(part.strip() and part.strip() not in code for part in quote.split("..."))]
    assert not missing
