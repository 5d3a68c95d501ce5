"""Tables for terminals, which may be narrow: columns are left out before figures are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

GAP = 2  #: spaces between two columns


def table(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str | int]],
    *,
    width: int,
    spare: Sequence[str] = (),
) -> Table:
    """A table in which numbers stand to the right. What doesn't fit even without the spare columns is folded.

    Args:
        title: Above it.
        heads: The columns' names.
        rows: A cell for each column.
        width: Characters that there are for it.
        spare: Columns that may be left out, the first of them first.
    """
    from rich.table import Table
    from rich.text import Text

    shown = list(range(len(heads)))
    wide = [max(len(str(cell)) for cell in column) for column in zip(heads, *rows, strict=True)]
    for name in spare:
        if sum(wide[i] + GAP for i in shown) - GAP <= width:
            break
        shown.remove(heads.index(name))
    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i in shown:
        number = bool(rows) and isinstance(rows[0][i], int)
        made.add_column(heads[i], justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(row[i])) for i in shown))
    return made
