"""The task of SkyPilot."""

from __future__ import annotations

from typing import Any

from lumen.cli.yaml_text import dump_yaml
from lumen.tools.submit.job import Job, quoted


def text(job: Job) -> str:
    """The task, a managed job: where a machine is taken away, another one goes on with it."""
    resources: dict[str, Any] = {"job_recovery": {"max_restarts_on_errors": job.restarts}}
    if job.gpus_per_node:
        resources["accelerators"] = f"{job.gpu}:{job.gpus_per_node}"
    if job.image is not None:
        resources["image_id"] = f"docker:{job.image}"
    run = (
        f'torchrun --nnodes="$SKYPILOT_NUM_NODES" --nproc-per-node={job.processes_per_node} \\\n'
        f"  --max-restarts={job.restarts} --rdzv-backend=c10d \\\n"
        '  --rdzv-endpoint="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):29400" \\\n'
        f"  --no-python {quoted('lumen', *job.words)}\n"
    )
    task: dict[str, Any] = {"name": job.name, "workdir": ".", "num_nodes": job.nodes, "resources": resources}
    if job.setup is not None:
        task["setup"] = f"{job.setup}\n"
    return f"{dump_yaml(task)}run: |\n{''.join(f'  {line}' for line in run.splitlines(keepends=True))}"
