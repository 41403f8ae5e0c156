"""Lightning's hooks: each hook of any Lightning 1.0 to 2.6 is called, or refused with the replacement."""

import importlib
import inspect
import pkgutil
import re

import pytest
import torch
from torch import nn

import lumen
from lumen.errors import ConfigError
from lumen.task.hooks import HOOKS, NOT_CALLED, describe_misspelt_hooks
from tests.helpers import OF_TORCHVISION
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer

ON_STAGES = [f"on_{stage}_{end}" for stage in ("train", "validation", "test", "predict") for end in ("start", "end")]
ON_PARTS = [
    f"on_{stage}_{part}_{end}"
    for stage in ("train", "validation", "test", "predict")
    for part in ("epoch", "batch")
    for end in ("start", "end")
]
#: Hooks of ModelHooks and Callback in 1.0.8, 1.2.10, 1.3.8, 1.5.10, 1.7.7, 1.9.5, 2.0.9, 2.3.3 or 2.6.0.
SHARED = [
    *ON_STAGES, *ON_PARTS, "setup", "teardown", "on_fit_start", "on_fit_end", "on_before_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_save_checkpoint", "on_load_checkpoint",
    "on_epoch_start", "on_epoch_end", "on_pretrain_routine_start", "on_pretrain_routine_end",
]  # fmt: skip
LOADERS = ["train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"]
#: Hooks of DataHooks.
DATA = [
    *LOADERS, "prepare_data", "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer",
    "on_train_dataloader", "on_val_dataloader", "on_test_dataloader", "on_predict_dataloader",
]  # fmt: skip
LIGHTNING = {
    "task": [
        *SHARED, *DATA, "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers",
        "configure_model", "configure_sharded_model", "configure_callbacks", "configure_gradient_clipping",
        "clip_gradients", "backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step",
        "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad", "on_test_model_eval",
        "on_test_model_train", "on_predict_model_eval", "on_post_move_to_device", "tbptt_split_batch",
        "truncated_bptt_steps", "training_step_end", "validation_step_end", "test_step_end", "training_epoch_end",
        "validation_epoch_end", "test_epoch_end", "predict_epoch_end", "on_hpc_save", "on_hpc_load",
        "get_progress_bar_dict", "add_to_queue", "get_from_queue", "on_batch_start", "on_batch_end",
    ],
    "data module": [
        *DATA, "setup", "teardown", "state_dict", "load_state_dict", "on_exception", "on_save_checkpoint",
        "on_load_checkpoint", "on_hpc_save", "on_hpc_load",
    ],
    "callback": [
        *SHARED, "on_batch_start", "on_batch_end", "on_init_start", "on_init_end", "on_sanity_check_start",
        "on_sanity_check_end", "on_before_accelerator_backend_setup", "on_configure_sharded_model",
        "on_keyboard_interrupt", "on_exception", "state_dict", "load_state_dict", "state_key",
    ],
}  # fmt: skip


class Task(Regression):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]


class Data(lumen.DataModule):
    def loader(self):
        return loader(16, 8)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class Quiet(lumen.Callback):
    def state_dict(self):
        return {"kept": 1}


KINDS = {"task": Task, "data module": Data, "callback": Quiet}


def fail(trainer, *_):
    raise ZeroDivisionError


@pytest.fixture(scope="module")
def called_names(tmp_path_factory):
    """Return the names called in a run that is saved, resumes, fails, and is evaluated, by their owner."""
    path, seen = tmp_path_factory.mktemp("called"), {kind: set() for kind in KINDS}

    def noting(kind, base, name):
        original = inspect.getattr_static(base, name)
        if isinstance(original, property):
            return property(lambda self: seen[kind].add(name) or original.fget(self))

        def method(self, *args):
            seen[kind].add(name)
            return getattr(base, name)(self, *args)

        def step(self, batch):
            return method(self, batch)

        return step if name in ("training_step", "validation_step", "test_step", "predict_step") else method

    def instance(kind):
        base = KINDS[kind]
        names = {name: noting(kind, base, name) for name in LIGHTNING[kind] if hasattr(base, name)}
        return type("Noting", (base,), names)()

    def run(method, data=True, **options):
        callbacks = [instance("callback"), *options.pop("callbacks", [])]
        task = instance("task")
        given = [instance("data module")] if data else []
        if not data:
            for name in LOADERS:
                setattr(task, name, lambda name=name: seen["task"].add(name) or loader(16, 8))
        getattr(quiet_trainer(path, callbacks=callbacks, **options), method)(task, *given)

    run("fit", max_steps=1)
    run("fit", max_steps=2, resume="auto")
    with pytest.raises(ZeroDivisionError):
        run("fit", max_steps=1, resume=None, callbacks=[lumen.LambdaCallback(on_train_batch_end=fail)])
    for method in ("fit", "validate", "test", "predict"):
        run(method, data=False, max_steps=1)
        run(method, max_steps=1)
    return seen


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in LIGHTNING.items() for name in names])
def test_lightning_hooks_are_called_or_rejected_with_replacement(tmp_path, called_names, kind, name):
    if name in called_names[kind]:
        assert name not in NOT_CALLED[kind]
        return
    owners = {each: base() for each, base in KINDS.items()}
    owners[kind] = type("Ported", (KINDS[kind],), {name: 3 if name == "truncated_bptt_steps" else lambda self: None})()
    for method in ("fit", "validate", "test", "predict"):
        trainer = bare_trainer(tmp_path, max_steps=1, callbacks=[owners["callback"]])
        with pytest.raises(ConfigError) as caught:
            getattr(trainer, method)(owners["task"], owners["data module"])
        text = NOT_CALLED[kind][name]
        assert (
            str(caught.value)
            == f"Ported defines methods that Lumen does not call for a {kind}. Replacements:\n  {name}: {text}"
        )


