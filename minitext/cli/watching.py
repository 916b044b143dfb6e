"""The commands that look at a run: where its time went, what a trace says, and how it stands now.

Chapters: 20.
"""

import json
from typing import Annotated

import typer

from minitext.cli.arguments import Json, RunDir


def goodput(
    directory: RunDir,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="draw it: .svg, .png")] = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="hand the ledger to ml-goodput-measurement under a name"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where a run's wall time went: steps that count, lost steps, compiling, data, checkpoints, no job at all."""
    from minitext.observability import goodput

    found = goodput.measure(directory)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        goodput.print_goodput(found)
    if plot is not None:
        from minitext.perf.figures import plot_goodput, save_figure

        save_figure(plot, lambda: plot_goodput(found))
    if record is not None:
        from minitext.observability import goodput_export

        recorder = goodput_export.make_recorder(record)
        goodput_export.replay(directory, recorder)
        recorder.flush()


def profile(
    directory: RunDir,
    rows: Annotated[int, typer.Option(min=0, help="operations to list, the longest first")] = 15,
    as_json: Json = False,
) -> None:
    """Summarise the trace of a run, or of any folder with an .xplane.pb: operations, idle time, collectives, memory.

    Traces are made by training with profile.first_step=10 profile.steps=3.
    """
    from minitext.observability import profile_report

    found = profile_report.summarise(directory)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        profile_report.print_profile(found, rows)


def watch(
    directory: RunDir,
    once: Annotated[bool, typer.Option("--once", help="print how it stands and exit")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="seconds between two looks")] = 1.0,
    as_json: Json = False,
) -> None:
    """Watch a run: loss, tokens/s, MFU, goodput, memory, last checkpoint, time left. Ends with the run, or by Ctrl-C.

    A run that has not begun is awaited; one that has gone silent is said to be. --json prints one look.
    """
    from rich.console import Console

    from minitext.observability import watch

    if as_json:
        print(json.dumps(watch.read_status(directory).to_json()))
    elif once:
        Console().print(watch.draw_status(watch.read_status(directory)))
    else:
        watch.watch(directory, every)
