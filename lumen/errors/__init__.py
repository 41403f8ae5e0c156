"""Every error that Lumen raises on purpose.

    LumenError
    ├── ConfigError              a setting, a hook or a task that cannot work, found before training (also a ValueError)
    ├── DataError                a loader, a data set or a download that cannot be used
    ├── CheckpointError          a checkpoint cannot be written or read
    │   ├── CheckpointDamaged    bytes are missing or changed, or the commit never happened
    │   │   └── CheckpointGone   nothing is there, or it was removed while it was read
    │   └── CheckpointMismatch   it is intact, but belongs to another model, optimizer or run
    ├── RunDirectoryError        a run directory cannot be claimed, locked or written
    └── TrainingError            training cannot go on
        ├── NonFiniteLoss        a loss, a gradient or a parameter is NaN or infinite
        ├── ProcessStuck         a process waited in vain for another one, which does something else
        └── ProcessLost          another process of the run has ended; its own error says why

A message says what is wrong, what was found, and what to do.
"""

#: Exit code of a process of a job that hung, and was ended for that.
HUNG = 70


class LumenError(Exception):
    """Base of all errors raised by Lumen on purpose."""


class ConfigError(LumenError, ValueError):
    """A setting, a combination of settings or a user class that cannot work."""


class DataError(LumenError):
    """A loader, a data set or a download that cannot be used."""


class CheckpointError(LumenError):
    """A checkpoint cannot be written or read."""


class CheckpointDamaged(CheckpointError):
    """A checkpoint whose bytes are missing or changed, or that was never committed."""


class CheckpointGone(CheckpointDamaged):
    """A checkpoint that is not there, perhaps because its run removed it while it was read."""


class CheckpointMismatch(CheckpointError):
    """An intact checkpoint that belongs to another model, optimizer or run."""


class RunDirectoryError(LumenError):
    """A run directory that cannot be claimed, locked or written."""


class TrainingError(LumenError):
    """Training cannot go on."""


class NonFiniteLoss(TrainingError):
    """A loss, a gradient or a parameter is NaN or infinite."""


class ProcessStuck(TrainingError):
    """A process waited in vain for another one, which does something else."""


class ProcessLost(TrainingError):
    """Another process of the run has ended; its own error says why."""