def test_every_text_names_what_exists():
    places = (lumen.TaskModule, lumen.DataModule, lumen.Callback)
    for kind, texts in NOT_CALLED.items():
        assert texts.keys() < set(LIGHTNING[kind]) | {"predict_step_end"}
        for text in texts.values():
            for word in re.findall(r"\b(?:on_\w+|configure_\w+|\w+_step|\w+_dataloader|\w*state_dict)\b(?!\*)", text):
                assert any(hasattr(place, word) for place in places) or word in ("on_", "scale_step"), (text, word)


def test_unsupported_hooks_are_found_in_bases_and_instance(tmp_path):
    class Mixin:
        def training_step_end(self, *_):
            pass

    class Parent(Regression):
        def on_hpc_save(self, checkpoint):
            pass

    class Child(Mixin, Parent):
        pass

    task = Child()
    task.on_epoch_end = print
    with pytest.raises(ConfigError) as caught:
        bare_trainer(tmp_path, max_steps=1).fit(task, loader())
    assert re.findall(r"^  (\w+):", str(caught.value), re.M) == ["on_epoch_end", "training_step_end", "on_hpc_save"]


def test_module_or_flag_with_hook_name_is_allowed(tmp_path):
    class Bidirectional(Regression):
        def __init__(self):
            super().__init__()
            self.on_epoch_end, self.optimizer_step = nn.Linear(6, 1), 3

    assert bare_trainer(tmp_path, max_steps=1).fit(Bidirectional(), loader()) is None


# ---------------------------------------------------------------------- signatures


async def waiting(self):
    pass


def yielding(self, trainer, task):
    yield


