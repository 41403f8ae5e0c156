"""Strategy written by a user: tensor parallelism and FSDP2 on a mesh, compared with one process."""

import json
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

import lumen
from lumen.errors import ConfigError
from tests.helpers.sharded import unshard
from tests.helpers.tasks import FEATURES, quiet_trainer, regression_data

SAMPLES = 22  # the last step of an epoch has fewer samples than the other steps


class Steps(nn.Module):
    """Module that runs the steps of a task in its forward, which `fully_shard` needs."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def forward(self, step, *args):
        return getattr(self.task, step)(*args)


class Mesh(lumen.Strategy):
    """FSDP2 over `shard` groups of processes; each group splits the hidden layer by tensor parallelism."""

    spans_processes = True

    def __init__(self, shard, tensor):
        self.shape, self.root = (shard, tensor), None

    @property
    def data_rank(self):
        return self.device_mesh.get_local_rank("shard")

    @property
    def data_world_size(self):
        return self.shape[0]

    def connect(self):
        self.processes.connect(self.device)
        self.device_mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=("shard", "tensor"))
        self.processes.include(self.device_mesh.get_all_groups())

    def has_collectives_in(self, part):
        return True

    def setup(self, task):
        if self.root is not None:  # the prediction after the fit
            return
        plan = {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}
        parallelize_module(task, self.device_mesh["tensor"], plan, src_data_rank=None)
        self.root = Steps(task)
        fully_shard(self.root, mesh=self.device_mesh["shard"])

    def call(self, step, *args):
        return self.root(step, *args)

    @contextmanager
    def gradient_sync(self, *, last):
        self.root.set_requires_gradient_sync(last)
        yield

    def make_zero_loss(self):
        return None

    @contextmanager
    def evaluation(self, *, inference_mode):
        assert not inference_mode
        with super().evaluation(inference_mode=inference_mode):
            yield
        self.root.reshard()


class Weighted(lumen.TaskModule):
    """Task with parameters on both meshes and weights of samples, which logs values that depend on these weights."""

    def __init__(self, weighs):
        super().__init__()
        torch.manual_seed(0)
        hidden = [nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh()]
        self.net = nn.Sequential(*hidden, nn.Linear(4, 1)).double()
        self.weighs = weighs
        self.count = SumMetric()

    def training_step(self, batch):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("samples", float(len(inputs)), on_step=False, on_epoch=True, reduce_fx="sum")
        return (loss, float(targets.exp().sum())) if self.weighs else loss

    def validation_step(self, batch):
        inputs, targets = batch
        self.count.update(len(inputs))
        self.log("count", self.count)
        self.log("val_samples", float(len(inputs)), reduce_fx="sum")
        self.log("val_loss", nn.functional.mse_loss(self.net(inputs), targets))

    def predict_step(self, batch):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(shuffle):
    return DataLoader(TensorDataset(*regression_data(SAMPLES, torch.float64)), 2, shuffle=shuffle)


def train(folder, shape, weighs, max_steps):
    """Return parameters, logged values and predictions of a run that resumes if the folder has a checkpoint."""
    task, writer = Weighted(weighs), lumen.PredictionWriter(folder / f"predictions-{max_steps}", format="jsonl")
    trainer = quiet_trainer(
        folder, max_steps=max_steps, global_batch_size=8, gradient_clip_val=0.05, resume="auto", callbacks=[writer],
        strategy=Mesh(*shape) if shape else "auto",
    )  # fmt: skip
    trainer.fit(task, data(shuffle=True), data(shuffle=False))
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(task, data(shuffle=False))
    return torch.cat([unshard(each).flatten() for each in task.parameters()]), values, torch.cat(predictions)


def read_files(folder):
    lines = [line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda line: line["index"])


@pytest.mark.parametrize(
    ("shape", "weighs"), [((2, 2), True), ((1, 2), False)], ids=["2x2-by-weights", "1x2-by-samples"]
)
def test_a_mesh_trains_as_one_process(group, tmp_path, shape, weighs):
    weights, values, predictions = train(tmp_path / "one", None, weighs, 7)
    ranks = group(shape[0] * shape[1]).run(train, tmp_path / "mesh", shape, weighs, 7, limit_s=180)
    for theirs, their_values, their_predictions in ranks:
        torch.testing.assert_close(theirs, weights, rtol=0, atol=1e-11)
        torch.testing.assert_close(their_predictions, predictions, rtol=0, atol=1e-11)
        assert their_values.keys() == values.keys()
        assert their_values == pytest.approx(values, rel=1e-11)
        assert their_values["val_samples"] == their_values["count"] == SAMPLES
    assert [line["index"] for line in read_files(tmp_path / "mesh/predictions-7")] == [*range(SAMPLES)]
    # the resumed run reads the checkpoint of the other one, within an epoch
    ended = train(tmp_path / "mesh", None, weighs, 10)
    ranks = group(shape[0] * shape[1]).run(train, tmp_path / "one", shape, weighs, 10, limit_s=180)
    for theirs, their_values, _ in ranks:
        torch.testing.assert_close(theirs, ended[0], rtol=0, atol=1e-11)
        assert their_values == pytest.approx(ended[1], rel=1e-11)


class Uneven(Mesh):
    """Strategy that claims two parts of the data, although both processes read the first part."""

    data_rank, data_world_size = 0, 2


def catch_error(folder):
    with pytest.raises(ConfigError, match=r"data ranks of the 2 processes are \[0, 0\]"):
        quiet_trainer(folder, max_steps=1, strategy=Uneven(1, 2)).fit(Weighted(False), data(shuffle=True))


def test_uneven_data_ranks_are_refused(group, tmp_path):
    group(2).run(catch_error, tmp_path)
