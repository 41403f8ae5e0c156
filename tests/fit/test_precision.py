"""Precision: the dtypes of a run, and the error for a dtype that is not available."""

import json
import re
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torchmetrics
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.cli import main
from lumen.errors import CheckpointMismatch, ConfigError
from lumen.precision import Float16
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.pages import find_programs
from tests.helpers.tasks import FEATURES, Regression, loader, network, quiet_trainer, regression_data, weights

DOCS = (ROOT / "docs/guides/precision.md").read_text()


def fit(tmp_path, task, data=None, **options):
    trainer = quiet_trainer(tmp_path, **({"max_epochs": 2, "enable_checkpointing": False} | options))
    trainer.fit(task, loader(40) if data is None else data)
    return trainer


def assert_same(task, other):
    assert torch.equal(weights(task), weights(other))


def dtypes(task):
    return {parameter.dtype for parameter in task.parameters()}


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("names", "parameters", "outputs"),
    [
        (["fp32", "32", "32-true", 32], torch.float32, torch.float32),
        (["bf16", "bf16-mixed"], torch.float32, torch.bfloat16),
        (["fp16", "16", "16-mixed", 16], torch.float32, torch.float16),
        (["bf16-true"], torch.bfloat16, torch.bfloat16),
        (["fp64", "64", "64-true", 64], torch.float64, torch.float64),
    ],
)
def test_precision_names_train_and_predict_in_their_dtypes(tmp_path, names, parameters, outputs):
    for name in names:
        task = Regression()
        trainer = fit(tmp_path, task, max_epochs=1, precision=name)
        assert dtypes(task) == {parameters}
        (values,) = trainer.validate(task, loader(20))
        assert values["val_loss"] < 10
        predictions = trainer.predict(task, loader(20, shuffle=False))
        assert {batch.dtype for batch in predictions} == {outputs}
        assert not any(batch.requires_grad for batch in predictions)
        reference = Regression()
        reference.load_state_dict(task.state_dict())
        expected = reference(regression_data(20)[0])
        torch.testing.assert_close(torch.cat(predictions).float(), expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("16-true", "Use fp16 .* or bf16-true"),
        ("fp16-true", "Use fp16 .* or bf16-true"),
        ("transformer-engine", "no precision is named 'transformer-engine'; use one of fp32, .*bf16-true.*fp64"),
        (8, "no precision is named 8"),
        (16.0, "precision: expected a string, an int, a Precision or a class derived from Precision, found 16.0"),
    ],
)
def test_unsupported_precision_is_rejected_at_construction(name, answer):
    with pytest.raises(ConfigError, match=answer):
        lumen.Trainer(max_epochs=1, precision=name)


# ---------------------------------------------------------------------- settings of the gradient scaler


class Scales(lumen.Callback):
    """Callback that records the loss scale after every attempted update."""

    def __init__(self):
        self.scales = []

    def on_train_batch_end(self, trainer, task, *args):
        self.scales.append(trainer.run.precision.state_dict()["scale"])