@pytest.mark.parametrize(
    ("kind", "name", "method", "message"),
    [
        ("task", "on_train_epoch_end", lambda self, outputs: 0, r"\(outputs\): Lumen calls this method with \(\)"),
        (
            "task",
            "on_before_optimizer_step",
            lambda self, o, optimizer_idx: 0,
            r"Lumen calls this method with \(optimizer\)",
        ),
        (
            "task",
            "on_train_batch_start",
            lambda self, b, i, dataloader_idx: 0,
            r"Lumen calls this method with \(batch, batch_idx\)",
        ),
        ("callback", "on_train_batch_end", lambda self, outputs, batch, batch_idx: 0, r"\(trainer, task, outputs, ba"),
        ("callback", "on_train_start", lambda self, pl_module: 0, r"with \(trainer, task\); the last arguments may be"),
        (
            "task",
            "on_train_batch_start",
            lambda self, batch_idx: 0,
            r"Lumen calls this method with \(batch, batch_idx\); the",
        ),
        ("task", "on_train_start", staticmethod(lambda self: 0), r"\(self\): Lumen calls this method with \(\)\."),
        ("task", "on_train_start", lambda self, *, rate: 0, r"\(\*, rate\): Lumen calls this method with \(\)"),
        ("task", "on_train_start", property(lambda self: print), r"Ported.on_train_start is a property, but a hook"),
        ("task", "validation_step", property(lambda self: print), "validation_step is a property"),
        ("task", "backward", property(lambda self: print), "backward is a property"),
        (
            "task",
            "on_train_start",
            waiting,
            r"waiting\(\): calling this method would not run its code.* without `async`",
        ),
        (
            "callback",
            "on_train_start",
            yielding,
            r"yielding\(trainer, task\): calling this method would not run .* without `yield`",
        ),
        ("task", "configure_model", lambda self, hparams: 0, r"\(hparams\): Lumen calls this method with \(\)"),
        (
            "data module",
            "setup",
            lambda self, stage, more: 0,
            r"Lumen calls this method with \(stage\); the last arguments",
        ),
        (
            "data module",
            "train_dataloader",
            lambda self, batch_size: 0,
            r"\(batch_size\): Lumen calls this method with \(\)\.",
        ),
        ("data module", "val_dataloader", property(lambda self: []), "val_dataloader is a property"),
        ("data module", "load_state_dict", lambda self, state, strict: 0, r"Lumen calls this method with \(state\)"),
        ("data module", "transfer_batch_to_device", lambda self, device: 0, r"with \(batch, device, dataloader_idx\)"),
        (
            "task",
            "lr_scheduler_step",
            lambda self, scheduler: 0,
            r"Lumen calls this method with \(scheduler, metric\)\.",
        ),
        ("callback", "on_test_end", lambda self, t, m, outputs: 0, r"Lumen calls this method with \(trainer, task\)"),
        (
            "task",
            "optimizer_step",
            lambda self, e, b, o, optimizer_idx, closure, on_tpu: 0,
            r"\(epoch, batch_idx, optim",
        ),
        (
            "task",
            "training_step",
            lambda self, b, batch_idx, optimizer_idx: 0,
            "does not pass optimizer_idx. Lumen calls a step",
        ),
        ("task", "training_step", lambda self, b, batch_idx, optimizer_idx=0: 0, "does not pass optimizer_idx"),
        ("task", "validation_step", lambda self, b, *, hiddens=None: 0, "does not pass hiddens. Split the sequence"),
    ],
)
def test_unsupported_signature_raises_before_training(tmp_path, kind, name, method, message):
    owners = {each: base() for each, base in KINDS.items()}
    owners[kind] = type("Ported", (KINDS[kind],), {name: method})()
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, max_steps=1, callbacks=[owners["callback"]]).fit(owners["task"], owners["data module"])


def test_hooks_may_omit_their_last_arguments(tmp_path):
    seen = []

    class Short(lumen.Callback):
        def on_train_start(self):
            seen.append("train")

        def on_train_batch_start(self, *_):
            seen.append(len(_))

        def on_train_batch_end(self, trainer, pl_module, outputs, *rest, **options):
            seen.append(("callback", sorted(outputs), len(rest), options))

        @staticmethod
        def on_train_end(trainer):
            seen.append(trainer.global_step)

        def on_before_backward(self, trainer, _, loss, unused=3):
            seen.append((loss.ndim, unused))

    class Ported(Regression):
        def on_train_batch_start(self):
            seen.append("start")

        def on_train_batch_end(self, outputs):
            seen.append(("task", sorted(outputs)))

        def training_step(self, batch):
            return {"loss": super().training_step(batch)}

        def setup(self):
            seen.append("setup")

    class Bringing(Data):
        def setup(self):
            seen.append("data")

        def on_before_batch_transfer(self, batch):
            return [each * 1 for each in batch]

        def transfer_batch_to_device(self, batch, device):
            seen.append(str(device))
            return batch

        def on_after_batch_transfer(self, batch):
            return batch

        def teardown(self):
            seen.append("end")

    bare_trainer(tmp_path, max_steps=1, limit_val_batches=0, callbacks=[Short()]).fit(Ported(), Bringing())
    assert seen == [
        "data", "setup", "train", "cpu", 4, "start", (0, 3), ("callback", ["loss"], 2, {}), ("task", ["loss"]),
        1, "end",
    ]  # fmt: skip


def test_shortened_hook_may_end_the_epoch(tmp_path):
    class Skipping(Regression):
        def on_train_batch_start(self, batch):
            return -1 if self.global_step == 2 else None

    trainer = bare_trainer(tmp_path, max_epochs=1)
    trainer.fit(Skipping(), loader())
    assert trainer.global_step == 2


