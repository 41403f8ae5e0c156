"""Exact evaluation: a sample counts once, for any number of processes and any division into batches.

Metrics and predictions of every partition are compared with one process, and one process with plain tensor code.
"""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.functional.classification import multiclass_auroc

import lumen
from tests.helpers.tasks import FEATURES, bare_trainer

CLASSES, BATCH = 3, 2
COUNTS = (1, 3, 10, 101)
TOLERANCE = 1e-11
AUROC_TOLERANCE = 1e-6  # torchmetrics computes it in float32


def make_data(count):
    """Return inputs (count, 6), classes (count) and numbers (count)."""
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (count,), generator=generator), torch.arange(count)


STRATEGIES = {"fsdp with stand-ins": lambda: lumen.FSDP(unshard_in_evaluation=False)}


class Samples(Dataset):
    def __init__(self, count):
        self.data = make_data(count)

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return tuple(part[index] for part in self.data)


class Stream(IterableDataset):
    """Stream of all samples, the same for every reader."""

    def __init__(self, count):
        self.data = Samples(count)

    def __iter__(self):
        return (self.data[index] for index in range(len(self.data)))


class Part(Stream):
    """Stream whose parts differ: rank 0 has every third sample more than the others."""

    shards_itself = True

    def __iter__(self):
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        owner = [0 if index % 3 == 0 else index % world for index in range(len(self.data))]
        return (self.data[index] for index in range(len(self.data)) if owner[index] == rank)


KINDS = {"map-style": Samples, "iterable": Stream, "in parts": Part}


def make_loader(kind, count):
    return DataLoader(KINDS[kind](count), BATCH)


class Classifier(lumen.TaskModule):
    """Task with every kind of evaluation result: logged numbers, torchmetrics, random numbers, predictions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.5)).double()
        self.head = nn.Linear(8, CLASSES).double()
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.auroc = MulticlassAUROC(CLASSES)
        self.computed = MulticlassAUROC(CLASSES)

    def forward(self, inputs):
        return self.head(self.body(inputs))

    def training_step(self, batch):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, classes, _ = batch
        scores = self(inputs)
        self.log("loss", nn.functional.cross_entropy(scores, classes))
        self.log("right", (scores.argmax(1) == classes).double().mean())
        self.log("last", float(batch_idx), reduce_fx="max")
        self.log("noise", torch.rand(()), reduce_fx="sum")
        self.accuracy.update(scores, classes)
        self.auroc.update(scores.softmax(1), classes)
        self.computed.update(scores.softmax(1), classes)
        self.log("accuracy", self.accuracy)
        self.log("auroc", self.auroc)

    def on_validation_epoch_end(self):
        self.log("computed", self.computed.compute())
        self.computed.reset()

    def test_step(self, batch, batch_idx):
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self):
        self.on_validation_epoch_end()

    def predict_step(self, batch):
        return {"scores": self(batch[0]), "number": batch[2], "noise": torch.rand(len(batch[0]))}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def training_loader():
    inputs, classes, _ = make_data(50)
    return DataLoader(TensorDataset(inputs, classes), 4, shuffle=True)


def evaluate(folder, kind, count, strategy):
    """Return the results of validate, test, predict and a validation within fit."""
    warnings.filterwarnings("ignore", "No (positive|negative) samples")  # of one class, among few samples

    def trainer(**options):
        chosen = STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
        return bare_trainer(folder, strategy=chosen, num_sanity_val_steps=0, **options)

    found = {
        "validate": trainer().validate(Classifier(), make_loader(kind, count))[0],
        "test": trainer().test(Classifier(), make_loader(kind, count))[0],
        "predict": join_batches(trainer().predict(Classifier(), make_loader(kind, count))),
    }
    fitting = trainer(max_steps=3, global_batch_size=12, val_check_interval=3)
    fitting.fit(Classifier(), training_loader(), val_dataloaders=make_loader(kind, count))
    found["fit"] = {name: fitting.newest_values[name] for name in found["validate"]}
    two = trainer().predict(Classifier(), [make_loader(kind, count), make_loader(kind, 3)])
    found["two loaders"] = join_batches(two[0]) | {
        f"{name} of the second": part for name, part in join_batches(two[1]).items()
    }
    return found


def join_batches(batches):
    return {name: torch.cat([batch[name] for batch in batches]).tolist() for name in batches[0]}


def evaluate_all(folder, cases, strategy):
    return {case: evaluate(folder, *case, strategy) for case in cases}


def compare(found, alone, *, in_parts):
    """Assert that two results of `evaluate` are equal; self-sharded parts have different batches."""
    for stage, values in alone.items():
        assert set(found[stage]) == set(values)
        for name, value in values.items():
            ours = found[stage][name]
            if in_parts and name.startswith(("noise", "last")):
                continue
            if in_parts and isinstance(value, list):
                ours = sort_by_number(ours, found[stage][f"number{' of the second' * name.endswith('second')}"])
            difference = (
                (torch.tensor(ours, dtype=torch.float64) - torch.tensor(value, dtype=torch.float64)).abs().max()
            )
            tolerance = AUROC_TOLERANCE if name in ("auroc", "computed") else TOLERANCE
            assert difference <= tolerance, f"{name} of {stage} differs by {difference}"


def sort_by_number(values, numbers):
    assert sorted(numbers) == list(range(len(numbers)))
    return [value for _, value in sorted(zip(numbers, values, strict=True))]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function of a kind of data and a number of samples, which returns what one process computes."""
    return functools.cache(functools.partial(evaluate, tmp_path_factory.mktemp("alone"), strategy="single"))


