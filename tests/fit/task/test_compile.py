"""Compiled runs: the compiled modules, equal results, and the messages if a module cannot be compiled."""

import copy
import pickle

import pytest
import torch
import yaml
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer, regression_data

pytestmark = pytest.mark.filterwarnings(  # torch's own code warns when it compiles and when it is imported for this
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.torch.jit:DeprecationWarning"
)


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs):
        return inputs + self.dropout(torch.tanh(self.linear(inputs)))


class Stack(Regression):
    """Task with six equal blocks and a head, called by `forward` and by a step without it."""

    def __init__(self, dropout=0.0, **others):
        super().__init__(**others)
        torch.manual_seed(1)
        self.first = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(6)])
        self.compiled = set()

    def forward(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.net(hidden)

    def on_fit_start(self):
        self.compiled = {name for name, module in self.named_modules() if module._compiled_call_impl is not None}


class Parts(Stack):
    """Task whose steps call the modules, never the task."""

    def training_step(self, batch):
        loss = nn.functional.mse_loss(Stack.forward(self, batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    forward = nn.Module.forward
    validation_step = training_step


def fit(tmp_path, task, *, samples=40, **options):
    trainer = quiet_trainer(tmp_path, **({"max_epochs": 2, "enable_checkpointing": False} | options))
    trainer.fit(task, loader(samples), val_dataloaders=loader(16))
    return trainer


def is_same(ours, theirs):
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# ---------------------------------------------------------------------- compiled modules

BLOCKS = {f"blocks.{number}" for number in range(6)}


@pytest.mark.parametrize(
    ("task", "setting", "compiled", "graphs"),
    [
        (Stack, {}, {"", "net", "first"} | BLOCKS, 2),  # one forward, in training and in evaluation
        (Parts, {}, {"net", "first"} | BLOCKS, 6),  # first, the blocks and the head
        (Stack, {"blocks": "Block"}, BLOCKS, 2),  # one for all six
        (Stack, {"blocks": ["Sequential", "Block"]}, BLOCKS | {"net"}, 4),
        (Stack, {"blocks": ["Tanh"]}, {"net.1"}, 2),
    ],
)
def test_the_modules_that_are_asked_for_are_compiled(tmp_path, task, setting, compiled, graphs):
    counter, ours = CompileCounter(), task()
    fit(tmp_path, ours, compile={"backend": counter} | setting)
    assert ours.compiled == compiled
    assert counter.frame_count == graphs
    assert is_same(ours, Stack()) is False  # the task has been trained


@pytest.mark.parametrize("setting", [None, False])
def test_nothing_is_compiled_unless_asked_for(tmp_path, setting):
    task = Stack()
    fit(tmp_path, task, compile=setting)
    assert task.compiled == set()


def test_layers_may_be_built_late(tmp_path):
    class Late(Stack):
        def configure_model(self):
            self.blocks.append(Block())

    task, counter = Late(), CompileCounter()
    fit(tmp_path, task, compile={"backend": counter, "blocks": ["Block"]})
    assert task.compiled == BLOCKS | {"blocks.6"}


# ---------------------------------------------------------------------- unchanged results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "backend"),
    [("fp32", "aot_eager"), ("fp64", "aot_eager"), ("bf16", "eager"), ("fp16", "eager"), ("bf16-true", "eager")],
)
def test_compiled_run_equals_uncompiled_run(tmp_path, precision, backend):
    tasks = Stack(dropout=0.3), Stack(dropout=0.3)
    trainers = [
        fit(tmp_path, task, precision=precision, compile=setting)
        for task, setting in zip(tasks, (False, {"backend": backend}), strict=True)
    ]
    assert is_same(*tasks)
    assert {*trainers[0].callback_metrics} == {"loss", "val_loss"}
    assert trainers[0].callback_metrics == trainers[1].callback_metrics


@pytest.mark.slow
def test_compiled_and_uncompiled_checkpoints_are_interchangeable(tmp_path):
    """A run that switches compile at every resumption ends where an uninterrupted one does."""
    whole, parts = Stack(dropout=0.3), None
    quiet_trainer(tmp_path / "whole", max_steps=9).fit(whole, loader(40))
    for steps, setting in ((3, {"backend": "aot_eager"}), (6, False), (9, {"backend": "aot_eager", "blocks": "Block"})):
        parts = Stack(dropout=0.3)
        quiet_trainer(tmp_path, max_steps=steps, resume="auto", compile=setting).fit(parts, loader(40))
    assert is_same(whole, parts)
    assert is_same(Stack.load_from_checkpoint(tmp_path / "runs/run"), whole)


@pytest.mark.parametrize("fail", [False, True])
def test_afterwards_the_task_is_as_it_was(tmp_path, fail):
    class Failing(Parts):
        def on_train_end(self):
            if fail:
                raise KeyError("on purpose")

    task = Failing()
    task.blocks[0].compile(backend="eager")  # compiled by the user
    own = task.blocks[0]._compiled_call_impl
    inside = [*task.modules()][1:]
    before = [{*vars(module)} for module in inside]
    limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit
    try:
        fit(tmp_path, task, compile={"backend": "eager"})
    except KeyError:
        assert fail
    assert len(task.compiled) == 8
    assert [{*vars(module)} for module in inside] == before
    assert "_compiled_call_impl" not in vars(task)
    assert task.blocks[0]._compiled_call_impl is own
    assert limits == (torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit)


@pytest.mark.slow
def test_afterwards_a_task_can_be_copied_and_pickled(tmp_path):
    class Copying(Stack):
        def on_train_start(self):
            self.copied = copy.deepcopy(self.blocks)

    task = Copying()
    fit(tmp_path, task, compile={"backend": "aot_eager"})
    inputs = torch.randn(3, FEATURES)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(task)(inputs), task(inputs))
        assert torch.equal(pickle.loads(pickle.dumps(task.blocks[0]))(inputs), task.blocks[0](inputs))
        assert task.copied[0](inputs).shape == inputs.shape


def test_copy_of_compiled_task_uses_its_own_weights(tmp_path):
    class Copying(Stack):
        def on_train_end(self):
            self.copied = [copy.deepcopy(self)]

    task = Copying()
    fit(tmp_path, task, compile={"backend": "eager", "blocks": False})
    (copied,), inputs = task.copied, torch.randn(3, FEATURES)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(inputs).any()


@pytest.mark.slow
def test_a_forward_that_logs_is_compiled_around_it(tmp_path):
    class Logging(Stack):
        def forward(self, inputs):
            outputs = super().forward(inputs)
            self.log("size", outputs.abs().mean())
            return outputs

    tasks = Logging(), Logging()
    settings = False, {"backend": "aot_eager"}
    trainers = [fit(tmp_path, task, compile=setting) for task, setting in zip(tasks, settings, strict=True)]
    assert is_same(*tasks)
    assert trainers[0].callback_metrics == trainers[1].callback_metrics


# ---------------------------------------------------------------------- repeatable results


class Wide(Regression):
    """Task whose sums over a batch are rounded differently if one graph serves every shape."""

    def __init__(self, **others):
        super().__init__(**others)
        layers = nn.Linear(FEATURES, 48), nn.GELU(), nn.BatchNorm1d(48), nn.Dropout(0.3), nn.LayerNorm(48)
        self.net = nn.Sequential(*layers, nn.Linear(48, 1))


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(("kind", "setting"), [pytest.param(Wide, True, marks=pytest.mark.slow), (Stack, "Block")])
def test_resumed_compiled_run_equals_uninterrupted_run(tmp_path, kind, setting):
    """The test really compiles, with dropout and short last batches; each resumed run compiles again."""
    tasks = []
    for root, stops in ((tmp_path / "whole", (12,)), (tmp_path / "parts", (3, 7, 12))):
        for steps in stops:
            trainer = quiet_trainer(root, max_steps=steps, resume="auto", compile=setting, num_sanity_val_steps=0)
            torch.manual_seed(2)
            task = kind(dropout=0.3)
            trainer.fit(task, loader(148, 32), val_dataloaders=loader(32, 32))
        tasks.append(task)
    assert is_same(*tasks)
    assert trainer.callback_metrics["val_loss"] < 10


# ---------------------------------------------------------------------- refused models


class Unprepared(lumen.DataModule):
    def prepare_data(self):
        pytest.fail("data was prepared before the setting was looked at")


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        (
            "Blok",
            "no module of Stack is a Blok. The classes of the modules are Block, Dropout, Linear, ModuleList, "
            "Sequential, Stack",
        ),
        ({"blocks": ["Block", "A", "B"]}, "is a A or a B"),
        ({"mode": "fastest"}, "torch.compile refuses its options: Unrecognized mode=fastest, should be one of"),
        ({"backend": "nope"}, "torch.compile refuses its options: Invalid backend"),
        ({"mode": "default", "options": {"max_autotune": True}}, "Either mode or options"),
    ],
)
def test_invalid_compile_setting_raises_before_data_is_prepared(tmp_path, setting, answer):
    with pytest.raises(ConfigError, match=f"^compile: .*{answer}"):
        quiet_trainer(tmp_path, max_steps=1, compile=setting).fit(Stack(), Unprepared())


