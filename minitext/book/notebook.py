"""What every chapter calls: simulated devices and figure style, source listings, measured numbers in prose.

`setup` makes a notebook behave the same on a laptop, on Colab and when the book is built. `show` prints the package's
own code, so a chapter never contains a pasted copy of it. `glue` puts a measured number into prose.

This and `figures` are the only modules of the package that import IPython or matplotlib, and they do so inside
functions: training on a server needs neither.
"""

import functools
import inspect
import re
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

from minitext.distributed.devices import start
from minitext.errors import UserError
from minitext.perf.figures import figure_style, shell


def setup(devices: int = 1) -> None:
    """Prepare a notebook: platform, simulated devices, figure style.

    Call it before any JAX operation. The environment variable ``JAX_PLATFORMS`` takes precedence if it is set.
    Otherwise one device means the accelerator, or the CPU if there is none. Several devices are always simulated on
    the CPU, so a chapter about meshes gives everyone the same ones. Calling it again changes nothing.

    Args:
        devices: how many devices to simulate; 1 uses whatever there is.

    Raises:
        UserError: JAX has already started with another number of devices, or the platform you
            named has another.
    """
    if devices < 1:
        raise UserError(f"setup(devices={devices}): choose at least 1 device.")
    start(devices if devices > 1 else None)
    figure_style()


def show(obj: Any) -> None:
    """Print the source of a function, class, method or module, with file, lines and a link.

    Wrappers such as `jax.jit`, `jax.custom_vjp`, `functools.partial` and `property` are removed first. In a notebook
    the listing is Markdown, so every front end highlights it in its own theme.

    Raises:
        UserError: the object has no source of its own; numbers and tuples, for example, don't.
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

    title = f"[{where}]({link})" if link else where
    display(Markdown(f"{title}\n\n{fenced(source)}"))


def fenced(code: str) -> str:
    """Returns code as a Markdown block whose fence is longer than any in the code, such as one in a docstring."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", code))])
    return f"{fence}python\n{code}\n{fence}"


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
    """A caption for these lines, and their URL in the repository if they belong to the package."""
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    root = Path(__file__).resolve().parents[1]
    if root not in file.resolve().parents:
        where = "this notebook" if "ipykernel_" in str(file) else file.name
        return f"{where}, {lines}", None
    path = file.resolve().relative_to(root.parent).as_posix()
    url = repository_url()
    return f"{path}, {lines}", url and f"{url}/blob/main/{path}#L{first}-L{last}"


def repository_url() -> str | None:
    """The repository's URL in pyproject.toml, or None if the package isn't installed."""
    try:
        urls = metadata.metadata("minitext").get_all("Project-URL") or []
    except metadata.PackageNotFoundError:  # imported from a source tree
        return None
    return dict(url.split(", ", 1) for url in urls)["Repository"]


def glue(name: str, value: Any, display: bool = False) -> None:
    """Store a value for prose to quote with MyST's ``glue`` role. Does nothing on Colab.

    Args:
        name: unique in its chapter.
        value: a number, text or figure. An array of one element becomes a Python number, to which formats such as
            ``.2f`` apply.
        display: whether to show it as the cell's output too.
    """
    try:
        from myst_nb import glue as myst_glue
    except ModuleNotFoundError:  # Colab doesn't render the prose
        return
    if getattr(value, "size", None) == 1 and hasattr(value, "item"):
        value = value.item()
    myst_glue(name, value, display=display)
