"""The commands that start a job of several processes.

Chapters: 21.
"""

import datetime
import sys
from typing import Annotated

import typer

Command = Annotated[
    list[str], typer.Argument(metavar="-- train ...", help="the train command, after two hyphens")
]


def local(
    command: Command,
    processes: Annotated[int, typer.Option(min=1, help="processes to start")] = 2,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="CPU devices each simulates; without: the GPU of its number"),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="how often to start again after a failure, to resume")
    ] = 0,
) -> None:
    """Run a training job as several processes on this machine.

    minitext launch local --processes 2 --devices 4 -- train laptop train.steps=300

    Each process's lines begin with its number. SIGTERM, Ctrl-C and SIGUSR1 go to all of them. When one fails, the
    others end too, and the exit code is that of the first to fail.
    """
    from minitext import launch
    from minitext.launch import local as here

    words = launch.with_run_name(command, datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    sys.exit(here.launch(words, processes=processes, devices=devices, restarts=restarts))
