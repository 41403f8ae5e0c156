# ruff: noqa: E501 - a message is on one line with its cause
"""Errors of the command line: the place of the mistake, the value found, and the fix."""

import sys
from pathlib import Path

import pytest

from lumen.cli import main
from tests.helpers import cli_tasks

CONFIG = """\
seed_everything: 7
model:
  class_path: tests.helpers.cli_tasks.Line
  init_args:
    lr: 0.05
data:
  class_path: tests.helpers.cli_tasks.Points
trainer: {max_steps: 2, enable_progress_bar: false, enable_model_summary: false}
"""


pytestmark = pytest.mark.usefixtures("config_directory")


@pytest.fixture
def catch_error(capsys):
    """Run a command that must fail before it writes a file, and return its message."""

    def run(*words, code=2):
        capsys.readouterr()
        assert main(list(words)) == code
        out, message = capsys.readouterr()
        assert out == ""
        assert message.count("error: ") == 1
        for noise in ("Traceback", "Union", "NoneType", "<class", "Namespace", "ArgumentError", "Parser key", "usage"):
            assert noise not in message
        assert not Path("runs").exists()
        return message.partition("error: ")[2]

    return run


def fit(catch_error, *words, config=None):
    """Return the error of `fit` with line.yaml, a second file and options."""
    files = ["--config", "line.yaml"]
    if config is not None:
        Path("second.yaml").write_text(config)
        files += ["--config", "second.yaml"]
    return catch_error("fit", *files, *words)


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("modle: {}", "modle (second.yaml): lumen has no option modle. Did you mean model?"),
        ("max_steps: 3", "max_steps (second.yaml): lumen has no option max_steps. Did you mean trainer.max_steps?"),
        (
            "trainer: {max_step: 3}",
            "trainer.max_step (second.yaml): Trainer has no option max_step. Did you mean max_steps",
        ),
        ("trainer: {seed: 3}", "trainer.seed (second.yaml): Trainer has no option seed. Use seed_everything."),
        ("1: 2", "1 (second.yaml): lumen has no option 1."),
        ("null: 2", "None (second.yaml): lumen has no option None."),
        ("model: {1: 2}", "model.1 (second.yaml): Line has no option 1."),
        ("trainer: {2: 3}", "trainer.2 (second.yaml): Trainer has no option 2."),
        ("trainer: {callbacks: {1: EarlyStopping}}", "trainer.callbacks.1 (second.yaml): EarlyStopping needs monitor."),
        ("ckpt_path: best", "ckpt_path (second.yaml): lumen has no option ckpt_path."),
        (
            "trainer: {callbacks: {bar: {class_path: ProgressBar, init_args: {plain_every: 3}}}}",
            "trainer.callbacks.bar.plain_every (second.yaml): ProgressBar has no option plain_every. Did you mean plain_every_s?",
        ),
        (
            "trainer: {callbacks: {bar: {class_path: ProgressBar, init_args: {unknown: 3}}}}",
            "trainer.callbacks.bar.unknown (second.yaml): ProgressBar has no option unknown.",
        ),
        (
            "trainer: {callbacks: [{class_path: ProgressBar, dict_kwargs: {plain_every: 3}}]}",
            "ProgressBar has no argument plain_every. Did you mean plain_every_s?",
        ),
        ("model: {init_args: {widht: 3}}", "model.widht (second.yaml): Line has no option widht. Did you mean width"),
        ("model: {lrr: 3}", "model.lrr (second.yaml): Line has no option lrr. Did you mean lr?"),
        ("data: {init_args: {bach_size: 3}}", "Points has no option bach_size. Did you mean batch_size?"),
        (
            "optimizer: {class_path: SGD, init_args: {momentun: 1}}",
            "SGD has no option momentun. Did you mean momentum?",
        ),
        ("optimizer: {class_path: SGD, params: 1}", "optimizer.params (second.yaml): SGD has no option params."),
        (
            "lr_schedule: {intervall: step}",
            "lr_schedule.intervall (second.yaml): Schedule has no option intervall. Did you mean interval?",
        ),
        (
            "trainer: {callbacks: {early: {class_path: EarlyStopping, init_args: {monitor: x, patince: 3}}}}",
            "trainer.callbacks.early.patince (second.yaml): EarlyStopping has no option patince. Did you mean patience?",
        ),
        (
            "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: x, patince: 3}}]}",
            "trainer.callbacks.0.patince (second.yaml): EarlyStopping has no option patince. Did you mean patience?",
        ),
        (
            "model: {init_args: {encoder: {class_path: torch.nn.Linear, init_args: {in_featurs: 1, out_features: 1}}}}",
            "model.encoder.in_featurs (second.yaml): Linear has no option in_featurs. Did you mean in_features",
        ),
        (
            "model: {init_args: {noise: {sclae: 1}}}",
            "model.noise.sclae (second.yaml): Noise has no option sclae. Did you mean scale?",
        ),
    ],
)
def test_unknown_key_names_file_and_nearest_key(catch_error, config, message):
    assert message in fit(catch_error, config=config)


