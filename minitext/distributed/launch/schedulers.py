"""What starts a job on a cluster: an sbatch script for SLURM, an xpk command for TPUs, a JobSet for Kubernetes.

xpk (https://github.com/AI-Hypercomputer/xpk) starts TPU slices on Google Kubernetes Engine. It knows the node labels of
its clusters and makes the JobSet, in which GKE sets the variables from which JAX finds the other processes. `jobset` is
for pods with GPUs or CPUs; its fields are those of jobset.x-k8s.io/v1alpha2 (https://jobset.sigs.k8s.io).

Each function takes the train command (words after `minitext`) and the options that `minitext launch --help` explains.

Chapters: 21.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from minitext.distributed.cluster import PORT
from minitext.errors import UserError

PROGRAM = "minitext"
GRACE_SECONDS = 120  # between SIGTERM and SIGKILL: for the last checkpoint
REFUSALS = [2, 3]  # exit codes that the same command would get again
# The variables that `cluster` reads are set from labels that JobSet puts on every pod.
LABELS = {
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
}


def slurm_script(
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
    """Returns an sbatch script that runs the command on every node, or once for every GPU.

    The processes get SIGTERM before their time is over. A job that fails goes back into the queue, and resumes.

    Raises:
      UserError: if sbatch wouldn't understand the time, or the processes can't share the GPUs of a node.
    """
    if not re.fullmatch(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", time):
        raise UserError(
            f"--time {time} is not a time: write hours:minutes:seconds, such as 24:00:00"
        )
    if processes_per_node not in (1, gpus_per_node or 1):
        raise UserError(
            f"--processes-per-node {processes_per_node} with --gpus-per-node {gpus_per_node}: start 1 process on a "
            "node, or one for each GPU"
        )
    gpus = f"#SBATCH --gpus-per-node={gpus_per_node}\n" if gpus_per_node else ""
    queue = f"#SBATCH --partition={partition}\n" if partition else ""
    refusals = "".join(map(str, REFUSALS))
    # When a process is lost the others say which: srun leaves them a minute for it.
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={processes_per_node}
{gpus}{queue}#SBATCH --time={time}
#SBATCH --signal=TERM@{GRACE_SECONDS}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
srun --label --kill-on-bad-exit=0 --wait=60 {shlex.join([PROGRAM, *command])}
code=$?
# 2 and 3 are refusals, which the same command would get again.
if [[ $code != [0{refusals}] && ${{SLURM_RESTART_COUNT:-0}} -lt {restarts} ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def submit(script: str) -> str:
    """Hands a script to sbatch and returns its answer.

    Raises:
      UserError: if there is no sbatch here, or it refuses.
    """
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no sbatch on this machine: run it on a login node of the cluster, or print the script without "
            "--submit"
        )
    done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"sbatch refused the script: {done.stderr.strip()}: fix the options it names"
        )
    return done.stdout.strip()


def xpk_command(
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
    """Returns the words of the `xpk workload create` that runs the command on every host of the slices."""
    return [
        "xpk", "workload", "create",
        f"--workload={name}",
        f"--cluster={cluster}",
        f"--tpu-type={tpu_type}",
        f"--num-slices={slices}",
        f"--docker-image={image}",
        f"--max-restarts={restarts}",
        "--restart-on-user-code-failure",  # exit code 1, with which a job ends that has lost a process
        f"--termination-grace-period-seconds={GRACE_SECONDS}",
        f"--command={shlex.join([PROGRAM, *command])}",
        *([f"--project={project}"] if project else []),
        *([f"--zone={zone}"] if zone else []),
        *(["--dry-run"] if dry_run else []),
    ]  # fmt: skip


def jobset(
    command: Sequence[str],
    *,
    name: str,
    image: str,
    processes: int,
    gpus: int = 0,
    claim: str | None = None,
    restarts: int = 3,
) -> dict[str, Any]:
    """Returns the manifest of a JobSet that runs the command in every pod.

    A pod that fails fails the job, and the whole set is created again: the run resumes.
    """
    env: list[dict[str, Any]] = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
        for variable, label in LABELS.items()
    ]
    env += [{"name": "PROCESSES_IN_JOB", "value": str(processes)}, {"name": "JOBS", "value": "1"}]
    container: dict[str, Any] = {
        "name": PROGRAM,
        "image": image,
        "command": [PROGRAM, *command],
        "env": env,
        "ports": [{"containerPort": PORT}],
    }
    # No pod restarts on its own: the other processes of the job wouldn't accept a new one.
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    if claim:
        container["volumeMounts"] = [{"name": "runs", "mountPath": "/runs"}]
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}]
    on_exit = {"operator": "In", "values": REFUSALS}
    job = {
        "parallelism": processes,
        "completions": processes,
        "completionMode": "Indexed",  # gives every pod its JOB_COMPLETION_INDEX
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_exit}]},
        "template": {"spec": pod},
    }
    refused = {
        "name": "refused",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": restarts, "rules": [refused]},
            "replicatedJobs": [{"name": "train", "replicas": 1, "template": {"spec": job}}],
        },
    }