class Bursting(Regression):
    """Task whose gradients overflow at two batches, at every scale down to 2."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        return loss * 3e38 if batch_idx in (1, 4) else loss


def test_float16_scale_equals_torch_grad_scaler(tmp_path):
    settings = {"init_scale": 512.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    noted = Scales()
    precision = Float16(**settings)
    fit(tmp_path, Bursting(), loader(72), max_epochs=1, precision=precision, callbacks=[noted])
    scaler, expected = torch.amp.GradScaler("cpu", **settings), []
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for batch in range(9):
        weight.grad = torch.tensor(torch.inf if batch in (1, 4) else 1.0) * scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        expected.append(scaler.get_scale())
    assert noted.scales == expected
    assert expected[:5] == [512.0, 128.0, 128.0, 512.0, 128.0]
    assert precision.skipped_updates == 2


class Skipping(Regression):
    """Task whose optimizer has no gradients in every other step."""

    def __init__(self):
        super().__init__()
        self.untrained = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        return self.untrained(torch.ones(1, 1)).sum() if batch_idx % 2 else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


class SkipsUpdate(lumen.Callback):
    """Callback that skips the fourth update."""

    calls = 0

    def on_before_optimizer_step(self, trainer, task, optimizer):
        self.calls += 1
        if self.calls == 4:
            trainer.skip_update()


@pytest.mark.parametrize("skips", [False, True])
def test_step_without_gradients_changes_no_scale(tmp_path, skips):
    noted, trained = Scales(), []
    for precision in ("fp32", Float16(growth_interval=1, init_scale=4.0)):
        task, callbacks = Skipping(), [SkipsUpdate()] if skips else []
        callbacks += [] if precision == "fp32" else [noted]
        fit(tmp_path, task, loader(48), max_epochs=1, precision=precision, callbacks=callbacks)
        trained.append(weights(task))
    assert noted.scales == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]
    torch.testing.assert_close(*trained, rtol=0.05, atol=0.02)


def test_each_run_starts_with_the_initial_scale(tmp_path):
    precision = Float16(init_scale=64.0, growth_interval=1)
    for _ in range(2):
        noted = Scales()
        fit(tmp_path, Regression(), max_epochs=1, precision=precision, callbacks=[noted])
        assert noted.scales == [128.0, 256.0, 512.0, 1024.0, 2048.0]


def test_resumed_run_keeps_scale_and_warns_of_settings(tmp_path, caplog):
    quick, slow = ({"init_scale": 64.0, "growth_interval": interval} for interval in (1, 3))
    whole, resumed = Scales(), Scales()
    options = {"log_level": "WARNING", "resume": "auto"}
    quiet_trainer(tmp_path / "w", max_steps=9, callbacks=[whole], precision=Float16(**quick)).fit(
        Regression(), loader()
    )
    quiet_trainer(tmp_path, max_steps=4, precision=Float16(**quick)).fit(Regression(), loader())
    quiet_trainer(tmp_path, max_steps=6, callbacks=[resumed], precision=Float16(**quick), **options).fit(
        Regression(), loader()
    )
    assert resumed.scales == whole.scales[4:6]
    assert not caplog.records
    quiet_trainer(tmp_path, max_steps=9, callbacks=[resumed], precision=Float16(**slow), **options).fit(
        Regression(), loader()
    )
    assert resumed.scales[2:] == [whole.scales[5], whole.scales[5], 2 * whole.scales[5]]
    assert "growth_interval was 1, is 3. The new settings apply from now on" in caplog.text


@pytest.mark.parametrize(
    ("settings", "answer"),
    [
        ({"init_scale": 0.5}, "init_scale must be at least 1, found 0.5"),
        ({"growth_factor": 1.0}, "growth_factor must be more than 1, found 1"),
        ({"backoff_factor": 1}, "backoff_factor must be between 0 and 1, found 1"),
        ({"growth_interval": 0}, "growth_interval must be at least 1, found 0"),
        ({"growth_interval": 1.5}, "Float16: growth_interval: expected an int, found 1.5"),
        ({"growth": 2}, "Float16 has no argument growth. Did you mean growth_factor"),
    ],
)
def test_invalid_scaler_settings_are_rejected(settings, answer):
    with pytest.raises(ConfigError, match=answer):
        Float16(**settings)


SCALED = """
model: {class_path: tests.helpers.cli_tasks.Line}
data: {class_path: tests.helpers.cli_tasks.Points}
trainer:
  max_steps: 2
  callbacks: [tests.helpers.cli_tasks.Spy]
  logger: false
  enable_checkpointing: false
  precision: {class_path: lumen.precision.Float16, init_args: {init_scale: 1024, growth_interval: 1}}