def test_unknown_key_names_command_line_or_environment(catch_error, monkeypatch):
    assert "model.lrr (the command line): Line has no option lrr. Did you mean lr?" in fit(
        catch_error, "--model.lrr", "3"
    )
    assert "Did you mean --config?" in fit(catch_error, "--confg", "x")
    monkeypatch.setenv("LUMEN_FIT__TRAINER__MAX_STEP", "3")
    assert "trainer.max_step (the environment variable LUMEN_FIT__TRAINER__MAX_STEP): Trainer has no" in fit(
        catch_error
    )


def test_all_that_is_wrong_is_said_at_once(catch_error):
    said = fit(
        catch_error, "--model.lrr", "3", "--trainer.max_steps", "many", "--data", "tests.helpers.cli_tasks.Pints"
    )
    assert sorted(line.split(" ")[0] for line in said.splitlines()) == ["data", "model.lrr", "trainer.max_steps"]


def test_wrong_value_names_its_last_source(catch_error):
    Path("third.yaml").write_text("trainer: {max_epochs: 1}")
    said = fit(catch_error, "--config", "third.yaml", "--model.lr=1", config="trainer: {max_steps: many}")
    assert said == "trainer.max_steps (second.yaml): expected int, found 'many'.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fit", "line.yaml"],
            "'line.yaml' has no key. Write a setting as --key value, a config file as --config FILE.",
        ),
        (["fit", "--config", "line.yaml", "--model.widths", "1", "2"], "'2' has no key"),
        (
            ["fit"],
            "no model is configured. Give --config line.yaml, or --model module.Class. For a first project that "
            "trains, run: lumen init mine\n",
        ),
        (["fti"], "lumen has no command fti. Did you mean fit?"),
        (["dance"], "lumen has no command dance. lumen --help lists all commands."),
        (
            ["fit", "--trainer.callbacks.help"],
            "expected one argument. For the options of a class write --model.help module.Class.",
        ),
        (["fit", "--config", "--trainer.max_steps", "3"], "--config: no file is named. Write --config FILE."),
        (["fit", "--config", "lin.yaml"], "cannot read the config file lin.yaml: "),
    ],
)
def test_unreadable_command_line_explains_the_syntax(catch_error, words, message):
    assert message in catch_error(*words)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("a: b: c", "cannot read the config file second.yaml: mapping values are not allowed"),
        ("model:\n\tlr: 3", "cannot read the config file second.yaml: while scanning"),
        ("- a\n- b", "the config file second.yaml: expected `key: value` lines, found ['a', 'b']."),
        ("a: !!python/object/apply:os.system ['true']", "cannot read the config file second.yaml: could not determine"),
        ("model: [1]", "model"),
        ("model: {init_args: 3}", "init_args of None: expected `name: value` lines, found"),
        ("trainer: []", "trainer (second.yaml): expected `name: value` lines, found []."),
        ("trainer: 3", "trainer (second.yaml): expected `name: value` lines, found 3."),
        ("optimizer: {lr: 3}", "optimizer: no class is named. Write class_path: module.Class."),
    ],
)
def test_a_file_that_is_no_config_is_named(catch_error, config, message):
    assert message in fit(catch_error, config=config)


