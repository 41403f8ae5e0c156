"""Optimizers and tasks for tests of optimizer state."""

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from lumen.optim import Lookahead, MultiOptimizer
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, regression_data


def read_state(task):
    return {name: value.detach().numpy() for name, value in task.state_dict().items()}


def train_and_resume(folder, make, cuts=(4, 9, 14), **options):
    """Train one run without interruption and one in several parts; return their tasks and optimizers."""
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


class Finetuning(Regression):
    """Task that trains its head, then its body too, like callbacks that unfreeze a backbone, by weighted means."""

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


def train_by_hand(task, clip, epochs=3, window=2):
    """Train in a plain loop."""
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
    return read_state(task)


def finetune(folder, clip, weighted, way="group", strategy="auto", accumulate=2):
    task = Finetuning()
    task.weighted, task.way = weighted, way
    options = {} if clip is None else {"gradient_clip_val": 0.5 if clip == "norm" else 0.1}
    trainer = bare_trainer(
        folder, max_epochs=3, strategy=strategy, accumulate_grad_batches=accumulate,
        gradient_clip_algorithm=clip or "norm", **options,
    )  # fmt: skip
    trainer.fit(task, loader(shuffle=False, dtype=torch.float64))
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()}


def read_unsharded_state(task):
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach()
        for name, value in task.state_dict().items()
    }


def unshard(tensor):
    """Return all of a result, even one computed from shards."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Sgd(Optimizer):
    """Plain gradient descent whose rate is outside of `state`."""

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
    """Optimizer with a counter and a mean in a custom `state_dict`."""

    def begin(self):
        self._rest = {"k": 0, "mean": torch.zeros(())}

    def factor(self, parameter):
        self._rest["k"] += 1
        self._rest["mean"] = 0.9 * self._rest["mean"] + unshard(parameter.grad.abs().mean())
        return float(self._rest["mean"]) / (1 + 0.1 * self._rest["k"])

    def state_dict(self):
        return super().state_dict() | {"rest": dict(self._rest)}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self._rest = dict(state_dict.pop("rest"))
        super().load_state_dict(state_dict)


class Attributes(Sgd):
    """Optimizer with a counter, tensors by number and the initial parameters in attributes."""

    def begin(self):
        self.k, self.means = 0, []
        self.held = [each for group in self.param_groups for each in group["params"]]  # references stay valid
        self.start = [each.detach().clone() for each in self.held]

    def factor(self, parameter):
        place = self.k % len(self.held)
        assert self.held[place] is parameter
        if self.k < len(self.held):
            self.means.append(torch.zeros_like(parameter))
        self.k += 1
        self.means[place].mul_(0.9).add_(parameter.grad.abs())
        return unshard(self.means[place].mean()) / (1 + 0.1 * self.k) + unshard((parameter - self.start[place]).norm())


class Global(Sgd):
    """Optimizer with state under keys that are not parameters."""

    def factor(self, parameter):
        shared = self.state["global"]
        shared["k"] = shared.get("k", 0) + 1
        self.state[3] = {
            "mean": 0.9 * self.state[3].get("mean", torch.zeros(())) + unshard(parameter.grad.abs().mean())
        }
        return self.state[3]["mean"] / (1 + 0.1 * shared["k"])


class ById(Sgd):
    """Optimizer with state by parameter id in dictionaries of `state`, of a group and of attributes; a set of ids."""

    def begin(self):
        self.means, self.damped = {}, {id(self.param_groups[0]["params"][0])}

    def factor(self, parameter):
        key = id(parameter)
        counts = self.param_groups[0].setdefault("counts", {})
        counts[key] = counts.get(key, 0) + 1
        for kept in self.kept(key), self.means:
            kept[key] = 0.9 * kept.get(key, torch.zeros_like(parameter)) + parameter.grad.abs()
        mean = unshard(self.kept(key)[key].mean()) + unshard(self.means[key].mean())
        return mean / (1 + 0.1 * counts[key]) / (2 if key in self.damped else 1)

    def kept(self, key):
        return self.state["kept"]


class StateOfIds(ById):
    """Optimizer with ids as keys of `state`, so that no wrapper may use tensors."""

    def kept(self, key):
        return self.state[key]


class ByAddress(Sgd):
    """Optimizer with state by a memory address, which no other process has."""

    def factor(self, parameter):
        self.state[parameter.data_ptr()]["mean"] = parameter.grad.abs()
        return 1.0


class Around(Sgd):
    """Wrapper of an optimizer with separate state, whose `load_state_dict` ignores the inner optimizer."""

    def begin(self):
        self.base = AdamW(self.param_groups, lr=0.01)
        self.base.param_groups = self.param_groups

    def step(self, closure=None):
        self.base.step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups


WRAPS = {
    "alone": lambda kind, held: kind(held),
    "in Lookahead": lambda kind, held: Lookahead(kind(held), 3),
    "in MultiOptimizer": lambda kind, held: MultiOptimizer([kind(held[:2]), kind(held[2:])]),
    "in both": lambda kind, held: MultiOptimizer([Lookahead(kind(held[:2]), 3), AdamW(held[2:])]),
}


class UsersOptimizer(Regression):
    """Task that trains with a user's optimizer and a schedule."""

    kind, wrap = OwnStateDict, "alone"

    def __init__(self):
        super().__init__(dtype=torch.float64)

    def configure_optimizers(self):
        optimizer = WRAPS[self.wrap](self.kind, [*self.parameters()])
        return [optimizer], [StepLR(optimizer, 1, 0.7)]


def make_task(kind, wrap="alone"):
    task = UsersOptimizer()
    task.kind, task.wrap = kind, wrap
    return task