"""


def train_from_config(tmp_path, *words, config=SCALED):
    """Return the precision of a run from a config."""
    (tmp_path / "scaled.yaml").write_text(config)
    assert main(["fit", "--config", str(tmp_path / "scaled.yaml"), *words]) == 0
    return Spy.trainer.run.precision


def test_a_config_sets_the_scaler(tmp_path, capsys):
    assert train_from_config(tmp_path).state_dict()["scale"] == 4096.0
    option = "--trainer.precision.init_args.init_scale"
    assert train_from_config(tmp_path, option, "16").state_dict()["scale"] == 64.0
    with pytest.raises(AssertionError):
        train_from_config(tmp_path, option, "much")
    assert "expected float, found 'much'" in capsys.readouterr().err


# ---------------------------------------------------------------------- a user's precision


class StaticScale(lumen.Precision):
    """Precision unknown to Lumen: it multiplies the loss by a power of two, which changes nothing."""

    def __init__(self, scale=8.0):
        self.scale = scale
        self.calls = {}

    def count(self, name):
        self.calls[name] = self.calls.get(name, 0) + 1

    def check(self, device, parameter_device):
        self.count("check")

    def setup(self, device):
        self.count(f"setup on {device}")
        self.optimizer_steps = 0

    def convert(self, model):
        self.count("convert")

    @contextmanager
    def forward(self):
        self.count("forward")
        yield

    def backward(self, loss):
        self.count("backward")
        (loss * self.scale).backward()

    def unscale(self, optimizer):
        self.count("unscale")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad /= self.scale

    def step(self, optimizer, closure=None):
        self.optimizer_steps += 1
        return super().step(optimizer, closure)

    def state_dict(self):
        return {"name": "static", "optimizer_steps": self.optimizer_steps}

    def load_state_dict(self, state):
        self.optimizer_steps = state["optimizer_steps"]


@pytest.mark.parametrize("options", [{}, {"detect_anomaly": True}, {"profiler": "simple"}])
def test_equivalent_custom_precision_trains_identically(tmp_path, options):
    strange, tasks = StaticScale(), (Regression(dropout=0.2), Regression(dropout=0.2))
    for task, precision in zip(tasks, ("fp32", strange), strict=True):
        trainer = quiet_trainer(
            tmp_path, max_epochs=2, precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.1,
            num_sanity_val_steps=0, **options,
        )  # fmt: skip
        trainer.fit(task, loader(50, 8), val_dataloaders=loader(20, 8))
    assert_same(*tasks)
    assert strange.calls == {
        "check": 1, "setup on cpu": 1, "convert": 1, "forward": 20, "backward": 14, "unscale": 8,
    }  # fmt: skip
    assert strange.optimizer_steps == 8
    assert "forward" not in vars(strange)  # the end of the run removes its observers
    assert trainer.precision is strange


def test_custom_precision_is_saved_and_resumed(tmp_path):
    whole, resumed = Regression(), Regression()
    quiet_trainer(tmp_path / "whole", max_steps=9).fit(whole, loader())
    quiet_trainer(tmp_path, max_steps=4, precision=StaticScale).fit(Regression(), loader())
    strange = StaticScale(4.0)
    quiet_trainer(tmp_path, max_steps=9, precision=strange, resume="auto").fit(resumed, loader())
    assert_same(whole, resumed)
    assert strange.optimizer_steps == 9
    assert_same(Regression.load_from_checkpoint(tmp_path / "runs/run"), resumed)


def test_change_to_custom_precision_warns(tmp_path, caplog):
    quiet_trainer(tmp_path, max_steps=2).fit(Regression(), loader())
    options = {"resume": "auto", "log_level": "WARNING"}
    quiet_trainer(tmp_path, max_steps=4, precision=Bare(), **options).fit(Regression(), loader())
    assert "precision was 'fp32', is 'Bare'" in caplog.text
    assert "rounding was None, is 'up'" in caplog.text


class Bare(lumen.Precision):
    """Minimal precision, with one setting."""

    def forward(self):
        return nullcontext()

    @property
    def numerics(self):
        return {"rounding": "up"}


def test_config_may_name_a_custom_precision(tmp_path):
    named = f"precision: {{class_path: {__name__}.StaticScale, init_args: {{scale: 4}}}}"
    strange = train_from_config(tmp_path, config=re.sub("precision: .*", named, SCALED))
    assert (type(strange), strange.scale, strange.optimizer_steps) == (StaticScale, 4, 2)


def test_what_is_no_precision_is_refused():
    with pytest.raises(
        ConfigError, match=r"precision: expected .* a class derived from Precision, found the class DDP"
    ):
        lumen.Trainer(max_epochs=1, precision=lumen.DDP)
    with pytest.raises(ConfigError, match=r"no precision is named 'Float16'.*class_path"):
        lumen.Trainer(max_epochs=1, precision="Float16")


# ---------------------------------------------------------------------- all tensors in one dtype


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("fp64", torch.float64)])
def test_one_dtype_equals_the_loop_by_hand(tmp_path, precision, dtype):
    inputs, targets = regression_data(40)
    task = Regression()
    fit(tmp_path, task, DataLoader(TensorDataset(inputs, targets), 8), precision=precision, gradient_clip_val=0.5)

    net = network().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for _ in range(2):
        for batch in torch.arange(40).split(8):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs[batch].to(dtype)), targets[batch].to(dtype)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    assert torch.equal(weights(task.net), weights(net))


class Buffers(Regression):
    """Task with layers built late, buffers of several kinds, and a metric with a large count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(FEATURES))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen = torchmetrics.SumMetric()

    def configure_model(self):
        self.norm = nn.BatchNorm1d(FEATURES)

    def training_step(self, batch):
        inputs, targets = batch
        self.seen.update(torch.ones(3))
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return super().training_step((self.norm(inputs * self.table), targets))


