"""`lumen fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lumen import session
from lumen.checkpoint import find_checkpoint
from lumen.cli.help import print_help
from lumen.cli.layers import Node
from lumen.cli.outputs import check_output, show_values, texts, write_predictions, write_values
from lumen.cli.request import Request
from lumen.cli.saving import NAME, SaveConfig, dump
from lumen.cli.settings import Settings
from lumen.datamodule import DataModule
from lumen.errors import ConfigError, LumenError
from lumen.hooks import overrides
from lumen.random import seed_everything
from lumen.task import TaskModule
from lumen.trainer import Trainer

_log = logging.getLogger("lumen")


def run(command: str, words: Sequence[str]) -> int:
    """Run one of the four loops.

    Args:
        command: `fit`, `validate`, `test` or `predict`.
        words: The rest of the command line.

    Returns:
        0.

    Raises:
        LumenError: Something is wrong; see `lumen.errors`.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    request = Request.parse(words)
    if not request.configs:
        request.configs = _config_of_run(request)
    settings = Settings(command, request, os.environ)
    if request.help:
        print_help(command, settings)
        return 0
    settings.check()
    if request.print_config:
        print(dump(settings.record()), end="")
        return 0
    check_output(command, request.output)
    with session.console_log(settings.trainer.arguments().get("log_level", "INFO")):
        try:
            _fit(settings) if command == "fit" else _evaluate(command, settings, request.output)
        except LumenError:
            _log.debug("the traceback:", exc_info=True)
            raise
    return 0


def _fit(settings: Settings) -> None:
    trainer, task, data = _build(settings, settings.trainer.arguments().get("resume"), SaveConfig(settings))
    configure = None
    if "optimizer" in settings.classes:
        configure = partial(_configure_optimizers, settings, task)
    trainer.fit(task, data, configure_optimizers=configure)


def _evaluate(command: str, settings: Settings, output: Path | None) -> None:
    where = settings.top.arguments().get("ckpt_path")
    if where == "auto":
        raise ConfigError('ckpt_path: "auto" belongs to trainer.resume. Use last, best, or a path.')
    trainer, task, data = _build(settings, where)
    if where is None:
        _log.info("no ckpt_path is given: the model is used as it is built")
    results = getattr(trainer, command)(task, data, ckpt_path=where)
    if command != "predict":
        show_values(results, title=f"{command}: {trainer.name}, {where or 'without a checkpoint'}")
        if output is not None:
            write_values(results, output)
        return
    batches = [batch for loader in trainer.run.predictions for batch in loader]
    for text in texts(batches):
        print(text)
    if output is not None:
        write_predictions(batches, output)
    elif not any(True for _ in texts(batches)):
        _log.info("%d batches were predicted, without text to print; --output FILE.jsonl writes them", len(batches))


def _build(
    settings: Settings, checkpoint: Any, *callbacks: SaveConfig
) -> tuple[Trainer, TaskModule, DataModule | None]:
    """Build the trainer first, whose errors are the cheapest to find, then the data, then the model."""
    model = settings.require_model()
    options = settings.trainer.arguments()
    seed = settings.top.arguments().get("seed_everything")
    if seed is None:
        seed = _seed_of(checkpoint, settings)
    settings.top.given["seed_everything"] = Node(seed, "drawn")
    given = options.pop("callbacks", None) or ()
    listed = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else [given]
    trainer = Trainer(**options, callbacks=[*listed, *callbacks], seed=seed)
    seed_everything(seed)
    data = settings.classes["data"].build() if "data" in settings.classes else None
    settings.link(data)
    seed_everything(seed)  # again, so that the model does not depend on what the data drew
    return trainer, model.build(), data


def _seed_of(checkpoint: Any, settings: Settings) -> int:
    """The seed of the run that is gone on from, else a new one."""
    if checkpoint is not None:
        options = settings.trainer.arguments()
        folder = Path(options.get("default_root_dir", "runs")) / str(options["name"])
        found = find_checkpoint(str(checkpoint), folder)
        if found is not None:
            return int(found.state["seed"])
    return secrets.randbits(31)


def _configure_optimizers(settings: Settings, task: TaskModule) -> dict[str, Any]:
    """Build the configured optimizer and scheduler over the parameters that are trained."""
    if overrides(task, "configure_optimizers"):
        chosen = settings.classes["optimizer"].name
        _log.info(
            "%s from the configuration is used instead of configure_optimizers of %s", chosen, type(task).__name__
        )
    optimizer = _built(settings, "optimizer", [each for each in task.parameters() if each.requires_grad])
    if "lr_scheduler" not in settings.classes:
        return {"optimizer": optimizer}
    scheduler = _built(settings, "lr_scheduler", optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **settings.schedule.build()}}


def _built(settings: Settings, key: str, subject: Any) -> Any:
    component = settings.classes[key]
    try:
        return component.build(subject)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}: {component.name} does not take these arguments: {error}") from error


def _config_of_run(request: Request) -> list[Path]:
    """The saved configuration of the run whose checkpoint is named."""
    for key, value, _ in reversed(request.settings):
        if key == "ckpt_path" and isinstance(value, str) and value not in ("best", "last"):
            directories = [Path(value), *Path(value).absolute().parents[:2]]
            return [directory / NAME for directory in directories if (directory / NAME).is_file()][:1]
    return []
