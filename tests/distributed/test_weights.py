"""Weights of micro-batches in a step, and losses that are not finite."""

import pytest

from tests.helpers.tasks import Regression, bare_trainer, loader, weights


class Heavy(Regression):
    """Task whose forward returns the weights; the weights of every second step may differ."""

    def __init__(self, even, odd):
        super().__init__()
        self.even, self.odd = even, odd

    def training_step(self, batch):
        is_odd = self.trainer.run.progress.batches // 2 % 2
        return 0.1 * super().training_step(batch), self.odd if is_odd else self.even


def train_heavy(folder, even, odd, accumulate=2, **options):
    trainer = bare_trainer(
        folder, max_epochs=4, precision="fp16", accumulate_grad_batches=accumulate, log_level="INFO", **options
    )
    task = Heavy(even, odd)
    trainer.fit(task, loader(80, 8))
    return trainer.global_step, weights(task).tolist()


@pytest.mark.parametrize(("even", "odd", "skipped"), [(500, 500, 0), (1e6, 1e6, 0), (1e6, 1, 0), (1, 1e6, 1)])
def test_fp16_uses_every_step_whatever_the_weights_are(tmp_path, caplog, group, even, odd, skipped):
    """If weights rise, the first step that is much larger than all earlier ones may overflow."""
    caplog.set_level("INFO", "lumen")
    steps, ours = train_heavy(tmp_path, even, odd)
    assert 20 - skipped <= steps <= 20
    assert caplog.text.count("skipped an update") == caplog.text.count("updates were skipped") == 20 - steps
    ranks = group(2).run(train_heavy, tmp_path, even, odd, 1, strategy="ddp")
    assert ranks == [(steps, pytest.approx(ours, abs=1e-3))] * 2