# ---------------------------------------------------------------------- classes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "AdmW"], "optimizer (the command line): lumen has no class AdmW. Did you mean AdamW"),
        (["--optimizer", "adamw"], "Did you mean AdamW"),
        (["--optimizer", "torch.optim.AdmW"], "optimizer (the command line): torch.optim has no class AdmW. Did you mean AdamW"),
        (["--model", "tests.helpers.cli_tasks.Lime"], "model (the command line): tests.helpers.cli_tasks has no class Lime. Did you mean Line"),
        (["--model", "tests.helpers.cli_task.Line"], "there is no module tests.helpers.cli_task. Did you mean cli_tasks"),
        (["--model", "nowhere.Line"], "model (the command line): cannot import nowhere.Line: there is no module nowhere."),
        (["--model", "Qqqqqq"], "model (the command line): lumen has no class Qqqqqq. Write class_path: module.Class."),
        (["--model", "tests.helpers.cli_tasks.Points"], "model (the command line): tests.helpers.cli_tasks.Points is not a subclass of TaskModule."),
        (["--data", "tests.helpers.cli_tasks.Line"], "data (the command line): tests.helpers.cli_tasks.Line is not a subclass of DataModule."),
        (["--trainer.callbacks.early", "EarlyStoping"], "trainer.callbacks.early (the command line): lumen has no class EarlyStoping. Did you mean EarlyStopping"),
        (["--model.encoder", "{class_path: Rely}"], "model.encoder (the command line): lumen has no class Rely. Did you mean ReLU"),
        (["--model.encoder", "{class_path: ELU}"], "model.encoder (the command line): several classes are called ELU: torch."),
    ],
)  # fmt: skip
def test_missing_class_suggests_the_nearest_one(catch_error, words, message):
    assert message in fit(catch_error, *words)


def test_missing_module_lists_searched_directories(catch_error, monkeypatch, tmp_path):
    for folder in ("project/configs", "project/package", "elsewhere", "added"):
        Path(folder).mkdir(parents=True)
    Path("project/my_tasks_of_c11.py").write_text("from tests.helpers.cli_tasks import Line\n")
    config = CONFIG.replace("tests.helpers.cli_tasks.Line", "my_tasks_of_c11.Line")
    Path("project/configs/mine.yaml").write_text(config)
    monkeypatch.chdir("elsewhere")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "added"))
    fit_words = ["fit", "--config", "../project/configs/mine.yaml"]
    looked = f"Python searched {tmp_path}/elsewhere (where lumen was started), {tmp_path}/added and the installed"
    advice = f"The module is in {tmp_path}/project: start lumen there, or add that directory to PYTHONPATH."
    begin = (
        "model (../project/configs/mine.yaml): cannot import my_tasks_of_c11.Line: there is no module my_tasks_of_c11."
    )
    assert catch_error(*fit_words) == f"{begin} {looked} packages. {advice}\n"
    said = catch_error(*fit_words, "--model", "package.Line")
    assert f"there is no module package. {looked} packages. The module is in {tmp_path}/project: start" in said
    said = catch_error(*fit_words, "--model", "nowhere_at_all.Line")
    assert "Start lumen in the directory of this module, or add that directory to PYTHONPATH." in said
    said = catch_error(*fit_words, "--model", "tests.helpers.cli_task.Line")
    assert f"Did you mean cli_tasks or tasks? Python searched {Path(cli_tasks.__file__).parent}." in said
    monkeypatch.chdir(tmp_path / "project")
    assert main(["fit", "--config", "configs/mine.yaml", "--print_config"]) == 0


@pytest.mark.parametrize("absolute", [True, False])
def test_missing_data_file_near_config_is_located(monkeypatch, tmp_path, absolute):
    for folder in ("project/configs", "project/data", "elsewhere"):
        Path(folder).mkdir(parents=True)
    Path("project/data/iris.csv").touch()
    name = "Path('data/iris.csv').absolute()" if absolute else "'data/iris.csv'"
    Path("data_of_c12.py").write_text(
        "from pathlib import Path\nfrom tests.helpers.cli_tasks import Points\n"
        f"class Table(Points):\n    def setup(self, stage):\n        open({name})\n"
    )
    config = CONFIG.replace("tests.helpers.cli_tasks.Points", "data_of_c12.Table")
    Path("project/configs/mine.yaml").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "data_of_c12", raising=False)
    monkeypatch.chdir("elsewhere")
    with pytest.raises(FileNotFoundError) as caught:
        main(["fit", "--config", "../project/configs/mine.yaml"])
    said = f"lumen was started in {tmp_path}/elsewhere, but data/iris.csv is in {tmp_path}/project."
    assert caught.value.__notes__[-1] == f"{said} Start lumen there."
    (tmp_path / "project/data/iris.csv").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        main(["fit", "--config", "../project/configs/mine.yaml"])
    assert said not in " ".join(getattr(caught.value, "__notes__", []))


