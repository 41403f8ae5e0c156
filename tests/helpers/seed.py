"""Helper for tests of the seed."""

from torch.utils.data import DataLoader

from tests.helpers.tasks import Drawing, Seeing, quiet_trainer


def make_trainer(tmp_path, **options):
    return quiet_trainer(tmp_path, **{"seed": None, "max_epochs": 1} | options)


def train_and_read_order(trainer):
    """Return the seed of a run, and the samples of its steps in order."""
    task = Seeing()
    trainer.fit(task, DataLoader(Drawing(), 8, shuffle=True))
    return trainer.run.seed, [batch[2].tolist() for batch in task.epochs[0]]