def test_an_unknown_option_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"compile: unknown option block. The options are blocks, mode, dynamic"):
        lumen.Trainer(max_steps=1, compile={"block": "Block"})


def test_a_task_without_modules_to_compile_is_refused(tmp_path):
    class Bare(Regression):
        def __init__(self):
            super().__init__()
            del self.net
            self.weight = nn.Parameter(torch.zeros(FEATURES, 1))

        forward = nn.Module.forward

    with pytest.raises(ConfigError, match="compile: Bare has no forward and no module with parameters"):
        fit(tmp_path, Bare(), compile=True)


def test_graph_break_under_fullgraph_is_one_error(tmp_path):
    class Printing(Stack):
        def forward(self, inputs):
            torch._dynamo.graph_break()
            return super().forward(inputs)

    with pytest.raises(ConfigError, match=r"compile: torch.compile failed: .*graph.*Try compile: false"):
        fit(tmp_path, Printing(), compile={"backend": "eager", "fullgraph": True})
    fit(tmp_path, Printing(), compile={"backend": "eager", "fullgraph": True, "blocks": "Block"})


def test_exception_in_compiled_module_passes_through(tmp_path):
    class Mistaken(Stack):
        def forward(self, inputs):
            if len(inputs) < 9:
                raise ValueError("on purpose")
            return super().forward(inputs)

    with pytest.raises(ValueError, match="on purpose"):
        fit(tmp_path, Mistaken(), compile={"backend": "eager"})


