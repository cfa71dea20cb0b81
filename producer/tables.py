"""How the bench's tables look: one form for all, figures to the right, what must be said about them underneath."""
from __future__ import annotations

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text


def table(title: str, *columns: str, note: str = "", words: int = 1) -> Table:
    """columns: headers with their units; the first `words` hold text, the others figures."""
    made = Table(title=title, title_justify="left", title_style="bold", caption=note or None, caption_justify="left",
                 caption_style="dim", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="none")
    for i, header in enumerate(columns):
        made.add_column(header, justify="left" if i < words else "right", vertical="bottom" if i < words else "top",
                        overflow="fold")                             # on a narrow screen a figure breaks; it is never cut
    return made


def put(console: Console, shown: RenderableType) -> None:
    """Print with an empty line before.  A table's title and note take the screen's width, not the table's."""
    title, note = (shown.title, shown.caption) if isinstance(shown, Table) else (None, None)
    console.print()
    if isinstance(shown, Table):
        shown.title = shown.caption = None
        console.print(Text(str(title or ""), style="bold"))
    console.print(shown, highlight=False)
    if note:
        console.print(Text(str(note), style="dim"))


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits that mean something; - where nothing was measured."""
    return "-" if seconds is None else digits(seconds * 1e3)


def digits(value: float | None) -> str:
    """Three digits or all before the point: 0.012, 1.23, 12.3, 1234; a count as it is."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    size = abs(value)
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
