"""Starting one training command as several processes: here, or by SLURM, xpk or Kubernetes.

Every launcher runs the same `minitext train ...`; the processes find each other by `cluster.find_cluster`. What a
launcher adds is a name for the run, so that a restarted job resumes what it began.

Chapters: 21.
"""

import re
import sys
from collections.abc import Sequence

from minitext.errors import UserError

PROGRAM = "minitext"


def with_run_name(command: Sequence[str], name: str) -> list[str]:
    """Returns the command with `run.name=NAME`, unless it names its run or takes it from a configuration.

    Args:
      command: words after `minitext`, such as train laptop train.steps=300.
      name: of the run.

    Raises:
      UserError: if it is not the train command.
    """
    if not command or command[0] != "train":
        raise UserError(
            f"{' '.join(command) or 'nothing'} cannot be launched: put the train command after --, as in "
            "minitext launch local --processes 2 -- train laptop"
        )
    named = any(word.startswith(("run.name=", "config=")) for word in command)
    return [*command] if named else [*command, f"run.name={name}"]


def warn_of_loss(command: Sequence[str], shared: str | None, how: str) -> None:
    """Prints a line on stderr where a restart would not find the run: its directory is in the container.

    Args:
      command: words after `minitext`. One with `config=` is believed.
      shared: how the path of a directory begins that outlives the container and that all of them see; None: there is
        none.
      how: what to do about it.
    """
    settings = dict(word.split("=", 1) for word in command if "=" in word)
    where = settings.get("run.dir", "" if "config" in settings else "runs")
    found = shared is not None and f"{where.rstrip('/')}/".startswith(shared)
    if where and not found:
        print(
            f"note: run.dir={where} is in each container alone, so a restart begins anew: {how}",
            file=sys.stderr,
        )


def check_name(name: str) -> str:
    """Returns a job's name if Kubernetes, whose names are the strictest, takes it.

    Raises:
      UserError: if it doesn't.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--name {name}: use at most 40 small letters, digits and hyphens, beginning with a letter and ending "
            "with a letter or digit"
        )
    return name
