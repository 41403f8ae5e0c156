"""Helpers for resumed runs."""

import torch

from lumen.checkpoint import find_checkpoints
from tests.helpers.tasks import Regression, loader, quiet_trainer


class Expanded(Regression):
    """Task with buffers that show one number, or one column, several times; and one that is a view of another."""

    def __init__(self, **options):
        super().__init__(**options | {"dtype": torch.float64})
        self.register_buffer("wide", torch.full((1,), 2.0).expand(4))
        self.register_buffer("rows", torch.arange(3.0).reshape(3, 1).expand(3, 5))
        self.register_buffer("part", self.rows[:, :2])
        self.register_buffer("unknown", torch.full((), torch.nan).expand(2))

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            return None
        with torch.no_grad():
            self.rows[:, 0] += 1
        return super().training_step(batch) * self.part.mean()


def fit_expanded(folder, strategy="auto"):
    """Train a run in two parts and an uninterrupted one."""
    ends = []
    for name, cuts in (("whole", (9,)), ("parts", (4, 9))):
        for max_steps in cuts:
            task = Expanded()
            options = {"max_steps": max_steps, "resume": "auto", "strategy": strategy}
            quiet_trainer(folder / name, **options).fit(task, loader(dtype=torch.float64))
        ends.append({key: value.tolist() for key, value in task.state_dict().items() if key != "unknown"})
        assert strategy == "fsdp" or task.rows.stride() == task.part.stride() == (1, 0)
    assert ends[0] == ends[1]
    assert ends[0]["rows"][0][0] > 2


def find_newest(tmp_path, name="run"):
    return find_checkpoints(tmp_path / "runs" / name / "checkpoints")[-1]
