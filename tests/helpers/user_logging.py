"""Run with a callback that logs through the user's loggers."""

import logging

import lumen
from tests.helpers.tasks import Regression, loader, quiet_trainer


class LogMessages(lumen.Callback):
    """Callback that logs a message of each level with a named logger."""

    def __init__(self, *names):
        self.names = names

    def on_train_start(self, trainer, task):
        for name in self.names:
            for level in (logging.DEBUG, logging.INFO, logging.WARNING):
                logging.getLogger(name).log(level, "said at %d", level)


def fit_with_messages(folder, *names, task=None, data=None, **options):
    trainer = quiet_trainer(folder, **{"max_steps": 1, "log_level": "INFO", "callbacks": LogMessages(*names)} | options)
    trainer.fit(task or Regression(), data or loader())
    return (trainer.run_directory / "run.log").read_text().splitlines()


def filter_messages(lines):
    return [line.split(" ", 2)[2] for line in lines if ": said" in line]