def test_compiled_layer_without_float16_kernel_is_named(tmp_path):
    class Sequences(Stack):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(FEATURES, FEATURES, batch_first=True)

        def forward(self, inputs):
            return super().forward(self.cell(inputs[:, None])[0][:, -1])

    with pytest.raises(ConfigError, match=r"under fp16 torch cannot run 'cell' \(LSTM\) on cpu"):
        fit(tmp_path, Sequences(), precision="fp16", compile={"backend": "eager"})


class Lengths(Regression):
    """Task of which every batch has a different length."""

    def train_dataloader(self):
        inputs, targets = regression_data(50)
        return DataLoader(TensorDataset(inputs, targets), 1, collate_fn=self.collate)

    def collate(self, samples):
        inputs, targets = samples[0]
        length = 2 + int(inputs.abs().sum() * 1e4) % 1000
        return inputs.expand(length, -1), targets.expand(length, -1)


@pytest.mark.slow
def test_too_many_shapes_suggest_dynamic(tmp_path):
    options = {"max_epochs": 1, "enable_checkpointing": False}
    with pytest.raises(ConfigError, match=r"compile: .* more than 32 .*dynamic: true"):
        quiet_trainer(tmp_path, **options, compile={"backend": "eager"}).fit(Lengths())
    counter = CompileCounter()
    quiet_trainer(tmp_path, **options, compile={"backend": counter, "dynamic": True}).fit(Lengths())
    assert 1 <= counter.frame_count <= 2


# ---------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("word", "setting"),
    [
        ("true", True),
        ("false", False),
        ("Block", "Block"),
        ("[Block, Head]", ["Block", "Head"]),
        ("{mode: max-autotune, blocks: [Block]}", {"mode": "max-autotune", "blocks": ["Block"]}),
    ],
)
def test_the_command_line_takes_every_form(tmp_path, monkeypatch, capsys, word, setting):
    monkeypatch.chdir(tmp_path)
    words = [
        "--model=tests.helpers.cli_tasks.Line",
        "--model.width=2",
        "--trainer.max_steps=1",
        f"--trainer.compile={word}",
        "--print_config",
    ]
    assert main(["fit", *words]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["compile"] == setting
