"""Secrets: a run records references to the environment, and masks values with names of secrets."""

import json
from pathlib import Path

import pytest
import yaml

import lumen
from lumen.cli import main
from lumen.errors import CheckpointMismatch
from lumen.internals.masking import MASK, holds_secret, mask_words
from tests.helpers.cli import fit, read_saved_config
from tests.helpers.cli_tasks import Line, Points
from tests.helpers.tasks import Regression, bare_trainer, loader

HERE = "tests.fit.cli.test_secrets"
CONFIG = {
    "seed_everything": 7,
    "model": {"class_path": f"{HERE}.Secretive"},
    "data": {"class_path": f"{HERE}.Guarded"},
    "trainer": {
        "max_steps": 2,
        "callbacks": {"spy": "tests.helpers.cli_tasks.Spy"},
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
}
VALUE = "hunter2"
pytestmark = pytest.mark.usefixtures("config_directory")


class Secretive(Line):
    """Line task with secrets."""

    def __init__(
        self,
        width: int,
        api_key: str = "",
        label: str | None = None,
        sort_key: str = "length",
        places: list[str] | None = None,
    ):
        super().__init__(width)


class Needing(Line):
    """Line task with a label linked from the data."""

    def __init__(self, width: int, label: str):
        super().__init__(width)


class Guarded(Points):
    """Data with a password."""

    def __init__(self, samples: int = 12, password: str = "", url: str = ""):
        super().__init__(samples=samples)
        self.save_hyperparameters()


class Noting(lumen.Logger):
    """Logger that records its hyperparameters."""

    given: dict

    def log_hyperparams(self, params):
        Noting.given = params

    def log_metrics(self, metrics, step, epoch=""):
        pass


def find_files_with(value=VALUE, root="runs"):
    """Return the files below a directory that contain a text."""
    found = (path for path in Path(root).rglob("*") if path.is_file())
    return {path.name for path in found if value.encode() in path.read_bytes()}


def find_last_checkpoint(run="runs/line"):
    return max(Path(run, "checkpoints").glob("step-*"))


def test_references_are_kept_in_every_file(monkeypatch):
    monkeypatch.setenv("SECRET", VALUE)
    where = "https://${oc.env:SECRET}@${data.password}.org/${trainer.name} \\${x}"
    _, task = fit(
        "--model.label=${oc.env:SECRET}", f"--data.url={where}", "--data.password=${model.label}",
        "--model.places=['${oc.env:SECRET}', '${oc.env:ELSE,none}', here]", "--trainer.logger=[tensorboard]",
    )  # fmt: skip
    assert (task.hparams.label, task.hparams.places) == (VALUE, [VALUE, "none", "here"])
    assert find_files_with() == set()
    config = read_saved_config()
    assert config["model"]["init_args"]["label"] == "${oc.env:SECRET}"
    assert config["model"]["init_args"]["places"] == ["${oc.env:SECRET}", "${oc.env:ELSE,none}", "here"]
    assert config["data"]["init_args"]["password"] == "${oc.env:SECRET}"
    assert config["data"]["init_args"]["url"] == "https://${oc.env:SECRET}@${oc.env:SECRET}.org/line \\${x}"
    state = json.loads((find_last_checkpoint() / "state.json").read_text())
    assert state["hyperparameters"]["label"] == {"$env": "${oc.env:SECRET}"}
    assert state["data_hyperparameters"]["password"] == {"$env": "${oc.env:SECRET}"}


@pytest.mark.slow
def test_a_repeated_run_needs_the_variable(monkeypatch, capsys):
    monkeypatch.setenv("SECRET", VALUE)
    first = fit("--model.label=${oc.env:SECRET}")[1].hparams
    monkeypatch.delenv("SECRET")
    assert main(["fit", "--config", "runs/line/config.yaml", "--trainer.name=again"]) == 2
    said = "${oc.env:SECRET}: the environment variable SECRET is not set. Run: export SECRET=VALUE."
    assert f"model.label (runs/line/config.yaml): {said}" in capsys.readouterr().err
    monkeypatch.setenv("SECRET", VALUE)
    assert fit("--trainer.name=again", config="runs/line/config.yaml")[1].hparams == first
    assert Path("runs/again/metrics.csv").read_bytes() == Path("runs/line/metrics.csv").read_bytes()
    assert find_files_with() == set()
    assert main(["fit", "--config", "runs/again/config.yaml", "--trainer.resume=auto"]) == 0
    assert not Path("runs/again/config-1.yaml").exists()
    assert "hyperparameters differ from" not in Path("runs/again/run.log").read_text()


def test_checkpoints_read_nothing_of_the_environment(monkeypatch):
    """A stranger's checkpoint could refer to any variable and pass its value to any argument."""
    monkeypatch.setenv("SECRET", VALUE)
    fit("--model.label=${oc.env:SECRET}", "--data.password=${oc.env:SECRET}")
    with pytest.raises(
        CheckpointMismatch, match=r"holds \$\{oc.env:SECRET\} in place of .* Pass the value: .* label=\.\.\."
    ):
        Secretive.load_from_checkpoint(find_last_checkpoint())
    assert Secretive.load_from_checkpoint(find_last_checkpoint(), label="other").hparams.label == "other"
    with pytest.raises(CheckpointMismatch, match="the hyperparameter password, which may be a secret"):
        Guarded.load_from_checkpoint(find_last_checkpoint())


def test_a_secret_of_the_data_is_not_recorded(monkeypatch):
    monkeypatch.setenv("SECRET", VALUE)
    words = [f"--model={HERE}.Needing", "--data=tests.helpers.cli_tasks.Points", "--data.label=${oc.env:SECRET}"]
    assert fit(*words)[1].hparams.label == VALUE
    assert find_files_with() == set()


def test_values_under_names_of_secrets_are_masked(capsys):
    Path("more.yaml").write_text(f"data: {{password: {VALUE}, url: 'https://me:{VALUE}@host/x'}}\n")
    words = ["--config", "more.yaml", f"--model.api_key={VALUE}", "--trainer.logger", f"[{HERE}.Noting, tensorboard]"]
    _, task = fit(*words)
    assert task.hparams.api_key == VALUE
    assert find_files_with() == set()
    found = read_saved_config()
    assert (found["model"]["init_args"]["api_key"], found["model"]["init_args"]["sort_key"]) == (MASK, "length")
    assert found["data"]["init_args"] == {"samples": 12, "password": MASK, "url": f"https://me:{MASK}@host/x"}
    assert Noting.given["model"]["api_key"] == Noting.given["data"]["password"] == MASK
    assert main(["report", "runs/line", "--output", "report.html"]) == 0
    assert VALUE not in Path("report.html").read_text()
    with pytest.raises(CheckpointMismatch, match=r"hyperparameter api_key.*PATH, api_key=\.\.\."):
        Secretive.load_from_checkpoint(find_last_checkpoint())
    assert Secretive.load_from_checkpoint(find_last_checkpoint(), api_key="x").hparams.sort_key == "length"
    capsys.readouterr()


def test_a_masked_config_says_what_to_put_there(monkeypatch, capsys):
    fit(f"--model.api_key={VALUE}")
    assert main(["fit", "--config", "runs/line/config.yaml"]) == 2
    option = "--model.api_key '${oc.env:NAME}'"
    said = f"model.api_key (runs/line/config.yaml): {MASK}: the recorded config masks this value. Write {option}"
    assert said in capsys.readouterr().err
    monkeypatch.setenv("NAME", VALUE)
    assert fit("--model.api_key=${oc.env:NAME}", config="runs/line/config.yaml")[1].hparams.api_key == VALUE


def test_the_record_of_a_script_is_masked(tmp_path):
    class Hub(Regression):
        def __init__(self, hub_token=VALUE, options={"password": VALUE, "max_tokens": 3}):  # noqa: B006
            super().__init__()
            self.save_hyperparameters()

    bare_trainer(tmp_path, max_steps=1, logger=True, enable_checkpointing=True).fit(Hub(), loader())
    assert find_files_with() == set()
    arguments = yaml.safe_load((tmp_path / "runs/run/script.yaml").read_text())["model"]["init_args"]
    assert (arguments["hub_token"], arguments["options"]) == (MASK, {"password": MASK, "max_tokens": 3})


def test_files_that_may_hold_secrets_are_private(tmp_path):
    fit()
    fit("--trainer.resume=auto", "--trainer.max_steps=4", "--model.sort_key=x")
    bare_trainer(tmp_path, max_steps=1, logger=True).fit(Regression(), loader())
    private = {path.name for path in Path("runs").rglob("*") if path.is_file() and path.stat().st_mode & 0o077 == 0}
    assert private == {"config.yaml", "config-1.yaml", "environment.json", "script.yaml"}


SECRET = "key token password api_key apiKey HF_TOKEN db.passwd credentials client_secret authToken api_keys"
PLAIN = "monkey keyboard tokenizer max_tokens num_tokens key_dim sort_key pad_token stop_tokens image_key keys tokens"


@pytest.mark.parametrize(("names", "is_one"), [(SECRET, True), (PLAIN, False)], ids=["secret", "plain"])
def test_names_that_hold_secrets(names, is_one):
    assert [name for name in names.split() if holds_secret(name, VALUE) is not is_one] == []
    assert holds_secret("openai_key", "sk-0123456789abcdef")


@pytest.mark.parametrize(
    ("words", "recorded"),
    [
        (["--model.api_key", "a b"], ["--model.api_key", MASK]),
        (["--model.api_key=a,b"], [f"--model.api_key={MASK}"]),
        (["--data={password: a, n: 1}"], [f"--data={{password: {MASK}, n: 1}}"]),
        (["--uri", "http://a:b@c/d"], ["--uri", f"http://a:{MASK}@c/d"]),
        (["-c", "T(token='a b', n=1)"], ["-c", f"T(token={MASK}, n=1)"]),
        (["--token", "${oc.env:TOKEN}", "--lr", "1"], ["--token", "${oc.env:TOKEN}", "--lr", "1"]),
        (["--token", "--lr", "1"], ["--token", "--lr", "1"]),
    ],
)
def test_the_command_line_is_recorded_without_secrets(words, recorded):
    assert mask_words(words) == recorded
