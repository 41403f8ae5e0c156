"""References between settings, `${key.path}`, and required settings, `???`."""

from pathlib import Path

import pytest
import yaml

from lumen.cli import main
from tests.helpers.cli import fit
from tests.helpers.cli_tasks import Spy

CONFIG = """
seed_everything: 7
model: {class_path: tests.helpers.cli_tasks.Line, init_args: {lr: 0.05}}
data: {class_path: tests.helpers.cli_tasks.Points, init_args: {samples: 12, width: 4}}
trainer:
  max_epochs: 1
  log_every_n_steps: 1
  callbacks: {spy: tests.helpers.cli_tasks.Spy}
  enable_progress_bar: false
  enable_model_summary: false
"""


pytestmark = pytest.mark.usefixtures("config_directory")


def get_trained(*words):
    return fit(*words)[1].hparams


@pytest.fixture
def print_config(capsys):
    def run(*words):
        assert main(["fit", "--config", "line.yaml", *words, "--print_config"]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return run


@pytest.fixture
def catch_error(capsys):
    def run(*words):
        assert main(["fit", "--config", "line.yaml", *words]) == 2
        return capsys.readouterr().err

    return run


def test_setting_takes_final_value_of_another():
    Path("more.yaml").write_text("model:\n  width: ${data.width}\n")
    assert get_trained("--config", "more.yaml").width == 4
    assert get_trained("--config", "more.yaml", "--data.width", "5").width == 5
    assert (
        get_trained("--config", "more.yaml", "--model.width", "4", "--model.label", "${data.width} wide").label
        == "4 wide"
    )


@pytest.mark.parametrize(
    "way", ["${data.width}", "${data.init_args.width}", "${..data.width}", "${oc.env:WIDTH}", "${model.widths[0]}"]
)
def test_every_way_to_name_a_setting(way, monkeypatch):
    monkeypatch.setenv("WIDTH", "4")
    Path("more.yaml").write_text("model: {widths: [4, 2]}\n")
    assert get_trained("--config", "more.yaml", "--model.width", way).width == 4


def test_lists_and_classes_can_be_interpolated(print_config):
    Path("more.yaml").write_text(
        "model: {widths: '${trainer.limit_val_batches}'}\n"
        "trainer:\n"
        "  limit_val_batches: [1, 2]\n"
        "  callbacks: {first: {class_path: Spy, name: of two}, second: '${trainer.callbacks.first}', spy: null}\n"
    )
    config = print_config(
        "--config", "more.yaml", "--trainer.limit_val_batches=3", "--model.widths=[1, '${data.width}']"
    )
    assert config["model"]["init_args"]["widths"] == [1, 4]
    assert config["trainer"]["callbacks"]["second"]["init_args"] == {"name": "of two"}


def test_the_saved_config_repeats_the_run(monkeypatch):
    monkeypatch.setenv("SOMEWHERE", "here")
    label = "${oc.env:SOMEWHERE}/${trainer.name} \\${x} \\\\\\${y}"
    first = get_trained("--model.width", "${data.width}", "--model.label", label)
    assert first.label == "here/line ${x} \\${y}"
    text = Path("runs/line/config.yaml").read_text()
    assert "label: ${oc.env:SOMEWHERE}/line " in text
    assert "${data" not in text
    assert main(["fit", "--config", "runs/line/config.yaml", "--trainer.name", "again"]) == 0
    assert Spy.task.hparams == first
    assert Path("runs/again/metrics.csv").read_bytes() == Path("runs/line/metrics.csv").read_bytes()
    assert main(["fit", "--config", "runs/again/config.yaml", "--trainer.resume", "auto"]) == 0
    assert not Path("runs/again/config-1.yaml").exists()


def test_mandatory_values_are_named_until_given(catch_error):
    Path("more.yaml").write_text("model:\n  width: ???\n  lr: ???\ntrainer:\n  max_epochs: ???\n")
    lines = catch_error("--config", "more.yaml", "--model.lr", "0.1").splitlines()
    said = "(more.yaml): ???: this setting is required. Set a value."
    assert lines == [f"error: trainer.max_epochs {said}", f"model.width {said}"]
    assert get_trained("--config", "more.yaml", "--model.width=4", "--model.lr=0.5", "--trainer.max_epochs=1").lr == 0.5


UNKNOWN = "model.lr (the command line): ${data.widht}: data.widht is not set. Did you mean data.width?"
CIRCLE = "model.lr (the command line): ${model.width}: this reference leads back to itself."
NOT_READ = "model.lr (the command line): ${model.width: this reference cannot be read. Write ${key.path}"
WRONG_TYPE = "model.lr (the command line): expected float, found 'many'."
IN_BRACES = "(line 1, column 17). Between braces and brackets write '${...}' and '???' in quotes."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.lr=${data.widht}"], UNKNOWN),
        (["--model.lr=${data.batch_size}"], "data.batch_size is not set. Set this key: references do not see"),
        (["--model.lr=${model.width}", "--model.width=${model.lr}"], CIRCLE),
        (["--model.lr=${model.width"], NOT_READ),
        (["--model.lr=${oc.env:NOWHERE}"], "the environment variable NOWHERE is not set. Run: export NOWHERE=VALUE."),
        (["--model.lr=${data.label}", "--data.label=many"], WRONG_TYPE),
        (["--config=flow.yaml"], IN_BRACES),
    ],
)
def test_dangling_reference_is_named_with_its_place(catch_error, words, said):
    Path("flow.yaml").write_text("model: {width: ${data.width}}")
    assert said in catch_error(*words)