def test_import_error_in_user_module_passes_through():
    Path("needy.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        main(["fit", "--config", "line.yaml", "--model", "needy.Model"])


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.max_steps", "many"], "trainer.max_steps (the command line): expected int, found 'many'."),
        (["--trainer.max_steps", "1.5"], "trainer.max_steps (the command line): expected int, found 1.5."),
        (["--trainer.gradient_clip_algorithm", "noorm"], "expected one of norm, value, found 'noorm'."),
        (["--trainer.deterministic", "maybe"], "trainer.deterministic (the command line): expected bool or one of warn, found 'maybe'."),
        (["--trainer.callbacks", "[1]"], "trainer.callbacks"),
        (["--model.lr", "fast"], "model.lr (the command line): expected float, found 'fast'."),
        (["--model.widths", "[a]"], "model.widths (the command line): expected a list of int, found [a]."),
        (["--model.widths", "3"], "model.widths (the command line): expected a list of int, found 3."),
        (["--trainer.profiler", "fast"], "expected one of simple, advanced, torch, pytorch or Profiler, found 'fast'."),
        (["--trainer.resume_parts", "model"], "expected a list of one of model, optimizer, schedulers, progress, data, found 'model'."),
        (["--trainer.init_from.rename", "x"], "trainer.init_from"),
        (["--model.encoder", "torch.nn.Linear", "--model.encoder.in_features=a", "--model.encoder.out_features=1"], "model.encoder.in_features (the command line): expected int, found 'a'."),
        (["--seed_everything", "lucky"], "seed_everything (the command line): expected int or bool, found 'lucky'."),
        (["--optimizer", "SGD", "--optimizer.lr", "x"], "optimizer.lr (the command line): expected float, found 'x'."),
        (["--lr_schedule.interval=week"], "lr_schedule.interval (the command line): expected one of step, epoch, token, found 'week'."),
    ],
)  # fmt: skip
def test_wrong_type_names_the_expected_type(catch_error, words, message):
    assert message in fit(catch_error, *words)


TUNED = """\
model: {encoder: {class_path: torch.nn.Linear, init_args: {in_features: 4, out_features: 4}}}
optimizer: {class_path: AdamW, init_args: {lr: 0.1}}
lr_scheduler: {class_path: StepLR, init_args: {step_size: 3}}
trainer:
  strategy: {class_path: lumen.SingleDevice}
  callbacks: {stop: {class_path: EarlyStopping, init_args: {monitor: loss}}}
"""


@pytest.mark.parametrize("value", ["null", "[1, 2]"])
@pytest.mark.parametrize(
    "key",
    [
        "model.lr", "model.noise.scale", "model.noise", "model.encoder.in_features", "data.samples", "optimizer.lr", "lr_scheduler.step_size", "lr_schedule.warmup_steps", "lookahead.alpha",
        "trainer.strategy.timeout_s", "trainer.callbacks.stop.patience",
    ],
)  # fmt: skip
def test_files_refuse_what_the_command_line_refuses(catch_error, key, value):
    names, config = key.split("."), value
    for name in reversed(names):
        config = f"{{{name}: {config}}}"
    Path("tuned.yaml").write_text(TUNED)
    Path("third.yaml").write_text(config)
    of_file = fit(catch_error, "--config", "tuned.yaml", "--config", "third.yaml")
    of_words = fit(catch_error, "--config", "tuned.yaml", f"--{key}={value}")
    assert of_file == of_words.replace("(the command line)", "(third.yaml)")
    assert of_file.startswith(f"{key} (third.yaml): expected ")
    assert f"found {value}" in of_file


def test_missing_required_argument_is_named(catch_error):
    assert "lr_scheduler (the command line): StepLR needs step_size." in fit(
        catch_error, "--optimizer=SGD", "--lr_scheduler=StepLR"
    )
    orphan = fit(catch_error, "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5")
    assert "lr_scheduler needs an optimizer. Set optimizer too." in orphan
    linear = fit(catch_error, "--model.encoder", "{class_path: torch.nn.Linear}", "--model.encoder.in_features=3")
    assert "model.encoder (the command line): Linear needs out_features." in linear
    early = "trainer.callbacks.early (the command line): EarlyStopping needs monitor."
    assert early in fit(catch_error, "--trainer.callbacks.early=EarlyStopping")