def test_evaluation_batch_hooks_may_omit_dataloader_idx(tmp_path):
    seen = []

    class Quietly(lumen.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(("callback starts", batch_idx))

        def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(("callback ends", batch_idx))

    class Ported(Regression):
        def on_validation_batch_end(self, outputs, batch, batch_idx):
            seen.append(("task ends", batch_idx))

        def on_predict_batch_start(self, batch, batch_idx):
            seen.append(("task predicts", batch_idx))

    trainer, task = bare_trainer(tmp_path, callbacks=[Quietly()]), Ported()
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(task, [loader(16, 8), loader(8, 8)])
    assert seen == [
        ("callback starts", 0), ("task ends", 0), ("callback starts", 1), ("task ends", 1), ("callback starts", 0),
        ("task ends", 0), ("callback ends", 0), ("callback ends", 1), ("callback ends", 0),
        ("task predicts", 0), ("task predicts", 1), ("task predicts", 0),
    ]  # fmt: skip


# ---------------------------------------------------------------------- misspelt names


def make_class_with_hooks(base, *names):
    return type("Defining", (base,), {name: lambda self, *_: None for name in names})()


@pytest.mark.parametrize(
    ("base", "name", "meant"),
    [
        (Task, "predict_stepp", None),  # this hook is defined
        (lumen.TaskModule, "validaton_step", "validation_step"),
        (Task, "on_train_epoch_ends", "on_train_epoch_end"),
        (Task, "on_training_epoch_end", "on_train_epoch_end"),
        (Task, "val_dataloaders", "val_dataloader"),
        (Quiet, "on_validation_batchend", "on_validation_batch_end"),
        (Quiet, "load_statedict", "load_state_dict"),
        (lumen.DataModule, "val_data_loader", "val_dataloader"),
        (lumen.DataModule, "tear_down", "teardown"),
    ],
)
def test_misspelled_hook_warns_with_a_suggestion(tmp_path, caplog, base, name, meant):
    task, data, callbacks = Task(), Data(), []
    owner = make_class_with_hooks(base, name)
    if isinstance(owner, lumen.Callback):
        callbacks = [owner]
    elif isinstance(owner, lumen.DataModule):
        data = type("Defining", (Data,), {name: vars(type(owner))[name]})()
        data = owner if meant == "val_dataloader" else data
    else:
        task = owner
    trainer = bare_trainer(tmp_path, max_steps=1, callbacks=callbacks, log_level="WARNING")
    if isinstance(owner, (Task, lumen.Callback)):
        trainer.fit(task, data)
    else:
        trainer.predict(task if isinstance(task, Task) else Task(), loader())
    found = describe_misspelt_hooks(task, data, callbacks)
    assert found == ([] if meant is None else [f"Lumen does not call Defining.{name}. Did you mean {meant}?"])
    if isinstance(owner, (Task, lumen.Callback)):
        assert [record.message for record in caplog.records if "does not call" in record.message] == found


HELPERS = (
    "training_stage", "train_dataloaders_", "train_step", "val_step", "valid_step", "shared_step", "training_steps",
    "eval_step", "configure_optimizer", "configure_scheduler", "init_weight", "prepare_dataset", "after_step",
    "training_step_1", "validation_step_", "prepare_batch", "train_dataset", "train_loader", "get_train_dataloader",
    "predict", "predict_batch", "load_state", "training_loss", "optimizer_steps", "on_train_epoch_begin", "validate",
    "_validaton_step", "forward_step", "transfer_to_device", "log_metrics", "backward_pass", "setup_model",
)  # fmt: skip


def test_helpers_and_mixins_are_no_misspelled_hooks():
    class Mixin:
        def validaton_step(self):
            pass

    class Helped(Mixin, Regression):
        @property
        def predict_dataloaders(self):
            return []

        def validaton_step(self):
            """Do nothing; the mixin calls this name."""

    assert (
        describe_misspelt_hooks(
            Helped(), make_class_with_hooks(Data, *HELPERS), [make_class_with_hooks(Quiet, *HELPERS)]
        )
        == []
    )
    assert describe_misspelt_hooks(make_class_with_hooks(Task, *HELPERS), None, []) == []


def test_nothing_in_this_repository_has_a_misspelt_hook():
    found = []
    for package in ("models", "datamodules", "lumen.callbacks"):
        module = importlib.import_module(package)
        names = {each.name for each in pkgutil.walk_packages(module.__path__, f"{package}.")}
        for each in [module, *map(importlib.import_module, names - {f"models.{name}" for name in OF_TORCHVISION})]:
            for kind in vars(each).values():
                known = isinstance(kind, type) and issubclass(
                    kind, (lumen.TaskModule, lumen.DataModule, lumen.Callback)
                )
                if known and not inspect.isabstract(kind):
                    thing = kind.__new__(kind)
                    task = thing if isinstance(thing, lumen.TaskModule) else Task()
                    data = thing if isinstance(thing, lumen.DataModule) else None
                    found.append(
                        describe_misspelt_hooks(task, data, [thing] if isinstance(thing, lumen.Callback) else [])
                    )
    assert len(found) > 10
    assert not any(found)


def test_all_common_hooks_are_listed():
    assert set(HOOKS) - set(LIGHTNING["callback"]) == {"on_step_end", "on_step_checkpoint"}
