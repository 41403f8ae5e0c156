"""Recompiles: a run compiles all its graphs in its first steps, as the compiler's counters show."""

from functools import partial

import pytest
import torch
from torch import nn

import lumen
from lumen.errors import ConfigError
from tests.helpers.recompiles import EPOCHS, Deep, count_compilations
from tests.helpers.tasks import FEATURES, Regression, bare_trainer, loader

pytestmark = pytest.mark.filterwarnings(  # torch's own code warns when it compiles and when it is imported for this
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.torch.jit:DeprecationWarning"
)


class Normed(Regression):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))


class BlocksFirst(Deep):
    """Task in which the input of the first block needs no gradient, and the other inputs do."""

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.net(inputs)


class ByHand(Deep):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.1)
        optimizer.step()
        self.lr_schedulers().step()


class Gan(lumen.TaskModule):
    """Task with two networks in turn; the other network's parameters have no gradients."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch):
        of_generator, of_critic = self.optimizers()
        losses = {
            of_generator: lambda: -self.critic(self.generator(batch[0])).mean(),
            of_critic: lambda: (self.critic(self.generator(batch[0]).detach()) - self.critic(batch[0])).mean(),
        }
        for optimizer, loss in losses.items():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def validation_step(self, batch):
        self.log("val", self.critic(batch[0]).mean())

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.01) for part in (self.generator, self.critic)]


class Telling(Deep):
    """Task that logs in its `forward`, which is compiled."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        self.log("size", outputs.abs().mean())
        self.log_dict({"largest": outputs.max(), "smallest": outputs.min()})
        return outputs * 2


EVERYTHING = {
    "gradient_clip_val": 0.1, "accumulate_grad_batches": {0: 1, 1: 2}, "val_check_interval": 0.5,
    "log_every_n_steps": 1,
}  # fmt: skip
SHORT = (loader, 44)  # five batches of eight, and one of four
#: Compiled runs, and their number of graphs: one for training, one for evaluation.
CASES = {
    "plain": (Regression, {}, 2),
    "logged, with a schedule": (Deep, {}, 2),
    "averaged": (Deep, {"callbacks": [partial(lumen.EMA, 0.9)]}, 2),
    "averaged at the end": (Deep, {"callbacks": [partial(lumen.SWA, 0.01, swa_epoch_start=1)]}, 2),
    "statistics averaged too": (Normed, {"callbacks": [partial(lumen.EMA, 0.9)]}, 2),
    "everything": (Deep, {"callbacks": [partial(lumen.EMA, 0.9)]} | EVERYTHING, 2),
    "everything, in halves of 16 bits": (Deep, {"callbacks": [partial(lumen.EMA, 0.9)], "precision": "fp16"}, 2),
    "no sanity check": (Deep, {"num_sanity_val_steps": 0}, 2),
    "the ordinary no_grad": (Deep, {"inference_mode": False}, 2),
    "by hand": (ByHand, {}, 2),
    "two optimizers in turn": (Gan, {"num_sanity_val_steps": 0}, 5),  # one and two in training, two in evaluation
    "two shapes": (Deep, {"batches": SHORT}, 4),
    "one shape of two": (Deep, {"batches": (partial(loader, drop_last=True), 44)}, 2),
    "two shapes, one code": (Deep, {"batches": SHORT, "setting": {"dynamic": True}}, 2),
    "equal blocks": (partial(Deep, 24), {"setting": {"blocks": ["Block"]}}, 2),
    "equal blocks of two shapes": (partial(Deep, 24), {"setting": {"blocks": ["Block"]}, "batches": SHORT}, 4),
    "the first block of all": (BlocksFirst, {"setting": {"blocks": ["Block"]}}, 3),
}


@pytest.mark.parametrize(("task", "options", "graphs"), CASES.values(), ids=CASES)
def test_nothing_recompiles_after_the_first_epoch(tmp_path, task, options, graphs):
    """No graph breaks either."""
    options = options | {"callbacks": [make() for make in options.get("callbacks", ())]}
    first, *others = count_compilations(tmp_path, task(), **options)
    assert others == [first] * (EPOCHS - 1)
    assert first[:2] == (graphs, 0)


def test_first_training_and_evaluation_steps_compile(tmp_path):
    counted = count_compilations(tmp_path, Deep(), num_sanity_val_steps=0, max_epochs=1, limit_val_batches=1)
    steps = count_compilations(
        tmp_path, Deep(), num_sanity_val_steps=0, max_steps=1, limit_train_batches=1, limit_val_batches=1
    )
    assert steps == counted


def test_logging_in_forward_breaks_graph_without_recompiling(tmp_path, capfd):
    """The call is between two graphs, where no code is compiled."""
    first, *others = count_compilations(tmp_path, Telling())
    assert others == [first] * (EPOCHS - 1)
    graphs, breaks, _ = first
    assert (graphs, breaks) == (6, 4)  # three in training and three in evaluation
    assert "Graph break" not in capfd.readouterr().err


@pytest.mark.parametrize("fail", [False, True])
def test_patched_task_methods_are_restored(tmp_path, fail):
    class Failing(Deep):
        def on_train_end(self):
            assert not fail, "on purpose"

    own = {name: vars(lumen.TaskModule)[name] for name in ("log", "log_dict", "print")}
    try:
        count_compilations(tmp_path, Failing(), max_epochs=1)
    except AssertionError:
        assert fail
    assert {name: vars(lumen.TaskModule)[name] for name in own} == own


# ---------------------------------------------------------------------- expected recompiles


class Backbone(Regression):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())

    def forward(self, inputs):
        return self.net(self.backbone(inputs))

    def configure_optimizers(self):
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.01)


class Dated(Regression):
    """Task whose `forward` reads a number that changes with the epochs."""

    def forward(self, inputs):
        return super().forward(inputs) * (1 + self.current_epoch)


def test_what_is_unfrozen_is_compiled_anew_once(tmp_path):
    counted = count_compilations(tmp_path, Backbone(), callbacks=[lumen.BackboneFinetuning(1)])
    assert [graphs for graphs, _, _ in counted] == [2, 4, 4]


def test_changing_number_is_compiled_as_a_constant(tmp_path):
    counted = count_compilations(tmp_path, Dated())
    assert [graphs for graphs, _, _ in counted] == [2, 4, 6]


@pytest.mark.slow
def test_number_changing_every_step_is_one_clear_error(tmp_path):
    class Stepping(Regression):
        def forward(self, inputs):
            return super().forward(inputs) * (1 + self.global_step)

    with pytest.raises(
        ConfigError, match=r"more than 32 .*each value of a number .*self.global_step, in training_step"
    ):
        bare_trainer(tmp_path, max_steps=40, compile={"backend": "eager"}).fit(Stepping(), loader(40))


def test_compiled_code_is_not_shared_between_runs(tmp_path):
    assert count_compilations(tmp_path, Deep()) == count_compilations(tmp_path, Deep())
