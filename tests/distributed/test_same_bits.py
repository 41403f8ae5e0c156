"""Exact reduction: parameters, optimizer state and `metrics.csv` are bitwise identical on any number of processes."""

import logging
import shutil

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torchmetrics import CatMetric, MaxMetric, MeanMetric

import lumen
from lumen.errors import ConfigError
from lumen.strategies.ordered_sum import OrderedSum
from tests.helpers.same_bits import VOCAB, WIDTH, Model, make_loaders, train
from tests.helpers.tasks import bare_trainer

LAYOUTS = [
    (1, "ddp"), (1, "fsdp"), (2, "ddp"), (2, "fsdp"), (3, "ddp"), (3, "fsdp"), (4, "ddp"), (4, "fsdp"), (4, "hybrid"),
    (4, "shard_grad_op"), (4, "mesh"),
]  # fmt: skip
KINDS = {
    "fp32": {},  # with a ragged last step of 3 micro-batches
    "fp64": {
        "weights": "known",
        "precision": "fp64",
        "model": {"momentum": True},
    },  # where the last digit of a weight matters
    "bf16": {"weights": "returned", "precision": "bf16"},
    "fp16": {"weights": "returned", "precision": "fp16", "samples": 33},  # a last step of one micro-batch
}
SKIPS = {"weights": "returned", "model": {"skips": True}}
PLAIN = {"samples": 96, "gradient_clip_val": None, "augments": False, "model": {"dropout": 0.0}}
#: Runs of 200 steps, each with a single feature, for micro-batches of two samples.
LONG = {
    "mean": {},
    "token weights": {"weights": "returned"},
    "ragged": {"samples": 91},
    "clip": {"gradient_clip_val": 0.5},
    "dropout": {"model": {"dropout": 0.1}},
    "augmentation": {"augments": True},
    "bf16": {"precision": "bf16"},
}


def train_kinds(folder, strategy, names=tuple(KINDS)):
    return {name: train(folder / name, strategy, **KINDS[name]) for name in names}


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the hash and the metrics of a run on one process, by kind."""
    return train_kinds(tmp_path_factory.mktemp("single"), "single")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_exact_runs_are_bitwise_identical(group, tmp_path, single, layout):
    """With 8 micro-batches per step, a ragged last step, fractional weights, dropout, augmentation and clipping."""
    processes, strategy = layout
    for found in group(processes).run(train_kinds, tmp_path, strategy, limit_s=100):
        assert found == single


def train_long(folder, strategy):
    """Return the hash and the metrics of each long run, by its feature and the number of micro-batches in a step."""
    length = {"max_steps": 200, "check_val_every_n_epoch": 10}
    return {
        (name, count): train(
            folder / f"{name} {count}", strategy, **PLAIN | options | length, global_batch_size=2 * count
        )
        for name, options in LONG.items()
        for count in (4, 8, 16)  # one, two and four on each of four processes
    }


@pytest.fixture(scope="module")
def single_long(tmp_path_factory):
    """Return the hash and the metrics of each long run on one process."""
    return train_long(tmp_path_factory.mktemp("long"), "single")


@pytest.mark.torture
@pytest.mark.time_limit(7200)
@pytest.mark.parametrize(
    "layout", [(1, "shard_grad_op"), (2, "shard_grad_op"), (3, "shard_grad_op"), *LAYOUTS], ids=str
)
def test_long_exact_runs_are_bitwise_identical(group, tmp_path, single_long, layout):
    processes, strategy = layout
    assert len({(rows, digest) for digest, rows in single_long.values()}) == len(single_long)
    for found in group(processes).run(train_long, tmp_path, strategy, limit_s=3600):
        assert found == single_long


@pytest.mark.parametrize(("processes", "strategy"), [(2, "ddp_unused"), (3, "ddp_unused"), (2, "ddp_views")])
def test_exact_runs_allow_unused_parameters(group, tmp_path, processes, strategy):
    """Some micro-batches have no loss, or do not use a block that an earlier micro-batch of the step has used."""
    expected = train(tmp_path / "single", "single", **SKIPS)
    assert group(processes).run(train, tmp_path / "several", strategy, **SKIPS)[0] == expected


def train_in_wrong_order(folder, how):
    """Train with a wrong order of sums on purpose."""
    if how == "plain":
        return train(folder, "ddp", reduction=None)
    with pytest.MonkeyPatch.context() as patch:
        add = OrderedSum.add
        order = {"reversed": lambda parts: parts.flip(0), "by rank": lambda parts: parts.sum(0, keepdim=True)}[how]
        patch.setattr(OrderedSum, "add", lambda self, key, parts, work: add(self, key, *wait(parts, work, order)))
        return train(folder, "ddp")


def wait(parts, work, order):
    work.wait()
    return order(parts), work


@pytest.mark.parametrize("how", ["plain", "reversed", "by rank"])
def test_exact_hash_catches_wrong_orders(group, tmp_path, single, how):
    found = group(3).run(train_in_wrong_order, tmp_path, how)
    assert found[0] == found[1]
    assert found[0] != single["fp32"]


@pytest.mark.parametrize(
    "layouts", [((2, "ddp"), (3, "fsdp"), (4, "hybrid")), ((4, "fsdp"), (1, "single"), (3, "ddp"))], ids=str
)
def test_exact_run_resumes_on_other_layouts(group, tmp_path, single, layouts):
    """Each part of the run begins in the middle of an epoch."""
    for (processes, strategy), max_steps in zip(layouts, (2, 5, 8), strict=True):
        run = train if processes == 1 else group(processes).run
        arguments = () if processes == 1 else (train,)
        found = run(*arguments, tmp_path, strategy, max_steps=max_steps, resume="auto")
    assert (found if processes == 1 else found[0]) == single["fp32"]


def test_resumed_run_warns_of_other_reduction(tmp_path, caplog):
    for reduction, max_steps in (("exact", 2), (None, 3)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lumen"):
            train(tmp_path, max_steps=max_steps, resume="auto", reduction=reduction, log_level="WARNING")
    assert "reduction was 'exact', is None" in caplog.text


def test_exact_reduction_warns_of_several_threads(tmp_path, caplog):
    try:
        torch.set_num_threads(2)
        with caplog.at_level(logging.WARNING, "lumen"):
            bare_trainer(tmp_path, max_steps=1, reduction="exact", log_level="WARNING").fit(Model(), make_loaders()[0])
    finally:
        torch.set_num_threads(1)
    assert "set OMP_NUM_THREADS=1" in caplog.text


class Measured(Model):
    """Model with metrics of torchmetrics, the norms of its gradients, and a block that is unfrozen by a callback."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.cosine = torchmetrics.CosineSimilarity("mean")

    def validation_step(self, batch):
        self.cosine.update(self(batch[0]).flatten(0, 1), F.one_hot(batch[1].flatten(), VOCAB).float())
        self.log("cosine", self.cosine)

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(lumen.grad_norm(self, 2))

    def configure_optimizers(self):
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], 1e-2, fused=True)


