"""MONAI, PyTorch Geometric and pytorch-forecasting: exact resume, with workers, on two processes."""

import warnings
from functools import cache

import pytest
import torch

import lumen
import tests.helpers.torchvision_on_cpu  # noqa: F401
from lumen.errors import ConfigError
from tests.helpers.group import assert_equal
from tests.helpers.optimizer_state import read_unsharded_state
from tests.helpers.pages import find_programs, run_programs
from tests.helpers.tables import read_rows
from tests.helpers.tasks import quiet_trainer

with warnings.catch_warnings(action="ignore"):  # The libraries use deprecated parts of torch on import.
    import monai.networks.nets  # noqa: F401
    import pytorch_forecasting  # noqa: F401
    from torch_geometric.data import Data
    from torch_geometric.loader import NodeLoader
    from torch_geometric.nn import SAGEConv
    from torch_geometric.sampler import BaseSampler, SamplerOutput


PAGE = "docs/guides/libraries.md"


@cache
def read_page():
    """Return the names that the programs of the page define before their trainings."""
    names = {"__name__": "page"}
    for program in find_programs(PAGE):
        exec(program.partition("trainer = ")[0], names)
    return names


class TwoNeighbors(BaseSampler):
    """Draw two of six neighbors of each node, as NeighborLoader does, which needs the compiled package pyg-lib."""

    edge_permutation = None
    neighbors = torch.randint(40, (40, 6), generator=torch.Generator().manual_seed(0))

    def sample_from_nodes(self, inputs, **_):
        count = len(inputs.node)
        drawn = self.neighbors[inputs.node[:, None], torch.randint(6, (count, 2))].flatten().tolist()
        nodes = list(dict.fromkeys(inputs.node.tolist() + drawn))
        sources = torch.tensor([nodes.index(node) for node in drawn])
        targets = torch.arange(count).repeat_interleave(2)
        return SamplerOutput(torch.tensor(nodes), sources, targets, None, metadata=(inputs.input_id, None))

    def sample_from_edges(self, inputs, **_):
        raise NotImplementedError


class ClassifyNodes(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.convolution = SAGEConv(4, 2)

    def training_step(self, batch):
        logits = self.convolution(batch.x, batch.edge_index)[: batch.batch_size]
        return torch.nn.functional.cross_entropy(logits, batch.y[: batch.batch_size]), batch.batch_size

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def make_nodes(batch_size, workers):
    features = torch.randn(40, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = Data(x=features, edge_index=torch.zeros(2, 0, dtype=torch.int64), y=(features.sum(1) > 0).long())
    return ClassifyNodes(), NodeLoader(
        data, TwoNeighbors(), torch.arange(30), batch_size=batch_size, shuffle=True, num_workers=workers
    )


def make_scans(batch_size, workers):
    page = read_page()
    return (
        page["Segment"](),
        page["DataLoader"](
            page["train"],
            batch_size=batch_size,
            shuffle=True,
            collate_fn=page["list_data_collate"],
            num_workers=workers,
        ),
        page["DataLoader"](page["val"], batch_size=1),
    )


def make_graphs(batch_size, workers):
    page = read_page()
    return page["ClassifyGraphs"](), page["GraphLoader"](
        [graph.apply(torch.Tensor.double, "x") for graph in page["graphs"](30, seed=0)],
        batch_size=batch_size,
        shuffle=True,
        num_workers=workers,
    )


def make_forecasts(batch_size, workers):
    page = read_page()
    with warnings.catch_warnings(action="ignore"):  # The model advises how to save its own hyperparameters.
        task = page["Forecast"](page["past"])
    return (
        task,
        page["past"].to_dataloader(train=True, batch_size=batch_size, num_workers=workers),
        page["future"].to_dataloader(train=False),
    )


CASES = pytest.mark.parametrize("make", [make_scans, make_graphs, make_nodes, make_forecasts])


def train(make, folder, steps=6, batch_size=4, workers=0, **options):
    """Return the state of the task and the metrics of the validation after some steps."""
    read_page()  # draws random numbers
    torch.manual_seed(0)
    task, *loaders = make(batch_size, workers)
    trainer = quiet_trainer(folder, precision="fp64", max_epochs=3, max_steps=steps, resume="auto", **options)
    trainer.fit(task, *loaders)
    metrics = {name: value.numpy() for name, value in trainer.callback_metrics.items() if name != "loss"}
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()} | metrics


@pytest.mark.filterwarnings("ignore:Attribute '.*' is an instance of `nn.Module`:UserWarning")
def test_programs_of_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert list(run_programs(PAGE))
    for run, name in (("scans", "dice"), ("graphs", "val_acc"), ("forecast", "val_loss")):
        assert any(row[name] for row in read_rows(tmp_path / "runs" / run / "metrics.csv"))


@CASES
def test_library_resumes_exactly_with_workers(make, tmp_path):
    """A loader with an iterator of its own draws by worker, so its number of workers must stay."""
    whole = train(make, tmp_path / "whole", workers=int(make is make_nodes))
    for steps in (1, 3, 6):
        resumed = train(make, tmp_path / "resumed", steps, workers=1)
    assert_equal(resumed, whole, 0.0)


def train_on(make, strategy, batch_size, folder):
    return train(make, folder, 4, batch_size, global_batch_size=4, strategy=strategy)


@CASES
def test_library_trains_equally_on_two_processes(make, group, tmp_path):
    alone = train_on(make, "auto", 2, tmp_path / "alone")
    for each in group(2).run(train_on, make, "ddp", 2, tmp_path / "two"):
        assert_equal(each, alone, 1e-9)


def test_lightning_module_of_library_is_named(tmp_path):
    task, *loaders = make_forecasts(batch_size=4, workers=0)
    with pytest.raises(ConfigError, match=r"found TemporalFusionTransformer\. It is Lightning's: `lumen migrate`"):
        quiet_trainer(tmp_path).fit(task.model, *loaders)