def test_value_rejected_by_optimizer_is_a_config_error(capsys):
    assert main(["fit", "--config", "line.yaml", "--optimizer=SGD", "--optimizer.lr=-1"]) == 2
    said = "error: torch.optim.SGD does not accept these arguments: Invalid learning rate: -1.0"
    assert said in capsys.readouterr().err


def test_naming_one_callback_does_not_drop_a_list(catch_error):
    config = "trainer: {callbacks: [LearningRateMonitor]}"
    said = fit(catch_error, "--trainer.callbacks.early.patience=3", config=config)
    assert (
        "trainer.callbacks is a list. Write the whole list, add an entry by --trainer.callbacks+, or give "
        "the entries names." in said
    )


# ---------------------------------------------------------------------- links


def test_missing_argument_names_both_ways_to_set_it(catch_error):
    Path("blank.py").write_text("import lumen\n\nclass Blank(lumen.DataModule):\n    pass\n")
    said = fit(catch_error, "--data", "blank.Blank")
    assert (
        "model.width is required and not set. Set width in the config or as --model.width, or give Blank an attribute width"
        in said
    )
    assert "model (line.yaml): Line needs width. Set width." in fit(catch_error, "--data", "null")


# ---------------------------------------------------------------------- evaluation


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["validate", "--output", "values.csv"], "--output values.csv: validate writes .json files."),
        (["predict", "--output", "text.txt"], "--output text.txt: predict writes .jsonl or .safetensors files."),
        (["predict", "--output", "no/text.jsonl"], "--output no/text.jsonl: there is no directory no."),
        (["fit", "--output", "values.json"], "output (the command line): lumen has no option output."),
    ],
)
def test_unwritable_output_is_found_before_the_work(catch_error, words, message):
    assert message in catch_error(words[0], "--config", "line.yaml", *words[1:])


def test_missing_checkpoint_is_a_checkpoint_error(catch_error):
    words = ["validate", "--config", "line.yaml", "--ckpt_path"]
    assert "no valid checkpoint found in runs/line/checkpoints" in catch_error(*words, "last", code=1)
    assert "no valid checkpoint found" in catch_error(*words, "elsewhere", code=1)
    assert "no model is configured" in catch_error("validate", "--ckpt_path", "elsewhere")


def test_predictions_unfit_for_file_suggest_another_format(capsys):
    words = [
        "predict",
        "--config",
        "line.yaml",
        "--model",
        "tests.helpers.cli_tasks.Slope",
        "--output",
        "text.safetensors",
    ]
    assert main(words) == 1
    assert "Write a .jsonl file." in capsys.readouterr().err
    assert not Path("text.safetensors").exists()


# ---------------------------------------------------------------------- end of a command