def test_bf16_true_converts_parameters_but_not_integers(tmp_path):
    """Sums of logged values are not converted either."""
    task = Buffers()
    trainer = fit(tmp_path, task, loader(400, 2), max_epochs=1, precision="bf16-true")
    assert dtypes(task) == {torch.bfloat16}
    assert {task.table.dtype, task.norm.running_mean.dtype} == {torch.bfloat16}
    assert {task.count.dtype, task.norm.num_batches_tracked.dtype} == {torch.int64}
    assert trainer.callback_metrics["seen"] == 600  # bfloat16 cannot count beyond 256
    state = trainer.optimizers[0].state[task.norm.weight]
    assert state["exp_avg"].dtype == torch.bfloat16


class Looking(Regression):
    def __init__(self):
        super().__init__()
        self.found = []

    def training_step(self, batch):
        self.found.append((batch["inputs"].dtype, batch["more"][0].dtype, batch["more"][1].dtype))
        return super().training_step((batch["inputs"].to(self.net[0].weight), batch["more"][0].to(self.net[0].weight)))


class Deciding(Looking):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return {"inputs": batch["inputs"].bfloat16(), "more": batch["more"]}


class LastWord(Looking):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch | {"inputs": batch["inputs"].double()}


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Looking, (torch.bfloat16, torch.bfloat16, torch.int64)),
        (Deciding, (torch.bfloat16, torch.float32, torch.int64)),
        (LastWord, (torch.float64, torch.bfloat16, torch.int64)),
    ],
)
def test_floating_point_inputs_are_converted_unless_task_does(tmp_path, kind, found):
    inputs, targets = regression_data(8)
    data = [{"inputs": inputs[i], "more": (targets[i], torch.tensor(i))} for i in range(8)]
    task = kind()
    fit(tmp_path, task, DataLoader(data, 4), max_epochs=1, precision="bf16-true")
    assert task.found == [found] * 2


def test_bf16_true_run_resumes_and_loads_exactly(tmp_path):
    def trainer(**options):
        return quiet_trainer(tmp_path, **({"precision": "bf16-true", "resume": "auto"} | options))

    whole = Regression(dropout=0.2)
    quiet_trainer(tmp_path / "whole", max_steps=9, precision="bf16-true").fit(whole, loader())
    trainer(max_steps=4).fit(Regression(dropout=0.2), loader())
    for precision in ("fp32", "bf16"):
        with pytest.raises(CheckpointMismatch, match=r"precision: bf16-true.*bfloat16 saved.*float32 in the model"):
            trainer(max_steps=9, precision=precision).fit(Regression(dropout=0.2), loader())
    resumed = Regression(dropout=0.2)
    trainer(max_steps=9).fit(resumed, loader())
    assert torch.equal(weights(whole), weights(resumed))

    loaded = Regression.load_from_checkpoint(tmp_path / "runs/run")
    assert dtypes(loaded) == {torch.bfloat16}
    assert torch.equal(weights(loaded), weights(resumed))


def test_fp32_run_cannot_resume_in_bf16_true(tmp_path):
    quiet_trainer(tmp_path, max_steps=2).fit(Regression(), loader())
    with pytest.raises(CheckpointMismatch, match=r"precision: fp32, bf16 or fp16.*Set the same precision"):
        quiet_trainer(tmp_path, max_steps=4, resume="auto", precision="bf16-true").fit(Regression(), loader())


def test_a_float32_run_may_go_on_under_autocast(tmp_path):
    for steps, precision in ((2, "fp32"), (4, "fp16"), (6, "bf16"), (8, "fp32")):
        trainer = quiet_trainer(tmp_path, max_steps=steps, resume="auto", precision=precision)
        trainer.fit(Regression(), loader())
        assert trainer.global_step == steps


# ---------------------------------------------------------------------- operations without a kernel


class Recurrent(nn.Module):
    def __init__(self, cell=nn.LSTM):
        super().__init__()
        self.cells = nn.ModuleList([nn.Identity(), cell(FEATURES, 4, batch_first=True)])

    def forward(self, inputs):
        return self.cells[1](inputs[:, None])[0][:, -1]


class Sequences(Regression):
    def __init__(self, cell=nn.LSTM):
        super().__init__()
        self.encoder = Recurrent(cell)
        self.head = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.head(self.encoder(inputs))


