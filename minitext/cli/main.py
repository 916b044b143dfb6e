"""The command line: `minitext` and `python -m minitext`.

Commands parse, call one function, and print; JAX is imported only by the commands that compute. Exit codes: 0 done,
1 failed, 2 bad input, 3 does not fit, 130 interrupted.

Chapters: 6.
"""

import sys
from typing import Any

import typer

from minitext.book.grading.command import grade
from minitext.cli import launching, reports, running, setup, watching
from minitext.errors import UserError

app = typer.Typer(
    name="minitext",
    help="Train language models the way MaxText does, in code small enough to read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(no_args_is_help=True, help="Show and explain configurations.")
app.add_typer(config_app, name="config")
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
app.add_typer(data_app, name="data")
optim_app = typer.Typer(no_args_is_help=True, help="What optimizers cost.")
app.add_typer(optim_app, name="optim")

launch_app = typer.Typer(no_args_is_help=True, help="Train with several processes.")
app.add_typer(launch_app, name="launch")

app.command("train")(running.train)
app.command("generate")(running.generate)
app.command("export")(running.export)
app.command("eval")(running.evaluate)
app.command("goodput")(watching.goodput)
app.command("profile")(watching.profile)
app.command("watch")(watching.watch)
app.command("compile")(reports.compile_)
app.command("plan")(reports.plan)
app.command("roofline")(reports.roofline)
app.command("predict")(reports.predict)
app.command("shard")(reports.shard)
app.command("memory")(reports.memory_)
app.command("comms")(reports.comms)
app.command("llo")(reports.llo)
app.command("tune")(reports.tune)
app.command("grade")(grade)
config_app.command("show")(setup.config_show)
config_app.command("explain")(setup.config_explain)
config_app.command("presets")(setup.config_presets)
data_app.command("pack")(setup.data_pack)
optim_app.command("memory")(reports.optim_memory)
launch_app.command("local")(launching.local)
launch_app.command("slurm")(launching.slurm)
launch_app.command("xpk")(launching.xpk)
launch_app.command("k8s")(launching.k8s)
app.command("doctor")(setup.doctor)


# Typer's own class for options and arguments that cannot be read, of which it exports one kind alone.
UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Runs the command line; a UserError becomes one line on stderr and its exit code, as do words it cannot read."""
    import logging

    from minitext.distributed import job

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("minitext").setLevel(logging.INFO)
    try:
        # By itself typer would draw a box around an error.
        sys.exit(app(prog_name="minitext", standalone_mode=False) or 0)
    except UsageError as error:
        if error.format_message():  # none where a command's help was printed, for want of words
            print(f"error: {_in_one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:
        sys.exit(1)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        job.finish(error)
        sys.exit(error.exit_code)
    except BaseException as error:  # also of a command that is done
        job.finish(error)
        raise


def _in_one_line(error: Any) -> str:
    """Says what is wrong with the words of a command, with the value, which typer leaves out, and where to look."""
    from pydantic import ValidationError

    said = error.format_message().rstrip(".")
    if isinstance(error.__cause__, ValidationError):
        fault = error.__cause__.errors()[0]
        said = f"{error.param.opts[0]} {fault['input']}: {fault['msg'].lower()}"
    return f"{said}: see {error.ctx.command_path if error.ctx else 'minitext'} --help"
