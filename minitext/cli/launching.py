"""The commands that start a job of several processes.

The options of `slurm`, `xpk` and `k8s` are the arguments of the functions in `launch.schedulers`, under the same names.

Chapters: 21.
"""

import datetime
import re
import shlex
import shutil
import subprocess
import sys
from typing import Annotated, Any

import typer

from minitext.cli.arguments import load
from minitext.errors import UserError


def check_word(param: typer.CallbackParam, value: str | None) -> str | None:
    """Refuses an empty name, or one of several words, which whoever gets it would take for something else."""
    if value is not None and not re.fullmatch(r"\S+", value):
        raise UserError(f"{param.opts[0]} {value!r} is not a name: give one word")
    return value


Command = Annotated[
    list[str], typer.Argument(metavar="-- train ...", help="the train command, after two hyphens")
]
Name = Annotated[str, typer.Option(help="of the job, and of the run: a restart resumes it")]
Restarts = Annotated[int, typer.Option(min=0, help="of the whole job after a failure, to resume")]
Image = Annotated[
    str, typer.Option(help="container image with minitext installed", callback=check_word)
]


def local(
    command: Command,
    processes: Annotated[int, typer.Option(min=1, max=1024, help="processes to start")] = 2,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="CPU devices each simulates; without: the GPU of its number"
        ),
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
    from minitext.distributed import launch
    from minitext.distributed.launch import local

    words = launch.with_run_name(command, datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    load(words[1:])  # a fault in them is said once, not by every process
    sys.exit(local.launch(words, processes=processes, devices=devices, restarts=restarts))


def slurm(
    ctx: typer.Context,
    command: Command,
    name: Name,
    nodes: Annotated[int, typer.Option(min=1, help="machines")] = 2,
    processes_per_node: Annotated[
        int, typer.Option(min=1, help="1, or as many as GPUs: each process takes one")
    ] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs to ask for")] = 0,
    time: Annotated[str, typer.Option(help="limit of the job")] = "24:00:00",
    partition: Annotated[
        str | None, typer.Option(help="of the cluster", callback=check_word)
    ] = None,
    restarts: Restarts = 3,
    submit: Annotated[
        bool, typer.Option("--submit/--dry-run", help="hand it to sbatch, or print it")
    ] = False,
) -> None:
    """Print an sbatch script that trains on several nodes, or submit it.

    minitext launch slurm --name big --nodes 4 --gpus-per-node 8 -- train llama3-8b
    """
    from minitext.distributed.launch import schedulers

    script = schedulers.slurm_script(**_arguments(ctx))
    print(schedulers.submit(script) if submit else script.rstrip())


def xpk(
    ctx: typer.Context,
    command: Command,
    name: Name,
    cluster: Annotated[str, typer.Option(help="GKE cluster", callback=check_word)],
    tpu_type: Annotated[
        str, typer.Option(help="of a slice, as xpk calls it: v5litepod-256", callback=check_word)
    ],
    image: Image,
    slices: Annotated[int, typer.Option(min=1, help="TPU slices")] = 1,
    project: Annotated[
        str | None, typer.Option(help="Google Cloud project", callback=check_word)
    ] = None,
    zone: Annotated[str | None, typer.Option(help="of the cluster", callback=check_word)] = None,
    restarts: Restarts = 3,
    submit: Annotated[
        bool, typer.Option("--submit/--dry-run", help="start it, or let xpk print what it would do")
    ] = False,
) -> None:
    """Train on TPU slices of Google Kubernetes Engine, with xpk.

    minitext launch xpk --name big --cluster c --tpu-type v5p-128 --image IMAGE -- train llama2-70b run.dir=/gcs/runs

    Prints the `xpk workload create` command and runs it, as a dry run unless --submit is given.
    """
    from minitext.distributed import launch
    from minitext.distributed.launch import schedulers

    words = schedulers.xpk_command(**_arguments(ctx), dry_run=not submit)
    fix = "name a mounted bucket or file system by its whole path, as in -- train ... run.dir=/gcs/runs"
    launch.warn_of_loss(command, "/", fix)
    print(shlex.join(words), flush=True)
    if shutil.which("xpk"):
        sys.exit(subprocess.run(words).returncode)
    if submit:
        raise UserError("xpk is not installed: run pip install xpk, then the command above")
    print("xpk is not installed, so it was not tried: pip install xpk", file=sys.stderr)


def k8s(
    ctx: typer.Context,
    command: Command,
    name: Name,
    image: Image,
    processes: Annotated[int, typer.Option(min=1, help="pods")] = 2,
    gpus: Annotated[int, typer.Option(min=0, help="of each pod")] = 0,
    claim: Annotated[
        str | None,
        typer.Option(
            help="PersistentVolumeClaim to mount at /runs in all pods", callback=check_word
        ),
    ] = None,
    restarts: Restarts = 3,
) -> None:
    """Print a Kubernetes JobSet that trains in several pods.

    minitext launch k8s --name big --image IMAGE --claim runs -- train laptop run.dir=/runs | kubectl apply -f -
    """
    import yaml

    from minitext.distributed import launch
    from minitext.distributed.launch import schedulers

    made = schedulers.jobset(**_arguments(ctx))
    fix = "add --claim NAME, a PersistentVolumeClaim, and -- train ... run.dir=/runs"
    launch.warn_of_loss(command, "/runs/" if claim else None, fix)
    print(yaml.safe_dump(made, sort_keys=False), end="")


def _arguments(ctx: typer.Context) -> dict[str, Any]:
    """Returns a command's arguments for its function in `schedulers`, with a name for the run."""
    from minitext.distributed import launch

    options = {key: value for key, value in ctx.params.items() if key != "submit"}
    name = launch.check_name(options["name"])
    words = launch.with_run_name(options["command"], name)
    if not any(
        word.startswith("config=") for word in words
    ):  # its file may be on the cluster alone
        load(words[1:])
    return options | {"command": words}