def test_layer_without_float16_kernel_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"fp16.*'encoder\.cells\.1' \(LSTM\) on cpu.*Use precision: bf16 or fp32"):
        fit(tmp_path, Sequences(), precision="fp16")
    fit(tmp_path, Sequences(), max_epochs=1, precision="fp64")  # not every processor has one in bfloat16
    fit(tmp_path, Sequences(nn.GRU), max_epochs=1, precision="fp16")


class Tail(nn.Module):
    """Task with a function without a float16 kernel; some processors have one for an LSTM in evaluation."""

    def forward(self, inputs):
        return torch.special.erfcx(inputs)


class Tailed(Regression):
    def __init__(self):
        super().__init__()
        self.tails = nn.ModuleList([nn.Identity(), Tail()])

    def forward(self, inputs):
        return self.tails[1](super().forward(inputs))


def test_so_it_is_in_evaluation(tmp_path):
    with pytest.raises(ConfigError, match=r"'tails\.1' \(Tail\)"):
        quiet_trainer(tmp_path, precision="fp16").validate(Tailed(), loader())


class Adaptive(Regression):
    def __init__(self):
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(FEATURES, 20, [5])

    def training_step(self, batch):
        return self.loss(batch[0], torch.arange(len(batch[0]))).loss


class Pooling(Regression):
    def training_step(self, batch):
        return nn.functional.avg_pool3d(self.net[0](batch[0]).reshape(1, -1, 2, 2, 2), 2).mean()


class OwnTensor(Regression):
    def training_step(self, batch):
        return self(torch.zeros(4, FEATURES)).mean()


