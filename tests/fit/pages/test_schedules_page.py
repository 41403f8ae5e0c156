"""Configs of docs/guides/learning-rate-schedules.md: each one builds the schedule that the page describes."""

import re
from pathlib import Path

import pytest

from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.working_directory import LINE as CONFIG  # noqa: F401

TEXT = (ROOT / "docs/guides/learning-rate-schedules.md").read_text()
CONFIGS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)


KINDS = (["Warmup"], ["Warmup", "ReduceLROnPlateau"], ["ExponentialLR", "Warmup", "ReduceLROnPlateau"])


@pytest.mark.parametrize(
    ("config", "kinds"), list(zip(CONFIGS, KINDS, strict=True)), ids=["cosine", "plateau", "several"]
)
def test_configs_of_the_page_build_their_schedules(config_directory, config, kinds):
    Path("schedule.yaml").write_text(config)
    assert main(["fit", "--config", "line.yaml", "--config", "schedule.yaml", "--trainer.max_epochs=1"]) == 0
    configs = Spy.trainer.lr_scheduler_configs
    assert [type(each.scheduler).__name__ for each in configs] == kinds


def test_steps_of_a_config_follow_max_steps(config_directory):
    reference = 'steps: "${trainer.max_steps}"'
    assert f"`{reference}`" in TEXT
    Path("schedule.yaml").write_text(CONFIGS[0].replace("steps: 60", reference))
    assert main(["fit", "--config", "line.yaml", "--config", "schedule.yaml", "--trainer.max_steps=14"]) == 0
    (config,) = Spy.trainer.lr_scheduler_configs
    assert config.scheduler.steps + config.scheduler.scheduler.total_steps == 14
