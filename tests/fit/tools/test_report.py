"""`lumen report`: one HTML file of runs, with any contents and with missing files."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import lumen
from lumen.cli import main
from lumen.errors import ConfigError, RunDirectoryError
from lumen.tools.report.record import Series, ValueTable, thin_series
from tests.helpers import ROOT
from tests.helpers.checkpoints import save
from tests.helpers.pages import find_programs
from tests.helpers.report import CONFIG, FILES, Page, compute_digest, write_run
from tests.helpers.tables import read_rows
from tests.helpers.tasks import Regression, bare_trainer, loader

HOSTILE = '</script><script>window.pwned = 1</script>"\'><img src=x onerror="window.pwned = 1">{{ 7 * 191 }}'

# ---------------------------------------------------------------------- contents


def test_report_shows_all_recorded_parts(tmp_path, report):
    text = report(write_run(tmp_path / "a")).text
    assert "Report of a run a" in text
    assert "a finished 3 2 1 min 40 s 60.0 % 1" in text  # steps, epochs, time, goodput, restarts
    assert "loss 0.125 0.125 3 0.5 1 3" in text  # last, lowest and highest value, and their steps
    assert "val_loss 0.5 0.5 3 0.75 2 2" in text
    assert "training 1 min 0 s 60.0 %" in text
    assert "evaluation 10 s 10.0 %" in text
    assert "class_path: Net" in text
    assert "INFO the run is in runs/a" in text
    assert "host elderberry" in text
    assert "steps_per_s" in text


def test_report_shows_numbers_of_the_record(tmp_path, report):
    trainer = bare_trainer(tmp_path, max_epochs=2, logger=True, enable_checkpointing=True, log_every_n_steps=1)
    trainer.fit(Regression(), loader(), loader())
    rows = read_rows(trainer.run_directory / "metrics.csv")
    page = report(trainer.run_directory)
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert f"{losses[-1]:.6g} {min(losses):.6g}" in page.text
    assert f"step-{rows[-1]['step'].zfill(8)}" in page.text
    assert f"run finished {rows[-1]['step']} 2 " in page.text  # steps, and completed epochs
    assert f"torch {torch.__version__}" in page.text
    drawn = [tuple(each) for each in page.drawn()["y"]]
    assert tuple(losses) in drawn


def test_several_runs_are_overlaid_and_settings_compared(tmp_path, report):
    one = write_run(tmp_path / "one")
    two = write_run(tmp_path / "two", config_yaml=CONFIG.replace("lr: 0.1", "lr: 0.2"))
    page = report(one, two)
    assert "Settings that differ Setting one two model.init_args.lr 0.1 0.2 ▸" not in page.text
    assert "Settings that differ Setting one two model.init_args.lr 0.1 0.2 config.yaml of one" in page.text
    loss = {name: each for name, each in page.tags if each.get("data-chart") == "m0"}
    assert loss["figure"]["aria-label"].startswith("Curves of loss over")
    of_loss = [each for _, each in page.tags if each.get("data-line", "").startswith("m0-")]
    assert [(each["data-run"], each["data-colour"]) for each in of_loss] == [
        ("0", "0"),
        ("0", "0"),
        ("1", "1"),
        ("1", "1"),
    ]
    assert "one finished" in page.text
    assert "two finished" in page.text


def test_equal_names_are_distinguished_and_directories_expanded(tmp_path, report):
    for parent in ("may", "june"):
        save(write_run(tmp_path / f"all/{parent}/a") / "checkpoints/step-00000003")
    page = report(tmp_path / "all", tmp_path / "all/may/a")
    assert "Report of 2 runs june/a may/a" in page.text


def test_what_scripts_have_set_is_compared_too(tmp_path, report):
    rates = {"one": 0.1, "two": 0.2}
    texts = {name: f"model: {{lr: {rate}}}\n" for name, rate in rates.items()}
    runs = [write_run(tmp_path / name, config_yaml=None, script_yaml=text) for name, text in texts.items()]
    text = report(*runs).text
    assert "Settings that differ Setting one two model.lr 0.1 0.2 script.yaml of one" in text
    assert text.count("elderberry") == 1  # equal in both environments


def test_settings_are_read_as_the_command_line_reads(tmp_path, report):
    values = {"one": "1e-4", "two": "0.0001"}
    runs = [write_run(tmp_path / name, config_yaml=f"model: {{lr: {value}}}\n") for name, value in values.items()]
    assert "The settings of these runs do not differ." in report(*runs).text


def write_table(columns):
    """Return two rows of a metrics.csv: by name, the first value; the second value is half of it."""
    rows = [",".join(map(str, [step, 0, *(each / step for each in columns.values())])) for step in (1, 2)]
    return "\n".join([f"step,epoch,{','.join(columns)}", *rows, ""])


def read_charts(page):
    """Return title and legend of each chart of logged values, without numbers."""
    drawn = re.findall(r'data-chart="m.*?<h3>(.*?)</h3>(.*?)</figcaption>', page.source, re.S)
    labels = [re.findall(r"</svg><span>(.*?)</span>|</svg>([^<]+)</th>", legend) for _, legend in drawn]
    return [(title, ["".join(each) for each in found]) for (title, _), found in zip(drawn, labels, strict=True)]


def test_charts_begin_with_losses_and_end_with_rates(tmp_path, report):
    rates = {"lr/decay": 0.1, "lr/no decay": 0.1, "lr/head": 0.001}
    metrics = {"train/loss": 2.0, "val/loss": 3.0, "student/loss": 1.5, "critic_loss": 1.0, "val/r2": 0.5}
    pinball = {"pinball/same": 0.5, "pinball/noisy": 0.75, "val/pinball/slow": 0.25}
    table = write_table(rates | {"grad_norm/body": 9.0, "grad_norm/head": 0.01} | pinball | metrics)
    page = report(write_run(tmp_path / "a", metrics_csv=table))
    assert read_charts(page) == [
        ("loss", ["train/loss", "val/loss", "student/loss"]),
        ("critic_loss", []),
        ("grad_norm/body", []),  # A common axis would show the smaller one as a line at 0.
        ("grad_norm/head", []),
        ("pinball", ["pinball/same", "pinball/noisy", "val/pinball/slow"]),
        ("val/r2", []),
        ("lr", ["lr/decay, lr/no decay", "lr/head"]),
    ]
    assert page.text.index("Values Name Last") < page.text.index("train/loss 1 1 2 2 1 2")
    assert page.text.index("critic_loss 0.5 0.5") < page.text.index("lr/head 0.0005 0.0005")


def test_many_names_of_a_prefix_get_own_charts(tmp_path, report):
    norms = {f"norm/{number}": 1.0 + number for number in range(9)}
    rates = {f"lr/{number}": 0.1 for number in range(5)}
    drawn = read_charts(report(write_run(tmp_path / "a", metrics_csv=write_table(norms | rates))))
    assert drawn == [*((name, []) for name in norms), ("lr", ["lr/0, lr/1, lr/2 and 2 more"])]


def test_long_names_of_runs_are_shortened(tmp_path, report):
    names = [f"regression-with-width-{width}-and-a-cosine-schedule" for width in (8, 16, 32, 64)]
    runs = [write_run(tmp_path / name, config_yaml=f"width: {number}\n") for number, name in enumerate(names)]
    page = report(*runs)
    labels = ["…width-8…", "…width-16…", "…width-32…", "…width-64…"]
    assert read_charts(page) == [("loss", ["loss", "val_loss", *labels])]
    assert "Report 4 runs" in page.text
    assert all(f"{name} finished" in page.text for name in names)
    assert f"Settings that differ Run width {labels[0]} 0 {labels[1]} 1 {labels[2]} 2 {labels[3]} 3 " in page.text


def test_what_a_resume_has_changed_is_shown(tmp_path, report):
    run = write_run(tmp_path / "a")
    (run / "config-1.yaml").write_text(CONFIG.replace("width: 8", "width: 4"))
    text = report(run).text
    assert "changed when the run was resumed Setting config-1.yaml config.yaml model.init_args.width 4 8" in text


def test_restarts_epochs_and_checkpoints_are_marked(tmp_path, report):
    run = write_run(tmp_path / "a")
    (run / "checkpoints").mkdir()
    save(run / "checkpoints/step-00000003")
    page = report(run)
    kinds = [each["data-marks"] for _, each in page.tags if "data-marks" in each]
    assert kinds == ["restarts", "checkpoints", "epochs"]
    marks = [each.tolist() for each in page.drawn()["x"]]
    assert [2] in marks  # the second start
    assert [2, 3] in marks  # the second and the third epoch


# ---------------------------------------------------------------------- missing or broken files


@pytest.mark.parametrize("name", FILES)
def test_missing_file_hides_only_its_part(tmp_path, report, name):
    run = write_run(tmp_path / "a")
    (run / name).unlink()
    text = report(run).text
    assert "a finished 3 " in text or name == "run.log"  # system.csv has steps too
    shown = {
        "metrics.csv": "val_loss", "system.csv": "steps_per_s", "config.yaml": "class_path: Net",
        "run.log": "INFO finished", "environment.json": "elderberry", "goodput.jsonl": "60.0 %",
    }  # fmt: skip
    assert {each: what in text for each, what in shown.items()} == {each: each != name for each in shown}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe{[:,\n\n- &a [*a]\r\n" * 3], ids=["empty", "no-text"])
def test_invalid_file_hides_only_its_part(tmp_path, report, name, content):
    run = write_run(tmp_path / "a")
    (run / name).write_bytes(content)
    text = report(run).text
    assert "a finished" in text or name == "run.log"
    assert "loss" in text or name == "metrics.csv"


def test_empty_run_has_no_script(tmp_path, report):
    page = report(write_run(tmp_path / "a", **{name.replace(".", "_"): None for name in FILES if name != "run.log"}))
    assert page.scripts == []
    assert "a finished – –" in page.text


def test_non_finite_values_are_counted(tmp_path, report):
    rows = "step,epoch,loss,rising\n1,0,nan,1\n2,0,0.5,2\n3,0,inf,3\n4,0,-inf,4\n5,0,0.25,inf\n"
    page = report(write_run(tmp_path / "a", metrics_csv=rows, system_csv="step,only\n1,nan\n"))
    assert "loss 0.25 0.25 5 0.5 2 5 (3 not finite)" in page.text
    assert "rising inf 1 1 4 4 5 (1 not finite)" in page.text
    arrays = page.drawn()
    assert any(np.isnan(each).tolist() == [True, False, True, True, False] for each in arrays["y"])
    assert [1, 3, 4] in [each.tolist() for each in arrays["x"]]


def test_incomplete_last_line_is_ignored(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,epoch,loss\r\n1,0,0.5\r\n2,0,0.1234")
    assert ValueTable(tmp_path / "metrics.csv").series["loss"].values.tolist() == [0.5]


def test_links_out_of_the_run_are_not_followed(tmp_path, report):
    (tmp_path / "secret").write_text("INFO the password is swordfish\n")
    run = write_run(tmp_path / "a", run_log=None, config_yaml=None)
    for name in ("run.log", "config.yaml"):
        (run / name).symlink_to(tmp_path / "secret")
    assert "swordfish" not in report(run).source


def test_text_of_a_run_is_always_escaped(tmp_path, report):
    column = '"' + HOSTILE.replace('"', '""') + '"'
    run = write_run(
        tmp_path / re.sub("/", "∕", HOSTILE),
        metrics_csv=f"step,epoch,{column}\n1,0,0.5\n2,0,0.25\n",
        system_csv=f"step,{column}\n1,0.5\n",
        config_yaml=json.dumps({"model": {HOSTILE: HOSTILE}}),
        environment_json=json.dumps({HOSTILE: HOSTILE, "packages": {HOSTILE: HOSTILE}}),
        run_log=f"INFO {HOSTILE}\n2026-01-01 00:00:09,000 INFO the run is in {HOSTILE}\n"
        f"2026-01-01 00:00:09,000 ERROR failed: {HOSTILE}\n",
    )
    (run / "config-1.yaml").write_text(json.dumps({"model": {HOSTILE: "another"}}))
    page = report(run, write_run(tmp_path / "other"))
    assert len(page.scripts) == 4
    assert {compute_digest(script) for script in page.scripts} == page.allowed
    assert not any("pwned" in script or "1337" in script for script in page.scripts)
    assert "'unsafe-inline'" not in page.policy.partition("script-src")[2]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not {tag for tag, _ in page.tags} & {"img", "iframe", "object", "embed", "base", "link"}
    assert page.text.count("{{ 7 * 191 }}") > 10
    assert "1337" not in page.text


# ---------------------------------------------------------------------- large runs


def test_thinning_keeps_peaks_ends_and_mean():
    values = np.sin(np.arange(100_001) / 9.0)
    values[[31_234, 77_777]] = 50.0, -60.0
    values[500:600] = math.nan
    thinned = thin_series(Series(np.arange(100_001.0), values), 1000)
    assert len(thinned.values) <= 1000
    assert {31_234, 77_777, 0, 100_000} <= {*thinned.steps.astype(int)}
    assert (np.nanmin(thinned.values), np.nanmax(thinned.values)) == (-60.0, 50.0)
    assert (np.diff(thinned.steps) > 0).all()
    assert np.isnan(thin_series(Series(np.arange(600.0), np.full(600, math.nan)), 100).values).all()
    weights = np.diff(np.append(thinned.mean_steps, 100_000))
    assert np.average(thinned.means, weights=weights) == pytest.approx(np.nanmean(values), abs=2e-2)


@pytest.mark.slow
def test_million_rows_are_reduced_with_their_peak(tmp_path, report):
    rows = [f"{step},{step // 100_000},{1000 / (step + 1000):.12f},\n" for step in range(1_000_000)]
    rows[654_321] = "654321,6,77.5,1\n"
    page = report(write_run(tmp_path / "a", metrics_csv="step,epoch,loss,lr\n" + "".join(rows)))
    assert "loss 0.000999002 0.000999002 999,999 77.5 654,321 1,000,000" in page.text
    highest = [each.max() for each in page.drawn()["y"]]
    assert 77.5 in highest
    assert max(map(len, page.drawn()["y"])) <= 2000


@pytest.mark.slow
def test_many_names_and_long_logs_are_truncated_visibly(tmp_path, report):
    names = [f"metric_{number}" for number in range(1000)]
    lines = [",".join([str(step), "0", *["0.5"] * 1000]) for step in range(40)]
    metrics = "\n".join([",".join(["step", "epoch", *names]), *lines, ""])
    log = "".join(f"2026-01-01 00:00:00,000 INFO line {number}\n" for number in range(100_000))
    page = report(write_run(tmp_path / "a", metrics_csv=metrics, run_log=log))
    assert sum("data-chart" in each for _, each in page.tags) == 40
    assert "Too many curves; not drawn: metric_40" in page.text
    assert "INFO line 99999" in page.text
    assert "INFO line 0 " not in page.text
    assert re.search(r"without the first [\d,]+ bytes", page.text)


# ---------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["nowhere"], ConfigError, "there is no directory nowhere. Name runs on this machine"),
        (["empty"], ConfigError, "there are no runs in empty"),
        (["a", "--output", "report.pdf"], ConfigError, "--output report.pdf: expected an .html file"),
        (["a", "--output", "none/report.html"], RunDirectoryError, "none/report.html cannot be written: No such file"),
        (["a", "--ouptut", "x.html"], ConfigError, "has no option --ouptut. Did you mean --output?"),
    ],
)
def test_invalid_command_is_one_error_with_a_fix(tmp_path, monkeypatch, capsys, words, error, said):
    monkeypatch.chdir(tmp_path)
    write_run("a")
    Path("empty").mkdir()
    assert main(["report", *words]) == (2 if error is ConfigError else 1)
    assert said in capsys.readouterr().err
    assert not list(Path().glob("*.html"))


def test_report_changes_no_run_and_replaces_old_report(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write_run("a")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()}
    Path("report.html").write_text("old")
    assert main(["report", "a"]) == 0
    assert re.fullmatch(r"report\.html: 1 run, 1\.\d+ MB\n", capsys.readouterr().out)
    assert Path("report.html").read_text().startswith("<!DOCTYPE html>")
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.iterdir()} == before


# ---------------------------------------------------------------------- at the end of a training


class Fails(Regression):
    def training_step(self, batch):
        if self.global_step == 2:
            raise KeyError("nothing")
        return super().training_step(batch)


def train_with_report(tmp_path, task, **options):
    options = {"max_steps": 4, "logger": True, "log_every_n_steps": 1, "callbacks": [lumen.Report()]} | options
    trainer = bare_trainer(tmp_path, enable_checkpointing=True, **options)
    trainer.fit(task, loader())
    return trainer


def test_a_training_leaves_its_report_when_it_ends(tmp_path):
    trainer = train_with_report(tmp_path, Regression())
    text = Page((trainer.run_directory / "report.html").read_text()).text
    assert "run finished 4" in text
    assert "step-00000004" in text


def test_failed_training_is_reported_with_its_error(tmp_path):
    with pytest.raises(KeyError, match="nothing"):
        train_with_report(tmp_path, Fails())
    (file,) = tmp_path.rglob("report.html")
    text = Page(file.read_text()).text
    assert "run failed 2" in text
    assert "run: KeyError: 'nothing'" in text


def test_unwritable_report_does_not_fail_the_training(tmp_path):
    class InTheWay(lumen.Callback):
        def on_fit_start(self, trainer, task):
            (trainer.run_directory / "report.html" / "full").mkdir(parents=True)

    trainer = train_with_report(tmp_path, Regression(), callbacks=[lumen.Report(), InTheWay()], log_level="WARNING")
    assert trainer.global_step == 4
    assert trainer.state.finished
    log = (trainer.run_directory / "run.log").read_text()
    assert " WARNING no report was written: RunDirectoryError: " in log


@pytest.mark.slow
def test_examples_of_the_page_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = find_programs("docs/guides/report.md")
    exec(compile(program, "docs/guides/report.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.splitlines()[-1] == "runs/line/report.html"
    assert Path("runs/line/report.html").exists()
    commands = re.findall(r"^lumen (report .*?) *(?:#.*)?$", (ROOT / "docs/guides/report.md").read_text(), re.M)
    assert len(commands) == 3
    for name in ("gpt", "gpt-2"):
        save(write_run(f"runs/{name}") / "checkpoints/step-00000003")
    for command in commands:
        assert main(command.split()) == 0
    assert {path.name for path in Path().glob("*.html")} == {"report.html", "both.html", "all.html"}
    assert "3 runs" in capsys.readouterr().out
