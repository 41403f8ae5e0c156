"""`accumulate_grad_batches` that grows with the epochs: processes train exactly like one and resume exactly."""

import pytest
import torch

import lumen
from lumen.errors import ConfigError
from tests.helpers.accumulation import (
    SCHEDULE,
    RecordsWindows,
    list_parameters,
    loader,
    read_state,
    train_with_schedule,
)
from tests.helpers.tasks import bare_trainer

TWICE = {epoch: 2 * number for epoch, number in SCHEDULE.items()}


def train(folder, strategy, steps=-1):
    trainer, task = train_with_schedule(folder, dropout=0.3, strategy=strategy, max_steps=steps, resume="auto")
    return list_parameters(task), read_state(trainer, task), trainer.estimated_stepping_batches


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_accumulation_equals_single_process_and_resumes_exactly(group, tmp_path, strategy):
    trainer, task = train_with_schedule(tmp_path / "alone", dropout=0.3, accumulate_grad_batches=TWICE)
    whole = group(2).run(train, tmp_path / "whole", strategy)
    for steps in (3, 4, 5, 8, -1):  # of 4, 2, 2, 1 and 2 micro-batches in an epoch
        parts = group(2).run(train, tmp_path / "parts", strategy, steps)
    assert parts == whole
    parameters, counted, estimated = whole[0]
    assert counted[-2:] == [trainer.global_step, trainer.current_epoch] == [11, 5]
    assert estimated == 11
    for mine, theirs in zip(parameters, list_parameters(task), strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)


def resume_alone(folder, caplog):
    caplog.clear()
    train_with_schedule(folder, accumulate_grad_batches=TWICE, resume="auto", log_level="WARNING")
    return [line for line in caplog.messages if "settings" in line]


def test_other_world_size_with_equal_steps_warns_nothing(group, tmp_path, caplog):
    group(2).run(train, tmp_path, "ddp", 5)
    assert resume_alone(tmp_path, caplog) == []


def refuse(folder):
    started = []
    trainer = bare_trainer(
        folder, max_epochs=3, strategy=lumen.DDP(static_graph=True), accumulate_grad_batches={2: 2},
        callbacks=lumen.LambdaCallback(on_train_start=lambda trainer, task: started.append(True)),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="static_graph=True communicates in every backward") as error:
        trainer.fit(RecordsWindows(), loader())
    return started, str(error.value)


def test_strategy_without_accumulation_raises_before_first_epoch(group, tmp_path):
    first, second = group(2).run(refuse, tmp_path)
    assert first == second
    assert first[0] == []
