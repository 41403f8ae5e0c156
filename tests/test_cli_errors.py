# ruff: noqa: E501 - a message stands on one line with what causes it
"""What the command line says when something is wrong: where it was written, what was found, what to do."""

import os
import sys
from pathlib import Path

import pytest
import yaml

from lumen.cli import main
from tests import cli_tasks

QUIET = "enable_progress_bar: false, enable_model_summary: false"
CONFIG = f"""\
seed_everything: 7
model:
  class_path: tests.cli_tasks.Line
  init_args:
    lr: 0.05
data:
  class_path: tests.cli_tasks.Points
trainer: {{max_steps: 2, {QUIET}}}
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in os.environ:
        if name.startswith("LUMEN_"):
            monkeypatch.delenv(name)
    Path("line.yaml").write_text(CONFIG)


@pytest.fixture
def refused(capsys):
    """Run a command that must fail before anything is written, and return its message."""

    def run(*words, code=2):
        capsys.readouterr()
        assert main(list(words)) == code
        out, message = capsys.readouterr()
        assert out == ""
        assert message.count("error: ") == 1
        for noise in ("Traceback", "Union", "NoneType", "<class", "Namespace", "ArgumentError", "Parser key"):
            assert noise not in message
        assert not Path("runs").exists()
        return message.partition("error: ")[2]

    return run


def fit(refused, *words, config=None):
    """What `fit` says about line.yaml with a second file and options."""
    files = ["--config", "line.yaml"]
    if config is not None:
        Path("second.yaml").write_text(config)
        files += ["--config", "second.yaml"]
    return refused("fit", *files, *words)


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("modle: {}", "modle (second.yaml:1): there is no such key. Did you mean model?"),
        ("\nmax_steps: 3", "max_steps (second.yaml:2): there is no such key. Did you mean trainer.max_steps?"),
        ("trainer:\n  # more\n  max_step: 3", "trainer.max_step (second.yaml:3): Trainer has no option max_step. Did you mean max_steps"),
        ("trainer: {seed: 3}", "trainer.seed (second.yaml:1): Trainer has no option seed. Use the top-level key seed_everything."),
        ("ckpt_path: best", "ckpt_path (second.yaml:1): there is no such key here. It belongs to validate, test and predict"),
        ("model:\n  init_args:\n    widht: 3", "model.widht (second.yaml:3): tests.cli_tasks.Line has no option widht. Did you mean width"),
        ("model:\n  lrr: 3", "model.lrr (second.yaml:2): tests.cli_tasks.Line has no option lrr. Did you mean lr?"),
        ("data: {init_args: {bach_size: 3}}", "tests.cli_tasks.Points has no option bach_size. Did you mean batch_size?"),
        ("optimizer: {class_path: SGD, init_args: {momentun: 1}}", "torch.optim.SGD has no option momentun. Did you mean momentum?"),
        ("optimizer: {class_path: SGD, params: 1}", "torch.optim.SGD has no option params. It is given the task's parameters."),
        (
            "trainer:\n  callbacks:\n    early:\n      class_path: EarlyStopping\n      init_args:\n        monitr: x",
            "trainer.callbacks.early.monitr (second.yaml:6): lumen.callbacks.EarlyStopping has no option monitr. "
            "Did you mean monitor?",
        ),
        (
            "model: {init_args: {encoder: {class_path: torch.nn.Linear, init_args: {in_featurs: 1}}}}",
            "model.encoder.in_featurs (second.yaml:1): torch.nn.Linear has no option in_featurs. Did you mean in_features",
        ),
        ("model: {init_args: {noise: {sclae: 1}}}", "model.noise.sclae (second.yaml:1): Noise has no option sclae. Did you mean scale?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one(refused, config, message):
    assert message in fit(refused, config=config)


def test_an_unknown_key_of_the_command_line_or_the_environment_is_named_so(refused, monkeypatch):
    said = fit(
        refused, "--model.lrr", "3", "--trainer.callbacks.early", "EarlyStopping", "--trainer.callbacks.early.monitr=a"
    )
    assert "model.lrr (command line): tests.cli_tasks.Line has no option lrr. Did you mean lr?" in said
    assert "trainer.callbacks.early.monitr (command line): lumen.callbacks.EarlyStopping has no option monitr." in said
    assert "--config" in fit(refused, "--confg", "x")
    monkeypatch.setenv("LUMEN_FIT__TRAINER__MAX_STEP", "3")
    assert "trainer.max_step (environment variable LUMEN_FIT__TRAINER__MAX_STEP): Trainer has no option" in fit(refused)


def test_all_that_is_wrong_is_said_at_once(refused):
    said = fit(
        refused, "--model.lrr", "3", "--trainer.max_steps", "many", "--data", "tests.cli_tasks.Pints"
    ).splitlines()
    assert len(said) == 3
    assert len({line.split(".")[0].split(" ")[0] for line in said}) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "line.yaml"], "'line.yaml' stands alone; settings are written --key value, a list as --key '[1, 2]'. Did you mean --config line.yaml?"),
        (["fit", "--config", "line.yaml", "--model.widths", "1", "2"], "'2' stands alone"),
        (["fit", "--config"], "--config needs a file after it."),
        (["fit"], "no model is configured. Give --config FILE, or --model module.Class."),
        (["fti"], "lumen has no command fti. Did you mean fit?"),
        (["dance"], "There are: fit, validate, test, predict"),
        (["fit", "--config", "lin.yaml"], "cannot read the config file lin.yaml: No such file or directory."),
    ],
)  # fmt: skip
def test_a_command_line_that_cannot_be_read_says_how_it_is_written(refused, words, message):
    assert message in refused(*words)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("a: b: c", "second.yaml:1: this is not valid YAML: mapping values are not allowed here."),
        ("model:\n\tlr: 3", "second.yaml:2: this is not valid YAML"),
        ("trainer: {max_steps: 1}\ntrainer: {max_steps: 2}", "second.yaml:2: the key trainer is there for the second time."),
        ("- a\n- b", "second.yaml: expected `key: value` lines, found ['a', 'b']."),
        ("a: !!python/object/apply:os.system ['true']", "second.yaml:1: this is not valid YAML: could not determine a constructor"),
        ("a: &a [*a]", "second.yaml:1: this is not valid YAML"),
        ("? [a]\n: 1", "second.yaml:1: this is not valid YAML"),
        ("model: [1]", "model (second.yaml:1): expected a class, as `class_path: module.Class` and `init_args:`, found [1]."),
        ("model: {init_args: 3}", "model.init_args (second.yaml:1): expected `name: value` lines, found 3."),
        ("trainer: 3", "trainer (second.yaml:1): expected the Trainer's options, found 3."),
        ("optimizer: {lr: 3}", "optimizer (second.yaml:1): no class is named. Add class_path: module.Class."),
    ],
)  # fmt: skip
def test_a_file_that_is_no_config_is_named_with_its_line(refused, config, message):
    assert message in fit(refused, config=config)


# ---------------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "AdmW"], "optimizer (command line): there is no class AdmW. Did you mean AdamW"),
        (["--optimizer", "adamw"], "Did you mean AdamW"),
        (["--optimizer", "torch.optim.AdmW"], "optimizer (command line): torch.optim has no AdmW. Did you mean torch.optim.AdamW"),
        (["--model", "tests.cli_tasks.Lime"], "model (command line): tests.cli_tasks has no Lime. Did you mean tests.cli_tasks.Line?"),
        (["--model", "tests.cli_task.Line"], "model (command line): tests has no cli_task. Did you mean tests.cli_tasks"),
        (["--model", "nowhere.Line"], "model (command line): cannot import nowhere.Line: there is no module nowhere in {cwd} or where Python looks"),
        (["--model", "Unheard"], "model (command line): there is no class Unheard. Give module and class, such as my_module.MyClass."),
        (["--model", "tests.cli_tasks.Points"], "model (command line): tests.cli_tasks.Points is no TaskModule."),
        (["--data", "tests.cli_tasks.Line"], "data (command line): tests.cli_tasks.Line is no DataModule."),
        (["--model", "tests.cli_tasks.not_a_class"], "model (command line): tests.cli_tasks.not_a_class is not a class but function"),
        (["--trainer.callbacks.early", "EarlyStoping"], "trainer.callbacks.early (command line): there is no class EarlyStoping. Did you mean EarlyStopping?"),
        (["--model.encoder", "{{class_path: Rely}}"], "model.encoder (command line): there is no class Rely. Did you mean ReLU"),
    ],
)  # fmt: skip
def test_a_class_that_is_not_there_is_named_with_the_nearest_one(refused, words, message):
    words = [word.format() for word in words]
    assert message.format(cwd=os.getcwd()) in fit(refused, *words)


def test_two_classes_of_one_name_are_told_apart_by_their_modules(refused):
    for name in ("one", "two"):
        Path(f"twin_{name}.py").write_text("import lumen\n\nclass Twin(lumen.Callback):\n    pass\n")
    both = "trainer: {callbacks: {a: twin_one.Twin, b: twin_two.Twin, c: Twin}}"
    assert "Twin may be twin_one.Twin or twin_two.Twin. Give the full name." in fit(refused, config=both)


def test_an_import_error_inside_a_users_module_is_the_users_own():
    Path("needy.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        main(["fit", "--config", "line.yaml", "--model", "needy.Model"])


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.max_steps", "many"], 'trainer.max_steps (command line): expected int or null, found "many".'),
        (["--trainer.max_steps", "1.5"], 'trainer.max_steps (command line): expected int or null, found "1.5".'),
        (["--trainer.gradient_clip_algorithm", "noorm"], 'expected "norm" or "value", found "noorm".'),
        (["--trainer.deterministic", "maybe"], 'trainer.deterministic (command line): expected bool, found "maybe".'),
        (["--trainer.name"], "trainer.name (command line): expected str or null, found true."),
        (["--trainer.callbacks", "[1]"], "trainer.callbacks"),
        (["--model.lr", "fast"], 'model.lr (command line): expected float, found "fast".'),
        (["--model.widths", "[a]"], 'model.widths (command line): expected tuple[int, ...], found "[a]".'),
        (["--model.noise.scale", "loud"], 'model.noise.scale (command line): expected float, found "loud".'),
        (["--model.encoder", "torch.nn.Linear", "--model.encoder.in_features=a"], 'model.encoder.in_features (command line): expected int, found "a".'),
        (["--seed_everything", "lucky"], 'seed_everything (command line): expected int or null, found "lucky".'),
        (["--optimizer", "SGD", "--optimizer.lr", "x"], 'optimizer.lr (command line): expected float or Tensor, found "x".'),
        (["--optimizer=SGD", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=1", "--lr_scheduler.interval=week"], 'lr_scheduler.interval (command line): expected "step" or "epoch", found "week".'),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_shown_with_the_type_that_is_expected(refused, words, message):
    assert message in fit(refused, *words)


def test_a_value_in_a_file_is_named_with_its_line(refused):
    said = fit(refused, config="trainer:\n  max_epochs: 2\n  name: 2024\nmodel:\n  init_args:\n    lr: null\n")
    assert "trainer.name (second.yaml:3): expected str or null, found 2024." in said
    assert "model.lr (second.yaml:6): expected float, found null." in said


def test_what_a_class_needs_and_does_not_get_is_named(refused):
    assert "lr_scheduler.step_size: torch.optim.lr_scheduler.StepLR needs it, and it is not set." in fit(
        refused, "--optimizer=SGD", "--lr_scheduler=StepLR"
    )
    assert "lr_scheduler: it needs the optimizer that it schedules. Set optimizer too." in fit(
        refused, "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5"
    )
    assert "model.encoder.out_features: torch.nn.Linear needs it" in fit(
        refused, "--model.encoder", "torch.nn.Linear", "--model.encoder.in_features=3"
    )
    early = "trainer.callbacks.early.monitor: lumen.callbacks.EarlyStopping needs it, and it is not set."
    assert early in fit(refused, "--trainer.callbacks.early=EarlyStopping")


def test_a_value_that_the_class_itself_refuses_is_a_config_error(capsys):
    assert main(["fit", "--config", "line.yaml", "--optimizer=SGD", "--optimizer.lr=-1"]) == 2
    assert (
        "error: optimizer: torch.optim.SGD does not take these arguments: Invalid learning rate: -1.0"
        in capsys.readouterr().err
    )


def test_a_list_of_callbacks_is_not_lost_by_naming_one(refused):
    config = "trainer: {callbacks: [EarlyStopping]}"
    said = fit(refused, "--trainer.callbacks.early.patience=3", config=config)
    assert "callbacks are changed by name, and second.yaml:1 lists them without names" in said


# ---------------------------------------------------------------------- links


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("link_arguments: {data.width: model.wdth}", "link_arguments, data.width: model.wdth: tests.cli_tasks.Line has no option wdth. Did you mean width"),
        ("link_arguments: {data.depth: model.width}", "link_arguments: Points has no attribute depth, or it is not plain data."),
        ("link_arguments: {data.points: model.width}", "link_arguments: Points has no attribute points"),
        ("link_arguments: {model.width: data.width}", "link_arguments, model.width: data.width: expected data.NAME: model.NAME."),
        ("data: null\nlink_arguments: {data.width: model.width}", "link_arguments, data.width: model.width: no data is configured."),
        ("data: null", "model.width: tests.cli_tasks.Line needs it, and it is not set."),
        ("link_arguments: [1]", "link_arguments (second.yaml:1): expected dict[str, str] or null, found [1]."),
    ],
)  # fmt: skip
def test_a_link_without_a_source_or_a_target_is_one_error(refused, config, message):
    said = fit(refused, config=config)
    assert message in said
    assert said.count("\n") == 1


def test_a_value_that_neither_config_nor_data_has_is_named_with_both(refused):
    Path("blank.py").write_text("import lumen\n\nclass Blank(lumen.DataModule):\n    pass\n")
    said = fit(refused, "--data", "blank.Blank")
    assert "model.width: tests.cli_tasks.Line needs it, and it is not set. Blank has no attribute of that name" in said


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["validate", "--output", "values.csv"], "--output values.csv: validate writes .json files."),
        (["predict", "--output", "text.txt"], "--output text.txt: predict writes .jsonl or .safetensors files."),
        (["predict", "--output", "no/text.jsonl"], "--output no/text.jsonl: there is no directory no."),
        (["fit", "--output", "values.json"], "--output values.json: fit writes into its run directory"),
    ],
)
def test_an_output_that_cannot_be_written_is_found_before_the_work(refused, words, message):
    assert message in refused(words[0], "--config", "line.yaml", *words[1:])


def test_a_checkpoint_that_is_not_there_is_an_error_of_the_checkpoint(refused):
    words = ["validate", "--config", "line.yaml", "--ckpt_path"]
    assert "no valid checkpoint found in runs/line/checkpoints" in refused(*words, "last", code=1)
    assert "no valid checkpoint found" in refused(*words, "elsewhere", code=1)
    assert "no model is configured" in refused("validate", "--ckpt_path", "elsewhere")
    assert 'ckpt_path: "auto" belongs to trainer.resume.' in refused(*words, "auto")


def test_predictions_that_do_not_fit_the_file_say_which_other_one_does(capsys):
    words = ["predict", "--config", "line.yaml", "--model", "tests.cli_tasks.Slope", "--output", "text.safetensors"]
    assert main(words) == 1
    message = capsys.readouterr().err
    assert ".safetensors files hold tensors only; predictions is a list. Write a .jsonl file." in message
    assert not Path("text.safetensors").exists()


# ---------------------------------------------------------------------- how a command ends


def test_an_error_of_lumen_is_one_paragraph_and_its_kind_the_exit_code(refused, capsys):
    said = fit(refused, "--model", "tests.cli_tasks.Stepless")
    assert "Stepless has no training_step" in said
    assert "how long to train is not set" in fit(refused, "--trainer.max_steps", "null")
    assert "accumulate_grad_batches: must be at least 1" in fit(refused, "--trainer.accumulate_grad_batches=0")
    assert (
        main(["fit", "--config", "line.yaml", "--data.batch_size=4", "--data.samples=0", "--trainer.resume=nowhere"])
        == 1
    )
    assert "no valid checkpoint" in capsys.readouterr().err


def test_a_users_own_exception_keeps_its_traceback():
    with pytest.raises(KeyError, match="nothing") as caught:
        main(["fit", "--config", "line.yaml", "--model", "tests.cli_tasks.Broken"])
    assert caught.traceback[-1].path == Path(cli_tasks.__file__)
    assert caught.value.__cause__ is None


def test_ctrl_c_is_130_without_a_traceback_and_exit_codes_pass(capsys):
    words = ["fit", "--config", "line.yaml", "--model", "tests.cli_tasks.Interrupted"]
    assert main(words) == 130
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([*words, "--model.signal", "term"])
    assert caught.value.code == 143


def test_debugging_shows_the_traceback_of_an_error(monkeypatch, capsys):
    words = ["fit", "--config", "line.yaml", "--model", "tests.cli_tasks.Stepless"]
    monkeypatch.setenv("LUMEN_DEBUG", "1")
    assert main(words) == 2
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.delenv("LUMEN_DEBUG")
    assert main([*words, "--trainer.log_level", "DEBUG"]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "error: Stepless has no training_step" in shown


def test_wrong_settings_of_another_command_do_not_matter(monkeypatch):
    monkeypatch.setenv("LUMEN_FIT__NONSENSE", "1")
    assert main(["validate", "--config", "line.yaml"]) == 0
    assert not Path("runs").exists()
    assert yaml.safe_load(CONFIG)["trainer"]["max_steps"] == 2
