"""Predictions: each process writes its own, each sample once with its index, and memory need not hold them."""

import re
import sys
from pathlib import Path

import pytest
import torch
from pyarrow.parquet import ParquetFile, read_table
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import lumen
from lumen.cli import main
from lumen.errors import ConfigError, DataError
from tests.helpers.predictions import Doubling, make_data, read_predictions
from tests.helpers.tasks import Regression, bare_trainer, loader, make_numbers
from tests.helpers.working_directory import LINE

CONFIG = LINE


def predict(tmp_path, writer, loaders=None, task=None, **options):
    trainer = bare_trainer(tmp_path, callbacks=[writer])
    return trainer.predict(task or Doubling(), make_data() if loaders is None else loaders, **options)


@pytest.mark.parametrize("form", ["safetensors", "jsonl", "parquet"])
def test_each_sample_is_written_once_with_its_index(tmp_path, form):
    writer = lumen.PredictionWriter(tmp_path / "out", form)
    assert predict(tmp_path, writer, return_predictions=False) is None
    assert read_predictions(tmp_path / "out") == [((0, number), 2 * number, [number] * 2) for number in range(10)]
    assert len(list((tmp_path / "out").iterdir())) == (4 if form == "safetensors" else 1)


def test_several_loaders_and_samplers_tell_their_own_indices(tmp_path):
    torch.manual_seed(0)
    sampled = DataLoader(make_numbers(10), 3, sampler=WeightedRandomSampler([1.0] * 10, 6))
    predict(tmp_path, lumen.PredictionWriter(tmp_path / "out"), [make_data(4), sampled])
    found = read_predictions(tmp_path / "out")
    assert [place for place, *_ in found[:4]] == [(0, number) for number in range(4)]
    assert all(value == 2 * index and loader == 1 for (loader, index), value, _ in found[4:])
    assert len(found) == 10


def test_predictions_that_are_not_wanted_are_not_kept(tmp_path):
    class Watching(lumen.Callback):
        def on_predict_end(self, trainer, task):
            self.kept = [len(each) for each in trainer._run.values.predictions]

    watching = Watching()
    trainer = bare_trainer(tmp_path, callbacks=[watching])
    assert trainer.predict(Doubling(), make_data(), return_predictions=False) is None
    assert watching.kept == []
    assert trainer.predict(Doubling(), make_data())[0]["value"].tolist() == [0, 2, 4]


def test_a_writer_of_ones_own_gets_lightnings_arguments(tmp_path):
    class Own(lumen.BasePredictionWriter):
        def __init__(self):
            super().__init__("batch_and_epoch")
            self.batches, self.epochs = [], []

        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            self.batches.append((prediction["value"].tolist(), batch_indices, batch_idx, dataloader_idx))

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.epochs.append(([[each["value"].tolist() for each in one] for one in predictions], batch_indices))

    own = Own()
    predict(tmp_path, own, [make_data(4), make_data(2)])
    assert own.batches == [([0, 2, 4], [0, 1, 2], 0, 0), ([6], [3], 1, 0), ([0, 2], [0, 1], 0, 1)]
    assert own.epochs == [([[[0, 2, 4], [6]], [[0, 2]]], [[[0, 1, 2], [3]], [[0, 1]]])]


@pytest.mark.parametrize(("interval", "method"), [("batch", "write_on_batch_end"), ("epoch", "write_on_epoch_end")])
def test_writer_without_its_method_raises(tmp_path, interval, method):
    class Half(lumen.BasePredictionWriter):
        pass

    with pytest.raises(ConfigError, match=f"Half: write_interval='{interval}' needs {method}, which the class"):
        bare_trainer(tmp_path, callbacks=[Half(interval)]).predict(Regression(), loader())


def test_predictions_of_one_loader_are_a_flat_list(tmp_path):
    class Own(lumen.BasePredictionWriter):
        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.given = [each["value"].tolist() for each in predictions], batch_indices

    own = Own("epoch")
    predict(tmp_path, own, make_data(4))
    assert own.given == ([[0, 2, 4], [6]], [[[0, 1, 2], [3]]])


def test_of_a_stream_nobody_knows_the_indices(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from (torch.tensor([number]) for number in range(5))

    class Plain(lumen.TaskModule):
        def predict_step(self, batch):
            return batch[:, 0]

    out = tmp_path / "out"
    predict(tmp_path, lumen.PredictionWriter(out, "jsonl"), DataLoader(Stream(), 2), Plain())
    assert (out / "predictions-rank-0.jsonl").read_text().splitlines()[0] == (
        '{"index": null, "dataloader": 0, "prediction": 0}'
    )


class Shaped(lumen.TaskModule):
    """Task with predictions of many dtypes and dimensions; the length of one differs in each batch."""

    def predict_step(self, batch):
        value = batch[0].float().reshape(-1, 1, 1)
        longest = int(value.max()) + 1
        return {
            "half": value[:, 0, 0].bfloat16(),
            "is_odd": batch[0] % 2 == 1,
            "ragged": (value * torch.ones(2, longest)).double(),
        }


def test_parquet_keeps_dtypes_and_shapes(tmp_path):
    predict(tmp_path, lumen.PredictionWriter(tmp_path / "out", "parquet"), [make_data(7), make_data(2)], Shaped())
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "predictions-0-rank-0.parquet", "predictions-1-rank-0.parquet",
    ]  # fmt: skip
    found = read_table(tmp_path / "out" / "predictions-0-rank-0.parquet")
    types = {field.name: str(field.type) for field in found.schema}
    assert types == {
        "index": "int64", "half": "float", "is_odd": "bool", "ragged": "list<element: list<element: double>>",
    }  # fmt: skip
    lengths = [3, 3, 3, 6, 6, 6, 7]
    assert found.to_pylist() == [
        {"index": number, "half": number, "is_odd": number % 2 == 1, "ragged": [[number] * lengths[number]] * 2}
        for number in range(7)
    ]


