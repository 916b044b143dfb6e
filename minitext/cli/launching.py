"""The commands that start a job of several processes.

The options of `slurm`, `xpk` and `k8s` are the arguments of the functions in `launch.schedulers`, under the same names.

Chapters: 21.
"""

import contextlib
import datetime
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minitext import terminal
from minitext.cli.arguments import Json, Plot, Settings, answer, check_new, load
from minitext.errors import UserError, did_you_mean
from minitext.files import shorten

if TYPE_CHECKING:
    from minitext.config.config import Config


def check_word(param: typer.CallbackParam, value: str | None) -> str | None:
    """Refuses an empty name, or one of several words, which whoever gets it would take for something else."""
    if value is not None and not re.fullmatch(r"(?!-)[\w./:@,+-]+", value):
        raise UserError(
            f"{param.opts[0]} {value[:60]!r} is not a name: give one word without special characters"
        )
    return value


def check_claim(claim: str | None) -> str | None:
    """Refuses what Kubernetes refuses as a name."""
    if claim is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", claim):
        raise UserError(
            f"--claim {claim[:60]!r} is not a name: use lowercase letters, digits, dots and hyphens"
        )
    return claim


Command = Annotated[
    list[str], typer.Argument(metavar="-- train ...", help="the train command, after two hyphens")
]
Name = Annotated[str, typer.Option(help="of the job, and of the run: a restart resumes it")]
Restarts = Annotated[
    int, typer.Option(min=0, max=10_000, help="of the whole job after a failure, to resume")
]
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
        int,
        typer.Option(min=0, max=10_000, help="how often to start again after a failure, to resume"),
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


# What `drill` trains unless told otherwise: a model so small that a start costs more than a hundred steps.
DRILL = (
    "model.layers=1", "model.embed=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64", "data.seq_len=32",
    "data.source=grammar", "train.global_batch=8", "train.sample_tokens=0", "train.save_every=10",
    "train.eval_every=50", "train.eval_batches=1",
)  # fmt: skip
HANG_SECONDS = 15


def drill(
    settings: Settings = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="of the job")] = 2,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="CPU devices each simulates; without: the GPU of its number"
        ),
    ] = None,
    faults: Annotated[int, typer.Option(min=1, max=1000, help="how many")] = 6,
    kinds: Annotated[
        str | None, typer.Option(help="which, such as kill,freeze; by default all that work here")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="of the faults: when, which, whom")
    ] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Hit a training job of several processes with faults on purpose, and say what each of them cost.

    minitext drill --faults 6                           # a tiny model, 2 processes: about three minutes

    minitext drill laptop train.save_every=20 --processes 4 --kinds kill,tear --faults 10 --seed 3

    kill: SIGKILL while it trains, saves or starts. freeze: SIGSTOP, for seconds or for good. slow: stopped half of the
    time. tear: the newest checkpoint damaged, then SIGKILL. disk: no file can grow (RLIMIT_FSIZE set from outside: it
    needs Linux but no privilege). nan: a NaN in a batch.

    Trains twice: undisturbed, then under faults, with the same command after each end. Every second gets a cause, and
    the final state is compared bit for bit. Both runs, their output and drill.json are kept in run.dir/run.name. Exits
    with 1 if steps before the newest whole checkpoint were lost, if more than 2% of the time has no cause, or if the
    state differs. Ctrl-C ends all processes.
    """
    from minitext.training import drill
    from minitext.training.faults import plan as make_plan

    words, save_every = _drill_words(settings, faults)
    cfg = load(words)
    chosen = _drill_kinds(kinds, cfg)
    name = cfg.run.name or f"drill-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}"
    directory = Path(check_new(str(Path(cfg.run.dir) / name)))
    plan = make_plan(
        chosen, faults, processes=processes, steps=cfg.train.steps, save_every=save_every, seed=seed
    )
    kept = [word for word in words if not word.startswith(("run.dir=", "run.name="))]
    with terminal.bar() as bar, _ending_on_hang_up():
        task = bar.add_task("drill", total=faults + 1)

        def say(line: str) -> None:
            bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            bar.update(task, advance=line.startswith(("fault", "undisturbed: done")))

        found = drill.drill(
            kept, directory, plan, processes=processes, devices=devices, save_every=save_every,
            seed=seed, say=say,
        )  # fmt: skip
    answer(found, as_json, drill.print_drill)
    if plot is not None:
        from minitext.perf.figures import plot_downtime, save_figure

        save_figure(plot, lambda: plot_downtime(found.downtime))
    if found.failures:
        raise typer.Exit(1)


def _drill_words(settings: list[str] | None, count: int) -> tuple[list[str], int]:
    """Returns preset and settings with what a drill adds, and the steps between two saves."""
    from minitext.training import faults

    given = [*(settings or [])]
    is_tiny = not any("=" not in word or word.startswith("config=") for word in given)
    words = [*(DRILL if is_tiny else ()), *given]
    cfg = load(words)
    if cfg.checkpoint.load_full_state is not None:
        raise UserError("checkpoint.load_full_state: a drill trains from step 0: leave it out")
    if cfg.provenance("train.hang_seconds") == "default":
        words.append(f"train.hang_seconds={HANG_SECONDS}")
    save_every = cfg.train.save_every
    least = faults.least_steps(count, save_every)
    if not any(word.startswith("train.steps=") for word in given):
        words.append(f"train.steps={least}")
    elif cfg.train.steps < least:
        raise UserError(
            f"train.steps={cfg.train.steps}: {count} faults with train.save_every={save_every} need at least {least} "
            "steps: raise train.steps, or lower --faults or train.save_every"
        )
    return words, save_every


def _drill_kinds(kinds: str | None, cfg: "Config") -> list[str]:
    """Returns the kinds of faults to make."""
    from minitext.training import faults

    why_not = {
        "disk": "" if faults.can_fill_disks() else "needs Linux",
        "nan": ""
        if cfg.train.on_nan == "stop"
        else "loses a batch with train.on_nan=skip: the runs would differ",
        "tear": "" if cfg.checkpoint.keep > 1 else "needs checkpoint.keep=2 or more",
    }
    known = [kind for kind in faults.KINDS if not why_not.get(kind)]
    if kinds is None:
        return known
    chosen = kinds.split(",")
    for kind in chosen:
        if kind not in known:
            why = why_not.get(kind) or f"is not a kind of fault{did_you_mean(kind, known)}"
            raise UserError(f"--kinds {shorten(kind)} {why}: choose among {', '.join(known)}")
    return chosen


@contextlib.contextmanager
def _ending_on_hang_up() -> Iterator[None]:
    """A terminal that closes ends the command as SIGTERM does: by way of its `finally` blocks."""
    before = signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def slurm(
    ctx: typer.Context,
    command: Command,
    name: Name,
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="machines")] = 2,
    processes_per_node: Annotated[
        int, typer.Option(min=1, max=1024, help="1, or as many as GPUs: each process takes one")
    ] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, max=1024, help="GPUs to ask for")] = 0,
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
    slices: Annotated[int, typer.Option(min=1, max=10_000, help="TPU slices")] = 1,
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
    processes: Annotated[int, typer.Option(min=1, max=100_000, help="pods")] = 2,
    gpus: Annotated[int, typer.Option(min=0, max=1024, help="of each pod")] = 0,
    claim: Annotated[
        str | None,
        typer.Option(
            help="PersistentVolumeClaim to mount at /runs in all pods", callback=check_claim
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
    load(
        words[1:]
    )  # a fault in them, or in a file that they name, is said before a job waits in a queue
    return options | {"command": words}
