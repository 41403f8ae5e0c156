"""Several ModelCheckpoints in one run: each has its own best, one rule picks the best of the run, and all resume."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.checkpoint import find_checkpoint, find_checkpoints
from lumen.cli import main
from lumen.errors import CheckpointError
from tests.helpers.scripted_values import Both
from tests.helpers.tasks import quiet_trainer

DATA = DataLoader(TensorDataset(torch.arange(4.0)), 2)
#: Arguments for `Both`, whose loss is best at step 4 and worst at step 12.
BEST, WORST, PLAIN = {"monitor": "loss"}, {"monitor": "loss", "mode": "max"}, {"every_n_train_steps": 1}


def make_savers(*options):
    return [lumen.ModelCheckpoint(**{"keep_last": 1} | each) for each in options]


def fit(tmp_path, callbacks, epochs=6, task=None, **options):
    options = {"num_sanity_val_steps": 0, "logger": False} | options
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, max_epochs=epochs, **options)
    trainer.fit(Both() if task is None else task, DATA, val_dataloaders=DATA)
    return trainer


def step(path):
    return path and int(Path(path).name[5:])


def read_best(directory, capsys):
    """Return the checkpoint that `lumen runs` marks as best."""
    capsys.readouterr()
    assert main(["runs", str(directory), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    return [step(each["path"]) for each in run["checkpoints"] if each["best"]]


@pytest.mark.parametrize(
    ("options", "best", "own"),
    [
        ((BEST, WORST), 4, [4, 12]),
        ((WORST, BEST), 12, [12, 4]),
        ((PLAIN, BEST, WORST), 4, [12, 4, 12]),
        ((WORST | {"save_top_k": 0}, BEST, PLAIN), 4, ["", 4, 12]),
        ((PLAIN, WORST, PLAIN), 12, [12, 12, 12]),
        ((PLAIN, BEST | {"every_n_epochs": 0, "keep_last": 0, "at_end": False}), 4, [12, 4]),
    ],
)
def test_everybody_names_one_checkpoint_as_the_best(tmp_path, capsys, caplog, options, best, own):
    trainer = fit(tmp_path, each := make_savers(*options))
    assert [step(callback.best_model_path) for callback in each] == own
    directory = tmp_path / "runs/run"
    assert step(trainer.checkpoint_callback.best_model_path) == best
    assert step(find_checkpoint("best", directory / "checkpoints").path) == best
    assert read_best(directory, capsys) == [best]
    assert main(["export", str(directory), "--which", "best", "--output", str(tmp_path / "w.safetensors")]) == 0
    task = Both.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    assert torch.equal(load_file(tmp_path / "w.safetensors")["weight"], task.weight)
    evaluated = Both()
    fit(tmp_path, make_savers(*options), epochs=6, resume="auto").validate(evaluated, DATA, ckpt_path="best")
    assert torch.equal(evaluated.weight, task.weight)
    with caplog.at_level(logging.INFO, "lumen"):
        fit(tmp_path, make_savers(*options), epochs=6, resume="best", log_level="INFO")
    assert f"resuming from {directory}/checkpoints/step-{best:08d}" in caplog.text


@pytest.mark.parametrize("options", [(PLAIN, BEST), (PLAIN, WORST, BEST), (BEST | {"on_best": False}, PLAIN)])
def test_directory_and_callback_always_agree_on_best(tmp_path, options):
    said = []

    def look(trainer, task, *_):
        newest = find_checkpoints(trainer.run_directory / "checkpoints")
        if newest:
            there = find_checkpoint("best", newest[0].parent).path if trainer.current_epoch else ""
            said.append((str(there), trainer.checkpoint_callback.best_model_path))

    fit(tmp_path, [lumen.LambdaCallback(on_train_batch_start=look), *make_savers(*options)])
    assert len(said) >= 10
    assert all(there == known for there, known in said)


@pytest.mark.parametrize("options", [(PLAIN, BEST), (PLAIN, WORST | {"save_top_k": 3}, BEST)])
@pytest.mark.parametrize("cut", [2, 4])
def test_every_checkpoint_holds_scores_of_all_savers(tmp_path, options, cut):
    fit(tmp_path / "whole", whole := make_savers(*options))
    fit(tmp_path, make_savers(*options), epochs=cut)
    fit(tmp_path, resumed := make_savers(*options), resume="auto")
    for ours, theirs in zip(resumed, whole, strict=True):
        assert ours.scores == theirs.scores
        assert step(ours.best_model_path) == step(theirs.best_model_path)
    kept = [
        sorted(path.name for path in find_checkpoints(root / "runs/run/checkpoints"))
        for root in (tmp_path, tmp_path / "whole")
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("change", ["second", "one less", "mode", "monitor"])
def test_resumed_run_keeps_checkpoints_without_scores(tmp_path, caplog, change):
    """A different state_key hides the scores of the three best, which are of the steps 2, 4 and 6."""
    ranked = BEST | {"save_top_k": 3, "dirpath": tmp_path / "a"}
    other = BEST | {"dirpath": tmp_path / "b"}
    before = [ranked, other] if change == "one less" else [ranked]
    after = {
        "second": [ranked, other],
        "one less": [ranked],
        "mode": [ranked | {"mode": "max"}],
        "monitor": [ranked | {"monitor": "score"}],
    }[change]
    fit(tmp_path, make_savers(*before), epochs=4)
    for epochs in (4, 5, 6):
        with caplog.at_level(logging.WARNING, "lumen"):
            fit(tmp_path, resumed := make_savers(*after), epochs=epochs, resume="auto", log_level="WARNING")
    assert {2, 4, 6, 12} <= {step(path) for path in find_checkpoints(tmp_path / "a")}
    assert step(resumed[0].best_model_path) == (12 if change in ("mode", "monitor") else 10)
    said = f"ModelCheckpoint keeps the earlier checkpoints in {tmp_path / 'a'} (4), because the resumed run saved no "
    assert f"{said}{resumed[0].monitor} for them. Remove these checkpoints if they are not needed" in caplog.text


# ---------------------------------------------------------------------- several directories


def make_savers_in_places(tmp_path, *options):
    return make_savers(*[given | {"dirpath": tmp_path / name} for name, given in zip("abc", options, strict=False)])


def read_contents(tmp_path):
    return {name: sorted(path.name for path in (tmp_path / name).iterdir()) for name in "ab"}


@pytest.mark.parametrize("options", [(BEST, PLAIN), (PLAIN, BEST), (BEST | {"keep_last": 3}, BEST), (WORST, BEST)])
def test_run_resumes_from_newest_of_all_directories(tmp_path, options):
    fit(tmp_path / "whole", make_savers_in_places(tmp_path / "whole", *options))
    fit(tmp_path, make_savers_in_places(tmp_path, *options), epochs=3)
    trainer = fit(tmp_path, resumed := make_savers_in_places(tmp_path, *options), resume="auto")
    assert trainer.run.checkpoint.info["step"] == 6
    assert read_contents(tmp_path) == read_contents(tmp_path / "whole")
    decides = resumed[0] if options[0] is not PLAIN else resumed[1]
    assert trainer.checkpoint_callback is decides
    evaluated = Both()
    trainer.validate(evaluated, DATA, ckpt_path="best")
    assert torch.equal(evaluated.weight, Both.load_from_checkpoint(decides.best_model_path).weight)


@pytest.mark.parametrize(("lacks", "damaged"), [("a", None), ("b", None), (None, "a"), (None, "b")])
def test_damaged_checkpoint_is_replaced_from_other_directory(tmp_path, lacks, damaged):
    often, seldom = {"every_n_train_steps": 1, "keep_last": 9}, {"every_n_train_steps": 2, "keep_last": 9}
    fit(tmp_path / "whole", make_savers_in_places(tmp_path / "whole", often, seldom), task=(whole := Both()))
    fit(tmp_path, make_savers_in_places(tmp_path, often, seldom), epochs=3)
    for name in filter(None, (lacks, damaged)):
        for number in (5, 6):
            path = tmp_path / name / f"step-{number:08d}"
            if lacks and path.is_dir():
                shutil.rmtree(path)
            for file in path.glob("model/*"):
                file.write_bytes(bytes(file.stat().st_size))
    trainer = fit(
        tmp_path,
        make_savers_in_places(tmp_path, often, seldom),
        resume="auto",
        log_level="CRITICAL",
        task=(task := Both()),
    )
    assert trainer.run.checkpoint.path == tmp_path / ("b" if "a" in (lacks, damaged) else "a") / "step-00000006"
    assert torch.equal(task.weight, whole.weight)


def test_checkpoints_of_another_run_are_left_alone(tmp_path):
    fit(tmp_path, make_savers_in_places(tmp_path, PLAIN, BEST))
    before = read_contents(tmp_path)
    for number, resume in enumerate((None, tmp_path / "b/step-00000004")):
        home = tmp_path / str(number)
        trainer = fit(home, savers := make_savers_in_places(tmp_path, PLAIN, BEST), resume=resume)
        assert [each.dirpath for each in savers] == [tmp_path / "a-2", tmp_path / "b-2"]
        newest = [each.last_model_path for each in savers]
        assert newest == [f"{each.dirpath}/step-{trainer.global_step:08d}" for each in savers]
        for folder in (home, *(each.dirpath for each in savers)):
            assert folder.exists()
            shutil.rmtree(folder)
    assert read_contents(tmp_path) == before


def test_saver_without_monitor_has_no_best_checkpoint(tmp_path):
    trainer = fit(tmp_path, make_savers(PLAIN, {"monitor": "loss", "save_top_k": 0}))
    plain, silent = trainer.checkpoint_callback, trainer.callbacks[-1]
    assert (plain.monitor, silent.monitor) == (None, "loss")
    assert plain.best_model_path == plain.last_model_path != ""  # as in Lightning
    assert silent.best_model_path == ""
    with pytest.raises(CheckpointError, match="no ModelCheckpoint that saves there has a monitor"):
        trainer.validate(Both(), DATA, ckpt_path="best")


def test_exception_checkpoint_does_not_decide_the_best(tmp_path, capsys):
    fit(tmp_path, make_savers(BEST, PLAIN))
    folder = tmp_path / "runs/run/checkpoints"
    shutil.copytree(folder / "step-00000004", folder / "exception-step-00000013")
    assert read_best(tmp_path / "runs/run", capsys) == [4]
    for file in (folder / "step-00000012").glob("model/*"):
        file.unlink()
    assert read_best(tmp_path / "runs/run", capsys) == [4]
