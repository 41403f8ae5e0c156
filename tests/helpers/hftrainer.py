"""Run a script that assigns `trainer` and `model`, in float64, and record what its optimizer did.

`python -m tests.helpers.hftrainer SCRIPT RECORD` writes RECORD, a JSON file. The script may be written for
transformers' `Trainer` or for Lumen's.
"""

import csv
import json
import runpy
import sys

import torch


def record_updates():
    """Make AdamW record the options and the number of elements of each group, at each update."""
    updates, update = [], torch.optim.AdamW.step

    def step(self, *words, **options):
        updates.append([
            [group["lr"], group["weight_decay"], *group["betas"], group["eps"], sum(p.numel() for p in group["params"])]
            for group in self.param_groups
        ])  # fmt: skip
        return update(self, *words, **options)

    torch.optim.AdamW.step = step
    return updates


def read_values(trainer):
    """Return the logged values as a list of step, name and value."""
    if hasattr(trainer.state, "log_history"):
        rows = trainer.state.log_history
    else:
        with open(trainer.run_directory / "metrics.csv") as file:
            rows = list(csv.DictReader(file))
    names = ("loss", "eval_loss", "eval_accuracy", "eval_f1")
    return [[int(row["step"]), name, float(row[name])] for row in rows for name in names if row.get(name)]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    updates = record_updates()
    names = runpy.run_path(sys.argv[1], run_name="__main__")
    weights = {name: tensor.tolist() for name, tensor in names["model"].state_dict().items()}
    with open(sys.argv[2], "w") as file:
        json.dump({"updates": updates, "values": read_values(names["trainer"]), "weights": weights}, file)