class Unfreezing(lumen.callbacks.BaseFinetuning):
    def freeze_before_training(self, task):
        self.freeze(task.blocks[0])

    def finetune_function(self, task, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.blocks[0], optimizer, lr=1e-3)


def train_measured(folder, strategy, **options):
    return train(folder, strategy, make_task=Measured, callbacks=[Unfreezing()], **options)


def test_exact_runs_add_groups_and_log_norms(group, tmp_path):
    """A group that a plain run has added is resumed too: it was saved with `fused`."""
    expected = train_measured(tmp_path / "single", "single")
    assert group(2).run(train_measured, tmp_path / "several", "fsdp")[0] == expected
    train_measured(tmp_path / "plain", "single", max_steps=5, reduction=None)
    shutil.copytree(tmp_path / "plain", tmp_path / "copy")
    resumed = train_measured(tmp_path / "copy", "single", resume="auto")
    assert group(2).run(train_measured, tmp_path / "plain", "fsdp", resume="auto")[0] == resumed


def test_exact_reduction_warns_of_summed_floats(tmp_path, caplog):
    task = Model()
    task.exact, task.mean, task.largest = CatMetric(), MeanMetric(), MaxMetric()
    with caplog.at_level(logging.WARNING, "lumen"):
        bare_trainer(tmp_path, max_steps=1, reduction="exact", log_level="WARNING").fit(task, make_loaders()[0])
    assert "mean (MeanMetric) adds floats" in caplog.text
    assert caplog.text.count("adds floats") == 1


class Factored(Model):
    def configure_optimizers(self):
        return lumen.optim.Lookahead(torch.optim.Adafactor(self.parameters()))


class Normed(Model):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, ids):
        return super().forward(ids) + self.norm(self.tokens(ids).flatten(0, 1)).mean()


class Running(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.mean = torch.lerp(self.mean, loss.detach(), 0.1)
        return loss


class Rescaled(Model):
    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)


class Hooked(Model):
    def __init__(self):
        super().__init__()
        self.zero.register_post_accumulate_grad_hook(lambda parameter: None)


class Manual(Model):
    automatic_optimization = False


class Closure(Model):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Rprop(torch.optim.Rprop):
    """Optimizer whose step may be anything."""


