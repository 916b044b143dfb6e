"""Progress bars on stderr, for people only: into a file or a pipe they write nothing.

Rich ends a bar that no terminal shows with an empty line, which would stand before or after the one line of an error.

Chapters: none.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

QUIET_SECONDS = 2.0


def bar(*columns: "str | ProgressColumn") -> "Progress":
    """Returns a bar that vanishes when its `with` block ends; `columns` are Rich's usual ones if none are named."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)


@contextmanager
def of_slow_work(total: float, what: str) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with the amount done so far.

    A bar appears once the work has taken two seconds, so that quick work prints nothing.
    Where stderr is no terminal, one line says what is going on.
    """
    shown = bar()
    task = shown.add_task(what, total=total)
    started, announced = time.monotonic(), False

    def advance_to(done: float) -> None:
        nonlocal announced
        if not announced and time.monotonic() - started > QUIET_SECONDS:
            announced = True
            if shown.disable:
                shown.console.print(f"{what} ...")
            shown.start()
        shown.update(task, completed=done)

    try:
        yield advance_to
    finally:
        shown.stop()


def print_tables(*parts: Any) -> None:
    """Prints texts and tables on stdout, an empty line between each two."""
    from rich.console import Console

    console = Console(highlight=False)
    # A file or a pipe has no width; rich would take 80 columns and break the lines of the tables.
    console = console if console.is_terminal else Console(width=130, highlight=False)
    for i, part in enumerate(parts):
        console.print(*[""] * bool(i), part, sep="\n")


def show_bytes(size: float) -> str:
    """Writes a size in the largest unit that leaves a digit before the point."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:,.2f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    raise AssertionError


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[int, ...]) -> Any:
    """Returns a table that `rich` can print; `right` are the columns to align there."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))  # Text: shapes in brackets are no markup
    return made
