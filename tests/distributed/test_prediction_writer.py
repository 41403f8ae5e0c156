"""Predictions of several processes: each process writes its own, and no process gathers them."""

import pytest

import lumen
from tests.helpers.predictions import Doubling, make_data, read_predictions
from tests.helpers.tasks import bare_trainer


def predict(folder, form):
    trainer = bare_trainer(folder, strategy="ddp", callbacks=[lumen.PredictionWriter(folder / "out", form)])
    return trainer.predict(Doubling(), make_data(), return_predictions=False)


@pytest.mark.parametrize("form", ["safetensors", "jsonl", "parquet"])
def test_files_of_all_ranks_hold_every_sample_once(group, tmp_path, form):
    assert group(2).run(predict, tmp_path, form) == [None, None]
    found = sorted(read_predictions(tmp_path / "out"))
    assert found == [((0, number), 2 * number, [number] * 2) for number in range(10)]
    assert len(list((tmp_path / "out").iterdir())) == (4 if form == "safetensors" else 2)
