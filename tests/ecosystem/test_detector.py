"""Example of torchvision's detection: scenes, losses, exact evaluation, and learned digits."""

import pytest
import torch

import lumen
import tests.helpers.torchvision_on_cpu  # noqa: F401
from datamodules.scenes import Scenes
from models.detector import Detector
from tests.helpers.cli import run_model
from tests.helpers.group import assert_equal
from tests.helpers.optimizer_state import read_unsharded_state
from tests.helpers.tables import read_rows
from tests.helpers.tasks import quiet_trainer


def test_each_box_holds_its_digit_and_nothing_else(tmp_path):
    data = Scenes(scenes=50)
    data.setup("fit")
    torch.manual_seed(0)
    for number in range(50):
        image, target = data.train[number]
        rest = image.clone()
        for x1, y1, x2, y2 in target["boxes"].int().tolist():
            inside = image[0, y1:y2, x1:x2] > 0.1
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
            rest[0, y1:y2, x1:x2] = 0
        assert rest.max() <= 0.1
        assert target["labels"].min() >= 1
        assert target["labels"].max() <= 10


def test_no_digit_of_the_validation_is_trained_on():
    data = Scenes()
    data.setup("fit")
    assert not {*data.train.digits.indices} & {*data.val.digits.indices}


def train(folder, steps=6, **options):
    torch.manual_seed(0)
    task = Detector(width=32)
    trainer = quiet_trainer(folder, max_steps=steps, resume="auto", log_every_n_steps=1, **options)
    trainer.fit(task, Scenes(scenes=32, batch_size=8))
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()}


def test_resumed_run_sees_the_same_scenes(tmp_path):
    whole_run = train(tmp_path / "whole", limit_val_batches=0)
    for steps in (2, 6):
        cut = train(tmp_path / "cut", steps, limit_val_batches=0)
    assert_equal(cut, whole_run, 0.0)
    columns = {*read_rows(tmp_path / "whole/runs/run/metrics.csv")[0]}
    assert {"classification", "bbox_regression", "bbox_ctrness"} <= columns


def average_precision(folder):
    torch.manual_seed(0)
    task, options = Detector(width=32), {"default_root_dir": folder, "enable_progress_bar": False, "seed": 3}
    task.net.score_thresh, task.net.topk_candidates = 0.0, 30  # all boxes of an untrained model are poor
    (metrics,) = lumen.Trainer(log_level="ERROR", limit_val_batches=3, **options).validate(task, Scenes(batch_size=5))
    return metrics


def test_mean_average_precision_equals_single_process(group, tmp_path):
    alone = average_precision(tmp_path / "alone")
    for each in group(2).run(average_precision, tmp_path / "two"):
        assert each == alone


@pytest.mark.slow
def test_the_config_finds_the_digits(tmp_path):
    run_model("fit", "detector", tmp_path)
    rows = read_rows(tmp_path / "detector/metrics.csv")
    assert max(float(row["map_50"]) for row in rows if row["map_50"]) >= 0.7
