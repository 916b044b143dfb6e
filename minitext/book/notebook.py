"""What every chapter's first cell calls: devices, figures, source listings, checks.

`setup` makes a notebook behave the same on a laptop, on Colab and in the book's build. `show`
prints the package's own code, so that a chapter never holds a pasted copy of it. `glue` puts a
measured number into prose.

This and `figures` are the only modules of the package that import IPython or matplotlib, and they do
so inside functions: training on a server needs neither.

Chapters: none.
"""

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from minitext.distributed.devices import start
from minitext.errors import UserError
from minitext.perf.figures import figure_style, shell


def setup(devices: int = 1) -> None:
    """Prepare a notebook: platform, simulated devices, figure style.

    Call it before any JAX operation. A platform named in the environment variable
    ``JAX_PLATFORMS`` is kept. Otherwise JAX runs on the accelerator if one is there, and on the CPU
    if there is none or if several devices are asked for: those are simulated, so that a chapter
    about meshes gives everyone the same devices. Calling it again changes nothing.

    Args:
        devices: how many devices to simulate; 1 takes what is there.

    Raises:
        UserError: JAX had already started with another number of devices, or the platform you
            named has another.
    """
    if devices < 1:
        raise UserError(f"setup(devices={devices}): choose at least 1 device.")
    start(devices if devices > 1 else None)
    figure_style()


def show(obj: Any) -> None:
    """Print the source of a function, class, method or module, with file, lines and a link.

    Wrappers such as `jax.jit`, `jax.custom_vjp`, `functools.partial` and `property` are taken off
    first. In a notebook the listing is Markdown, which every front end colours in its own theme.

    Raises:
        UserError: the object has no source of its own, as a number or a tuple has none.
    """
    obj = _unwrap(obj)
    if not (inspect.isclass(obj) or inspect.isroutine(obj) or inspect.ismodule(obj)):
        raise UserError(
            f"show() was given a value of type {type(obj).__name__}, which has no source of its "
            "own: give it the function, class or module that makes or uses the value."
        )
    try:
        lines, first = inspect.getsourcelines(obj)
        file = Path(inspect.getsourcefile(obj) or "")
    except (OSError, TypeError) as error:
        raise UserError(
            f"show({obj.__name__}) found no Python source: it may be compiled code."
        ) from error
    first = max(first, 1)  # a module starts at line 0
    last = first + len(lines) - 1
    where, link = _place(file, first, last)
    source = textwrap.dedent("".join(lines)).rstrip()
    if shell() is None:
        print(f"# {where}\n{source}")
        return
    from IPython.display import Markdown, display

    # A docstring may hold a fence of its own: ours is longer than any in it.
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`{3,}", source))])
    title = f"[{where}]({link})" if link else where
    display(Markdown(f"{title}\n\n{fence}python\n{source}\n{fence}"))


def _unwrap(obj: Any) -> Any:
    """The function, class or module inside wrappers and bound methods."""
    while True:
        if isinstance(obj, functools.partial):
            obj = obj.func
        elif isinstance(obj, property):
            obj = obj.fget
        elif isinstance(obj, (staticmethod, classmethod)) or inspect.ismethod(obj):
            obj = obj.__func__
        elif hasattr(obj, "__wrapped__") and not inspect.isclass(obj):
            obj = obj.__wrapped__
        else:
            return obj


def _place(file: Path, first: int, last: int) -> tuple[str, str | None]:
    """What to call these lines, and their address in the repository if they are the package's."""
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    root = Path(__file__).resolve().parents[1]
    if root not in file.resolve().parents:
        where = "this notebook" if "ipykernel_" in str(file) else file.name
        return f"{where}, {lines}", None
    path = file.resolve().relative_to(root.parent).as_posix()
    url = repository_url()
    return f"{path}, {lines}", url and f"{url}/blob/main/{path}#L{first}-L{last}"


def repository_url() -> str | None:
    """The project's address in pyproject.toml, or None where the package is not installed."""
    try:
        urls = metadata.metadata("minitext").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # imported from a source tree
        return None
    return dict(url.split(", ", 1) for url in urls)["Repository"]


def glue(name: str, value: Any, display: bool = False) -> None:
    """Store a value for prose to quote with MyST's ``glue`` role. Does nothing on Colab.

    Args:
        name: unique in its chapter.
        value: a number, text or figure. Arrays of one element become Python numbers, so that
            formats such as ``.2f`` work.
        display: also show it as the cell's output.
    """
    try:
        from myst_nb import glue as myst_glue
    except ModuleNotFoundError:  # Colab: the prose is not rendered there
        return
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()
    myst_glue(name, value, display=display)


def check(exercise: str, answer: Callable | Sequence[Callable], **options: Any) -> Any:
    """Grade one answer and print the verdict: see `minitext.book.grading.check`, which does the work."""
    from minitext.book import grading

    return grading.check(exercise, answer, **options)
