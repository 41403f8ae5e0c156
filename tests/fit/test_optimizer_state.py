"""Whatever an optimizer keeps, and wherever, a resumed run has it; what a hook adds to it is trained and saved."""

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import lumen
from lumen.errors import CheckpointError, CheckpointMismatch, ConfigError, TrainingError
from lumen.optim import Lookahead, MultiOptimizer
from tests.helpers.checkpoints import same
from tests.helpers.group import assert_equal, on_ranks
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, regression_data, weights


def state_of(task):
    return {name: value.detach().numpy() for name, value in task.state_dict().items()}


def resumed(folder, make, cuts=(4, 9, 14), **options):
    """A run in one part and one in several: their tasks and optimizers."""
    ends = []
    for name, steps in (("whole", cuts[-1:]), ("parts", cuts)):
        for max_steps in steps:
            task = make()
            options = {"dtype": task.hparams.dtype} | options
            trainer = quiet_trainer(
                folder / name, max_steps=max_steps, resume="auto",
                **{key: value for key, value in options.items() if key != "dtype"},
            )  # fmt: skip
            trainer.fit(task, loader(dtype=task.hparams.dtype))
        ends.append((task, trainer.optimizers[0]))
    return ends


# ---------------------------------------------------------------------- parameters added in training


class Finetuning(Regression):
    """Trains its head, then its body too, as callbacks that unfreeze a backbone do, by weighted means."""

    weighted, way, wrap = True, "group", staticmethod(lambda optimizer: optimizer)

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.net[0].requires_grad_(False)

    def training_step(self, batch):
        loss = 30 * super().training_step(batch)
        return (loss, batch[0].abs().sum()) if self.weighted else loss

    def configure_optimizers(self):
        optimizer = self.wrap(AdamW(self.net[3].parameters(), lr=0.01))
        return [optimizer], [StepLR(optimizer, 1, 0.5)]

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)
            self.add(self.optimizers())

    def add(self, optimizer):
        if self.way == "group":
            optimizer.add_param_group({"params": [*self.net[0].parameters()], "lr": 0.003, "name": "body"})
        else:
            optimizer.param_groups[0]["params"].extend(self.net[0].parameters())


def by_hand(task, clip, epochs=3, window=2):
    """The same training, as anybody would write it."""
    (optimizer,), (schedule,) = task.configure_optimizers()
    inputs, targets = regression_data(dtype=torch.float64)
    batches = [*zip(inputs.split(8), targets.split(8), strict=True)]
    for epoch in range(epochs):
        if epoch == 1:
            task.net[0].requires_grad_(True)
            task.add(optimizer)
        for start in range(0, len(batches), window):
            parts = [
                (*batch, batch[0].abs().sum() if task.weighted else len(batch[0])) for batch in batches[start:][:window]
            ]
            losses = [30 * nn.functional.mse_loss(task(x), y) * weight for x, y, weight in parts]
            optimizer.zero_grad()
            (sum(losses) / sum(weight for *_, weight in parts)).backward()
            held = [each for group in optimizer.param_groups for each in group["params"]]
            if clip == "norm":
                nn.utils.clip_grad_norm_(held, 0.5)
            elif clip == "value":
                nn.utils.clip_grad_value_(held, 0.1)
            optimizer.step()
        schedule.step()
    return state_of(task)


def finetune(folder, clip, weighted, way="group", strategy="auto", accumulate=2):
    task = Finetuning()
    task.weighted, task.way = weighted, way
    options = {} if clip is None else {"gradient_clip_val": 0.5 if clip == "norm" else 0.1}
    trainer = bare_trainer(
        folder, max_epochs=3, strategy=strategy, accumulate_grad_batches=accumulate,
        gradient_clip_algorithm=clip or "norm", **options,
    )  # fmt: skip
    trainer.fit(task, loader(shuffle=False, dtype=torch.float64))
    return {name: value.numpy() for name, value in whole(task).items()}


def whole(task):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for name, value in task.state_dict().items()
    }


@pytest.mark.parametrize("way", ["group", "longer group"])
@pytest.mark.parametrize(("clip", "weighted"), [("norm", False), ("value", False), (None, True), ("norm", True)])
def test_parameters_added_in_training_are_clipped_and_brought_to_the_mean(tmp_path, clip, weighted, way):
    reference = Finetuning()
    reference.weighted, reference.way = weighted, way
    assert_equal(finetune(tmp_path, clip, weighted, way), by_hand(reference, clip))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_so_they_are_on_two_processes(group, tmp_path, strategy):
    ours = on_ranks(group, 2, finetune, tmp_path, "norm", True, "group", strategy, 1)
    assert_equal(ours, by_hand(Finetuning(), "norm"))


