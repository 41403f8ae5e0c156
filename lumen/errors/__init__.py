"""All errors that Lumen raises on purpose.

    LumenError
    ├── ConfigError              a setting, a hook or a task that cannot work, found before training (also a ValueError)
    ├── DataError                a loader, a data set or a download that cannot be used
    ├── CheckpointError          a checkpoint that cannot be written or read
    │   ├── CheckpointDamaged    an incomplete checkpoint, or one with missing or changed bytes
    │   │   └── CheckpointGone   a checkpoint that does not exist, or was removed during reading
    │   └── CheckpointMismatch   an intact checkpoint of a different model, optimizer or run
    ├── RunDirectoryError        a run directory that cannot be claimed, locked or written
    └── TrainingError            training cannot continue
        ├── NonFiniteLoss        a loss, a gradient or a parameter is NaN or infinite
        ├── ProcessStuck         a process timed out waiting for a process that executes different code
        └── ProcessLost          a different process of the run has ended; the error of that process says why

A message says what is wrong, what was found, and what to do.
"""

#: Exit code of a process that Lumen ends because its job hangs.
HUNG = 70


class LumenError(Exception):
    """Base class of all errors that Lumen raises on purpose."""


class ConfigError(LumenError, ValueError):
    """Setting, combination of settings or user class that cannot work."""


class DataError(LumenError):
    """Loader, data set or download that cannot be used."""


class CheckpointError(LumenError):
    """Checkpoint that cannot be written or read."""


class CheckpointDamaged(CheckpointError):
    """Checkpoint that is incomplete, or whose bytes are missing or changed."""


class CheckpointGone(CheckpointDamaged):
    """Checkpoint that does not exist, perhaps because its run removed it during reading."""


class CheckpointMismatch(CheckpointError):
    """Intact checkpoint that belongs to a different model, optimizer or run."""


class RunDirectoryError(LumenError):
    """Run directory that cannot be claimed, locked or written."""


class TrainingError(LumenError):
    """Error after which training cannot continue."""


class NonFiniteLoss(TrainingError):
    """Loss, gradient or parameter that is NaN or infinite."""


class ProcessStuck(TrainingError):
    """Timeout of a process that waits for a process that executes different code."""


class ProcessLost(TrainingError):
    """End of a different process of the run; the error of that process says why."""
