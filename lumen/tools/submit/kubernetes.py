"""The PyTorchJob of Kubeflow's training operator, version 1, and a policy that lets only its own pods connect."""

from __future__ import annotations

from typing import Any

from lumen.cli.yaml_text import dump_yaml
from lumen.errors import ConfigError
from lumen.tools.submit.job import Job

_GRACE_S = 90


def text(job: Job) -> str:
    """The job: a pod a node, in each torchrun, which the operator's environment tells where the others are."""
    mounts, volumes = (
        [{"name": "shm", "mountPath": "/dev/shm"}],  # what data workers hand over lies there; 64 MB by default
        [dict[str, Any](name="shm", emptyDir={"medium": "Memory"})],
    )
    if job.volume is not None:
        mounts.append({"name": "runs", "mountPath": "/runs"})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": job.volume}})
    words = map(_literal, job.words)
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this one
        "image": job.image,
        "command": ["torchrun", f"--nproc-per-node={job.processes_per_node}", "--no-python", "lumen", *words],
        "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(_GRACE_S - 10)}],  # else torchrun kills earlier
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
    own = {"matchLabels": {"training.kubeflow.org/job-name": job.name}}  # which the operator gives to pods
    documents = [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": job.name},
            "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]},
        },
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job.name},
            "spec": {
                "runPolicy": policy,
                "elasticPolicy": elastic,
                "pytorchReplicaSpecs": {"Worker": workers},
            },
        },
    ]
    return "---\n".join(map(dump_yaml, documents))


def _literal(word: str) -> str:
    """A word in which Kubernetes replaces no `$(VARIABLE)`.

    Raises:
        ConfigError: The word has bytes that are no UTF-8.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in word):
        raise ConfigError(f"{word!r}: a job of Kubernetes is YAML, which holds UTF-8 alone. Rename what it names.")
    return word.replace("$", "$$")
