"""A Kubernetes JobSet: pods that find each other by name, with GPUs or on CPUs.

The fields are those of the API jobset.x-k8s.io/v1alpha2 (https://jobset.sigs.k8s.io). For TPUs use xpk, which knows
the node labels of its clusters.

Chapters: 21.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from minitext.distributed.cluster import PORT
from minitext.distributed.launch import PROGRAM

GRACE_SECONDS = 120  # between SIGTERM and SIGKILL: for the last checkpoint
REFUSALS = [2, 3]  # exit codes that the same command would meet again
NEVER_AGAIN = {
    "name": "refused",
    "action": "FailJobSet",
    "onJobFailureReasons": ["PodFailurePolicy"],
}
JOB = "train"  # the name of the one replicated job
# What the variables that `cluster` reads come from: labels that JobSet puts on every pod.
LABELS = {
    "JOBSET_NAME": "jobset.sigs.k8s.io/jobset-name",
    "REPLICATED_JOB_NAME": "jobset.sigs.k8s.io/replicatedjob-name",
    "JOB_INDEX": "jobset.sigs.k8s.io/job-index",
}


def manifest(
    command: Sequence[str],
    *,
    name: str,
    image: str,
    processes: int,
    gpus: int = 0,
    claim: str | None = None,
    restarts: int = 3,
) -> dict[str, Any]:
    """Returns a JobSet that runs `minitext COMMAND` in every pod.

    A pod that fails fails the job, and the whole set is made anew: the run resumes.

    Args:
      command: words after `minitext`.
      name: of the JobSet.
      image: container image with minitext installed.
      processes: pods.
      gpus: of each pod; 0: none.
      claim: PersistentVolumeClaim that all pods mount at /runs, where the run's directory must be; None: no volume.
      restarts: of the whole set.
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
    # Kubernetes restarts nothing by itself: one new process would not be let into the old job.
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
    job = {
        "parallelism": processes,
        "completions": processes,
        "completionMode": "Indexed",  # gives every pod its JOB_COMPLETION_INDEX
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": REFUSALS}}]
        },
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": restarts, "rules": [NEVER_AGAIN]},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def to_yaml(content: dict[str, Any]) -> str:
    """Returns a manifest as kubectl reads it."""
    return yaml.safe_dump(content, sort_keys=False)
