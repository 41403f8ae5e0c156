"""Job files of each engine: SLURM's script, Ray's program, the resources of Kubernetes, SkyPilot's task."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, final

from lumen.cli.yaml_text import dump_yaml
from lumen.errors import ConfigError


def quote_words(*words: str) -> str:
    """Return words quoted for bash. The result is printable and has one line, regardless of the words' bytes."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escape_word(word)}'" for word in words)


def _escape_word(word: str) -> str:
    found = word.encode("utf-8", "surrogateescape")
    return "".join(f"\\{byte:03o}" if byte in b"\\'" or not 32 <= byte < 127 else chr(byte) for byte in found)


@final
@dataclass(frozen=True)
class Job:
    """Description of a job, independent of the engine.

    Attributes:
        name: The job's name in the engine: at most 50 lowercase letters, digits and inner hyphens.
        words: The command of Lumen and its arguments, such as `fit --config run.yaml`.
        nodes: Number of nodes, >= 1.
        gpus_per_node: Number of GPUs on each node, >= 0.
        processes_per_node: Number of processes on each node, >= 1.
        restarts: Number of restarts by the engine after failures, >= 0.
        python: The Python interpreter, for engines whose nodes share this machine's files.
        directory: The working directory, for engines whose nodes share this machine's files.
        gpu: Kind of GPU, or None.
        time: Time limit as `HH:MM:SS`, or None.
        partition: SLURM partition, or None.
        account: SLURM account, or None.
        image: Container image, or None.
        volume: Kubernetes volume claim to mount at `/runs`, or None.
        setup: Shell command to run first, or None.
    """

    name: str
    words: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    processes_per_node: int
    restarts: int
    python: str
    directory: str
    gpu: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    volume: str | None = None
    setup: str | None = None

    @property
    def seconds(self) -> int | None:
        """Time limit in seconds, or None."""
        if self.time is None:
            return None
        hours, minutes, seconds = map(int, self.time.split(":"))
        return hours * 3600 + minutes * 60 + seconds


_NOTICE_S = 90
_WAIT_S = 300  # time for rank 0 to finish writing after the other ranks; lost ranks hold the nodes as long
_SCRIPT = """\
set -e
cd {directory}
{setup}# {notice} s before the time limit, the processes get SIGUSR1: they finish the step, save, and exit with code 75.
# If a job of higher priority needs the nodes, the processes get SIGTERM. After both signals the job is requeued.
code=0
srun --kill-on-bad-exit=0 --wait={wait} {command} || code=$?
if [ "$code" != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; then
    code=75
fi
if [ "$code" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def make_slurm_script(job: Job) -> str:
    """Return the batch script: one process per SLURM task. Lumen reads ranks from SLURM's environment."""
    gpus = f"{job.gpu}:{job.gpus_per_node}" if job.gpu else job.gpus_per_node
    options = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.processes_per_node,
        "gpus-per-node": gpus if job.gpus_per_node else None,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": f"{job.name}-%j.log",
        "open-mode": "append",
        "signal": f"USR1@{_NOTICE_S}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    setup, words = f"{job.setup}\n" if job.setup else "", quote_words(job.python, "-P", "-m", "lumen", *job.words)
    fields = {"directory": quote_words(job.directory), "setup": setup, "command": words}
    script = _SCRIPT.format(notice=_NOTICE_S, wait=_WAIT_S, **fields)
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue", script])


_PROGRAM = '''\
"""Runs a command of Lumen on Ray."""

import os

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

DIRECTORY = {directory!r}  # must exist on every node
COMMAND = {words!r}


def train():
    from lumen.cli import main

    os.chdir(DIRECTORY)
    if code := main(COMMAND):  # `main` has printed the error
        raise RuntimeError(f"lumen ended with exit code {{code}}")


if __name__ == "__main__":
    TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers={workers}, {devices}),
        run_config=RunConfig(
            name={name!r}, storage_path=os.path.join(DIRECTORY, "ray"), failure_config=FailureConfig({restarts})
        ),
    ).fit()
'''