def check(group, alone, folder, world, strategy, cases):
    for found in group(world).run(evaluate_all, folder, cases, strategy):
        for kind, count in cases:
            expected = alone(kind="map-style" if kind == "in parts" else kind, count=count)
            compare(found[kind, count], expected, in_parts=kind == "in parts")


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", ["map-style", "iterable"])
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
def test_one_process_gives_what_plain_code_gives(alone, kind, count):
    inputs, classes, numbers = make_data(count)
    task = Classifier().eval()
    with torch.no_grad():
        scores = task(inputs)
    expected = {
        "loss": nn.functional.cross_entropy(scores, classes),
        "right": (scores.argmax(1) == classes).double().mean(),
        "accuracy": (scores.argmax(1) == classes).double().mean(),
        "auroc": multiclass_auroc(scores.softmax(1), classes, CLASSES),
        "last": (count - 1) // BATCH,
    }
    found = alone(kind=kind, count=count)
    for name, value in expected.items():
        for stage in ("validate", "test"):
            assert found[stage][name] == pytest.approx(float(value), abs=1e-7)
    assert found["predict"]["number"] == numbers.tolist()
    assert (torch.tensor(found["predict"]["scores"], dtype=torch.float64) - scores).abs().max() < 1e-15


FEW = [("map-style", 1), ("map-style", 10), ("iterable", 3), ("in parts", 10)]
ALL = [(kind, count) for kind in KINDS for count in COUNTS]


@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        pytest.param("ddp", 2, marks=pytest.mark.everyday),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("fsdp", 2, marks=pytest.mark.everyday),
        ("fsdp with stand-ins", 2),
    ],
)
def test_processes_evaluate_as_one_does(group, alone, tmp_path, strategy, world):
    check(group, alone, tmp_path, world, strategy, FEW)


#: Every pair of a strategy, a number of processes and a kind of data, but not every combination of the three.
COVERING = [
    (strategy, world, [*KINDS][(world + place) % len(KINDS)])
    for place, strategy in enumerate(["ddp", "fsdp", "fsdp with stand-ins"])
    for world in (1, 2, 3, 4)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:No (positive|negative) samples")
@pytest.mark.parametrize(("strategy", "world", "kind"), COVERING)
def test_evaluation_on_ranks_equals_single_process(group, alone, tmp_path, strategy, world, kind):
    check(group, alone, tmp_path, world, strategy, [case for case in ALL if case[0] == kind])
