"""`lumen verify`, `diff` and `replay`: record the computations of steps, and compare two recordings."""

from lumen.cli.commands import Command

VERIFY = Command(
    "Prove the promises of Lumen on your task and data.",
    "lumen.tools.proof.verify",
    has_config=True,
    example="lumen verify --config mine.yaml --steps 4",
)
DIFF = Command(
    "Compare two runs or configs: find their first difference, down to the operator.",
    "lumen.tools.proof.diff",
    example="lumen diff runs/mine runs/mine-2",
)
REPLAY = Command(
    "Repeat one step of a run, and compare the step with the record of the run.",
    "lumen.tools.proof.replay",
    example="lumen replay runs/mine --step 2",
)
