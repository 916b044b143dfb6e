"""The commands that look at a run: where its time went, what a trace shows, and its current state.

Chapters: 20.
"""

import json
from typing import Annotated

import typer

from minitext.cli.arguments import Json, Plot, RunDir, answer, refuse_options
from minitext.errors import UserError
from minitext.files import shorten


def goodput(
    directory: RunDir,
    plot: Plot = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="JOB", help="hand the ledger to ml-goodput-measurement under a name"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where a run's wall time went: steps that count, lost steps, compiling, data, checkpoints, no job at all."""
    from minitext.observability import goodput, goodput_export

    found, recorder = goodput.measure(directory), None
    if record is not None:
        if not record.strip() or not record.isprintable():
            raise UserError(f"--record {shorten(record)} is not a job's name: give one")
        recorder = goodput_export.make_recorder(record)
    answer(found, as_json, goodput.print_goodput)
    if plot is not None:
        from minitext.perf.figures import plot_goodput, save_figure

        save_figure(plot, lambda: plot_goodput(found))
    if recorder is not None:
        goodput_export.replay(directory, recorder)
        recorder.flush()


def profile(
    ctx: typer.Context,
    directory: RunDir,
    rows: Annotated[int, typer.Option(min=0, help="operations to list, the longest first")] = 15,
    as_json: Json = False,
) -> None:
    """Summarise the trace of a run, or of any folder with an .xplane.pb: operations, idle time, collectives, memory.

    Traces are made by training with profile.first_step=10 profile.steps=3.
    """
    if as_json:
        refuse_options(ctx, ["rows"], "with --json, which lists all operations")
    from minitext.observability import profile_report

    found = profile_report.summarise(directory)
    answer(found, as_json, lambda found: profile_report.print_profile(found, rows))


def watch(
    ctx: typer.Context,
    directory: RunDir,
    once: Annotated[bool, typer.Option("--once", help="print the current state and exit")] = False,
    every: Annotated[
        float, typer.Option(min=0.1, max=86_400, help="seconds between updates")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Watch a run: loss, tokens/s, MFU, goodput, memory, last checkpoint, time left. Ends with the run, or by Ctrl-C.

    Waits for a run that hasn't begun, and says so when one has gone silent. --json prints its state once.
    """
    if as_json or once:
        refuse_options(ctx, ["every"], f"with {'--json' if as_json else '--once'}")
    from rich.console import Console

    from minitext.observability import watch

    if as_json:
        print(json.dumps(watch.read_status(directory).to_json()))
    elif once:
        Console().print(watch.draw_status(watch.read_status(directory)))
    else:
        watch.watch(directory, every)
