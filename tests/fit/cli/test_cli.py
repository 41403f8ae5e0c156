"""Command line: `main([...])` in this process, with real runs of a tiny task."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import lumen
from lumen.cli import main
from lumen.profilers import PassThroughProfiler, SimpleProfiler, TorchProfiler
from tests.helpers.cli import fit, read_saved_config, write_config
from tests.helpers.cli_tasks import Grid, Line, Noise, Points, Slope, Spy
from tests.helpers.tables import read_rows
from tests.helpers.working_directory import CONFIG

pytestmark = pytest.mark.usefixtures("config_directory")


def get_optimizer_group(trainer):
    return trainer.optimizers[0].param_groups[0]


def read_metrics(path):
    return read_rows(Path(path) / "metrics.csv")


# ---------------------------------------------------------------------- starting


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (
            ["fit", "--help", "all"],
            [
                "--trainer.max_epochs",
                "Epochs to train.",
                "--config",
                "--lr_schedule.interval",
                "LUMEN_FIT__TRAINER__MAX_STEPS",
            ],
        ),
        (["fit", "--help"], ["--trainer.max_epochs", "--help all", "--model.help", "EarlyStopping", "tensorboard"]),
        (["validate", "--help"], ["--ckpt_path", "--output"]),
        (["fit", "--trainer.help"], ["--trainer.max_epochs", "Epochs to train.", "--trainer.matmul_precision"]),
        (
            ["fit", "--model.help", "tests.helpers.cli_tasks.Line"],
            ["--model.lr", "Learning rate.", "(required, type: int)"],
        ),
        (["fit", "--trainer.strategy.help", "mesh"], ["--trainer.strategy.tensor", "compute a layer of the plan"]),
        (["fit", "--trainer.strategy", "fsdp", "--trainer.strategy.help"], ["--trainer.strategy.cpu_offload"]),
    ],
)
def test_help_shows_options_with_what_they_are_for(words, shown, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert [text for text in shown if text not in out] == []


def test_arguments_accepted_only_for_rejection_are_no_options(capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--trainer.callbacks.help", "lumen.ProgressBar"])
    assert "unknown" not in (shown := capsys.readouterr().out)
    assert "--trainer.callbacks.plain_every_s" in shown
    callbacks = "{bar: lumen.ProgressBar, saver: ModelCheckpoint, summary: ModelSummary}"
    assert main(["fit", "--config", "line.yaml", "--trainer.callbacks", callbacks, "--print_config"]) == 0
    bar = yaml.safe_load(capsys.readouterr().out)["trainer"]["callbacks"]["bar"]
    assert bar == {"class_path": "lumen.ProgressBar", "init_args": {"refresh_per_second": 10.0, "plain_every_s": 10.0}}


# ---------------------------------------------------------------------- layers


def test_null_in_a_file_overrides_earlier_files():
    write_config("first.yaml", {"trainer": {"gradient_clip_val": 0.5}, "model": {"label": "a", "widths": [1]}})
    write_config("second.yaml", {"trainer": {"gradient_clip_val": None}, "model": {"label": None}})
    trainer, task = fit("--config", "first.yaml", "--config", "second.yaml")
    assert (trainer.gradient_clip_val, task.hparams.label, task.hparams.widths) == (None, None, (1,))
    assert read_saved_config()["model"]["init_args"]["label"] is None


def test_command_line_overrides_files_overrides_environment(monkeypatch):
    for number, key in enumerate(("MAX_STEPS", "LOG_EVERY_N_STEPS", "MIN_STEPS", "NUM_SANITY_VAL_STEPS"), start=10):
        monkeypatch.setenv(f"LUMEN_FIT__TRAINER__{key}", str(number))
    monkeypatch.setenv("LUMEN_FIT__MODEL__LR", "0.5")
    monkeypatch.setenv("LUMEN_VALIDATE__TRAINER__MAX_STEPS", "abc")
    write_config(
        "first.yaml", {"trainer": {"max_steps": 20, "log_every_n_steps": 21, "min_steps": 22}, "model": {"lr": 0.06}}
    )
    write_config("second.yaml", {"trainer": {"max_steps": 30, "log_every_n_steps": 31}})
    words = ["--config", "first.yaml", "--config", "second.yaml", "--trainer.max_steps=4", "--trainer.min_epochs", "1"]
    trainer, task = fit(*words)
    plan = trainer.plan
    assert (plan.max_steps, plan.log_every_n_steps, plan.min_steps, plan.sanity_batches) == (4, 31, 22, 13)
    assert plan.val_every_n_epochs == 1
    assert task.hparams.lr == 0.06


def test_values_are_parsed_by_parameter_type():
    trainer, task = fit(
        "--model.lr=1e-3", "--model.label", "12", "--model.widths", "[3, 4]", "--trainer.name", "2024",
        "--trainer.deterministic", "--trainer.max_time", "00:00:01:00", "--trainer.val_check_interval", "1.0",
    )  # fmt: skip
    assert (task.hparams.lr, task.hparams.label, task.hparams.widths) == (0.001, "12", (3, 4))
    assert (trainer.run_directory.name, trainer.deterministic) == ("2024", True)
    assert (trainer.plan.max_time_s, trainer.plan.val_every_epoch_fraction) == (60.0, 1.0)


@pytest.mark.parametrize("flags", ["", "skip_default", "skip_unset", "skip_null", "skip_default,skip_unset"])
@pytest.mark.parametrize("command", ["fit", "validate"])
def test_print_config_flags_leave_out_parts(capsys, command, flags):
    words = ["--model.lr", "0.3", "--optimizer", "SGD", "--trainer.callbacks.bar", "ProgressBar"]
    assert main([command, "--config", "line.yaml", *words, "--print_config"]) == 0
    everything = capsys.readouterr().out
    assert main([command, "--config", "line.yaml", *words, f"--print_config={flags}"]) == 0
    printed = capsys.readouterr().out
    config = yaml.safe_load(printed)
    assert ("max_steps" in config["trainer"]) == (flags == "")
    assert ("precision" in config["trainer"]) == ("skip_default" not in flags)
    assert config["model"]["init_args"]["lr"] == 0.3
    assert config["optimizer"]["class_path"] == "torch.optim.SGD"
    assert main([command, "--config", write_config("printed.yaml", printed), "--print_config"]) == 0
    assert capsys.readouterr().out == everything
    assert not Path("runs").exists()


def test_print_config_flags_are_documented_and_checked(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help", "all"])
    text = " ".join(capsys.readouterr().out.split())
    (described,) = re.findall(r"--print_config\S* (.*?) --seed_everything", text)
    assert re.findall("=(\\w+)", described) == ["flags", "skip_default", "skip_unset"]
    assert "comments" not in described
    for word in ("comments", "skip_defaults"):
        assert main(["fit", "--config", "line.yaml", f"--print_config={word}"]) == 2
        said = f"--print_config={word}: expected one of skip_default, skip_unset, skip_null.\n"
        assert capsys.readouterr().err == f"error: {said}"


def test_help_mentions_config_files_only_for_config(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help", "all"])
    text = capsys.readouterr().out
    assert re.findall(r"  --(\S+) .*\bCONFIG\b", text) == ["config"]
    assert "configuration file" not in text
    assert "--trainer {NAME: VALUE, ...}" in text
    assert main(["fit", "--config", "line.yaml", "--trainer", "{max_steps: 7}", "--print_config"]) == 0
    trainer = yaml.safe_load(capsys.readouterr().out)["trainer"]
    assert (trainer["max_steps"], trainer["max_epochs"]) == (7, 2)


def test_help_is_short_and_its_options_exist(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help", "all"])
    everything = capsys.readouterr().out
    for command in ("fit", "validate", "predict"):
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 50
        assert max(map(len, lines)) <= 80
        options = {each for line in lines for each in re.findall(r"^  --([\w.]+)", line)}
        assert len(options) > 15
        theirs = {"ckpt_path", "average", "output", "help", "trainer.help"}
        assert [each for each in options - theirs if f"  --{each}" not in everything] == []
        assert ("ckpt_path" in options, "trainer.max_steps" in options) == (command != "fit", command == "fit")
    assert main(["fit", "--help", "some"]) == 2
    assert "--help some: expected nothing or all." in capsys.readouterr().err


def test_help_lists_every_public_callback(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help"])
    listed = re.search(r"--trainer.callbacks  (.*?)\n\n", capsys.readouterr().out, re.S)[1]
    classes = {name: found for name in lumen.__all__ if isinstance(found := getattr(lumen, name), type)}
    callbacks = {name for name, found in classes.items() if issubclass(found, lumen.Callback)}
    assert {"LearningRateFinder", "BatchSizeFinder"} < callbacks
    assert {*listed.replace(",", "").split()} == {
        name for name in callbacks if not name.startswith(("Base", "Callback", "SaveConfig"))
    }


def test_help_with_unreadable_config_reports_the_reason(capsys):
    for content, said in ((b"\xff", "Save it as UTF-8."), (b"[" * 10_000, "nested more than 100 levels deep (line 1,")):
        Path("bad.yaml").write_bytes(content)
        for words in (["--config", "bad.yaml"], ["--config=bad.yaml"]):
            assert main(["fit", *words, "--help"]) == 2
            shown = capsys.readouterr()
            assert (shown.out, shown.err.count("\n")) == ("", 1)
            assert "error: cannot read the config file bad.yaml: " in shown.err
            assert said in shown.err
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "line.yaml", "--help"])


# ---------------------------------------------------------------------- lists that are appended to


def test_options_documented_with_plus_accept_it(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--help", "all"])
    options = re.findall(r", --(\S+)\+ ", capsys.readouterr().out)
    added = {
        "trainer.callbacks": "ModelSummary",
        "trainer.logger": "TensorBoardLogger",
        "trainer.resume_parts": "model",
    }
    words = [f"--{option}+={added.get(option, 'some')}" for option in options]
    assert {"trainer.callbacks", "trainer.logger", "trainer.resume_parts", "trainer.compile"} < set(options)
    one = list_classes(capsys, *words)
    two = list_classes(capsys, *words, *words)
    for option in options:
        group, name = option.split(".")
        assert len(two[group][name]) == len(one[group][name]) + 1
        assert isinstance(two[group][name], dict if name == "callbacks" else list)


def list_classes(capsys, *words, config="line.yaml"):
    capsys.readouterr()
    words = [*words, "--optimizer=SGD", "--print_config=skip_default"]
    assert main(["fit", "--config", config, *words]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def list_callbacks(capsys, *words, config="line.yaml"):
    return list_classes(capsys, *words, config=config)["trainer"]["callbacks"]


EARLY = {"class_path": "lumen.EarlyStopping", "init_args": {"monitor": "val_loss", "patience": 7}}
EARLY_WORDS = [
    "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.patience=7", "--trainer.callbacks.monitor", "val_loss"
]  # fmt: skip


@pytest.mark.slow
def test_plus_appends_and_later_options_configure_it(capsys):
    write_config(
        "listed.yaml",
        {"trainer": {"callbacks": [{"class_path": "tests.helpers.cli_tasks.Loud", "init_args": {"volume": 5}}]}},
    )
    files = ["--config", "listed.yaml"]
    write_config(
        "bare.yaml",
        CONFIG | {"trainer": {key: CONFIG["trainer"][key] for key in CONFIG["trainer"] if key != "callbacks"}},
    )
    loud = {"class_path": "tests.helpers.cli_tasks.Loud", "init_args": {"volume": 5}}
    bar = {"class_path": "lumen.LearningRateMonitor"}
    more = [*EARLY_WORDS, "--trainer.callbacks+", "LearningRateMonitor"]
    assert list_callbacks(capsys, *files, *EARLY_WORDS, config="bare.yaml") == [loud, EARLY]
    assert list_callbacks(capsys, *files, *more, config="bare.yaml") == [loud, EARLY, bar]
    assert list_callbacks(capsys, *EARLY_WORDS, config="bare.yaml") == [EARLY]
    in_one = ["--trainer.callbacks+", "{class_path: EarlyStopping, patience: 7, monitor: val_loss}"]
    assert list_callbacks(capsys, *files, *in_one, config="bare.yaml") == [loud, EARLY]
    several = [
        "--trainer.callbacks+",
        "[{class_path: EarlyStopping, patience: 7, monitor: val_loss}, LearningRateMonitor]",
    ]
    assert list_callbacks(capsys, *files, *several, config="bare.yaml") == [loud, EARLY, bar]
    of_words = ["--trainer.callbacks=[LearningRateMonitor]", *EARLY_WORDS]
    assert list_callbacks(capsys, *files, *of_words, config="bare.yaml") == [bar, EARLY]
    single = ["--trainer.callbacks=LearningRateMonitor", *EARLY_WORDS]
    assert list_callbacks(capsys, *single, config="bare.yaml") == [bar, EARLY]


def test_a_plus_adds_to_callbacks_that_have_names(capsys):
    found = list_callbacks(capsys, *EARLY_WORDS, "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=x")
    assert list(found) == ["spy", "earlystopping", "earlystopping2"]
    assert found["earlystopping"] == EARLY
    trainer, _ = fit(*EARLY_WORDS)
    assert sum(type(each).__name__ == "EarlyStopping" for each in trainer.callbacks) == 1


def test_plus_appends_to_any_list():
    write_config("many.yaml", {"model": {"init_args": {"widths": [3]}}})
    _, task = fit("--model.widths+=4", "--config", "many.yaml", "--model.widths+", "[5, 6]")
    assert tuple(task.hparams.widths) == (3, 4, 5, 6)
    _, task = fit("--model.widths+=4")  # appended to the default
    assert tuple(task.hparams.widths) == (1, 2, 4)


def test_errors_in_appended_values_are_reported(capsys):
    words = ["fit", "--config", "line.yaml", "--trainer.callbacks=[LearningRateMonitor]"]
    assert main([*words, "--trainer.callbacks+=EarlyStoping"]) == 2
    said = "trainer.callbacks.1 (the command line): lumen has no class EarlyStoping. Did you mean EarlyStopping"
    assert said in capsys.readouterr().err
    assert main([*words, *EARLY_WORDS, "--trainer.callbacks.patince=3"]) == 2
    said = "trainer.callbacks.1.patince (the command line): EarlyStopping has no option patince. Did you mean patience?"
    assert said in capsys.readouterr().err
    assert main(["fit", "--config", "line.yaml", "--trainer.callbacks+=EarlyStopping"]) == 2
    said = "trainer.callbacks.earlystopping (the command line): EarlyStopping needs monitor. Set monitor."
    assert said in capsys.readouterr().err
    assert main(["fit", "--config", "line.yaml", "--model.widths+=wide"]) == 2
    assert 'model.widths (the command line): expected a list of int, found [1, 2, "wide"].' in capsys.readouterr().err


def test_a_nested_class_and_a_dataclass_are_built():
    write_config("nested.yaml", {"model": {"init_args": {"noise": {"scale": 0.5}, "encoder": {"class_path": "ReLU"}}}})
    _, task = fit("--config", "nested.yaml", "--model.noise.kind", "uniform", "--model.encoder.inplace", "true")
    assert isinstance(task.encoder, torch.nn.ReLU)
    assert task.encoder.inplace
    assert task.noise == Noise(0.5, "uniform")
    assert main(["fit", "--config", "runs/line/config.yaml"]) == 0
    assert Spy.task.noise == Noise(0.5, "uniform")


def test_arguments_behind_keywords_are_options():
    write_config(
        "keyword_task.py",
        "from tests.helpers.cli_tasks import Line\n\n"
        "class Keyword(Line):\n"
        "    def __init__(self, depth: int, **keywords):\n"
        "        super().__init__(**keywords)\n"
        "        self.depth = depth\n",
    )
    _, task = fit("--model", "keyword_task.Keyword", "--model.depth", "4", "--model.lr", "0.3")
    assert (task.depth, task.hparams.lr, task.hparams.width) == (4, 0.3, 3)


# ---------------------------------------------------------------------- replaced classes

ADAMW = {"class_path": "AdamW", "init_args": {"lr": 0.3, "weight_decay": 0.7}}


@pytest.mark.parametrize(
    "words",
    [
        ["--optimizer", "SGD"],
        ["--optimizer=torch.optim.SGD"],
        ["--optimizer.class_path", "SGD"],
        ["--optimizer", "{class_path: SGD}"],
        ["--config", "sgd.yaml"],
        ["--config", "short.yaml"],
    ],
)
def test_new_optimizer_drops_arguments_of_the_old_one(words):
    write_config("adamw.yaml", {"optimizer": ADAMW})
    write_config("sgd.yaml", {"optimizer": {"class_path": "torch.optim.SGD"}})
    write_config("short.yaml", {"optimizer": "SGD"})
    trainer, _ = fit("--config", "adamw.yaml", *words)
    assert type(trainer.optimizers[0]) is torch.optim.SGD
    assert (get_optimizer_group(trainer)["weight_decay"], get_optimizer_group(trainer)["lr"]) == (0.0, 1e-3)
    assert read_saved_config()["optimizer"]["init_args"]["weight_decay"] == 0.0


def test_saved_config_can_switch_the_optimizer():
    fit("--optimizer", "AdamW")
    assert read_saved_config()["optimizer"]["init_args"]["weight_decay"] == 0.01
    trainer, _ = fit("--optimizer", "SGD", config="runs/line/config.yaml")
    assert get_optimizer_group(trainer)["weight_decay"] == 0.0


def test_arguments_of_new_class_apply_in_any_order():
    write_config("adamw.yaml", {"optimizer": ADAMW})
    for words in (["--optimizer.lr", "0.2", "--optimizer", "SGD"], ["--optimizer", "SGD", "--optimizer.lr", "0.2"]):
        trainer, _ = fit("--config", "adamw.yaml", *words)
        assert (get_optimizer_group(trainer)["lr"], get_optimizer_group(trainer)["weight_decay"]) == (0.2, 0.0)


@pytest.mark.parametrize("name", ["AdamW", "torch.optim.AdamW"])
def test_naming_the_same_class_again_keeps_its_arguments(name):
    write_config("adamw.yaml", {"optimizer": ADAMW})
    trainer, _ = fit("--config", "adamw.yaml", "--optimizer", name, "--optimizer.lr=0.1")
    assert (get_optimizer_group(trainer)["lr"], get_optimizer_group(trainer)["weight_decay"]) == (0.1, 0.7)


def test_an_environments_optimizer_leaves_nothing_behind_either(monkeypatch):
    monkeypatch.setenv("LUMEN_FIT__OPTIMIZER", "AdamW")
    monkeypatch.setenv("LUMEN_FIT__OPTIMIZER__WEIGHT_DECAY", "0.7")
    assert get_optimizer_group(fit()[0])["weight_decay"] == 0.7
    assert get_optimizer_group(fit("--optimizer", "SGD")[0])["weight_decay"] == 0.0


@pytest.mark.parametrize("by_file", [False, True])
def test_switching_any_class_drops_the_old_arguments(by_file):
    before = {
        "model": {"class_path": "tests.helpers.cli_tasks.Line", "init_args": {"lr": 0.9}},
        "data": {"class_path": "tests.helpers.cli_tasks.Points", "init_args": {"samples": 40, "width": 5}},
        "optimizer": "SGD",
        "lr_scheduler": {"class_path": "StepLR", "init_args": {"step_size": 1, "gamma": 0.5, "last_epoch": 3}},
        "trainer": {
            "callbacks": {"other": {"class_path": "tests.helpers.cli_tasks.Spy", "init_args": {"name": "old"}}}
        },
    }
    after = {
        "model": "tests.helpers.cli_tasks.Slope",
        "data": "tests.helpers.cli_tasks.Grid",
        "lr_scheduler": {"class_path": "ExponentialLR", "init_args": {"gamma": 0.9}},
        "trainer": {"callbacks": {"other": {"class_path": "tests.helpers.cli_tasks.Loud"}}},
    }
    words = ["--config", write_config("before.yaml", before)]
    if by_file:
        words += ["--config", write_config("after.yaml", after)]
    else:
        words += ["--model", after["model"], "--data", after["data"]]
        words += ["--lr_scheduler.gamma=0.9", "--lr_scheduler=ExponentialLR"]
        words += ["--trainer.callbacks.other.class_path", "tests.helpers.cli_tasks.Loud"]
    trainer, task = fit(*words)
    assert (type(task), task.hparams.lr) == (Slope, 0.02)
    assert type(trainer.datamodule) is Grid
    assert (trainer.datamodule.samples, trainer.datamodule.width) == (6, 2)
    assert trainer.lr_scheduler_configs[0].scheduler.gamma == 0.9
    assert [callback.name for callback in trainer.callbacks if type(callback).__name__ == "Loud"] == ["loud"]


def test_switching_a_nested_class_drops_its_arguments_too():
    write_config(
        "nested.yaml", {"model": {"init_args": {"encoder": {"class_path": "CELU", "init_args": {"alpha": 0.3}}}}}
    )
    write_config("other.yaml", {"model": {"init_args": {"encoder": {"class_path": "torch.nn.ELU"}}}})
    assert fit("--config", "nested.yaml", "--model.encoder.alpha=0.5")[1].encoder.alpha == 0.5
    assert fit("--config", "nested.yaml", "--config", "other.yaml")[1].encoder.alpha == 1.0
    assert fit("--config", "nested.yaml", "--model.encoder", "torch.nn.ELU")[1].encoder.alpha == 1.0


def test_lr_schedule_without_scheduler_is_reported_unused(capsys):
    fit("--optimizer=SGD", "--lr_schedule.warmup_steps=5")
    assert "ignoring lr_schedule: the config has no lr_scheduler" in capsys.readouterr().err
    fit("--optimizer=SGD")
    assert "lr_schedule" not in capsys.readouterr().err


def test_callbacks_may_be_listed_on_the_command_line():
    trainer, _ = fit("--trainer.callbacks", "[{class_path: tests.helpers.cli_tasks.Spy, init_args: {name: listed}}]")
    assert [callback.name for callback in trainer.callbacks if type(callback) is Spy] == ["listed"]


@pytest.mark.slow
def test_word_replaces_object_where_both_are_accepted():
    write_config(
        "traced.yaml", {"trainer": {"profiler": {"class_path": "lumen.TorchProfiler", "init_args": {"wait": 1}}}}
    )
    assert type(fit("--config", "traced.yaml")[0].profiler) is TorchProfiler
    assert type(fit("--config", "traced.yaml", "--trainer.profiler", "simple")[0].profiler) is SimpleProfiler
    assert type(fit("--config", "traced.yaml", "--trainer.profiler", "null")[0].profiler) is PassThroughProfiler


# ---------------------------------------------------------------------- optimizer, scheduler, callbacks


def test_configured_optimizer_replaces_configure_optimizers_with_one_message(capsys):
    trainer, task = fit("--optimizer", "Adagrad", "--optimizer.lr", "0.25")
    assert type(trainer.optimizers[0]) is torch.optim.Adagrad
    assert {id(p) for p in get_optimizer_group(trainer)["params"]} == {id(p) for p in task.parameters()}
    said = "optimizer: torch.optim.Adagrad, instead of the task's configure_optimizers"
    assert capsys.readouterr().err.count(said) == 1
    trainer, _ = fit("--optimizer", "null")
    assert type(trainer.optimizers[0]) is torch.optim.SGD
    assert "instead of" not in capsys.readouterr().err


def test_lr_schedule_says_when_the_scheduler_steps():
    config = {
        "optimizer": {"class_path": "SGD", "init_args": {"lr": 1.0}},
        "lr_scheduler": {"class_path": "StepLR", "init_args": {"step_size": 2, "gamma": 0.5}},
        "lr_schedule": {"interval": "step"},
    }
    words = ["--config", write_config("scheduled.yaml", config)]
    assert get_optimizer_group(fit(*words)[0])["lr"] == 0.125  # 6 steps
    assert get_optimizer_group(fit(*words, "--lr_schedule.interval=epoch")[0])["lr"] == 0.5
    assert get_optimizer_group(fit(*words, "--lr_schedule.frequency", "3")[0])["lr"] == 0.5
    plateau = ["--lr_scheduler", "ReduceLROnPlateau", "--lr_schedule.monitor", "val_loss", "--lr_scheduler.patience=5"]
    scheduler = fit(*words, *plateau, "--lr_schedule.interval=epoch")[0].lr_scheduler_configs[0]
    assert (scheduler.monitor, scheduler.scheduler.patience) == ("val_loss", 5)
    assert read_saved_config("runs/line-4")["lr_schedule"]["monitor"] == "val_loss"


def get_stoppers(trainer):
    return [callback for callback in trainer.callbacks if type(callback).__name__ == "EarlyStopping"]


def test_named_callbacks_merge_over_configs_and_null_removes():
    early = {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss", "patience": 8}}
    config = write_config("early.yaml", {"trainer": {"callbacks": {"early": early}}})
    assert [callback.patience for callback in get_stoppers(fit("--config", config)[0])] == [8]
    changes = ["--trainer.callbacks.early.patience", "9", "--trainer.callbacks.lr=LearningRateMonitor"]
    trainer, _ = fit("--config", config, *changes)
    assert [(callback.patience, callback.monitor) for callback in get_stoppers(trainer)] == [(9, "val_loss")]
    assert any(type(callback).__name__ == "LearningRateMonitor" for callback in trainer.callbacks)
    assert set(read_saved_config("runs/line-2")["trainer"]["callbacks"]) == {"spy", "early", "lr"}
    assert main(["fit", "--config", "runs/line-2/config.yaml"]) == 0
    assert [callback.patience for callback in get_stoppers(Spy.trainer)] == [9]
    assert get_stoppers(fit("--config", config, "--trainer.callbacks.early=null")[0]) == []
    off = write_config("off.yaml", {"trainer": {"callbacks": {"early": None}}})
    assert get_stoppers(fit("--config", config, "--config", off)[0]) == []


def test_callbacks_may_be_a_list_or_single():
    early = {"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss"}}
    listed = write_config("list.yaml", {"trainer": {"callbacks": ["tests.helpers.cli_tasks.Spy", early]}})
    assert [callback.monitor for callback in get_stoppers(fit("--config", listed)[0])] == ["val_loss"]
    trainer, _ = fit(
        "--config", listed, "--trainer.callbacks", "tests.helpers.cli_tasks.Spy", "--trainer.logger", "CSVLogger"
    )
    assert get_stoppers(trainer) == []
    assert [type(logger).__name__ for logger in trainer.loggers] == ["CSVLogger"]


# ---------------------------------------------------------------------- links


def test_required_model_arguments_come_from_data(capsys):
    _, task = fit("--data.width", "5", "--data.label", "five")
    assert (task.hparams.width, task.hparams.label) == (5, None)  # label has a default value
    assert capsys.readouterr().err.count("model.width is 5, from data.width") == 1
    assert read_saved_config()["model"]["init_args"]["width"] == 5
    _, task = fit(config="runs/line/config.yaml")
    assert task.hparams.width == 5
    assert "from data.width" not in capsys.readouterr().err


def test_untyped_required_argument_comes_from_data_too():
    code = (
        "from tests.helpers.cli_tasks import Line\n\n"
        "class Bare(Line):\n"
        "    def __init__(self, width, label):\n"
        "        super().__init__(width, label=label)\n"
    )
    write_config("bare.py", code)
    _, task = fit("--model", "bare.Bare", "--data.label", "five")
    assert (task.hparams.width, task.hparams.label) == (3, "five")


def test_long_values_from_data_are_abbreviated_in_messages(capsys):
    write_config("long.py", "from tests.helpers.cli_tasks import Line\n\nclass Long(Line):\n"
          "    def __init__(self, names):\n        super().__init__(3)\n")  # fmt: skip
    write_config("many.py", "from tests.helpers.cli_tasks import Points\n\nclass Many(Points):\n"
          "    names = [f'name {n}' for n in range(999)]\n")  # fmt: skip
    fit("--model", "long.Long", "--data", "many.Many")
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "from data.names" in line]
    assert said.startswith("model.names is ['name 0', 'name 1', ")
    assert len(said) < 120
    assert read_saved_config()["model"]["init_args"]["names"] == [f"name {n}" for n in range(999)]


def test_given_arguments_are_not_taken_from_data(capsys):
    assert fit("--data.width", "4", "--model.width", "4")[1].hparams.width == 4
    assert "from data" not in capsys.readouterr().err


# ---------------------------------------------------------------------- the name, seed and config of a run


def test_run_is_named_by_name_config_or_task():
    assert fit()[0].run_directory == Path("runs/line")
    assert fit("--trainer.name", "chosen")[0].run_directory == Path("runs/chosen")
    words = ["--model=tests.helpers.cli_tasks.Line", "--data=tests.helpers.cli_tasks.Points", "--trainer.max_steps=1"]
    assert main(["fit", *words, "--trainer.callbacks.spy=tests.helpers.cli_tasks.Spy"]) == 0
    assert Spy.trainer.run_directory == Path("runs/line-2")


def test_saved_config_repeats_the_run_exactly():
    _, first = fit("--optimizer=AdamW", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1")
    _, second = fit(config="runs/line/config.yaml")
    assert Spy.trainer.run_directory == Path("runs/line-2")
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert read_metrics("runs/line") == read_metrics("runs/line-2")
    assert len(read_metrics("runs/line")) >= 6
    renamed, original = read_saved_config("runs/line-2"), read_saved_config("runs/line")
    assert (renamed["trainer"].pop("name"), original["trainer"].pop("name")) == ("line-2", "line")
    assert renamed == original


def test_random_seed_is_recorded_and_repeats_the_run():
    _, first = fit("--seed_everything", "null")
    seed = read_saved_config()["seed_everything"]
    assert Spy.trainer.seed == seed
    _, second = fit(config="runs/line/config.yaml")
    assert torch.equal(first.layer.weight, second.layer.weight)
    fit("--seed_everything", "null")
    assert read_saved_config("runs/line-3")["seed_everything"] != seed


def test_resume_continues_in_place_with_the_saved_seed():
    fit("--trainer.max_epochs", "4", "--trainer.name", "whole", "--seed_everything", "null")
    seed = read_saved_config("runs/whole")["seed_everything"]
    fit("--trainer.max_epochs", "2", "--seed_everything", str(seed))
    trainer, _ = fit("--trainer.max_epochs", "4", "--seed_everything", "null", "--trainer.resume", "auto")
    assert trainer.run_directory == Path("runs/line")
    assert (trainer.seed, trainer.global_step) == (seed, 12)
    assert read_metrics("runs/whole") == read_metrics("runs/line")
    assert read_saved_config()["seed_everything"] == seed


@pytest.mark.parametrize(
    ("words", "seed"),
    [
        (["fit", "--trainer.resume=auto"], 5),
        (["fit", "--trainer.resume=last"], 5),
        (["fit", "--trainer.resume=kept/step-00000003", "--trainer.callbacks.saver.dirpath=new"], 5),
        (["fit", "--trainer.resume=kept", "--trainer.callbacks.saver.dirpath=new"], 11),  # looks like a run directory
        (["fit", "--trainer.name=line-2", "--trainer.resume=auto"], 7),  # in kept-2
        (["validate", "--ckpt_path=last"], 5),
        (["test", "--ckpt_path=best"], 5),
    ],
)
def test_seed_comes_from_the_checkpoint_that_is_read(words, seed):
    saver = ["--trainer.callbacks.saver=ModelCheckpoint", "--trainer.callbacks.saver.dirpath=kept"]
    saver.append("--trainer.callbacks.saver.monitor=val_loss")
    fit(*saver, "--trainer.callbacks.saver.dirpath=kept/checkpoints", "--trainer.name=other", "--seed_everything=11")
    for number in (5, 7):
        fit(*saver, "--trainer.max_epochs=1", f"--seed_everything={number}")
    command, *words = words
    words += ["--seed_everything=null", "--trainer.max_epochs=3"]
    assert main([command, "--config=line.yaml", *saver, *words]) == 0
    assert Spy.trainer.seed == seed
    if command == "fit":
        assert (Spy.trainer.run.seed, Spy.trainer.global_step) == (seed, 9)
        assert read_saved_config(Spy.trainer.run_directory)["seed_everything"] == seed


@pytest.mark.slow
def test_resume_with_changed_options_keeps_old_config():
    fit()
    first = read_saved_config()
    fit("--trainer.resume", "auto", config="runs/line/config.yaml")  # finished: a resume has no steps to train
    assert not Path("runs/line/config-1.yaml").exists()
    fit("--trainer.resume", "auto", "--trainer.max_epochs", "3", config="runs/line/config.yaml")
    second = Path("runs/line/config.yaml").read_text()
    fit("--trainer.resume", "last", "--trainer.max_epochs", "4", config="runs/line/config.yaml")
    assert yaml.safe_load(Path("runs/line/config-1.yaml").read_text()) == first
    assert Path("runs/line/config-2.yaml").read_text() == second
    assert read_saved_config()["trainer"]["max_epochs"] == 4
    assert read_saved_config()["trainer"]["resume"] is None
    assert not list(Path("runs/line").glob(".*.tmp"))


def test_strategy_is_built_once_and_checked_first(monkeypatch, capsys):
    built, begin = [], lumen.DDP.__init__

    def note(self, *args, **kwargs):
        built.append(self)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(lumen.DDP, "__init__", note)
    trainer, _ = fit("--trainer.strategy=ddp", "--trainer.accelerator=cpu")
    assert built == [trainer.strategy]
    capsys.readouterr()
    alone = ["--trainer.strategy=single", "--trainer.devices=2", "--trainer.accelerator=cpu"]
    assert main(["fit", "--config", "line.yaml", *alone, "--model=tests.helpers.cli_tasks.Interrupted"]) == 2
    assert "strategy: SingleDevice runs one process, but devices requests 2 processes." in capsys.readouterr().err


MESH = {"class_path": "lumen.Mesh", "init_args": {"tensor": 2}}
OF_FSDP = {"trainer": {"strategy": {"class_path": "lumen.FSDP", "init_args": {"cpu_offload": True}}}}


@pytest.mark.parametrize(
    ("config", "words", "strategy"),
    [
        ({}, ["--trainer.strategy=mesh", "--trainer.strategy.tensor=2"], MESH),
        ({}, ["--trainer.strategy.tensor=2", "--trainer.strategy=mesh"], MESH),
        ({"trainer": {"strategy": "mesh"}}, ["--trainer.strategy.tensor=2"], MESH),
        ({"trainer": {"strategy": MESH | {"class_path": "mesh"}}}, [], MESH),
        ({"trainer": {"strategy": MESH}}, ["--trainer.strategy=mesh"], MESH),
        (OF_FSDP, ["--trainer.strategy=mesh", "--trainer.strategy.tensor=2"], MESH),
        (OF_FSDP, ["--trainer.strategy=ddp"], "ddp"),
        ({}, ["--trainer.strategy=lumen.FSDP"], {"class_path": "lumen.FSDP"}),
        ({}, ["--trainer.strategy=fsdp", "--trainer.strategy.cpu_offload"], OF_FSDP["trainer"]["strategy"]),
    ],
)
def test_short_names_of_strategies_take_options(capsys, config, words, strategy):
    second = write_config("second.yaml", config)
    assert main(["fit", "--config", "line.yaml", "--config", second, *words, "--print_config=skip_default"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"] == strategy


def test_strategy_by_short_name_repeats_from_config():
    options = ["--trainer.strategy=fsdp", "--trainer.strategy.timeout_s=77", "--trainer.accelerator=cpu"]
    assert fit(*options)[0].strategy.processes.timeout_s == 77
    trainer, _ = fit("--trainer.name=again", config="runs/line/config.yaml")
    assert (type(trainer.strategy), trainer.strategy.processes.timeout_s) == (lumen.FSDP, 77)
    first, second = (read_saved_config(f"runs/{name}")["trainer"] for name in ("line", "again"))
    assert first | {"name": "again"} == second


# ---------------------------------------------------------------------- validate, test, predict


def values(*words):
    assert main([*words, "--output", "values.json"]) == 0
    return json.loads(Path("values.json").read_text())


@pytest.mark.slow
def test_evaluation_prints_a_table_and_writes_json(capsys):
    fit()
    capsys.readouterr()
    by_name = values("validate", "--config", "line.yaml", "--ckpt_path", "last")
    table = capsys.readouterr().out
    assert by_name == [{"val_loss": float(read_metrics("runs/line")[-1]["val_loss"])}]
    assert "val_loss" in table
    assert f"{by_name[0]['val_loss']:.6g}" in table
    assert values("validate", "--config", "runs/line/config.yaml", "--ckpt_path=last") == by_name
    assert values("validate", "--ckpt_path", "runs/line") == by_name
    assert values("validate", "--ckpt_path", "runs/line/checkpoints/step-00000006") == by_name
    assert values("test", "--ckpt_path", "runs/line") == [{"test_loss": by_name[0]["val_loss"]}]
    assert values("validate", "--config", "line.yaml") != by_name


@pytest.mark.parametrize(
    ("words", "heads"), [([], ["loader 0", "loader 1"]), (["--data.names", "[near, far]"], ["near", "far"])]
)
def test_evaluation_table_has_a_column_per_loader(capsys, words, heads):
    by_loader = values(
        "validate", "--config", "line.yaml", "--model.width=3", "--data=tests.helpers.cli_tasks.Pairs", *words
    )
    head, row = [line for line in capsys.readouterr().out.splitlines() if "metric" in line or "val_loss" in line]
    assert [cell.strip() for cell in head.split("┃")[2:-1]] == heads
    numbers = [value for column in by_loader for value in column.values()]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["val_loss", *(f"{value:.6g}" for value in numbers)]


def test_evaluation_table_of_one_loader_has_one_column(capsys):
    by_name = values("validate", "--config", "line.yaml")
    head, row = [line for line in capsys.readouterr().out.splitlines() if "metric" in line or "val_loss" in line]
    assert [cell.strip() for cell in head.split("┃")[1:-1]] == ["metric", "value"]
    assert [cell.strip() for cell in row.split("│")[1:-1]] == ["val_loss", f"{by_name[0]['val_loss']:.6g}"]


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluating_untrained_parameters_warns(capsys, command):
    warning = f"warning: {command} uses the initial parameters of Line. For the parameters of {{}}, set ckpt_path: "
    words = [command, "--config", "line.yaml"]
    assert main(words) == 0
    assert capsys.readouterr().err.count(warning.format("a run") + "--ckpt_path best") == 1
    fit()
    capsys.readouterr()
    assert main(words) == 0
    assert capsys.readouterr().err.count(warning.format("runs/line")) == 1
    assert main([*words, "--ckpt_path", "last"]) == 0
    assert "the initial parameters" not in capsys.readouterr().err


def test_best_is_the_checkpoint_that_the_monitor_names():
    saver = ["--trainer.callbacks.saver=ModelCheckpoint", "--trainer.callbacks.saver.monitor=val_loss"]
    fit(*saver, "--trainer.callbacks.saver.mode=max")  # `best` is the worst checkpoint here, so not the last one
    best = values("validate", "--config", "runs/line/config.yaml", "--ckpt_path", "best")[0]["val_loss"]
    assert best == max(float(row["val_loss"]) for row in read_metrics("runs/line") if row["val_loss"])
    assert best != values("validate", "--ckpt_path", "runs/line")[0]["val_loss"]


def test_predicted_text_is_printed_and_written_as_lines(capsys):
    words = ["--model", "tests.helpers.cli_tasks.Slope"]
    fit(*words)
    capsys.readouterr()
    assert main(["predict", "--config", "line.yaml", *words, "--ckpt_path", "last", "--output", "text.jsonl"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 12
    assert all(line.startswith("y = ") for line in printed)
    assert [json.loads(line) for line in Path("text.jsonl").read_text().splitlines()] == printed


HOW_TO_KEEP = "To save all predictions: --output FILE.jsonl, or FILE.safetensors for tensors"


@pytest.mark.parametrize(
    ("model", "line"), [("Line", r"\[(-?[\d.]+)\]"), ("Columns", r"x \[[-\d., ]+\], y (-?[\d.]+)")]
)
def test_predicted_tensors_are_printed_one_sample_per_line(capsys, model, line):
    predict = ["predict", "--config", "line.yaml", f"--model=tests.helpers.cli_tasks.{model}", "--data.samples=8"]
    assert main(predict) == 0
    shown = capsys.readouterr()
    assert f"printed all predictions. {HOW_TO_KEEP}" in shown.err
    assert main([*predict, "--output", "kept.safetensors"]) == 0
    kept = load_file("kept.safetensors")["y" if model == "Columns" else "predictions"].flatten().tolist()
    outputs = [re.fullmatch(line, text).group(1) for text in shown.out.splitlines()]
    assert outputs == [f"{value:.4g}" for value in kept]
    again = capsys.readouterr()
    assert again.out == shown.out
    assert "printed all predictions. All predictions are in kept.safetensors" in again.err


def test_many_or_large_predictions_are_abbreviated(capsys):
    write_config(
        "large.py",
        "import torch\nfrom tests.helpers.cli_tasks import Line\n\n"
        "class Large(Line):\n    def predict_step(self, batch):\n        return torch.zeros(len(batch[0]), 5, 9)\n\n"
        "class Silent(Line):\n    def predict_step(self, batch):\n        print('mine')\n",
    )
    predict = ["predict", "--config", "line.yaml", "--data.samples=24"]
    assert main([*predict, "--model=large.Large"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["(5, 9) float32"] * 10
    assert f"printed the first 10 predictions. {HOW_TO_KEEP}" in shown.err
    assert main([*predict, "--model=large.Silent"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["mine"] * 6
    assert "To keep" not in shown.err


@pytest.mark.slow
def test_predicted_tensors_are_written_as_lines_or_joined(capsys):
    fit()
    capsys.readouterr()
    predict = ["predict", "--ckpt_path", "runs/line", "--output"]
    assert main([*predict, "lines.jsonl"]) == 0
    assert main([*predict, "tensors.safetensors"]) == 0
    assert main([*predict, "tensors.safetensors"]) == 0  # the second call replaces the file
    joined = load_file("tensors.safetensors")["predictions"]
    assert joined.shape == (12, 1)
    assert [json.loads(line) for line in Path("lines.jsonl").read_text().splitlines()] == joined.tolist()
    columns = ["--model", "tests.helpers.cli_tasks.Columns"]
    assert main([*predict, "named.safetensors", *columns]) == 0
    named = load_file("named.safetensors")
    assert (named["x"].shape, named["y"].shape) == ((12, 3), (12,))
    assert main([*predict, "named.jsonl", *columns]) == 0
    rows = [json.loads(line) for line in Path("named.jsonl").read_text().splitlines()]
    assert rows == [{"x": x, "y": y} for x, y in zip(named["x"].tolist(), named["y"].tolist(), strict=True)]


def test_predictions_with_different_names_are_not_joined(capsys):
    write_config(
        "more.py",
        "from tests.helpers.cli_tasks import Line\n\n"
        "class More(Line):\n    def predict_step(self, batch, batch_idx):\n"
        "        return {'a': batch[0], 'b': batch[0]} if batch_idx else {'a': batch[0]}\n",
    )
    predict = ["predict", "--config", "line.yaml", "--model=more.More", "--output", "all.safetensors"]
    assert main(predict) == 1
    assert "cannot join the predictions of all batches" in capsys.readouterr().err
    assert main([*predict, "--trainer.limit_predict_batches=0"]) == 1
    assert "there are no predictions to write" in capsys.readouterr().err


def test_run_without_seed_resumes_after_change_of_dirpath():
    words = ["fit", "--config", "line.yaml", "--seed_everything=null", "--trainer.resume=auto"]
    assert main(words) == 0
    changed = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath=kept", "--trainer.max_epochs=3"]
    assert main([*words, *changed]) == 0
    assert [row["step"] for row in read_metrics("runs/line") if row["val_loss"]] == ["3", "6", "9"]


@pytest.mark.parametrize("place", ["best", "last", "line.safetensors"])
def test_config_of_working_directory_is_no_runs(capsys, place):
    Path("line.yaml").rename("config.yaml")
    Path("line.safetensors").touch()
    assert main(["validate", "--ckpt_path", place]) == 2
    assert "model" in capsys.readouterr().err


def test_every_subcommand_takes_the_saved_config():
    fit("--optimizer=SGD", "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.9", "--trainer.resume", "auto")
    for command in ("validate", "test", "predict"):
        assert main([command, "--config", "runs/line/config.yaml", "--ckpt_path", "last"]) == 0
    assert isinstance(Spy.task, Line)
    assert isinstance(Spy.trainer.datamodule, Points)


def test_argument_named_config_is_saved(capsys):
    Path("named.yaml").write_text(
        "model: {class_path: tests.helpers.cli_tasks.Configured, init_args: {config: {width: 3}}}\n"
        "data: tests.helpers.cli_tasks.Points\ntrainer: {max_epochs: 1}\n"
    )
    assert main(["fit", "--config", "named.yaml"]) == 0
    saved = yaml.safe_load(Path("runs/named/config.yaml").read_text())
    assert saved["model"]["init_args"] == {"config": {"width": 3}}
    assert "config" not in saved