@pytest.mark.parametrize("way", ["group", "longer group"])
@pytest.mark.parametrize("wrap", ["none", "Lookahead"])
def test_a_run_to_which_a_hook_added_parameters_goes_on_exactly(tmp_path, way, wrap):
    def make():
        task = Finetuning()
        task.way = way
        task.wrap = (lambda optimizer: Lookahead(optimizer, 3)) if wrap == "Lookahead" else task.wrap
        return task

    (ours, mine), (theirs, other) = resumed(tmp_path, make, (3, 9, 12, 20), gradient_clip_val=0.5)
    assert torch.equal(weights(ours), weights(theirs))
    assert [{**group, "params": 0} for group in mine.param_groups] == [
        {**group, "params": 0} for group in other.param_groups
    ]
    assert len(mine.param_groups) == (2 if way == "group" else 1)


class Readding(lumen.Callback):
    """Adds the group itself, when it gets its state."""

    def state_dict(self):
        return {"added": len(self.trainer.optimizers[0].param_groups) > 1}

    def setup(self, trainer, task, stage):
        self.trainer = trainer

    def load_state_dict(self, state):
        if state["added"]:
            task = self.trainer._run.task
            task.add(self.trainer.optimizers[0])


def test_a_callback_that_adds_its_group_itself_on_resume_is_asked_first(tmp_path):
    ends = []
    for name, cuts in (("whole", (20,)), ("parts", (9, 20))):
        for max_steps in cuts:
            task, callbacks = Finetuning(), [Readding(), lumen.ModelCheckpoint()]
            quiet_trainer(tmp_path / name, max_steps=max_steps, resume="auto", callbacks=callbacks).fit(
                task, loader(dtype=torch.float64)
            )
        ends.append(weights(task))
    assert torch.equal(*ends)


def test_other_groups_than_the_run_began_with_are_refused_still(tmp_path):
    class Other(Finetuning):
        def configure_optimizers(self):
            return AdamW([self.net[3].weight], lr=0.01)

    quiet_trainer(tmp_path, max_steps=9).fit(Finetuning(), loader(dtype=torch.float64))
    with pytest.raises(CheckpointMismatch, match=r"over \[2, 2\] parameters per group; this run has AdamW over \[1\]"):
        quiet_trainer(tmp_path, max_steps=12, resume="auto").fit(Other(), loader(dtype=torch.float64))


def test_what_is_no_parameter_of_the_task_is_refused_before_it_is_trained(tmp_path):
    class Stranger(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.optimizers().add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    trainer = bare_trainer(tmp_path, max_steps=5)
    with pytest.raises(ConfigError, match=r"holds 1 parameters that are not the task's.* attribute of the task"):
        trainer.fit(Stranger(), loader())
    assert trainer.global_step == 2


class Growing(Regression):
    """Gets a new branch in the second epoch."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.branch = None

    def training_step(self, batch):
        loss = super().training_step(batch)
        return loss if self.branch is None else loss + self.branch(batch[0]).square().mean()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            torch.manual_seed(5)
            self.branch = nn.Linear(6, 1).double()
            self.optimizers().add_param_group({"params": [*self.branch.parameters()], "lr": 0.1})


def grow(folder, strategy="auto", accumulate=2):
    task = Growing()
    bare_trainer(
        folder, max_epochs=3, strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=0.1
    ).fit(task, loader(dtype=torch.float64))
    return {name: value.numpy() for name, value in whole(task).items()}


def test_gradients_of_a_module_added_in_training_are_summed_too(group, tmp_path):
    alone = grow(tmp_path)
    assert alone.keys() > Growing().state_dict().keys()
    assert_equal(on_ranks(group, 2, grow, tmp_path, "ddp", 1), alone)


def test_fsdp_refuses_a_module_added_in_training_before_a_step_with_it(group, tmp_path):
    assert group(2).run(refuse_growth, tmp_path) == [7 // 2 + 1] * 2


def refuse_growth(folder):
    trainer = bare_trainer(folder, max_epochs=3, strategy="fsdp")
    with pytest.raises(TrainingError, match=r"FSDP: branch.weight, branch.bias came after the parameters were cut up"):
        trainer.fit(Growing(), loader(dtype=torch.float64))
    return trainer.global_step


class InTheStep(Finetuning):
    """Unfreezes in the middle of a step."""

    def on_train_epoch_start(self):
        pass

    def training_step(self, batch):
        if self.global_step == 2:
            self.net[0].requires_grad_(True)
        return super().training_step(batch)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_unfreezing_in_the_middle_of_a_step_is_an_error_before_the_update(group, tmp_path, strategy):
    for message, step in group(2).run(unfreeze_in_a_step, tmp_path, strategy):
        assert "net.0.weight, net.0.bias" in message
        assert "on_train_epoch_start" in message
        assert step == 2


def unfreeze_in_a_step(folder, strategy):
    gathered_at_once = lumen.FSDP(wrap_if=lambda name, module: False)
    trainer = bare_trainer(folder, max_epochs=3, strategy=gathered_at_once if strategy == "fsdp" else strategy)
    with pytest.raises(TrainingError) as caught:
        trainer.fit(InTheStep(), loader(dtype=torch.float64))
    return str(caught.value), trainer.global_step


# ---------------------------------------------------------------------- optimizers of the user's own


def number(tensor):
    """All of a result, also where it was computed from parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Sgd(Optimizer):
    """Plain descent at a rate that something beside `state` decides."""

    def __init__(self, parameters, lr=0.05):
        super().__init__(parameters, {"lr": lr})
        self.begin()

    def begin(self):
        pass

    def factor(self, parameter):
        return 1.0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.factor(parameter) * parameter.grad)


