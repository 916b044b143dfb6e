"""Starting one training command as several processes: on this machine, or through SLURM, xpk or Kubernetes.

Every launcher runs the same `minitext train ...`, whose processes find each other with `cluster.find_cluster`. What
a launcher adds is a name for the run, so that a restarted job resumes it.

Chapters: 21.
"""

import re
import sys
from collections.abc import Sequence

from minitext.errors import UserError
from minitext.files import ADDRESS, local_path, shorten


def with_run_name(command: Sequence[str], name: str) -> list[str]:
    """Returns the command with `run.name=NAME`, unless it names its run or takes it from a configuration.

    Args:
      command: words after `minitext`, such as train laptop train.steps=300.
      name: of the run.

    Raises:
      UserError: if it isn't the train command, or names a bucket's address.
    """
    if not command or command[0] != "train":
        what = f"{command[0]} cannot be launched" if command else "there is nothing to launch"
        raise UserError(
            f"{what}: put the train command after --, as in "
            "minitext launch local --processes 2 -- train laptop"
        )
    for word in command:
        if ADDRESS.match(value := word.partition("=")[2]):
            local_path(value)
    named = any(word.startswith(("run.name=", "config=")) for word in command)
    return [*command] if named else [*command, f"run.name={name}"]


def warn_of_loss(command: Sequence[str], shared: str | None, fix: str) -> None:
    """Prints a note on stderr if a restart wouldn't find the run, because its directory is inside the container.

    Args:
      command: words after `minitext`. One with `config=` is trusted.
      shared: prefix of the directories that all containers share and that outlive them; None: there are none.
      fix: what to do about it.
    """
    settings = dict(word.split("=", 1) for word in command if "=" in word)
    where = settings.get("run.dir", "" if "config" in settings else "runs")
    found = shared is not None and f"{where.rstrip('/')}/".startswith(shared)
    if where and not found:
        print(
            f"note: run.dir={where} is inside each container, so a restart begins again from step 0: {fix}",
            file=sys.stderr,
        )


def check_name(name: str) -> str:
    """Returns a job's name if Kubernetes, which is the strictest about names, accepts it.

    Raises:
      UserError: if it doesn't.
    """
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise UserError(
            f"--name {shorten(name)}: use at most 40 lowercase letters, digits and hyphens, beginning with a letter "
            "and ending with a letter or digit"
        )
    return name