class Own(Model):
    def configure_optimizers(self):
        return Rprop(self.parameters())


REFUSED = {
    "norm": (Normed, {}, r"the buffer norm\..*GroupNorm"),
    "buffer": (Running, {}, "the buffer mean, which training_step writes"),
    "after backward": (Rescaled, {}, "Rescaled.on_after_backward"),
    "gradient hook": (Hooked, {}, "register_post_accumulate_grad_hook"),
    "manual": (Manual, {}, "manual optimization"),
    "closure": (Closure, {}, "LBFGS, which evaluates the loss several times"),
    "halves": (Model, {"halve_on_oom": True}, "halve_on_oom"),
    "own": (Own, {"strategy": "fsdp"}, r"WholeMatrices\(Rprop"),
    "factored": (Factored, {"strategy": "fsdp"}, r"WholeMatrices\(Adafactor"),
    "param_dtype": (Model, {"strategy": {"param_dtype": "bf16"}}, "param_dtype of FSDP"),
    "compression": (Model, {"strategy": lumen.DDP(gradient_compression="bf16")}, "gradient_compression of DDP"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_exact_reduction_refuses_inexact_parts(tmp_path, name):
    make_task, options, message = REFUSED[name]
    if isinstance(strategy := options.get("strategy"), dict):
        options = options | {"strategy": lumen.FSDP(**strategy)}
    with pytest.raises(ConfigError, match=rf"(?s)reduction: exact does not support .*{message}"):
        bare_trainer(tmp_path, max_steps=1, reduction="exact", **options).fit(make_task(), make_loaders()[0])


def test_trainers_with_one_strategy_keep_their_reduction(tmp_path):
    strategy = lumen.DDP()
    exact, plain = (bare_trainer(tmp_path, max_steps=1, strategy=strategy, reduction=each) for each in ("exact", None))
    with pytest.raises(ConfigError, match="reduction: exact does not support the buffer norm"):
        exact.fit(Normed(), make_loaders()[0])
    plain.fit(Normed(), make_loaders()[0])
    assert plain.global_step == 1


def refuse_on_two(folder):
    for strategy, message in (
        (lumen.Mesh(tensor=2), "Mesh with tensor"),
        (lumen.FSDP(sharding_strategy="no_shard"), "replicas without shards"),
        ("fsdp", "register_post_accumulate_grad_hook"),
    ):
        with pytest.raises(ConfigError, match=f"reduction: exact does not support {message}"):
            bare_trainer(folder, max_steps=1, reduction="exact", strategy=strategy).fit(Hooked(), make_loaders()[0])


def test_exact_reduction_refuses_inexact_shards(group, tmp_path):
    group(2).run(refuse_on_two, tmp_path)


class Twice(Model):
    def forward(self, ids):
        x = self.tokens(ids)
        return self.head(self.blocks[0](self.blocks[1](self.blocks[0](x))))


def refuse_shared_unit(folder):
    trainer = bare_trainer(folder, max_steps=1, reduction="exact", strategy="fsdp")
    with pytest.raises(lumen.errors.TrainingError, match="calls the unit twice"):
        trainer.fit(Twice(), make_loaders()[0])


def test_exact_reduction_refuses_units_called_twice(group, tmp_path):
    group(2).run(refuse_shared_unit, tmp_path)


class Sometimes(Model):
    """Model whose last block is used by the first half of the micro-batches of a step."""

    uses_all = True

    def training_step(self, batch, batch_idx):
        self.uses_all = batch_idx % 8 < 4
        return super().training_step(batch)

    def forward(self, ids):
        x = self.blocks[0](self.tokens(ids))
        return self.head(self.blocks[1](x) if self.uses_all else x)


def train_sometimes(folder, strategy):
    return train(folder, strategy, max_steps=2, make_task=Sometimes)


def test_exact_runs_allow_uneven_calls_of_units(group, tmp_path):
    expected = train_sometimes(tmp_path / "single", "single")
    assert group(2).run(train_sometimes, tmp_path / "several", "fsdp")[0] == expected


def read_losses(folder, strategy):
    """Return the mean losses of steps, as callbacks read them."""
    losses = []

    class Reader(lumen.Callback):
        needs_step_loss = True

        def on_before_optimizer_step(self, trainer, task, optimizer):
            losses.append((float(trainer.step_loss()), float(trainer.gradient_norm())))

    train(folder, strategy, "returned", max_steps=3, callbacks=[Reader()])
    return losses


def test_exact_step_loss_is_bitwise_identical(group, tmp_path):
    expected = read_losses(tmp_path / "single", "single")
    assert group(3).run(read_losses, tmp_path / "several", "fsdp")[0] == expected