def make_ray_program(job: Job) -> str:
    """Return the Ray program: one Ray worker per process. Lumen uses the process group of Ray."""
    devices = f"use_gpu={job.gpus_per_node > 0}"
    if job.gpu is not None:
        devices += f", accelerator_type={job.gpu!r}"
    fields = vars(job) | {"words": list(job.words), "devices": devices}
    return _PROGRAM.format(workers=job.nodes * job.processes_per_node, **fields)


_GRACE_S = 90


def make_kubernetes_job(job: Job) -> str:
    """Return the Kubernetes resources: torchrun in one pod per node. The operator's environment configures torchrun."""
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]  # for tensors of dataloader workers; the default is 64 MB
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if job.volume is not None:
        mounts.append({"name": "runs", "mountPath": "/runs"})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": job.volume}})
    words = map(_escape_variables, job.words)
    container: dict[str, Any] = {
        "name": "pytorch",  # The operator requires this name.
        "image": job.image,
        "command": ["torchrun", f"--nproc-per-node={job.processes_per_node}", "--no-python", "lumen", *words],
        "env": [
            {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(_GRACE_S - 10)}
        ],  # By default, torchrun kills earlier.
        "volumeMounts": mounts,
    }
    if job.gpus_per_node:
        container["resources"] = {"limits": {"nvidia.com/gpu": job.gpus_per_node}}
    pod: dict[str, Any] = {"terminationGracePeriodSeconds": _GRACE_S, "containers": [container], "volumes": volumes}
    if job.gpu is not None:
        pod["nodeSelector"] = {"nvidia.com/gpu.product": job.gpu}
    policy = {"cleanPodPolicy": "None", "backoffLimit": job.restarts}
    if job.seconds is not None:
        policy["activeDeadlineSeconds"] = job.seconds
    elastic = {
        "rdzvBackend": "c10d", "minReplicas": job.nodes, "maxReplicas": job.nodes, "maxRestarts": job.restarts,
    }  # fmt: skip
    workers = {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    pods = {"matchLabels": {"training.kubeflow.org/job-name": job.name}}  # The operator gives this label to pods.
    access = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}
    training = {"runPolicy": policy, "elasticPolicy": elastic, "pytorchReplicaSpecs": {"Worker": workers}}
    documents = [("networking.k8s.io/v1", "NetworkPolicy", access), ("kubeflow.org/v1", "PyTorchJob", training)]
    return "---\n".join(
        dump_yaml({"apiVersion": version, "kind": kind, "metadata": {"name": job.name}, "spec": spec})
        for version, kind, spec in documents
    )


def _escape_variables(word: str) -> str:
    """Return a word escaped so that Kubernetes replaces no `$(VARIABLE)`.

    Raises:
        ConfigError: The word has bytes that are not UTF-8.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in word):
        raise ConfigError(f"{word!r}: a Kubernetes job is YAML and must be UTF-8. Rename the file.")
    return word.replace("$", "$$")


def make_skypilot_task(job: Job) -> str:
    """Return the SkyPilot task, for a managed job: SkyPilot restarts the job on a new machine after preemption."""
    resources: dict[str, Any] = {"job_recovery": {"max_restarts_on_errors": job.restarts}}
    if job.gpus_per_node:
        resources["accelerators"] = f"{job.gpu}:{job.gpus_per_node}"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    run = (
        f'torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node={job.processes_per_node} \\\n'
        f"  --max-restarts={job.restarts} --rdzv-backend=c10d \\\n"
        '  --rdzv-endpoint="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):29400" \\\n'
        f"  --no-python {quote_words('lumen', *job.words)}\n"
    )
    task: dict[str, Any] = {"name": job.name, "workdir": ".", "num_nodes": job.nodes, "resources": resources}
    if job.setup is not None:
        task["setup"] = f"{job.setup}\n"
    return f"{dump_yaml(task)}run: |\n{''.join(f'  {line}' for line in run.splitlines(keepends=True))}"
