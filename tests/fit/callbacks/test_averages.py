"""Averages in place of parameters: the mean of checkpoints and the averages of callbacks, for every reader."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.cli import main
from lumen.errors import CheckpointDamaged, CheckpointMismatch, ConfigError
from lumen.tools.export.weights import export_weights
from tests.helpers.checkpoints import save
from tests.helpers.ema import Normed, RecordStates, fit
from tests.helpers.tasks import Regression, bare_trainer, loader

RUN = "runs/run"
DATA = {"samples": 20, "shuffle": False, "dtype": torch.float64}


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Turning(Normed):
    """Task whose best steps are 6 and 2."""

    def validation_step(self, batch):
        self.log("score", {2: 1.0, 4: 3.0, 6: 0.5, 8: 2.0}.get(self.global_step, 9.0))


def train(*callbacks, task=None, **options):
    """Train eight steps with a checkpoint at each second step; return the states at these steps."""
    monitor, kept = "score" if task is None else None, RecordStates()
    saver = lumen.ModelCheckpoint(every_n_train_steps=2, keep_last=-1, monitor=monitor, at_end=False)
    options = {"max_steps": 8, "val_check_interval": 2, "resume": None, "num_sanity_val_steps": 0} | options
    fit(Path(), saver, kept, *callbacks, task=Turning() if task is None else task, **options)
    return {step: kept.states[step - 1] for step in range(2, options["max_steps"] + 1, 2)}


def average_states(states):
    """Return the mean, computed by hand; a tensor that is not floating-point is the last one."""
    found = {}
    for name, last in states[-1].items():
        total = sum(state[name].double() for state in states) / len(states)
        found[name] = total.to(last.dtype) if last.is_floating_point() else last
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], each) and found[name].dtype == each.dtype for name, each in expected.items())


def compute_loss(state):
    """Return the validation loss of a task in this state."""
    task = Normed()
    task.load_state_dict(state)
    return bare_trainer(Path()).validate(task, loader(**DATA))


# ---------------------------------------------------------------------- the mean of checkpoints


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mean_of_last_checkpoints_is_exact_everywhere(dtype):
    states = train()
    if dtype != torch.float64:
        for step, state in states.items():
            cast = {name: each.to(dtype) if each.is_floating_point() else each for name, each in state.items()}
            save(Path(f"cast/step-{step}"), model=cast)
            states[step] = cast
    source = RUN if dtype == torch.float64 else "cast"
    expected = average_states([states[step] for step in (4, 6, 8)])
    assert main(["export", source, "--average", "last:3", "--output", "mean.safetensors"]) == 0
    assert assert_same(load_file("mean.safetensors"), expected)
    task = Normed(dtype)
    trainer = bare_trainer(Path(), init_from=lumen.Weights(source, average="last:3"), max_steps=1)
    seen = RecordStates()
    seen.on_fit_start = lambda trainer, task: seen.on_step_end(trainer, task)
    trainer.callbacks.append(seen)
    trainer.fit(task, loader(48, dtype=dtype))
    assert assert_same(seen.states[0], expected)
    if dtype == torch.float64:
        assert assert_same(Turning.load_from_checkpoint(source, average="last:3").state_dict(), expected)
        assert trainer.validate(Normed(), loader(**DATA), source, average="last:3") == compute_loss(expected)


def test_average_last_ends_at_path_best_follows_monitor():
    states = train()
    read = Turning.load_from_checkpoint
    until = read(f"{RUN}/checkpoints/step-00000006", average="last:2")
    assert assert_same(until.state_dict(), average_states([states[4], states[6]]))
    best = average_states([states[2], states[6]])
    whole_numbers = {name: each for name, each in states[8].items() if not each.is_floating_point()}
    assert assert_same(read(RUN, average="best:2").state_dict(), best | whole_numbers)
    one = read(RUN, average="best:1").state_dict()
    assert assert_same(one, states[6] | whole_numbers)


class Buffered(Normed):
    """Task with the vectors of a power iteration and a queue."""

    def __init__(self):
        super().__init__()
        torch.nn.utils.parametrizations.spectral_norm(self.net[0])
        self.register_buffer("queue", torch.zeros(3, dtype=torch.float64))

    def training_step(self, batch):
        self.queue += 1.0
        return super().training_step(batch)


def test_checkpoint_means_average_only_running_statistics_of_buffers():
    states = train(task=Buffered())
    found, by_hand = (
        Buffered.load_from_checkpoint(RUN, average="last:3").state_dict(),
        average_states([states[step] for step in (4, 6, 8)]),
    )
    copied = {name for name in found if name.endswith(("._u", "._v", "queue", "batches_tracked"))}
    assert len(copied) == 4
    assert assert_same(found, by_hand | {name: states[8][name] for name in copied})


def test_means_of_bfloat16_checkpoints_export_in_float32():
    states = train()
    halves = [{name: each.bfloat16() for name, each in states[step].items()} for step in (6, 8)]
    for step, state in enumerate(halves):
        save(Path(f"half/step-{step}"), model=state)
    export_weights("half", Path("wide.safetensors"), average="last:2", dtype=torch.float32)
    expected = {name: ((one.double() + halves[1][name].double()) / 2).float() for name, one in halves[0].items()}
    assert assert_same(load_file("wide.safetensors"), expected)


def test_average_accepts_paths_and_safetensors_files(capsys):
    states = train()
    paths = [f"{RUN}/checkpoints/step-{step:08d}" for step in (2, 8)]
    expected = average_states([states[2], states[8]])
    assert main(["export", *paths, "--output", "mean.safetensors"]) == 0
    assert assert_same(load_file("mean.safetensors"), expected)
    numbers = sum(each.is_floating_point() for each in expected.values())
    assert f"{numbers} tensors are averages of the 2 sources; the others are as saved" in capsys.readouterr().out
    files = []
    for step in (2, 8):
        files.append(f"{step}.safetensors")
        save_file(states[step], files[-1])
    assert main(["export", *files, "--output", "soup.safetensors"]) == 0
    assert assert_same(load_file("soup.safetensors"), expected)
    assert assert_same(
        Turning.load_from_checkpoint(paths[1], average=[Path(each) for each in paths]).state_dict(), expected
    )
    assert bare_trainer(Path()).validate(Normed(), loader(**DATA), files[1], average=files) == compute_loss(expected)


def test_a_step_that_was_saved_twice_counts_once():
    states = train()
    folder = Path(f"{RUN}/checkpoints")
    shutil.copytree(folder / "step-00000006", folder / "step-00000006-validating")
    assert len(find_checkpoints(folder)) == 5
    task = Turning.load_from_checkpoint(RUN, average="last:3")
    assert assert_same(task.state_dict(), average_states([states[4], states[6], states[8]]))


def test_a_damaged_one_is_passed_over_or_named(capsys):
    states = train()
    [file] = Path(f"{RUN}/checkpoints/step-00000006/model").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert main(["export", RUN, "--average", "last:3", "--output", "mean.safetensors"]) == 0
    assert "step-00000006 is damaged and is not part of the mean" in capsys.readouterr().err
    assert assert_same(load_file("mean.safetensors"), average_states([states[2], states[4], states[8]]))
    with pytest.raises(CheckpointDamaged, match="step-00000006"):
        Turning.load_from_checkpoint(RUN, average=[f"{RUN}/checkpoints/step-{step:08d}" for step in (4, 6)])
    with pytest.raises(ConfigError, match=r"average last:4: .* has 3 valid checkpoints for this average. Set"):
        Turning.load_from_checkpoint(RUN, average="last:4")


def test_what_has_no_mean_is_one_error():
    train()
    save(Path("other/step-1"), model={"weight": torch.ones(3)})
    save(Path("other/step-2"), model={"weight": torch.ones(2)})
    read = Turning.load_from_checkpoint
    with pytest.raises(CheckpointMismatch, match=r"cannot average .* net.0.bias is not in other/step-1; "):
        read(RUN, average=[RUN, "other/step-1"])
    with pytest.raises(CheckpointMismatch, match=re.escape("weight is (3,) torch.float32 in other/step-1")):
        bare_trainer(Path()).validate(Regression(), loader(), "other", average="last:2")
    with pytest.raises(ConfigError, match="other has no record of the best checkpoints"):
        bare_trainer(Path()).validate(Regression(), loader(), "other", average="best:2")
    with pytest.raises(ConfigError, match=r"average last:0: .* at least 1"):
        read(RUN, average="last:0")
    with pytest.raises(ConfigError, match="the list of checkpoints is empty"):
        read(RUN, average=[])
    Path(f"{RUN}/checkpoints/step-00000004").rename("mine")
    with pytest.raises(ConfigError, match="mine is not named by its step"):
        read("mine", average="last:1")


# ---------------------------------------------------------------------- callbacks


@pytest.mark.parametrize(
    "make", [lambda: lumen.EMA(decay=0.7, warmup=True), lambda: lumen.SWA(0.02, 1, 1)], ids=["EMA", "SWA"]
)
def test_averages_begin_again_in_each_fit(make):
    def end(callback, factor):
        task = Normed()
        with torch.no_grad():
            task.net[0].weight.mul_(factor)
        fit(Path(), callback, task=task, resume=None, max_steps=18, val_check_interval=1.0)
        return task.state_dict()

    used = make()
    end(used, 2.0)
    assert assert_same(end(used, 1.0), end(make(), 1.0))


@pytest.mark.parametrize("callback", [lumen.EMA(), lumen.SWA(0.02, 0)], ids=["EMA", "SWA"])
def test_a_layer_added_in_training_is_refused(callback):
    class Adding(lumen.Callback):
        def on_train_epoch_start(self, trainer, task):
            if trainer.current_epoch == 1:
                task.extra = torch.nn.Linear(1, 1)

    with pytest.raises(ConfigError, match=r"different tensors: extra.bias, extra.weight\. .* in configure_model"):
        fit(Path(), Adding(), callback, resume=None, max_steps=12)


def test_averages_of_bfloat16_parameters_are_float32():
    def run(steps, resume):
        ema, kept = lumen.EMA(decay=0.999), RecordStates()
        options = {"max_steps": steps, "val_check_interval": 2, "precision": "bf16-true", "resume": resume}
        return ema, kept, *fit(Path(), ema, kept, **options)

    ema, kept, _, task = run(8, None)
    end = task.state_dict()
    alone = RecordStates()
    fit(Path(), alone, max_steps=8, precision="bf16-true", resume=None)
    assert all(assert_same(ours, theirs) for ours, theirs in zip(kept.states, alone.states, strict=True))
    names = [name for name in end if not name.endswith("num_batches_tracked")]
    expected = {name: Normed().state_dict()[name].bfloat16().float() for name in names}
    for state in kept.states:
        for name, each in expected.items():
            each.lerp_(state[name].float(), 1.0 - 0.999)
    assert assert_same({name: ema.average[name] for name in names}, expected)
    assert assert_same({name: end[name] for name in names}, {name: each.bfloat16() for name, each in expected.items()})
    run(3, None)
    parts, _, trainer, _ = run(8, "auto")
    assert assert_same(dict(parts.average), dict(ema.average))
    newest = find_checkpoints(trainer.run_directory / "checkpoints")[-1]
    rounded = Normed.load_from_checkpoint(newest, average="EMA", dtype=torch.bfloat16).state_dict()
    assert assert_same({name: rounded[name] for name in names}, {name: end[name] for name in names})
    trainer = bare_trainer(Path(), precision="bf16-true")
    trainer.validate(task := Normed(), loader(**DATA), newest, average="EMA")
    assert assert_same(task.state_dict(), end)
    assert main(["export", str(newest), "--average", "EMA", "--output", "average.safetensors"]) == 0
    assert assert_same({name: load_file("average.safetensors")[name] for name in names}, expected)


@pytest.mark.parametrize("hook", ["on_validation_epoch_end", "on_validation_end"])
@pytest.mark.parametrize("callback", [lumen.EMA(decay=0.8), lumen.SWA(0.02, 9)], ids=["EMA", "SWA"])
def test_saving_in_a_validation_is_refused(callback, hook):
    saver = lumen.LambdaCallback(**{hook: lambda trainer, task: trainer.save_checkpoint("mine")})
    with pytest.raises(ConfigError, match=r"save_checkpoint: during a validation .* Save in on_train_epoch_end"):
        fit(Path(), callback, saver, resume=None)
    assert not Path("mine").exists()


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_step_checkpoint"])
def test_saving_after_a_validation_keeps_parameters(hook):
    kept, saver = (
        RecordStates(),
        lumen.LambdaCallback(
            **{hook: lambda trainer, task: trainer.global_step == 6 and trainer.save_checkpoint("mine")}
        ),
    )
    fit(Path(), lumen.EMA(decay=0.8), kept, saver, resume=None, max_steps=6, val_check_interval=1.0)
    assert assert_same(Normed.load_from_checkpoint("mine", average="parameters").state_dict(), kept.states[-1])


@pytest.mark.parametrize("callback", [lumen.EMA(decay=0.8), lumen.SWA(0.02, 0)], ids=["EMA", "SWA"])
def test_only_running_statistics_of_buffers_are_averaged(callback):
    kept = RecordStates()
    fit(Path(), callback, kept, task=Buffered(), resume=None, max_steps=12)
    vectors = {name for name in kept.states[-1] if name.endswith(("._u", "._v"))}
    equal = {name for name, each in kept.states[-1].items() if torch.equal(callback.average[name], each)}
    assert len(vectors) == 2
    assert equal == vectors | {"queue", "net.1.num_batches_tracked"}


def test_several_averages_are_refused():
    with pytest.raises(ConfigError, match=r"SWA and EMA both average the parameters.* Remove one"):
        fit(Path(), lumen.SWA(0.02, 0), lumen.EMA(), resume=None)


# ---------------------------------------------------------------------- evaluations


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
@pytest.mark.parametrize("callback", [lumen.EMA(decay=0.9), lumen.SWA(0.02, 1, 1)], ids=["EMA", "SWA"])
def test_best_is_what_was_validated(callback, precision, caplog):
    saver, data = lumen.ModelCheckpoint(monitor="val_loss"), loader(**DATA)
    options = {"resume": None, "max_steps": 24, "val_check_interval": 1.0, "precision": precision}
    trainer, _ = fit(Path(), saver, callback, log_level="INFO", **options)
    best, score = saver.best_model_path, float(saver.best_model_score)
    assert [trainer.validate(Normed(), data, ckpt_path=each)[0]["val_loss"] for each in ("best", best)] == [score] * 2
    assert trainer.validate(Normed(), data, ckpt_path="best", average="parameters")[0]["val_loss"] != score
    weights = Normed.load_from_checkpoint(best, dtype=torch.float64).state_dict()
    [line] = [each.getMessage() for each in caplog.records if each.getMessage().startswith("weights: lumen ")]
    assert main(line.split()[2:]) == 0
    exported = load_file(line.split()[-1])

    class Seeing(lumen.Callback):
        def on_fit_start(self, trainer, task):
            self.state = {name: each.clone() for name, each in task.state_dict().items()}

    seen = Seeing()
    bare = bare_trainer(Path(), init_from=best, max_steps=1, precision=precision, callbacks=[seen])
    bare.fit(Normed(), loader(48, dtype=torch.float64))
    for name, each in seen.state.items():
        assert torch.equal(each, weights[name])
        assert torch.equal(each, exported[name].to(each.dtype))


def test_evaluation_accepts_average_of_a_callback():
    ema = lumen.EMA(decay=0.7)
    states = train(ema, task=Normed(), val_check_interval=1.0)
    trainer = bare_trainer(Path())
    expected, plain = compute_loss(dict(ema.average)), compute_loss(states[8])
    assert expected != plain
    task, data = Normed(), loader(**DATA)
    assert trainer.validate(task, data, RUN, average="EMA") == expected
    assert assert_same(task.state_dict(), dict(ema.average))
    assert trainer.validate(task, data, RUN, average="parameters") == plain
    assert trainer.validate(task, data, lumen.Weights(RUN, average="EMA")) == expected
    found = trainer.predict(task, data, ckpt_path=RUN, average="callbacks.EMA.average", return_predictions=False)
    assert found is None
    assert assert_same(task.state_dict(), dict(ema.average))


def test_an_average_of_nothing_is_refused():
    train(task=Normed(), max_steps=2)
    trainer, data = bare_trainer(Path()), loader(**DATA)
    with pytest.raises(ConfigError, match="validate: average='EMA' needs a checkpoint"):
        trainer.validate(Normed(), data, average="EMA")
    with pytest.raises(ConfigError, match=r"average EMA: .* has no average of that name. .* none at all."):
        trainer.validate(Normed(), data, RUN, average="EMA")
    with pytest.raises(ConfigError, match="average='EMA' and average='last:2' of ckpt_path were set"):
        trainer.validate(Normed(), data, lumen.Weights(RUN, average="last:2"), average="EMA")
    save_file(Normed().state_dict(), "plain.safetensors")
    with pytest.raises(
        ConfigError, match=r"average EMA: only checkpoints of Lumen hold averages, and .* plain weights"
    ):
        bare_trainer(Path(), init_from=lumen.Weights("plain.safetensors", average="EMA"), max_steps=1).fit(
            Normed(), loader(8, dtype=torch.float64)
        )


LINE = """
model: {class_path: tests.helpers.cli_tasks.Line, init_args: {width: 3}}
data: {class_path: tests.helpers.cli_tasks.Points}
trainer: {max_steps: 6, accelerator: cpu, enable_progress_bar: false}
"""


@pytest.mark.slow
def test_the_command_line_validates_averages_as_python_does(capsys):
    Path("line.yaml").write_text(LINE)
    saver = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2"]
    ema = ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=0.5"]
    assert main(["fit", "--config", "line.yaml", *ema, *saver, "--trainer.callbacks.keep_last=-1"]) == 0

    def value(*words):
        assert main(["validate", "--ckpt_path", "runs/line", *words, "--output", "v.json"]) == 0
        return json.loads(Path("v.json").read_text())[0]["val_loss"]

    found = {each: value("--average", each) for each in ("EMA", "last:3")}
    begun = ["--trainer.init_from.path=runs/line", "--trainer.init_from.average=last:3", "--trainer.name=begun"]
    assert main(["fit", "--config", "line.yaml", *begun, "--trainer.max_steps=1", "--model.lr=0"]) == 0
    assert main(["validate", "--ckpt_path", "runs/begun", "--output", "v.json"]) == 0
    assert json.loads(Path("v.json").read_text())[0]["val_loss"] == pytest.approx(found["last:3"], rel=1e-5)
    assert "average last:3" in capsys.readouterr().out
    assert value() == found["EMA"]
    assert len({*found.values(), value("--average", "parameters")}) == 3
    for average, expected in found.items():
        assert main(["export", "runs/line", "--average", average, "--output", f"{average}.safetensors"]) == 0
        words = ["validate", "--config", "line.yaml", "--ckpt_path", f"{average}.safetensors", "--output", "v.json"]
        assert main(words) == 0
        assert json.loads(Path("v.json").read_text())[0]["val_loss"] == expected
