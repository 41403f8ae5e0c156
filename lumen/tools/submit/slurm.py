"""The batch script of SLURM."""

from __future__ import annotations

from lumen.tools.submit.job import Job, quoted

_NOTICE_S = 90
_LAST_S = 300  # what rank 0 may still write when others are done; also how long lost ranks may hold the nodes
_SCRIPT = """\
set -e
cd {directory}
{setup}# {notice} s before the time limit the processes get SIGUSR1: they finish their step, save, and leave with 75.
# When a job of higher priority needs the nodes, they get SIGTERM. After both the job is put back into the queue.
code=0
srun --kill-on-bad-exit=0 --wait={last} {command} || code=$?
if [ "$code" != 0 ] && scontrol show job "$SLURM_JOB_ID" | grep -q ' PreemptTime=[0-9]'; then
    code=75
fi
if [ "$code" = 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def text(job: Job) -> str:
    """The script: one process per task, which Lumen finds as SLURM describes it."""
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
    script = _SCRIPT.format(
        directory=quoted(job.directory),
        setup=f"{job.setup}\n" if job.setup else "",
        notice=_NOTICE_S,
        last=_LAST_S,
        command=quoted(job.python, "-P", "-m", "lumen", *job.words),
    )
    return "\n".join(["#!/bin/bash", *lines, "#SBATCH --requeue", script])
