"""TPU slices on Google Kubernetes Engine: the `xpk workload create` command.

xpk (https://github.com/AI-Hypercomputer/xpk) makes the JobSet. GKE sets TPU_WORKER_HOSTNAMES and, for several slices,
MEGASCALE_*, from which JAX finds the other processes.

Chapters: 21.
"""

import shlex
import shutil
import subprocess
from collections.abc import Sequence

from minitext.distributed.launch import PROGRAM
from minitext.errors import UserError

INSTALL = "pip install xpk"
GRACE_SECONDS = 120  # between SIGTERM and SIGKILL: for the last checkpoint


def command_line(
    command: Sequence[str],
    *,
    name: str,
    cluster: str,
    tpu_type: str,
    image: str,
    slices: int = 1,
    project: str | None = None,
    zone: str | None = None,
    restarts: int = 3,
    dry_run: bool = True,
) -> list[str]:
    """Returns the words of the command that starts `minitext COMMAND` on every host of the slices.

    Args:
      command: words after `minitext`.
      name: of the workload.
      cluster: GKE cluster.
      tpu_type: as xpk calls slices: v5litepod-256, v5p-128, v6e-64.
      image: container image with minitext installed.
      slices: TPU slices.
      project: Google Cloud project; None: gcloud's.
      zone: None: gcloud's.
      restarts: of the whole workload after a failure.
      dry_run: whether xpk shall only print what it would do.
    """
    words = [
        "xpk", "workload", "create",
        f"--workload={name}",
        f"--cluster={cluster}",
        f"--tpu-type={tpu_type}",
        f"--num-slices={slices}",
        f"--docker-image={image}",
        f"--max-restarts={restarts}",
        "--restart-on-user-code-failure",  # exit code 1, with which a job ends whose process was lost
        f"--termination-grace-period-seconds={GRACE_SECONDS}",
        f"--command={shlex.join([PROGRAM, *command])}",
    ]  # fmt: skip
    words += [f"--project={project}"] if project else []
    words += [f"--zone={zone}"] if zone else []
    return [*words, *(["--dry-run"] if dry_run else [])]


def is_installed() -> bool:
    """Returns whether xpk can be called here."""
    return shutil.which("xpk") is not None


def create(words: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
      UserError: if xpk is not installed.
    """
    if not is_installed():
        raise UserError(f"xpk is not installed: run {INSTALL}, then the command above")
    return subprocess.run(words).returncode
