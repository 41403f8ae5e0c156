"""`seed_everything` sets the seed of all runs of its process, like the option of the command line."""

import logging
import re

import numpy as np
import pytest
import torch

import lumen
from lumen.errors import ConfigError
from tests.helpers.seed import make_trainer, train_and_read_order
from tests.helpers.tasks import Regression, loader, weights


def test_same_seed_gives_the_same_order(tmp_path):
    lumen.seed_everything(123, workers=True)
    first = train_and_read_order(make_trainer(tmp_path))
    lumen.seed_everything(123)
    assert train_and_read_order(make_trainer(tmp_path)) == first
    assert first[0] == 123
    assert train_and_read_order(make_trainer(tmp_path)) == first, "a second fit of the process has the seed too"
    assert train_and_read_order(make_trainer(tmp_path, seed=123)) == first, "as the trainer's own argument"


def test_a_run_repeats_where_torch_is_seeded(tmp_path):
    """A script that only seeds torch repeats its runs, although two fits in it differ."""

    def drawn(seed=None):
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(0)
        return train_and_read_order(make_trainer(tmp_path))

    first, second = drawn(7), drawn()
    assert (drawn(7), drawn()) == (first, second)
    assert len({first[0], second[0], drawn(8)[0]}) == 3
    state = torch.get_rng_state()
    torch.seed()
    assert drawn()[0] not in (first[0], second[0])
    torch.set_rng_state(state)


def test_trainer_seed_wins_over_last_seed_everything(tmp_path):
    early = make_trainer(tmp_path)
    lumen.seed_everything(1)
    lumen.seed_everything(2)
    assert train_and_read_order(early)[0] == 2, "a trainer may be built before"
    assert train_and_read_order(make_trainer(tmp_path, seed=5))[0] == 5
    assert train_and_read_order(make_trainer(tmp_path))[0] == 2


def test_a_model_built_after_it_is_the_same(tmp_path):
    def built():
        lumen.seed_everything(7, verbose=False)
        return torch.nn.Linear(3, 3).weight

    assert torch.equal(built(), built())


def test_seed_is_recorded_and_used_on_resume(tmp_path):
    lumen.seed_everything(123)
    task, data = Regression(dropout=0.3), loader()
    make_trainer(tmp_path, max_epochs=2).fit(task, data)
    expected = weights(task)
    make_trainer(tmp_path / "again").fit(Regression(dropout=0.3), data)
    resumed, task = make_trainer(tmp_path / "again", max_epochs=2, resume="auto"), Regression(dropout=0.3)
    resumed.fit(task, data)
    assert resumed.run.checkpoint.state["seed"] == 123
    assert torch.equal(weights(task), expected)
    lumen.seed_everything(124)
    with pytest.raises(ConfigError, match="seed_everything: 124 is not the seed 123 of"):
        make_trainer(tmp_path / "again", max_epochs=3, resume="auto").fit(task, data)


def test_missing_seed_is_0_with_optional_warning(caplog):
    assert lumen.seed_everything() == 0
    assert "the seed is 0" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "lumen"):
        assert lumen.seed_everything(np.int64(4)) == 4
        assert "the seed is 4" in caplog.text
        caplog.clear()
        lumen.seed_everything(None, verbose=False)
        lumen.seed_everything(4, verbose=False)
    assert caplog.text == ""


@pytest.mark.parametrize("seed", [-1, 2**63, 1.5, "7", True])
def test_what_is_no_seed_is_an_error(tmp_path, seed):
    said = re.escape("a seed is an integer from 0 to 2**63 - 1, found")
    with pytest.raises(ConfigError, match=f"^seed_everything: {said}"):
        lumen.seed_everything(seed)
    with pytest.raises(ConfigError, match=f"seed: ({said}|expected an int or None, found)"):
        lumen.Trainer(seed=seed)
