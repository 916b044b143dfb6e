"""Progress bars on stderr, for people only: into a file or a pipe they write nothing.

Rich ends a bar that no terminal shows with an empty line, which would stand before or after the one line of an error.

Chapters: none.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
