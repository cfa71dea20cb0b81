"""`hstrain arms`: what each arm asks, of what, and beside which other."""
from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainer.arms import ARMS, Arm, differences, option_of

COLUMNS = {"loss": "loss", "attention": "in block", "corruption": "masked", "weights": "weights"}       # field: heading
LEGEND = (
    "in block: the slots of its block that a slot sees: up to its own (causal), all (bidi), or as the layer slides or not (mixed). "
    "masked: all but the known token (full), a random share (uniform), all from a random slot on (prefix). hstrain run --arm NAME "
    "trains one; --loss, --attention, --corruption, --weights, --gamma, --alpha, --all-sliding, --draft-vocab and --block-size make "
    "another of it.")


def show() -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
    console.print(fields())
    console.print(questions())
    console.print(Text(LEGEND, style="dim"))


def fields() -> Table:
    """What each arm is, and what parts it from the arm that it is compared with, in colour."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("arm", *COLUMNS.values()):
        made.add_column(heading, no_wrap=True, style="bold" if heading == "arm" else "")
    made.add_column("compared with")
    for arm in ARMS.values():
        made.add_row(arm.name, *(_told(arm, field) for field in COLUMNS), f"{arm.beside} ({which_has(arm)})")
    return made


def questions() -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    made.add_column("arm", no_wrap=True, style="bold")
    made.add_column("what training it answers")
    for arm in ARMS.values():
        made.add_row(arm.name, arm.question)
    return made


def _told(arm: Arm, field: str) -> Text:
    """A field's value, in colour where it parts the arm from the one that it is compared with."""
    value = getattr(arm, field)
    return Text(value, style="cyan" if field in differences(arm, ARMS[arm.beside]) else "")


def which_has(arm: Arm) -> str:
    """Of the arm that it is compared with, every field that parts them."""
    return " ".join(option_of(name, other) for name, (_, other) in differences(arm, ARMS[arm.beside]).items())