class OwnStateDict(Sgd):
    """A counter and a mean in a `state_dict` of its own."""

    def begin(self):
        self._rest = {"k": 0, "mean": torch.zeros(())}

    def factor(self, parameter):
        self._rest["k"] += 1
        self._rest["mean"] = 0.9 * self._rest["mean"] + number(parameter.grad.abs().mean())
        return float(self._rest["mean"]) / (1 + 0.1 * self._rest["k"])

    def state_dict(self):
        return super().state_dict() | {"rest": dict(self._rest)}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self._rest = dict(state_dict.pop("rest"))
        super().load_state_dict(state_dict)


class Attributes(Sgd):
    """A counter, and tensors by number, in attributes; the start, which a fresh optimizer would not know."""

    def begin(self):
        self.k, self.means = 0, []
        self.held = [each for group in self.param_groups for each in group["params"]]  # references stay what they are
        self.start = [each.detach().clone() for each in self.held]

    def factor(self, parameter):
        place = self.k % len(self.held)
        assert self.held[place] is parameter
        if self.k < len(self.held):
            self.means.append(torch.zeros_like(parameter))
        self.k += 1
        self.means[place].mul_(0.9).add_(parameter.grad.abs())
        return number(self.means[place].mean()) / (1 + 0.1 * self.k) + number((parameter - self.start[place]).norm())


class Global(Sgd):
    """State under keys that are no parameters."""

    def factor(self, parameter):
        shared = self.state["global"]
        shared["k"] = shared.get("k", 0) + 1
        self.state[3] = {"mean": 0.9 * self.state[3].get("mean", torch.zeros(())) + number(parameter.grad.abs().mean())}
        return self.state[3]["mean"] / (1 + 0.1 * shared["k"])


class Around(Sgd):
    """An optimizer inside with a state that it does not share, and a `load_state_dict` that knows nothing of it."""

    def begin(self):
        self.base = AdamW(self.param_groups, lr=0.01)
        self.base.param_groups = self.param_groups

    def step(self, closure=None):
        self.base.step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


class Packed(OwnStateDict):
    """A `state_dict` that has nothing of torch's form."""

    def state_dict(self):
        return {"packed": (self._rest["k"], self._rest["mean"])}

    def load_state_dict(self, state_dict):
        self._rest = dict(zip(("k", "mean"), state_dict["packed"], strict=True))


OWN = (OwnStateDict, Attributes, Global, Around, Packed)
WRAPS = {
    "alone": lambda kind, held: kind(held),
    "in Lookahead": lambda kind, held: Lookahead(kind(held), 3),
    "in MultiOptimizer": lambda kind, held: MultiOptimizer([kind(held[:2]), kind(held[2:])]),
    "in both": lambda kind, held: MultiOptimizer([Lookahead(kind(held[:2]), 3), AdamW(held[2:])]),
}


class WithOwn(Regression):
    """Trains with an optimizer of the user's own and a schedule."""

    kind, wrap = OwnStateDict, "alone"

    def __init__(self):
        super().__init__(dtype=torch.float64)

    def configure_optimizers(self):
        optimizer = WRAPS[self.wrap](self.kind, [*self.parameters()])
        return [optimizer], [StepLR(optimizer, 1, 0.7)]


