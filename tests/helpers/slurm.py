"""SLURM of one node on this host, for the time of a test: the real daemons, with temporary files."""

import os
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager

from tests.helpers.jobs import find_free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
WHY_NOT = None if all(map(shutil.which, NEEDED)) and os.getuid() == 0 else "needs root and Debian's slurm-wlm, munge"
_CONF = """\
ClusterName=lumen
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=30
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
NodeName={host} CPUs={cpus} State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes={host} PriorityTier=9 PreemptMode=OFF State=UP
"""


@contextmanager
def start_cluster(folder):
    """Start the daemons; yield the environment in which SLURM's programs find them."""
    folder.mkdir(mode=0o755)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host, cpus = socket.gethostname().split(".")[0], os.cpu_count()
    (folder / "slurm.conf").write_text(
        _CONF.format(host=host, folder=folder, cpus=cpus, ports=[find_free_port(), find_free_port()])
    )
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
    commands = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
         *(f"--{name if name in ('socket',) else f'{name}-file'}={path}" for name, path in files.items())],
        ["slurmctld", "-D"],
        ["slurmd", "-D"],
    ]  # fmt: skip
    daemons = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("w") as said:
                daemons.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
            wait_until(lambda: files["socket"].exists(), "munged's socket")
        wait_until(lambda: "idle" in run_program(environment, "sinfo", "--noheader", "--format=%T"), "an idle node")
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, check=False)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def run_program(environment, *command):
    """Return the output of a program of SLURM."""
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout


def wait_until(is_so, what, most_s=180):
    """Wait until a condition holds."""
    end_s = time.monotonic() + most_s
    while not is_so():
        assert time.monotonic() < end_s, f"no {what} in {most_s} s"
        time.sleep(0.2)
