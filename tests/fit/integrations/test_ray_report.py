"""Reports to Ray Train: the callback raises a clear error outside of Ray; `tests/system/test_ray.py` runs it in Ray."""

from importlib.util import find_spec

import pytest

import lumen
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression


def test_callback_outside_ray_worker_raises_with_a_fix(tmp_path):
    trainer = lumen.Trainer(max_steps=1, default_root_dir=tmp_path, callbacks=lumen.RayTrainReportCallback())
    said = "Call fit in the function that a TorchTrainer runs" if find_spec("ray") else "pip install 'lumen-train[ray]'"
    with pytest.raises(ConfigError, match="RayTrainReportCallback") as raised:
        trainer.fit(Regression())
    assert said in str(raised.value)


def test_a_negative_number_of_steps_is_an_error():
    with pytest.raises(ConfigError, match="preemption_every_n_steps must be at least 0, found -1"):
        lumen.RayTrainReportCallback(preemption_every_n_steps=-1)
