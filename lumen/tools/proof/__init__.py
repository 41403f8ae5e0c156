"""Where two trainings part, and whether the promises hold on a task: what a step computes is recorded, and compared."""

from lumen.cli.commands import Command

VERIFY = Command("Prove the promises of Lumen on your own task and data.", "lumen.tools.proof.verify", has_config=True)
DIFF = Command(
    "Compare two runs or configs: where their trainings part, down to the operator.", "lumen.tools.proof.diff"
)
REPLAY = Command("Make one step of a run again and compare it with what the run recorded.", "lumen.tools.proof.replay")
