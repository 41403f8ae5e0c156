"""ModelPruning: what is pruned is 0 and stays it; the rest has the bits of torch's own tools in a loop by hand."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.cli import main
from lumen.errors import ConfigError
from tests.helpers.cli_tasks import Spy
from tests.helpers.group import assert_equal
from tests.helpers.pruning import BATCH, EPOCHS, SAMPLES, by_hand, pruned, task_with
from tests.helpers.tasks import Regression, loader, weights
from tests.helpers.workplace import LINE as CONFIG  # noqa: F401

LEFT = {"use_lottery_ticket_hypothesis": False}


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("resets", [False, True])
def test_all_layers_are_pruned_together_as_by_hand(tmp_path, optimizer, resets):
    def prune_at(epoch, given):
        prune.global_unstructured(given, prune.L1Unstructured, amount=0.3)

    callback = lumen.ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=resets)
    ours, _ = pruned(tmp_path, callback, optimizer=optimizer)
    assert_equal(ours, by_hand(prune_at, optimizer=optimizer, resets=resets), 0.0)
    zeros = sum(int((each == 0).sum()) for each in ours.values())
    assert zeros == 39 + 27 + 19  # of 129, and of what is left


@pytest.mark.parametrize(
    ("name", "function", "options"),
    [
        ("l1_unstructured", prune.l1_unstructured, {}),
        ("ln_structured", prune.ln_structured, {"dim": 1, "n": 2}),
    ],
)
def test_each_layer_is_pruned_by_itself_as_by_hand(tmp_path, name, function, options):
    def prune_at(epoch, given):
        if epoch > 0:
            for module, parameter in given:
                function(module, parameter, amount=0.2 * epoch, **options)

    callback = lumen.ModelPruning(
        name, parameter_names=["weight"], use_global_unstructured=False, amount=lambda epoch: 0.2 * epoch,
        apply_pruning=lambda epoch: epoch > 0, pruning_dim=options.get("dim"), pruning_norm=options.get("n"), **LEFT,
    )  # fmt: skip
    ours, _ = pruned(tmp_path, callback)
    assert_equal(ours, by_hand(prune_at, names=("weight",)), 0.0)


class EverySecond(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def __init__(self, amount):
        self.amount = amount

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


def test_a_method_of_ones_own_prunes_what_it_is_given_by_pairs_or_by_names(tmp_path):
    ends = []
    for number in range(2):
        task = task_with()
        given = [(task.net[0], "weight")] if number else ["net.0.weight"]
        ends.append(pruned(tmp_path / str(number), lumen.ModelPruning(EverySecond, given, **LEFT), task=task)[0])
    assert_equal(*ends, 0.0)
    assert np.all(ends[0]["net.0.weight"].reshape(-1)[::2] == 0)
    assert np.all(ends[0]["net.3.weight"] != 0)


@pytest.mark.parametrize("cut", [4, 6, 9, 12])
@pytest.mark.parametrize("name", ["l1_unstructured", "random_unstructured"])
def test_a_run_in_two_parts_ends_with_the_bits_of_a_whole_one(tmp_path, name, cut):
    """Six steps are an epoch. What is drawn is drawn anew in each."""
    whole, first = pruned(tmp_path / "whole", lumen.ModelPruning(name, amount=0.2), lumen.EMA(0.9))
    pruned(tmp_path / "parts", lumen.ModelPruning(name, amount=0.2), lumen.EMA(0.9), steps=cut)
    parts, second = pruned(tmp_path / "parts", lumen.ModelPruning(name, amount=0.2), lumen.EMA(0.9))
    assert_equal(whole, parts, 0.0)
    masks = [{name: each.tolist() for name, each in trainer.callbacks[0].masks.items()} for trainer in (first, second)]
    assert masks[0] == masks[1]


def test_averages_and_checkpoints_are_pruned_too_and_anyone_reads_them(tmp_path):
    ours, trainer = pruned(
        tmp_path, lumen.ModelPruning("l1_unstructured", amount=0.4), lumen.EMA(0.9), lumen.ModelCheckpoint(keep_last=-1)
    )
    masks = trainer.callbacks[0].masks
    assert all(np.all(ours[name][~mask.numpy()] == 0) for name, mask in masks.items())  # of the average
    path = find_checkpoints(trainer.run_directory / "checkpoints")[1]
    assert {*Checkpoint.open(path).names("model")} == {*ours}
    for average in (None, "EMA"):
        task = Regression.load_from_checkpoint(path, average=average)
        zeros = sum(int((each == 0).sum()) for each in task.parameters())
        assert zeros == 52 + 31  # of 129, and of what was left after the first epoch


def test_new_values_are_drawn_only_for_what_is_pruned(tmp_path):
    class Watching(lumen.Callback):
        def on_train_epoch_end(self, trainer, task):
            self.before = {name: each.detach().clone() for name, each in task.named_parameters()}

    watching = Watching()
    callback = lumen.ModelPruning("l1_unstructured", ["net.0.weight"], amount=0.5, resample_parameters=True)
    ours, _ = pruned(tmp_path, watching, callback)
    assert (ours["net.0.weight"] == 0).sum() == 84  # of 96, after three times
    assert not np.any(
        ours["net.0.weight"][ours["net.0.weight"] != 0]
        == watching.before["net.0.weight"].numpy()[ours["net.0.weight"] != 0]
    )
    assert np.array_equal(ours["net.0.bias"], watching.before["net.0.bias"].numpy())


def test_it_prunes_after_a_validation_and_says_how_much(tmp_path, caplog):
    callback = lumen.ModelPruning(
        "l1_unstructured", amount=0.5, verbose=2, parameter_names=["weight"], prune_on_train_epoch_end=False, **LEFT
    )
    with caplog.at_level(logging.INFO, "lumen"):
        ours, _ = pruned(tmp_path, callback, lumen.EMA(0.5), val_check_interval=3, log_level="INFO")
    said = [record.getMessage() for record in caplog.records if "pruned" in record.getMessage()]
    assert len(said) == 3 * 2 * EPOCHS
    assert said[0] == "L1Unstructured: all: 56 of 112 pruned (50.00 %), 0 before"
    assert said[-3] == "L1Unstructured: all: 111 of 112 pruned (99.11 %), 109 before"
    assert sum(int((each == 0).sum()) for name, each in ours.items() if "weight" in name) == 111


@pytest.mark.parametrize("ema_first", [True, False])
def test_averages_move_before_a_reset(tmp_path, ema_first):
    pruning, ema = lumen.ModelPruning("l1_unstructured", amount=0.3), lumen.EMA(0.9)
    average = {name: each.detach().clone() for name, each in task_with().named_parameters()}

    class ByHand(lumen.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            for name, each in task.named_parameters():
                average[name].lerp_(each.detach(), 1.0 - 0.9)

        def on_train_epoch_end(self, trainer, task):
            for name, mask in pruning.masks.items():
                average[name] *= mask

    callbacks = [ema, pruning] if ema_first else [pruning, ema]
    ours, _ = pruned(tmp_path, *callbacks, ByHand(), limit_val_batches=0)
    assert_equal(ours, {name: each.numpy() for name, each in average.items()}, 0.0)


class Taught(Regression):
    def __init__(self):
        super().__init__(dtype=torch.float64, optimizer="SGD")
        self.teacher = lumen.Teacher(self.net, decay=0.9)


def test_teachers_are_not_pruned(tmp_path):
    pruning = lumen.ModelPruning("l1_unstructured", **LEFT)
    pruned(tmp_path, pruning, task=Taught())
    assert {*pruning.masks} == {name for name, _ in Taught().named_parameters() if name.startswith("net.")}
    with pytest.raises(ConfigError, match="or one of a Teacher"):
        pruned(tmp_path / "named", lumen.ModelPruning("l1_unstructured", ["teacher.module.0.weight"]), task=Taught())


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_computed_weights_are_refused(tmp_path, norm):
    task = task_with()
    norm(task.net[0])
    with pytest.raises(ConfigError, match=r"weight of a .*Linear is computed, as by weight_norm"):
        pruned(tmp_path, lumen.ModelPruning("l1_unstructured"), task=task)


@pytest.mark.parametrize("at_epoch_end", [True, False])
def test_functions_are_given_the_epoch_that_ends(tmp_path, at_epoch_end):
    """An epoch has six steps; the third is not complete."""
    epochs = []

    def amount(epoch):
        epochs.append(epoch)
        return 0.1

    pruning = lumen.ModelPruning("l1_unstructured", amount=amount, prune_on_train_epoch_end=at_epoch_end, **LEFT)
    pruned(tmp_path, pruning, steps=14)
    assert epochs == [0, 1]


def test_without_pruning_nothing_changes(tmp_path):
    never = lumen.ModelPruning("l1_unstructured", apply_pruning=False)
    ours, trainer = pruned(tmp_path / "never", never)
    theirs, _ = pruned(tmp_path / "without", lumen.LambdaCallback())
    assert_equal(ours, theirs, 0.0)
    assert trainer.callbacks[0].masks == {}


class ByHand(Regression):
    """Two optimizers by hand, in fp32."""

    automatic_optimization = False

    def training_step(self, batch):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in (self.net[0], self.net[3])]


def test_a_task_that_optimizes_by_hand_stays_pruned_by_each_optimizer(tmp_path):
    callback, task = lumen.ModelPruning("l1_unstructured", amount=0.5, **LEFT), ByHand()
    trainer = lumen.Trainer(
        max_epochs=2, default_root_dir=tmp_path, callbacks=[callback], enable_progress_bar=False, log_level="ERROR"
    )
    trainer.fit(task, loader(SAMPLES, BATCH))
    assert int((weights(task) == 0).sum()) == 64 + 32


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pruning_fn": "l2"}, "pruning_fn is one of l1_unstructured, .*found l2"),
        ({"pruning_fn": "ln_structured", "pruning_norm": 1}, "ln_structured needs pruning_dim"),
        ({"pruning_fn": "ln_structured", "pruning_dim": 1}, "ln_structured needs pruning_norm"),
        ({"pruning_fn": "random_structured", "pruning_dim": 1}, "use_global_unstructured=False"),
        ({"make_pruning_permanent": False}, "at any time. Leave out make_pruning_permanent"),
        ({"parameter_names": ["gain"]}, "parameter_names are of weight and bias, found gain"),
        ({"pruning_fn": nn.Linear}, "a class derived from BasePruningMethod"),
    ],
)
def test_what_cannot_be_meant_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        lumen.ModelPruning(**{"pruning_fn": "l1_unstructured"} | options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"parameters_to_prune": ["net.9.weight"]}, "no parameter of Regression"),
        ({"parameters_to_prune": [(nn.Linear(2, 2), "weight")]}, "no parameter of Regression"),
        ({"amount": 1.5}, "L1Unstructured cannot prune the parameters by 1.5"),
        (
            {"pruning_fn": "ln_structured", "pruning_dim": 1, "pruning_norm": 2, "use_global_unstructured": False},
            "LnStructured cannot prune net.0.bias by 0.5",
        ),
    ],
)
def test_what_cannot_be_pruned_is_one_clear_error(tmp_path, options, says):
    with pytest.raises(ConfigError, match=says):
        pruned(tmp_path, lumen.ModelPruning(**{"pruning_fn": "l1_unstructured"} | options))


def test_it_is_named_on_the_command_line(workplace):
    words = ["--trainer.callbacks+=ModelPruning", "--trainer.callbacks.pruning_fn=l1_unstructured"]
    words += ["--trainer.callbacks.amount=0.25", "--trainer.callbacks.parameters_to_prune=[layer.weight]"]
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    (callback,) = (each for each in Spy.trainer.callbacks if isinstance(each, lumen.ModelPruning))
    assert (callback.amount, callback.parameters_to_prune) == (0.25, ["layer.weight"])
