"""A SLURM job: the sbatch script that starts one process on each node, or on each GPU.

Chapters: 21.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence

from minitext.distributed.launch import PROGRAM
from minitext.errors import UserError

GRACE_SECONDS = 120  # between SIGTERM and the end of the job's time: for the last checkpoint


def script(
    command: Sequence[str],
    *,
    name: str,
    nodes: int,
    processes_per_node: int = 1,
    gpus_per_node: int = 0,
    time: str = "24:00:00",
    partition: str | None = None,
    restarts: int = 3,
) -> str:
    """Returns the text of an sbatch script that runs `minitext COMMAND` on every node.

    The steps get SIGTERM before their time is over. A job that fails goes back into the queue, and resumes.

    Args:
      command: words after `minitext`.
      name: of the job.
      nodes: machines.
      processes_per_node: 1, or as many as GPUs: then each process takes one.
      gpus_per_node: GPUs to ask for; 0: none.
      time: limit, as sbatch takes it.
      partition: of the cluster; None: its default.
      restarts: how often the job goes back into the queue after a failure.

    Raises:
      UserError: if the time is none of sbatch's forms, or processes cannot share the GPUs of a node.
    """
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", time):
        raise UserError(f"--time {time} is no time: write hours:minutes:seconds, such as 24:00:00")
    if processes_per_node not in (1, gpus_per_node or 1):
        raise UserError(
            f"--processes-per-node {processes_per_node} with --gpus-per-node {gpus_per_node}: start 1 process on a "
            "node, or one for each GPU"
        )
    lines = [
        f"--job-name={name}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={processes_per_node}",
        *([f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []),
        *([f"--partition={partition}"] if partition else []),
        f"--time={time}",
        f"--signal=TERM@{GRACE_SECONDS}",
        "--requeue",
        "--open-mode=append",
        "--output=%x-%j.log",
    ]
    # A process that is lost is told of by the others: srun leaves them a minute for it.
    srun = f"srun --label --kill-on-bad-exit=0 --wait=60 {shlex.join([PROGRAM, *command])}"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            srun,
            "code=$?",
            "# 2 and 3 are refusals, which the same command would meet again.",
            f"if [[ $code != [023] && ${{SLURM_RESTART_COUNT:-0}} -lt {restarts} ]]; then",
            '  scontrol requeue "$SLURM_JOB_ID"',
            "fi",
            "exit $code",
            "",
        ]
    )


def submit(text: str) -> str:
    """Hands a script to sbatch and returns what it answers.

    Raises:
      UserError: if there is no sbatch here, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on this machine: run it on a login node of the cluster, or print the script without "
            "--submit"
        )
    done = subprocess.run(["sbatch"], input=text, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"sbatch refused the script: {done.stderr.strip()}: mend the options it names"
        )
    return done.stdout.strip()
