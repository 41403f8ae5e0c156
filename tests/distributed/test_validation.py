"""Validation: when it runs, its values, and its lack of side effects; test and predict too."""

import pytest
import torch
from torch import nn

from tests.helpers.tasks import Regression, bare_trainer, loader
from tests.helpers.validation import Cramped, full_loss


class OwnNames(Regression):
    """Task that gives each loader its own metric, and one metric to both."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log(f"loss_{'ab'[dataloader_idx]}", loss, add_dataloader_idx=False)
        self.log("joint", loss, add_dataloader_idx=False)

    def on_validation_epoch_end(self):
        self.log("at_the_end", 3.0)


def validate_own_names(folder):
    loaders = [loader(samples, 8, dtype=torch.float64) for samples in (5, 50)]
    return bare_trainer(folder, strategy="auto").validate(OwnNames(dtype=torch.float64), loaders)


@pytest.mark.parametrize("world", [1, 2])
def test_values_of_one_loader_are_returned_only_there(group, tmp_path, world):
    """A process may have no batch of the first loader."""
    task = OwnNames(dtype=torch.float64)
    a, b = full_loss(task, 5), full_loss(task, 50)
    joint = pytest.approx((5 * a + 50 * b) / 55, rel=1e-12)
    for values in group(world).run(validate_own_names, tmp_path):
        assert values == [
            {"loss_a": pytest.approx(a, rel=1e-12), "joint": joint, "at_the_end": 3.0},
            {"loss_b": pytest.approx(b, rel=1e-12), "joint": joint, "at_the_end": 3.0},
        ]


def evaluate_cramped(folder, method, fits):
    trainer = bare_trainer(folder, strategy="auto", halve_on_oom=True)
    return getattr(trainer, method)(Cramped(fits), loader(50, 16, shuffle=False, dtype=torch.float64))


def test_halved_evaluation_batches_give_the_same_values(group, tmp_path):
    """50 = 3 * 16 + 2: the second process halves one batch, and its other batch fits."""
    full = full_loss(Cramped(50), 50)
    for values in group(2).run(evaluate_cramped, tmp_path, "validate", 3):
        assert values == [{"val_loss": pytest.approx(full, rel=1e-12)}]
    whole, halved = (group(2).run(evaluate_cramped, tmp_path, "predict", fits)[0] for fits in (16, 4))
    assert [len(each) for each in halved] == [16, 16, 16, 2]
    torch.testing.assert_close(torch.cat(halved), torch.cat(whole), rtol=1e-12, atol=1e-14)
