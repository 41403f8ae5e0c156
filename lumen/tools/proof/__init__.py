"""`lumen verify`, `diff` and `replay`: record the computations of steps, and compare two recordings."""

from lumen.cli.commands import Command

VERIFY = Command("Prove the promises of Lumen on your own task and data.", "lumen.tools.proof.verify", has_config=True)
DIFF = Command(
    "Compare two runs or configs: where their trainings part, down to the operator.", "lumen.tools.proof.diff"
)
REPLAY = Command("Make one step of a run again and compare it with what the run recorded.", "lumen.tools.proof.replay")
