"""The command line: `minitext` and `python -m minitext`.

Commands parse, call one function, and print; JAX is imported only by the commands that compute. Exit codes: 0 done,
1 failed, 2 bad input, 3 does not fit, 130 interrupted, 143 ended by SIGTERM with nothing to save.

Chapters: 6.
"""

import io
import os
import signal
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from minitext.cli import (
    bridge,
    journey,
    launching,
    reports,
    running,
    serving,
    setup,
    tuning,
    watching,
)
from minitext.errors import UserError, rule_of

HELP = {"help_option_names": ["-h", "--help"]}


class Commands(TyperGroup):
    """The commands. `grade` is imported when it is called or listed: training has no use for the grader."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names in the order of `minitext --help`."""
        return [*super().list_commands(ctx), "grade"]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns the command of a name, or None."""
        if cmd_name != "grade":
            return super().get_command(ctx, cmd_name)
        from minitext.book.grading.command import grade

        grader = typer.Typer(context_settings=HELP, pretty_exceptions_enable=False)
        grader.command("grade")(grade)
        return typer.main.get_command(grader)


app = typer.Typer(
    name="minitext",
    cls=Commands,
    help="Train language models the way MaxText does, in code small enough to read.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=HELP,
)
config_app = typer.Typer(no_args_is_help=True, help="Show and explain configurations.")
app.add_typer(config_app, name="config")
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
app.add_typer(data_app, name="data")
optim_app = typer.Typer(no_args_is_help=True, help="What optimizers cost.")
app.add_typer(optim_app, name="optim")

launch_app = typer.Typer(no_args_is_help=True, help="Train with several processes.")
app.add_typer(launch_app, name="launch")

maxtext_app = typer.Typer(no_args_is_help=True, help="MaxText's commands and checkpoints.")
app.add_typer(maxtext_app, name="maxtext")

app.command("train")(running.train)
app.command("sft")(tuning.sft)
app.command("dpo")(tuning.dpo)
app.command("grpo")(tuning.grpo)
app.command("ppo")(tuning.ppo)
app.command("generate")(running.generate)
app.command("chat")(serving.chat)
app.command("serve")(serving.serve)
app.command("predict-serving")(serving.predict)
app.command("import")(running.import_)
app.command("export")(running.export)
app.command("journey")(journey.journey)
app.command("quantize")(running.quantize)
app.command("eval")(running.evaluate)
app.command("parity")(running.parity)
app.command("goodput")(watching.goodput)
app.command("profile")(watching.profile)
app.command("watch")(watching.watch)
app.command("drill")(launching.drill)
app.command("compile")(reports.compile_)
app.command("plan")(reports.plan)
app.command("tune-options")(reports.tune_options)
app.command("roofline")(reports.roofline)
app.command("predict")(reports.predict)
app.command("shard")(reports.shard)
app.command("memory")(reports.memory_)
app.command("comms")(reports.comms)
app.command("quantized")(reports.quantized)
app.command("llo")(reports.llo)
app.command("tune")(reports.tune)
app.command("judge")(reports.judge)
config_app.command("show")(setup.config_show)
config_app.command("explain")(setup.config_explain)
config_app.command("presets")(setup.config_presets)
data_app.command("pack")(setup.data_pack)
data_app.command("preview")(tuning.preview)
optim_app.command("memory")(reports.optim_memory)
maxtext_app.command("explain")(bridge.explain)
maxtext_app.command("import")(bridge.import_)
maxtext_app.command("export")(bridge.export)
launch_app.command("local")(launching.local)
launch_app.command("slurm")(launching.slurm)
launch_app.command("xpk")(launching.xpk)
launch_app.command("k8s")(launching.k8s)
app.command("doctor")(setup.doctor)


# Typer's class for options and arguments that can't be read; it exports only a subclass.
UsageError: Any = typer.BadParameter.__base__


def main() -> None:
    """Runs the command line. A UserError, or words it can't read, become one line on stderr and an exit code."""
    import logging

    from minitext.distributed import job

    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("minitext").setLevel(logging.INFO)
    before = signal.signal(signal.SIGTERM, _stop)
    if isinstance(sys.stdout, io.TextIOWrapper):  # it may be closed, or have an encoding without é
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # By itself typer would draw a box around an error.
        code = app(prog_name="minitext", standalone_mode=False) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        sys.exit(code)
    except UsageError as error:
        if error.format_message():  # none where a command's help was printed, for want of words
            print(f"error: {_in_one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except typer.Abort:  # of Ctrl-C
        print("stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)
    except (UserError, PermissionError) as error:
        if isinstance(error, PermissionError):
            error = UserError(
                f"{error.filename}: {error.strerror}: name what you may use, or change who may"
            )
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        job.finish(error)
        sys.exit(error.exit_code)
    except BaseException as error:  # also of a command that is done
        job.finish(error)
        said = str(error).partition("\n")[0]
        if isinstance(error, RuntimeError) and said.startswith("Unable to initialize backend"):
            print(f"error: JAX: {said}", file=sys.stderr)  # of a platform that JAX_PLATFORMS names
            sys.exit(2)
        if isinstance(error, OSError) and error.filename is None and (lost := _lost_output()):
            # `head` and its like have read enough.
            if not isinstance(lost, BrokenPipeError):
                print(f"error: the output cannot be written ({lost.strerror})", file=sys.stderr)
            sys.exit(1)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _lost_output() -> OSError | None:
    """Returns why standard output takes no more, if it doesn't, and throws away what is left to write."""
    try:
        sys.stdout.flush()
        os.write(1, b"\n")  # what couldn't be written may be forgotten
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return error
    return None


def _stop(*_: object) -> None:
    """Ends the command on SIGTERM by way of its `finally` blocks; a training loop has `stopping.Stopper` instead."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # for the way out
    os.write(2, b"stopped by SIGTERM\n")
    sys.exit(128 + signal.SIGTERM)


def _in_one_line(error: Any) -> str:
    """Says what is wrong with a command's words, with the value, which typer leaves out, and where to look."""
    from pydantic import ValidationError

    said = error.format_message().rstrip(".")
    if isinstance(error.__cause__, ValidationError):
        problem = error.__cause__.errors()[0]
        said = f"{error.param.opts[0]} {problem['input']}: {rule_of(problem)}"
    said = " ".join(said.split()).rstrip(".")
    return f"{said}: see {error.ctx.command_path if error.ctx else 'minitext'} --help"
