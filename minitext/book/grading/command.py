"""The command `minitext grade`.

Nothing heavy is imported here until a grading starts: `minitext --help` loads this module.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from minitext import terminal
from minitext.errors import UserError
from minitext.files import check_new_file, local_path


def grade(
    ctx: typer.Context,
    which: Annotated[
        list[str] | None,
        typer.Argument(help="Chapters (05) or exercises (05.adamw); with --start, a folder."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Every exercise; also the default.")] = False,
    start: Annotated[
        bool, typer.Option("--start", help="Copy the stubs to ./exercises or the named folder.")
    ] = False,
    answers: Annotated[
        Path | None, typer.Option(help="Folder with your chNN_name.py files.")
    ] = None,
    notebook: Annotated[Path | None, typer.Option(help="Grade the cells of this .ipynb.")] = None,
    json_: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write a report; - for stdout.")
    ] = None,
    gradescope: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write Gradescope's results.json.")
    ] = None,
    solutions: Annotated[
        bool, typer.Option("--solutions", help="Maintainers: solutions pass, stubs count as such.")
    ] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Maintainers: wrong answers fail with their own hint.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Repeat a grading's random inputs.")
    ] = None,
    learner: Annotated[
        str | None, typer.Option(help="Whose constants to use; default: your user name.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = min(
        4, os.cpu_count() or 1
    ),
) -> None:
    """Grade your answers: each exercise in its own process, with one hint for each that fails.

    Exits 0 only if everything you asked for passes.
    """
    seed = secrets.randbits(31) if seed is None else seed
    kinds = ["solution", "stub"] * solutions + ["mutant"] * mutants
    try:
        _check_options(ctx)
        if start:
            _start(which or [])
            return
        for option, file in (("--json", json_), ("--gradescope", gradescope)):
            if file not in (None, "-"):
                check_new_file(option, file)
        from minitext.book.grading import registry, runner

        number = registry.learner_number(learner)
        grading = runner.Grading(registry.exercises_root(), seed, number, jobs)
        names = [] if all_ else which or []
        exercises = registry.select(grading.root, names)
        if kinds:
            good = _try_out(grading, exercises, kinds)
        else:
            tasks = _tasks(grading.root, exercises, names, answers, notebook)
            good = _grade(grading, tasks, learner or registry.learner_name(), json_, gradescope)
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(0 if good else 1)


def _check_options(ctx: typer.Context) -> None:
    """Refuses paths that no file has, and options that would change nothing beside others."""
    for name in ("answers", "notebook", "json_", "gradescope"):
        local_path(ctx.params[name])
    given = {
        name: f"--{name.strip('_')}"
        for name in ctx.params
        if name != "which" and getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    unused: dict[str, tuple[str, ...]] = {
        "start": tuple(name for name in given if name != "start"),
        "solutions": ("answers", "notebook", "json_", "gradescope"),
        "mutants": ("answers", "notebook", "json_", "gradescope"),
        "notebook": ("answers",),
    }
    for name, others in unused.items():
        for other in others:
            if name in given and other in given:
                raise UserError(f"{given[other]} has no effect with {given[name]}: leave one out")
    if "all_" in given and (names := ctx.params["which"]):
        raise UserError(f"{names[0]} has no effect with --all: leave one out")


def _start(names: list[str]) -> None:
    from minitext.book.grading.answers import start
    from minitext.book.grading.registry import exercises_root

    if len(names) > 1:
        raise UserError(f"--start takes one folder, not {len(names)}: {' '.join(names)}")
    folder = Path(local_path(names[0]) if names else "exercises")
    copied, kept = start(exercises_root(), folder)
    if copied:
        where = "" if folder == Path("exercises") else f" --answers {folder}"
        typer.echo(f"stubs copied to {folder}: {', '.join(path.name for path in copied)}")
        typer.echo(f"grade your answers with: minitext grade{where}")
    if kept:
        typer.echo(f"left as they are: {', '.join(str(path) for path in kept)}")


def _try_out(grading: Any, exercises: dict[str, Any], kinds: list[str]) -> bool:
    from rich.console import Console

    from minitext.book.grading import report, runner

    with _bar() as advance_to:
        rows = runner.try_out(grading, exercises.values(), kinds, advance_to)
    good = report.print_rows(Console(), rows)
    typer.echo(f"seed {grading.seed}")
    return good


def _tasks(
    root: Path,
    exercises: dict[str, Any],
    names: list[str],
    folder: Path | None,
    notebook: Path | None,
) -> list[tuple]:
    """Pairs of an exercise and the learner's answer; of a notebook, unless exercises are named, only those in it."""
    from minitext.book.grading import answers

    if notebook is None:
        place = answers.answers_folder(root, folder)
        found = answers.from_folder(place, root, exercises.values())
    else:
        found = answers.from_notebook(notebook, root, exercises.values())
        if not found:
            raise UserError(f"{notebook} has no cell of {' '.join(names) or 'any exercise'}")
    missing = answers.Answer(attempted=False)
    return [(e, found.get(id, missing)) for id, e in exercises.items() if names or id in found]


def _grade(
    grading: Any, tasks: list[tuple], learner: str, json_file: str | None, gradescope: str | None
) -> bool:
    from rich.console import Console

    from minitext.book.grading import report, runner

    with _bar() as advance_to:
        results = runner.grade_many(grading, tasks, advance_to)
    report.print_table(Console(stderr=json_file == "-"), results, grading.seed)
    if json_file:
        report.write_json(json_file, report.as_json(results, grading.seed, learner))
    if gradescope:
        report.write_json(gradescope, report.as_gradescope(results, grading.seed))
    return all(result.status == report.PASSED for result in results)


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error that disappears when done; yields a function of (done, total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

    columns = ("grading", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with terminal.bar(*columns) as bar:
        task = bar.add_task("grading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