def test_parquet_groups_many_rows(tmp_path):
    loader = DataLoader(make_numbers(40_000), 1000)
    predict(tmp_path, lumen.PredictionWriter(tmp_path / "out", "parquet"), loader, Doubling(), return_predictions=False)
    file = ParquetFile(tmp_path / "out" / "predictions-0-rank-0.parquet")
    assert 2 <= file.num_row_groups <= 4
    assert file.read(["index"]).column("index").to_pylist() == list(range(40_000))


class Changing(lumen.TaskModule):
    def predict_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("no more")
        return {"value": batch[0]} if batch_idx < 2 else {"other": batch[0]}


def test_incomplete_prediction_file_is_not_left(tmp_path):
    with pytest.raises(DataError, match=r"has the columns index \(int64\), value \(int64\), but a batch has .*other"):
        predict(tmp_path, lumen.PredictionWriter(tmp_path / "out", "parquet"), task=Changing())
    assert not list((tmp_path / "out").glob("predictions-*"))
    predict(tmp_path, lumen.PredictionWriter(tmp_path / "out", "parquet"))
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["predictions-0-rank-0.parquet"]


def test_missing_pyarrow_is_an_error_at_construction(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow, which cannot be .*pip install 'lumen-train\[parquet\]'"):
        lumen.PredictionWriter(tmp_path, "parquet")


def test_what_cannot_be_written_is_refused(tmp_path):
    class Word(lumen.TaskModule):
        def predict_step(self, batch):
            return "cat"

    class Mean(lumen.TaskModule):
        def predict_step(self, batch):
            return batch[0].float().mean()

    with pytest.raises(DataError, match="predict_step returned a str"):
        predict(tmp_path, lumen.PredictionWriter(tmp_path / "words"), task=Word())
    with pytest.raises(DataError, match="a line for each sample"):
        predict(tmp_path, lumen.PredictionWriter(tmp_path / "means", "jsonl"), task=Mean())
    predict(tmp_path, lumen.PredictionWriter(tmp_path / "out"))
    with pytest.raises(ConfigError, match="already contains predictions, such as predictions-0-00000000"):
        predict(tmp_path, lumen.PredictionWriter(tmp_path / "out"))
    with pytest.raises(ConfigError, match="format"):
        lumen.PredictionWriter(tmp_path / "out", "csv")


@pytest.mark.parametrize("form", ["safetensors", "jsonl", "parquet"])
@pytest.mark.parametrize(
    ("convert", "instead"),
    [
        (torch.Tensor.to_sparse, "prediction.to_dense()"),
        (lambda tensor: tensor.to(torch.complex128), "torch.view_as_real(prediction)"),
    ],
)
def test_tensors_without_file_format_are_refused(tmp_path, form, convert, instead):
    class Converts(lumen.TaskModule):
        def predict_step(self, batch):
            return convert(batch[0])

    with pytest.raises(DataError, match=re.escape(f"{form} files cannot hold prediction of ")) as error:
        predict(tmp_path, lumen.PredictionWriter(tmp_path / "out", form), task=Converts())
    assert str(error.value).endswith(f"Return {instead}.")
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize("form", ["safetensors", "jsonl", "parquet"])
def test_numbers_of_one_byte_are_written(tmp_path, form):
    class Short(lumen.TaskModule):
        def predict_step(self, batch):
            return batch[0].float().to(torch.float8_e4m3fn)

    predict(tmp_path, lumen.PredictionWriter(tmp_path / "out", form), task=Short())
    assert [*(tmp_path / "out").iterdir()]


@pytest.mark.parametrize(
    ("form", "name"), [("safetensors", "index"), ("jsonl", "index"), ("parquet", "index"), ("jsonl", "dataloader")]
)
def test_predictions_cannot_take_names_of_the_writer(tmp_path, form, name):
    class Named(lumen.TaskModule):
        def predict_step(self, batch):
            return {name: batch[0], "x": batch[0]}

    with pytest.raises(DataError, match=f"a tensor named '{name}', .*Rename the tensor"):
        predict(tmp_path, lumen.PredictionWriter(tmp_path / "out", form), task=Named())
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.usefixtures("config_directory")
def test_it_is_named_on_the_command_line():
    words = ["predict", "--config", "line.yaml", "--trainer.callbacks+=PredictionWriter"]
    assert main([*words, "--trainer.callbacks.directory=out", "--trainer.callbacks.format=jsonl"]) == 0
    assert len(Path("out/predictions-rank-0.jsonl").read_text().splitlines()) > 3