@pytest.mark.parametrize(
    ("task", "precision", "named"),
    [
        (Adaptive, "bf16", r"'loss' \(AdaptiveLogSoftmaxWithLoss\)"),
        (Adaptive, "fp16", r"'loss' \(AdaptiveLogSoftmaxWithLoss\)"),
        (Pooling, "bf16-true", "a step of Pooling"),
        (OwnTensor, "bf16-true", r"'net\.0' \(Linear\).*Create tensors in a step with the dtype"),
        (OwnTensor, "fp64", r"'net\.0' \(Linear\).*Create tensors in a step with the dtype"),
    ],
)
def test_other_operations_without_a_dtype_are_named_too(tmp_path, task, precision, named):
    with pytest.raises(ConfigError, match=rf"under {precision} .*{named}"):
        fit(tmp_path, task(), precision=precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-true", "fp64"])
def test_unrelated_shape_error_passes_through(tmp_path, precision):
    class Mistaken(Regression):
        def training_step(self, batch):
            return self(batch[0][:, 1:]).mean()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fit(tmp_path, Mistaken(), precision=precision)


# ---------------------------------------------------------------------- float32 inside autocast


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_part_without_autocast_computes_what_float32_computes(tmp_path, precision):
    class Island(Regression):
        def training_step(self, batch):
            inputs, targets = batch
            outside = self.net[:3](inputs)
            with torch.autocast(inputs.device.type, enabled=False):
                features = outside.float()
                inside = self.net[3](features)
            self.seen = outside, inside, features.detach()
            return nn.functional.mse_loss(inside, targets)

        def on_before_optimizer_step(self, optimizer):
            outside, inside, features = self.seen
            assert outside.dtype == (torch.bfloat16 if precision == "bf16" else torch.float16)
            assert inside.dtype == torch.float32
            assert torch.equal(inside, self.net[3](features))
            for parameter in self.parameters():
                assert parameter.grad.dtype == torch.float32
                assert parameter.grad.abs().sum() > 0
            self.looked = True

    task = Island()
    fit(tmp_path, task, precision=precision)
    assert task.looked


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_documentation_runs_as_shown(tmp_path, precision):
    trainer_block, task_block, own_block = find_programs("docs/guides/precision.md")
    _, attention_block = find_programs("docs/guides/compile.md")
    names = {"__name__": "documentation"}
    exec(task_block, names)
    fit(tmp_path, names["Classifier"](), precision=precision)
    exec(own_block + attention_block + trainer_block, names)
    assert names["trainer"].plan.max_steps == 4
    assert names["scaled"].precision.scale == 64.0
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    with torch.profiler.profile(acc_events=True) as profile:  # torch 2.11 warns without
        found = names["attend"](query, key, value)
    assert {event.key for event in profile.key_averages()} >= {"aten::_scaled_dot_product_attention_math"}
    scores = (query @ key.mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found, scores.softmax(-1) @ value)


def test_documented_precision_equals_fp32(tmp_path):
    names = {"__name__": "documentation", "lumen": lumen}
    exec(find_programs("docs/guides/precision.md")[2], names)
    plain, scaled = Regression(), Regression()
    fit(tmp_path, plain, gradient_clip_val=0.5)
    fit(tmp_path, scaled, gradient_clip_val=0.5, precision=names["StaticScale"](64.0))
    assert_same(plain, scaled)


def test_the_page_has_every_member_of_a_precision():
    table = DOCS.split("| member |")[1].split("\n\n")[0]
    public = {name for name in dir(lumen.Precision) if not name.startswith("_")}
    assert {
        name.split("(")[0]
        for row in table.splitlines()[2:]
        for name in re.findall(r"`(\w+(?:\(.*?\))?)`", row.split("|")[1])
    } == public


@pytest.mark.parametrize("config", list(re.findall(r"```yaml\n(.*?)```", DOCS, re.S)))
def test_the_documented_config_is_read(tmp_path, config):
    precision = yaml.safe_load(config)["trainer"]["precision"]
    text = re.sub("precision: .*", f"precision: {json.dumps(precision)}", SCALED)
    assert train_from_config(tmp_path, config=text).state_dict()["growth_interval"] == 500


# ---------------------------------------------------------------------- float32 matrices, cuDNN


def switches():
    matmul = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    return *matmul, torch.backends.cudnn.benchmark


class Watching(Regression):
    def __init__(self, fail=False):
        super().__init__()
        self.fail = fail

    def training_step(self, batch):
        self.precision = torch.get_float32_matmul_precision()
        self.switches = switches()
        if self.fail:
            raise KeyError("on purpose")
        return super().training_step(batch)


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matmul_precision_is_restored_after_the_run(tmp_path, precision, fail):
    before, task = switches(), Watching(fail)
    try:
        fit(tmp_path, task, max_epochs=1, matmul_precision=precision, benchmark=True)
    except KeyError:
        assert fail
    assert task.precision == precision
    assert task.switches[2] is True
    assert switches() == before
    assert torch.get_float32_matmul_precision() == "highest"


def test_what_is_not_asked_for_is_left_alone(tmp_path):
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as code with torch's newer switches
    try:
        before = switches()
        fit(tmp_path, Regression(), max_epochs=1)
        assert switches() == before
        task = Watching()
        fit(tmp_path, task, max_epochs=1, matmul_precision="highest")
        assert task.switches[0] == "ieee"
        assert switches() == before
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
    with pytest.raises(
        ConfigError, match="matmul_precision: expected 'highest', 'high', 'medium' or None, found 'tf32'"
    ):
        lumen.Trainer(max_epochs=1, matmul_precision="tf32")


# ---------------------------------------------------------------------- MPS

HAS_MPS = torch.backends.mps.is_available()


@pytest.mark.skipif(HAS_MPS, reason="there is MPS")
def test_unavailable_accelerator_lists_the_available_ones():
    with pytest.raises(ConfigError, match=r"'mps' is not available on this machine; available: auto, .*cpu"):
        lumen.Trainer(max_epochs=1, accelerator="mps")


@pytest.mark.skipif(not HAS_MPS, reason="there is no MPS")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true"])
def test_training_on_mps(tmp_path, precision):
    task = Regression(dropout=0.1)
    data = loader(40, pin_memory=True)
    trainer = quiet_trainer(tmp_path, max_epochs=1, accelerator="mps", precision=precision)
    trainer.fit(task, data, val_dataloaders=data)
    assert task.device.type == "mps"
    assert trainer.callback_metrics["val_loss"] < 10
    assert any((tmp_path / "runs/run/checkpoints").iterdir())
    with pytest.raises(ConfigError, match="float64, which MPS does not have"):
        lumen.Trainer(max_epochs=1, accelerator="mps", precision="fp64")


@pytest.mark.parametrize(
    ("precision", "text"), [("fp64", "double check the labels"), ("fp16", "Half of them are empty")]
)
def test_error_raised_by_user_is_unchanged(tmp_path, precision, text):
    class Raising(Regression):
        def training_step(self, batch):
            raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text) as caught:
        quiet_trainer(tmp_path, max_steps=1, precision=precision).fit(Raising(), loader())
    assert type(caught.value) is RuntimeError
