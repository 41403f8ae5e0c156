"""Task whose predictions identify their samples."""

import json

import torch
from pyarrow.parquet import read_table
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import lumen
from tests.helpers.tasks import make_numbers


class Doubling(lumen.TaskModule):
    def predict_step(self, batch):
        return {"value": batch[0] * 2, "pair": torch.stack([batch[0], batch[0]], 1)}


def make_data(count=10, **options):
    return DataLoader(make_numbers(count), 3, **options)


def read_predictions(folder):
    """Return samples by index, from all existing files: (loader, index) with the prediction."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found += [((row["dataloader"], row["index"]), row["value"], row["pair"]) for row in rows]
        elif path.suffix == ".parquet":
            rows = read_table(path).to_pylist()
            found += [((int(path.name.split("-")[1]), row["index"]), row["value"], row["pair"]) for row in rows]
        else:
            tensors, loader = load_file(path), int(path.name.split("-")[1])
            rows = zip(*(tensors[name].tolist() for name in ("index", "value", "pair")), strict=True)
            found += [((loader, index), value, pair) for index, value, pair in rows]
    return found