def test_lumen_errors_are_one_paragraph_with_exit_code(catch_error, capsys):
    assert "Stepless has no training_step" in fit(catch_error, "--model", "tests.helpers.cli_tasks.Stepless")
    assert "the length of the training is not set" in fit(catch_error, "--trainer.max_steps", "null")
    assert "accumulate_grad_batches (the command line): must be at least 1" in fit(
        catch_error, "--trainer.accumulate_grad_batches=0"
    )
    for key in ("0.5", "1.0"):
        assert (
            f"trainer.accumulate_grad_batches (the command line): a key must be a whole number, found {key}. Write"
            in fit(catch_error, f"--trainer.accumulate_grad_batches={{0: 1, {key}: 2}}")
        )
    assert main(["fit", "--config", "line.yaml", "--trainer.resume=nowhere"]) == 1
    assert "no valid checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.devices=9999", "--trainer.accelerator=cpu"], "trainer.devices (the command line): 9999 requested on the CPU, where each device is a process. "),
        (["--trainer.max_steps=-5"], "trainer.max_steps (the command line): must be at least 0 (or -1 for no limit), found -5."),
        (["--trainer.max_steps=1e3"], "trainer.max_steps (the command line): expected int, found 1e3."),
        (["--trainer.max_steps"], "trainer.max_steps (the command line): no value is given, expected int. Write --trainer.max_steps VALUE."),
        (["--trainer.name"], "trainer.name (the command line): no value is given, expected str. Write --trainer.name VALUE."),
        (["--trainer.callbacks.early"], "trainer.callbacks.early (the command line): no value is given, expected a class. Write"),
        (["--optimizer"], "optimizer (the command line): no value is given, expected a class. Write --optimizer VALUE."),
        (["--max_steps=3"], "max_steps (the command line): lumen has no option max_steps. Did you mean --trainer.max_steps?"),
        (["--lr=0.1"], "lr (the command line): lumen has no option lr. Did you mean --model.lr?"),
        (["--lr=0.1", "--optimizer=SGD"], "lr (the command line): lumen has no option lr. Did you mean --model.lr or --optimizer.lr?"),
        (["--learning_rate=0.1"], "learning_rate (the command line): lumen has no option learning_rate. Did you mean --model.lr?"),
        (["--bach_size=4"], "bach_size (the command line): lumen has no option bach_size. Did you mean --data.batch_size?"),
        (["--epochs=3"], "epochs (the command line): lumen has no option epochs. Did you mean --trainer.max_epochs?"),
        (["--gpus=2"], "gpus (the command line): lumen has no option gpus. Use --trainer.accelerator and --trainer.devices."),
        (["--max_nb_epochs=3"], "max_nb_epochs (the command line): lumen has no option max_nb_epochs. Use --trainer.max_epochs."),
        (["--seed=3"], "seed (the command line): lumen has no option seed. Use seed_everything."),
        (["--trainer.precision=fp17"], "trainer.precision (the command line): no precision is named 'fp17'; use one of fp32, 32, "),
        (["--trainer.accelerator=cup"], "trainer.accelerator (the command line): 'cup' is not available on this machine; available: auto, "),
        (["--config=lines.yaml"], "cannot read the config file lines.yaml: No such file or directory. Did you mean line.yaml?"),
        (["--trainer.devices=0"], "trainer.devices (the command line): expected a number of devices or auto, found 0."),
        (["--trainer.devices=two"], "trainer.devices (the command line): expected a number of devices or auto, found 'two'."),
        (["--trainer.strategy=dpp"], "trainer.strategy (the command line): 'dpp' is unknown; use auto, single, ddp, fsdp or mesh"),
        (["--trainer.strategy=deepspeed"], "trainer.strategy (the command line): 'deepspeed' is unknown; use fsdp, which"),
        (["--trainer.strategy=mesh", "--trainer.strategy.tenser=2"], "trainer.strategy.tenser (the command line): Mesh has no option tenser. Did you mean tensor?"),
        (["--trainer.strategy=single", "--trainer.strategy.tensor=2"], "trainer.strategy (the command line): single has no options. Set options of ddp, fsdp, mesh only."),
        (["--trainer.strategy.tensor=2"], 'trainer.strategy (the command line): expected Strategy or str, found {"tensor": "2"}. Set the class of these options by --trainer.strategy CLASS.'),
        (["--trainer.strategy=mesh", "--trainer.strategy.tensor=2"], "Mesh: replicate * shard * tensor * context is 1 * 1 * 2 * 1 = 2, but 1 process runs. Change a size, or set devices: 2."),
        (["--trainer.num_nodes=0"], "trainer.num_nodes (the command line): must be at least 1, found 0."),
        (["--trainer.gradient_clip_val=-1"], "trainer.gradient_clip_val (the command line): must be at least 0, found -1.0."),
        (["--trainer.global_batch_size=8", "--trainer.accumulate_grad_batches=2"], "global_batch_size and accumulate_grad_batches both set the size of a step. Set only one of them."),
        (["--trainer.val_check_interval=2.5"], "trainer.val_check_interval (the command line): a fraction of an epoch is in (0, 1], found 2.5."),
        (["--trainer.limit_train_batches=-1"], "trainer.limit_train_batches (the command line): expected a count >= 0 or a fraction of at most 1.0, found -1."),
        (["--trainer.log_every_n_steps=-1"], "trainer.log_every_n_steps (the command line): must be at least 1, found -1."),
        (["--trainer.max_time=abc"], 'trainer.max_time (the command line): expected a duration "DD:HH:MM:SS", found \'abc\'.'),
        (["--ckpt_path=last"], "ckpt_path (the command line): lumen has no option ckpt_path. For fit use trainer.resume."),
        (["--trainer.gpus=2"], "trainer.gpus (the command line): Trainer has no option gpus. Use accelerator and devices."),
        (["--data.path=x"], "data.path (the command line): Points has no option path."),
        (["--data=x.yaml"], "--data x.yaml: expected a value, found a file. Write --config x.yaml, with the settings below `data:` "
"in this file."),
        (["--trainer.max_restarts=-1"], "trainer.max_restarts (the command line): must be at least 0, found -1."),
        (["--trainer.log_level=LOUD"], "trainer.log_level (the command line): expected DEBUG, INFO, WARNING or ERROR, found 'LOUD'."),
        (["--trainer.name=a/b"], "'a/b' cannot name a run: use a name without '/' or"),
        (["--trainer=x"], "trainer (the command line): expected `name: value` lines, found 'x'."),
        (["--config", "."], "cannot read the config file .: Is a directory."),
        (["-v"], "'-v' has no key. Write a setting as --key value, a config file as --config FILE."),
        (["--config"], "--config: no file is named. Write --config FILE."),
    ],
)  # fmt: skip
def test_common_mistakes_are_one_line_errors(catch_error, words, message):
    said = fit(catch_error, *words)
    assert said.startswith(message)
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "mistyped", "meant"),
    [
        ("precision", "bf61", "bf16"),
        ("precision", "fp17", "fp16"),
        ("strategy", "fdsp", "fsdp"),
        ("strategy", "dpp", "ddp"),
        ("accelerator", "gpuu", "gpu"),
        ("accelerator", "cup", "cpu"),
    ],
)
def test_misspelled_precision_strategy_or_accelerator_gets_a_suggestion(catch_error, option, mistyped, meant):
    assert fit(catch_error, f"--trainer.{option}={mistyped}").endswith(f". Did you mean {meant}?\n")


