"""Resumed runs: their checkpoint, their directory, and the reasons for a refusal."""

from tests.helpers.resume import fit_expanded
from tests.helpers.tasks import Regression, loader, quiet_trainer, weights


class Rare(Regression):
    """Task that logs a value in the first epoch only."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        if self.current_epoch == 0:
            self.log("rare", loss, on_step=True, on_epoch=True)
        return loss


def fit_rare(folder, max_steps, strategy="single"):
    task = Rare()
    trainer = quiet_trainer(folder, strategy=strategy, max_steps=max_steps, global_batch_size=8, resume="auto")
    trainer.fit(task, loader(48, 4))
    return trainer.global_step, weights(task)


def test_so_they_are_on_two_processes(group, tmp_path):
    group(2).run(fit_expanded, tmp_path, "ddp")


def test_values_of_earlier_epochs_resume_on_other_sizes(group, tmp_path):
    for processes, max_steps in ((2, 8), (1, 10), (2, 14)):
        strategy = "single" if processes == 1 else "ddp"
        run = fit_rare if processes == 1 else group(processes).run
        found = run(*(() if processes == 1 else (fit_rare,)), tmp_path, max_steps, strategy)
        assert (found if processes == 1 else found[0])[0] == max_steps