def own(kind, wrap="alone"):
    task = WithOwn()
    task.kind, task.wrap = kind, wrap
    return task


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("kind", OWN)
def test_what_a_users_optimizer_keeps_beside_torchs_state_goes_on_exactly(tmp_path, kind, wrap):
    (ours, _), (theirs, _) = resumed(tmp_path, lambda: own(kind, wrap))
    assert torch.equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [OwnStateDict, Attributes, Global, Around])
def test_so_it_does_on_two_processes(group, tmp_path, kind, strategy):
    group(2).run(resume_own, tmp_path, kind, strategy)


def resume_own(folder, kind, strategy):
    (ours, _), (theirs, _) = resumed(folder, lambda: own(kind), strategy=strategy, global_batch_size=8)
    assert same(whole(ours), whole(theirs))


@pytest.mark.parametrize("kind", [OwnStateDict, Attributes])
def test_one_process_reads_what_two_have_cut_up_and_tensors_without_owner_are_refused_the_other_way(
    group, tmp_path, kind
):
    group(2).run(write_own, tmp_path, kind)
    train_own(tmp_path, kind, "auto", 9)
    ours = state_of(train_own(tmp_path / "whole", kind, "auto", 9))
    assert_equal(state_of(train_own(tmp_path, kind, "auto", 9)), ours)
    if kind is Attributes:
        group(2).run(refuse_own, tmp_path, kind)


def train_own(folder, kind, strategy, max_steps):
    task = own(kind)
    quiet_trainer(folder, max_steps=max_steps, resume="auto", strategy=strategy, global_batch_size=8).fit(
        task, loader(dtype=torch.float64)
    )
    return task


def write_own(folder, kind):
    train_own(folder, kind, "fsdp", 4)


def refuse_own(folder, kind):
    with pytest.raises(CheckpointMismatch, match=r"nobody knows how it is to be cut: Attributes"):
        train_own(folder, kind, "fsdp", 14)


class Unsavable(OwnStateDict):
    def state_dict(self):
        return super().state_dict() | {"lock": object()}


class ByParameter(Sgd):
    """Tensors in an attribute, by parameter."""

    def begin(self):
        self.means = {each: torch.zeros_like(each) for group in self.param_groups for each in group["params"]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Unsavable, r"own.*lock: an object of type object cannot be saved"),
        (ByParameter, r"ByParameter keeps tensors in its attribute 'means' .* Keep them in self.state\[parameter\]"),
    ],
)
def test_what_cannot_be_saved_of_an_optimizer_is_an_error_before_training(tmp_path, kind, message):
    trainer = quiet_trainer(tmp_path, max_steps=3)
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(own(kind), loader(dtype=torch.float64))
    assert trainer.global_step == 0


class Counting(AdamW):
    """Keeps a number that the configuration gives, and one that it counts."""

    def __init__(self, parameters, every=5):
        super().__init__(parameters, lr=0.01)
        self.every, self.k = every, 0

    def step(self, closure=None):
        self.k += 1
        return super().step(closure)


def test_a_changed_argument_that_an_optimizer_keeps_is_said(tmp_path, caplog):
    class Counted(Regression):
        every = 5

        def configure_optimizers(self):
            return Counting(self.parameters(), self.every)

    for max_steps, every in ((3, 5), (5, 5), (7, 6)):
        task = Counted()
        task.every = every
        trainer = quiet_trainer(tmp_path, max_steps=max_steps, resume="auto", log_level="WARNING")
        caplog.clear()
        trainer.fit(task, loader())
        assert ("optimizer.every 5 there, 6 here" in caplog.text) == (every == 6)
        assert "optimizer.k" not in caplog.text
        assert (trainer.optimizers[0].every, trainer.optimizers[0].k) == (5, max_steps)


class Learned(Sgd):
    """Keeps parameters and tensors with gradients of its own in its state."""

    def factor(self, parameter):
        state = self.state[parameter]
        if not state:
            state |= {"scale": nn.Parameter(torch.ones(())), "fixed": nn.Parameter(torch.ones(2), requires_grad=False)}
            state |= {"leaf": torch.ones((), requires_grad=True), "plain": torch.ones(())}
        return 1.0


def test_parameters_and_leaves_in_a_state_are_such_again(tmp_path):
    _, (_, optimizer) = resumed(tmp_path, lambda: own(Learned), cuts=(2, 4))
    for entries in optimizer.state.values():
        kinds = {name: (type(each), each.requires_grad) for name, each in entries.items()}
        assert kinds == {
            "scale": (nn.Parameter, True),
            "fixed": (nn.Parameter, False),
            "leaf": (torch.Tensor, True),
            "plain": (torch.Tensor, False),
        }