def test_similar_but_different_accelerator_gets_no_suggestion(catch_error):
    assert "Did you mean" not in fit(catch_error, "--trainer.accelerator=tpu")


def test_option_without_section_suggests_its_section(catch_error):
    said = fit(catch_error, config="lr: 0.1\ngpus: 2")
    assert "lr (second.yaml): lumen has no option lr. Did you mean model.lr?" in said
    assert "gpus (second.yaml): lumen has no option gpus. Use trainer.accelerator and trainer.devices." in said


def test_a_switch_without_a_value_is_on(capsys):
    assert main(["fit", "--config", "line.yaml", "--trainer.deterministic", "--print_config=skip_default"]) == 0
    assert "deterministic: true" in capsys.readouterr().out


def test_a_users_own_exception_keeps_its_traceback():
    with pytest.raises(KeyError, match="nothing") as caught:
        main(["fit", "--config", "line.yaml", "--model", "tests.helpers.cli_tasks.Broken"])
    assert caught.traceback[-1].path == Path(cli_tasks.__file__)
    assert caught.value.__cause__ is None


def test_constructor_exception_passes_through():
    code = "from tests.helpers.cli_tasks import Line\n\nclass Torn(Line):\n    def __init__(self, width: int):\n        raise KeyError('torn')\n"
    Path("torn.py").write_text(code)
    with pytest.raises(KeyError, match="torn") as caught:
        main(["fit", "--config", "line.yaml", "--model", "torn.Torn"])
    assert caught.traceback[-1].path == Path("torn.py").absolute()


def test_ctrl_c_exits_with_130_without_traceback(capsys):
    words = ["fit", "--config", "line.yaml", "--model", "tests.helpers.cli_tasks.Interrupted", "--model.width=1"]
    assert main(words) == 130
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main([*words, "--model.signal", "term"])
    assert caught.value.code == 143


def test_debugging_shows_the_traceback_of_an_error(monkeypatch, capsys):
    monkeypatch.setenv("LUMEN_DEBUG", "1")
    assert main(["fit", "--config", "line.yaml", "--model", "tests.helpers.cli_tasks.Stepless"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_wrong_settings_of_another_command_do_not_matter(monkeypatch):
    monkeypatch.setenv("LUMEN_FIT__NONSENSE", "1")
    assert main(["validate", "--config", "line.yaml"]) == 0
    assert not Path("runs").exists()
