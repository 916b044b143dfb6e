"""What people see in a terminal: progress bars on stderr, tables, and readable sizes.

Into a file or a pipe a bar writes nothing. Rich alone would end it with an empty line there, next to the one line of an
error.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

QUIET_SECONDS = 2.0


def bar(*columns: "str | ProgressColumn") -> "Progress":
    """Returns a bar that disappears when its `with` block ends; without `columns` it has Rich's default ones."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_interactive)


@contextmanager
def of_slow_work(total: float, what: str) -> Iterator[Callable[[float], None]]:
    """Gives a function to call with the amount done so far.

    After two seconds a bar appears, so quick work prints nothing. If stderr isn't a terminal, one line says what is
    going on.
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
    """Prints texts and tables on stdout, separated by empty lines."""
    from rich.console import Console

    console = Console(highlight=False)
    # A file or a pipe has no width; Rich would assume 80 columns and wrap the tables' lines.
    console = console if console.is_terminal else Console(width=130, highlight=False)
    for i, part in enumerate(parts):
        console.print(*[""] * bool(i), part, sep="\n")


def show_bytes(size: float) -> str:
    """Writes a size in the largest unit in which it's at least 1."""
    unit = 0
    while size >= 1024 and unit < 3:
        size, unit = size / 1024, unit + 1
    name = ("B", "KiB", "MiB", "GiB")[unit]
    return f"{size:,.2f} {name}" if unit else f"{size:.0f} B"


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[int, ...]) -> Any:
    """Returns a table for Rich to print; `right` are the numbers of the right-aligned columns."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False)
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))  # Text: shapes in brackets aren't markup
    return made
