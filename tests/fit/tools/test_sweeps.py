"""Sweeps in `lumen runs` and `lumen.runs`: differing settings, conditions, orders, two runs side by side."""

import json
import re
import shutil

import pytest
import yaml

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from tests.helpers.cli import write_config
from tests.helpers.tasks import Regression, bare_trainer, loader
from tests.helpers.working_directory import CONFIG

RATES = {"slow": 1e-4, "fast": 1e-2, "wild": 10.0}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Make three runs by the command line and one by a script, in `runs`; no test changes them."""
    root = tmp_path_factory.mktemp("sweep")
    config = write_config(root / "line.yaml", CONFIG)
    for name, lr in RATES.items():
        words = ["--model.lr", str(lr), "--trainer.name", name, "--trainer.default_root_dir", str(root / "runs")]
        words += ["--model.noise.scale", str(lr), "--trainer.max_epochs", "2" if name == "wild" else "1"]
        words += ["--trainer.enable_checkpointing", str(name != "wild")]  # its metrics.csv has the same values
        assert main(["fit", "--config", config, *words]) == 0
    bare_trainer(root, max_epochs=1, logger=True).fit(Regression(lr=0.5), loader(), loader())
    return root


@pytest.fixture(autouse=True)
def _in_sweep_directory(sweep, monkeypatch):
    monkeypatch.chdir(sweep)


def parse_rows(printed):
    """Return the cells of a table, by the name of the run."""
    head, *lines = (line.split() for line in printed.splitlines())
    assert head[0] == "RUN"
    return {line[0]: dict(zip(head, line, strict=True)) for line in lines}


def names(*words, **settings):
    return [each["name"] for each in lumen.runs("runs", *words, **settings)]


# ---------------------------------------------------------------------- in Python


@pytest.mark.slow
def test_runs_are_plain_records_of_settings_and_metrics():
    found = {each["name"]: each for each in lumen.runs()}
    assert {*found} == {*RATES, "run"}
    assert json.loads(json.dumps(list(found.values()))) == list(found.values())
    for name, lr in RATES.items():
        run = found[name]
        assert (run["status"], run["settings"]["model.lr"]) == ("finished", lr)
        assert run["settings"]["model"] == "tests.helpers.cli_tasks.Line"
        assert (run["step"], run["epoch"]) == ((6, 1) if name == "wild" else (3, 1))
    assert found["fast"]["metrics"].items() >= found["fast"]["checkpoints"][-1]["metrics"].items()
    assert found["wild"]["checkpoints"] == []
    assert found["wild"]["metrics"].keys() == found["fast"]["metrics"].keys()
    assert found["run"]["settings"]["model.lr"] == 0.5


def test_last_metrics_are_those_of_metrics_csv(sweep):
    (found,) = lumen.runs("runs/wild")
    header, *lines = (sweep / "runs/wild/metrics.csv").read_text().splitlines()
    for name, value in found["metrics"].items():
        column = header.split(",").index(name)
        assert str(value) == [cells[column] for cells in (line.split(",") for line in lines) if cells[column]][-1]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("lr < 1e-3", ["slow"]),
        ("model.lr<=1e-4", ["slow"]),
        ("lr >= 0.01", ["fast", "run", "wild"]),
        (["lr > 1e-3", "lr < 1"], ["fast", "run"]),
        ("name = fast", ["fast"]),
        ("name != fast", ["run", "slow", "wild"]),
        ("model == tests.helpers.cli_tasks.Line", ["fast", "slow", "wild"]),
        ("samples == 12", ["fast", "slow", "wild"]),
        ("status = failed", []),
        ("max_steps == null", ["fast", "run", "slow", "wild"]),
        ("enable_checkpointing = false", ["run", "wild"]),
        ("max_epochs > 1", ["wild"]),
        ("step > 3", ["run", "wild"]),
        ("val_loss > 1e3", ["wild"]),
        ("lr = 1", []),
        ("scale != 7", ["fast", "slow", "wild"]),  # a missing value is not unequal either
    ],
)
def test_runs_are_chosen_by_conditions(where, expected):
    assert names(where) == expected


def test_runs_are_sorted_by_setting_or_metric():
    assert names(sort="lr") == ["slow", "fast", "run", "wild"]
    assert names(sort="-lr") == ["wild", "run", "fast", "slow"]
    losses = [each["metrics"]["val_loss"] for each in lumen.runs(sort="val_loss")]
    assert losses == sorted(losses)
    assert names(sort="samples")[-1] == "run"  # a run without values
    assert names(sort="-samples")[-1] == "run"


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("lrr < 1", "no run has a setting or a metric lrr. Did you mean lr"),
        ("lr", "'lr' is not a condition. Write NAME < VALUE"),
        ("lr < fast", "only numbers can be ordered, found 'fast'. Use == or !=."),
        ("0.0 < __import__('os').getpid()", "only numbers can be ordered"),
    ],
)
def test_invalid_condition_raises_an_explanation(condition, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        lumen.runs(where=condition)


def test_ambiguous_short_name_raises(sweep, tmp_path):
    shutil.copytree(sweep / "runs", tmp_path / "runs")
    config = tmp_path / "runs/slow/config.yaml"
    before = config.read_text()
    config.write_text(
        before.replace("optimizer: null", "optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.3}}")
    )
    with pytest.raises(
        ConfigError, match=r"several settings are called lr: model.lr, optimizer.lr\. Write the full name"
    ):
        lumen.runs(tmp_path / "runs", where="lr < 1")
    assert [each["name"] for each in lumen.runs(tmp_path / "runs", where="optimizer.lr < 1")] == ["slow"]


@pytest.mark.parametrize("damage", ["a: [", "text", "model: {class_path: A, init_args: null}"])
def test_unreadable_config_hides_no_run(sweep, tmp_path, damage):
    shutil.copytree(sweep / "runs", tmp_path / "runs")
    (tmp_path / "runs/slow/config.yaml").write_text(damage)
    (tmp_path / "runs/slow/metrics.csv").write_bytes(b"step,epoch\n\xff,x\n")
    (run,) = lumen.runs(tmp_path / "runs/slow")
    assert run["settings"] == ({"model": "A"} if "model" in damage else {})
    assert run["metrics"]["val_loss"] == run["checkpoints"][-1]["metrics"]["val_loss"]


# ---------------------------------------------------------------------- on the command line


def test_table_shows_only_differing_settings(show_runs):
    found = parse_rows(show_runs("--where", "model = tests.helpers.cli_tasks.Line", "--sort=-lr"))
    assert list(found) == ["wild", "fast", "slow"]
    for name, lr in RATES.items():
        assert float(found[name]["MODEL.LR" if "MODEL.LR" in found[name] else "LR"]) == lr
    assert {*found["wild"]} >= {
        "RUN",
        "STATUS",
        "LR",
        "SCALE",
        "MAX_EPOCHS",
        "ENABLE_CHECKPOINTING",
        "STEP",
        "VAL_LOSS",
    }
    assert not {*found["wild"]} & {"SAMPLES", "NAME", "PRECISION", "DEFAULT_ROOT_DIR"}


def test_settings_in_conditions_are_shown_as_columns(show_runs):
    assert {row["SAMPLES"] for row in parse_rows(show_runs("--where", "samples = 12")).values()} == {"12"}


def test_callbacks_are_columns_by_their_classes(sweep, tmp_path, show_runs):
    shutil.copytree(sweep / "runs", tmp_path / "runs")
    averages = {"slow": ["lumen.SWA", "lumen.EMA"], "fast": ["lumen.EMA", "lumen.EMA"]}
    for name, classes in averages.items():
        config = tmp_path / "runs" / name / "config.yaml"
        settings = yaml.safe_load(config.read_text())
        decays = [{"decay": RATES[name] / (number + 1)} for number in range(2)]
        settings["trainer"]["callbacks"] = [
            {"class_path": path, "init_args": decay} for path, decay in zip(classes, decays, strict=True)
        ]
        settings["trainer"] |= {"log_level": name, "log_every_n_steps": len(name), "logger": [{"class_path": name}]}
        config.write_text(yaml.safe_dump(settings))
    found = {each["name"]: each["settings"] for each in lumen.runs(tmp_path / "runs")}
    assert found["slow"]["trainer.callbacks"] == ["SWA", "EMA"]
    assert found["fast"]["trainer.callbacks.EMA.decay"] == 0.01
    assert found["fast"]["trainer.callbacks.EMA-2.decay"] == 0.005
    rows = parse_rows(show_runs(tmp_path / "runs", "--sort=EMA.decay", "--where", "model = Line", "--where", "lr < 1"))
    assert [*rows] == ["slow", "fast"]
    assert rows["slow"] == rows["slow"] | {"MODEL": "Line", "CALLBACKS": "SWA,EMA", "DECAY": "5e-05"}
    assert not [head for head in rows["slow"] if head[0].isdigit() or head.startswith("LOG")]


def test_items_of_a_list_are_named_in_full(sweep, tmp_path, show_runs):
    shutil.copytree(sweep / "runs", tmp_path / "runs")
    for number, name in enumerate(RATES):
        with (tmp_path / "runs" / name / "config.yaml").open("a") as config:
            config.write(f"layers: [{{width: 1{number}}}, {{width: {number}}}]\n")
    (head, *_) = show_runs(tmp_path / "runs", "--table").splitlines()
    assert {"LAYERS.0.WIDTH", "LAYERS.1.WIDTH"} < {*head.split()}


def test_json_is_chosen_and_sorted_too(show_runs):
    assert json.loads(show_runs("--json", "--where", "lr < 1", "--sort", "lr")) == lumen.runs(where="lr < 1", sort="lr")


def test_unknown_sort_name_is_an_error(capsys):
    assert main(["runs", "--sort", "vall_loss"]) == 2
    assert "no run has a setting or a metric vall_loss. Did you mean val_loss" in capsys.readouterr().err
