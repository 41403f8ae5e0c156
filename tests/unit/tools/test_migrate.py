"""`lumen migrate`: replacements of single lines, and messages about them."""

import ast
import inspect
import os
import textwrap
from importlib import import_module

import pytest
import yaml

import lumen
from lumen.errors.lightning_names import RENAMED
from lumen.tools.migrate import arguments
from lumen.tools.migrate.command import migrate_project
from lumen.tools.migrate.config import ConfigEditor
from lumen.tools.migrate.names import ELSEWHERE, find_new_name
from lumen.tools.migrate.source import TABLES, EditableSource, ItemEditor
from tests.helpers.migrate import migrate_text, run_migrate, run_migrate_write

IMPORTS = [
    ("import lightning as L", "import lumen"),
    ("import lightning.pytorch as pl", "import lumen"),
    ("import pytorch_lightning as pl  # loops", "import lumen  # loops"),
    ("import os, lightning as L", "import os\nimport lumen"),
    ("import pytorch_lightning\nx = pytorch_lightning.Trainer", "import lumen\nx = lumen.Trainer"),
    ("import lightning.pytorch.callbacks\nx = lightning.pytorch.callbacks.Timer", "import lumen\nx = lumen.Timer"),
    ("from lightning import pytorch as pl\nx = pl.Callback", "import lumen\nx = lumen.Callback"),
    ("from lightning import Trainer", "from lumen import Trainer"),
    ("from lightning import Trainer as T\nx = T", "from lumen import Trainer as T\nx = T"),
    ("from lightning import LightningModule\nx = LightningModule", "from lumen import TaskModule\nx = TaskModule"),
    ("from lightning.pytorch import LightningDataModule as D", "from lumen import DataModule as D"),
    ("from lightning.pytorch.cli import LightningCLI", "from lumen import CLI"),
    ("from pytorch_lightning.callbacks import RichProgressBar", "from lumen import ProgressBar"),
    ("from pytorch_lightning.callbacks import TQDMProgressBar, RichProgressBar", "from lumen import ProgressBar"),
    ("from pytorch_lightning.callbacks.early_stopping import EarlyStopping", "from lumen import EarlyStopping"),
    ("from pytorch_lightning import Trainer\nfrom pytorch_lightning.callbacks import Timer, EarlyStopping",
     "from lumen import Trainer, Timer, EarlyStopping"),
    ("from lightning import Trainer\nimport torch\nfrom lightning import Callback",
     "from lumen import Trainer\nimport torch\nfrom lumen import Callback"),
    ("from lightning import Trainer\n# why\nfrom lightning import Callback",
     "from lumen import Trainer\n# why\nfrom lumen import Callback"),
    ("from lightning.pytorch.callbacks import (\n    Timer,  # long\n)", "# long\nfrom lumen import Timer"),
    ("from lightning.pytorch import loggers as pl_loggers\nx = pl_loggers.CSVLogger",
     "import lumen\nx = lumen.CSVLogger"),
    ("from lightning.pytorch.utilities.types import STEP_OUTPUT\nx: STEP_OUTPUT",
     "from typing import Any\nx: Any"),
    ("import os\nimport lightning as L\nfrom lightning.pytorch.utilities.types import STEP_OUTPUT\nx: STEP_OUTPUT",
     "import os\nimport lumen\nfrom typing import Any\nx: Any"),
    ("from typing import Any\nimport torch\nfrom lightning.pytorch.utilities.types import STEP_OUTPUT\nx: STEP_OUTPUT",
     "from typing import Any\nimport torch\nx: Any"),
    ("import lightning as L\nx = L.pytorch.utilities.exceptions.MisconfigurationException",
     "from lumen.errors import ConfigError\nx = ConfigError"),
    ("from torch import nn as TaskModule\nfrom lightning import LightningModule\nx = LightningModule",
     "from torch import nn as TaskModule\nfrom lumen import TaskModule as LightningModule\nx = LightningModule"),
    ("from lightning import LightningDataModule\nclass DataModule(LightningDataModule): ...",
     "from lumen import DataModule as LightningDataModule\nclass DataModule(LightningDataModule): ..."),
    ("import lightning as L\nlumen = 3\nx = L.LightningModule", "import lumen as L\nlumen = 3\nx = L.TaskModule"),
    ("import lightning as L\ndef f(L):\n    return L.x", "import lightning as L\ndef f(L):\n    return L.x"),
    ("def f():\n    import lightning as L\n    return L.Trainer",
     "def f():\n    import lumen\n    return lumen.Trainer"),
    ("try:\n    import lightning as L\nexcept ImportError:\n    L = None",
     "try:\n    import lumen as L\nexcept ImportError:\n    L = None"),
    ("try:\n    import lightning as L\nexcept ImportError:\n    L = None\nif L is not None:\n    x = L.Trainer",
     "try:\n    import lumen as L\nexcept ImportError:\n    L = None\nif L is not None:\n    x = L.Trainer"),
    ("try:\n    from lightning import LightningModule\nexcept ImportError:\n    LightningModule = object",
     "try:\n    from lumen import TaskModule as LightningModule\nexcept ImportError:\n    LightningModule = object"),
    ("import lightning as L\nx: 'L.Trainer'\ndef f(a: \"list[L.LightningModule]\") -> 'L.Callback': ...",
     "import lumen\nx: 'lumen.Trainer'\ndef f(a: \"list[lumen.TaskModule]\") -> 'lumen.Callback': ..."),
    ("import lightning as L\ndef f(é: 'dict[str, L.Trainer]' = 'L.Trainer', b: 'L.' = 1): ...",
     "import lumen\ndef f(é: 'dict[str, lumen.Trainer]' = 'L.Trainer', b: 'L.' = 1): ..."),
    ("import lightning as L\nx: Literal['', '\\0', 'a b', 'L\\x2eTrainer'] = L.Trainer\ny: 'L.Trainer' 'x'",
     "import lumen\nx: Literal['', '\\0', 'a b', 'L\\x2eTrainer'] = lumen.Trainer\ny: 'L.Trainer' 'x'"),
    ('import lightning as L\nclass A:\n    """L.Trainer"""', 'import lumen\nclass A:\n    """L.Trainer"""'),
    ("import logging, lightning\nlogging.getLogger('lightning.pytorch')",
     'import logging\nimport lumen\nlogging.getLogger("lumen")'),
    ("from lightning.pytorch.tuner import Tuner\nTuner(t).scale_batch_size(m, method='fit', max_val=5)",
     "from lumen import Tuner\nTuner(t).scale_batch_size(m, method='fit')"),
    ("from lightning.pytorch.utilities.model_summary import ModelSummary\nprint(ModelSummary(m, max_depth=2))",
     "from lumen import summarize\nprint(summarize(m, max_depth=2))"),
    ("from pytorch_lightning.core.memory import ModelSummary as S", "from lumen import summarize as S"),
    ("from lightning.pytorch.callbacks.model_summary import ModelSummary", "from lumen import ModelSummary"),
    ("from lightning.pytorch.strategies import FSDPStrategy, DDPStrategy", "from lumen import FSDP, DDP"),
    ("import lightning as L\nprint(L.__version__)", "import lumen\nprint(lumen.__version__)"),
]  # fmt: skip

TRAINER = [
    ("use_distributed_sampler=False, max_epochs=3", "max_epochs=3"),
    ("max_epochs=3, use_distributed_sampler=False", "max_epochs=3"),
    ("max_epochs=3, use_distributed_sampler=False,", "max_epochs=3,"),
    ("max_epochs=3, replace_sampler_ddp=False, devices=2", "max_epochs=3, devices=2"),
    ("enable_autolog_hparams=True", ""),
    ("barebones=False, model_registry=None, plugins=[]", ""),
    ("\n    max_epochs=3,\n    barebones=False,  # not\n    devices=2,\n", "\n    max_epochs=3,\n    devices=2,\n"),
    ("\n    barebones=False,\n", ""),
    ("max_epochs=3,\n    barebones=False)\n(", "max_epochs=3)\n("),
    ("max_epochs=3,  # why\n    barebones=False", "max_epochs=3,  # why\n    "),
    ("max_epochs=3, barebones=False,\n    devices=2", "max_epochs=3,\n    devices=2"),
    ("barebones=False,\n    devices=2", "devices=2"),
    ("gpus=2", 'accelerator="gpu", devices=2'),
    ("gpus=0", 'accelerator="cpu"'),
    ("gpus=None", ""),
    ("num_processes=1, devices=None, gpus=2, accelerator=None", 'accelerator="gpu", devices=2'),
    ("num_processes=1, gpus=n", 'accelerator="gpu" if n else "cpu", devices=n or 1'),
    ("num_processes=4, gpus=None, devices=2", "devices=2"),
    ("devices=[3], gpus=2", 'devices=1, accelerator="gpu"'),
    ("accelerator='gpu', gpus=0", "accelerator='gpu'"),
    ("accelerator='ddp', gpus='0', num_processes=2", "strategy='ddp', accelerator=\"cpu\", devices=2"),
    ("accelerator='ddp_cpu', num_processes=2", 'strategy="ddp", accelerator="cpu", devices=2'),
    ("distributed_backend='ddp_cpu', gpus=0", 'strategy="ddp", accelerator="cpu"'),
    ("\n    gpus=[0, 1],\n", '\n    accelerator="gpu",\n    devices=2,\n'),
    ("gpus=n", 'accelerator="gpu" if n else "cpu", devices=n or 1'),
    ("gpus=1 if a else 0", 'accelerator="gpu" if (1 if a else 0) else "cpu", devices=(1 if a else 0) or 1'),
    ("accelerator='gpu', gpus=2", "accelerator='gpu', devices=2"),
    ("accelerator='ddp', gpus=n", "strategy='ddp', accelerator=\"gpu\" if n else \"cpu\", devices=n or 1"),
    ("distributed_backend='ddp', accelerator='ddp'", "strategy='ddp'"),
    ("plugins=[L.pytorch.plugins.environments.SLURMEnvironment(auto_requeue=False)]", ""),
    ("accelerator='ddp', plugins=L.pytorch.plugins.DDPPlugin(find_unused_parameters=True)",
     "strategy=lumen.DDP(find_unused_parameters=True)"),
    ("plugins=[L.pytorch.plugins.DDPPlugin()], strategy='ddp'", "strategy=lumen.DDP()"),
    ("early_stop_callback=L.pytorch.callbacks.EarlyStopping('a')", "callbacks=[lumen.EarlyStopping('a')]"),
    ("checkpoint_callback=L.pytorch.callbacks.ModelCheckpoint(filename='a'), callbacks=[b]",
     "callbacks=[lumen.ModelCheckpoint(), b]"),
    ("early_stop_callback=L.pytorch.callbacks.EarlyStopping('a'), callbacks=b",
     "callbacks=[*b, lumen.EarlyStopping('a')]"),
    ("devices=[3]", "devices=1"),
    ("devices='0,1'", "devices=2"),
    ("devices=-1, num_nodes=2", "devices=-1, num_nodes=2"),
    ("accelerator='ddp'", "strategy='ddp'"),
    ("accelerator='gpu', strategy='ddp_spawn'", "accelerator='gpu', strategy=\"ddp\""),
    ("strategy='ddp_find_unused_parameters_false'", 'strategy="ddp"'),
    ("strategy='fsdp_native'", 'strategy="fsdp"'),
    ("distributed_backend='ddp'", "strategy='ddp'"),
    ("max_nb_epochs=5, min_nb_epochs=1", "max_epochs=5, min_epochs=1"),
    ("train_percent_check=0.1, val_percent_check=0.2", "limit_train_batches=0.1, limit_val_batches=0.2"),
    ("row_log_interval=10", "log_every_n_steps=10"),
    ("checkpoint_callback=False", "enable_checkpointing=False"),
    ("weights_summary=None", "enable_model_summary=False"),
    ("weights_summary='top'", ""),
    ("progress_bar_refresh_rate=0", "enable_progress_bar=False"),
    ("progress_bar_refresh_rate=20", ""),
    ("reload_dataloaders_every_epoch=True", "reload_dataloaders_every_n_epochs=1"),
    ("resume_from_checkpoint=None", ""),
    ("resume_from_checkpoint=path", "resume=path"),
    ("terminate_on_nan=True, flush_logs_every_n_steps=5", ""),
    ("precision=None, max_epochs=2", "precision=None, max_epochs=2"),
    ("precision='16-mixed', gradient_clip_algorithm='norm'", "precision='16-mixed', gradient_clip_algorithm='norm'"),
    ("auto_lr_find=False", ""),
    ("callbacks=[lambda a, b: 1], barebones=False", "callbacks=[lambda a, b: 1]"),
    ("key=lambda a, b: 1, barebones=False", "key=lambda a, b: 1"),
    ("**more, barebones=False", "**more"),
    ("f'{a, b}', barebones=False", "f'{a, b}'"),
]  # fmt: skip

CALLS = [
    ("L.pytorch.callbacks.RichProgressBar(refresh_rate=5)", "lumen.ProgressBar()"),
    ("L.pytorch.callbacks.ModelCheckpoint('out', 'best', monitor='a')",
     "lumen.ModelCheckpoint('out', monitor='a')"),
    ("L.pytorch.callbacks.ModelCheckpoint(filename='x', save_top_k=-1)", "lumen.ModelCheckpoint(save_top_k=-1)"),
    ("L.pytorch.callbacks.ModelCheckpoint(None, None, 'a')", "lumen.ModelCheckpoint(None, monitor='a')"),
    ("L.pytorch.callbacks.ModelCheckpoint(period=3)", "lumen.ModelCheckpoint(every_n_epochs=3)"),
    ("L.pytorch.callbacks.EarlyStopping('a', 0.0, 5)", "lumen.EarlyStopping('a', 0.0, 5)"),
    ("L.pytorch.callbacks.StochasticWeightAveraging(0.1, device=None)", "lumen.SWA(0.1)"),
    ("L.pytorch.callbacks.EMAWeightAveraging(decay=0.9)", "lumen.EMA(decay=0.9)"),
    ("L.pytorch.callbacks.DeviceStatsMonitor(cpu_stats=True)", "lumen.DeviceStatsMonitor(cpu_stats=True)"),
    ("trainer.fit(m, train_dataloader=a)", "trainer.fit(m, train_dataloaders=a)"),
    ("trainer.predict(m, dataloaders=a, ckpt_path=b)", "trainer.predict(m, dataloaders=a, ckpt_path=b)"),
    ("trainer.test(m, test_dataloaders=a, verbose=False)", "trainer.test(m, dataloaders=a, verbose=False)"),
    ("trainer.validate(m, a, 'best', True)", "trainer.validate(m, a, 'best', True)"),
    ("trainer.save_checkpoint(filepath=p, weights_only=True)", "trainer.save_checkpoint(filepath=p)"),
    ("other.fit(m, verbose=True)", "other.fit(m, verbose=True)"),
    ("trainer.lightning_module", "trainer.lightning_module"),
    ("trainer.num_gpus", "trainer.num_devices"),
    ("self.trainer.training_type_plugin.barrier()", "self.trainer.strategy.barrier()"),
    ("self.trainer.train_loop.x", "self.trainer.train_loop.x"),
    ("L.Trainer\ny = {'target': 'pytorch_lightning.Callback', 'a': 'lightning.pytorch.cli'}",
     "lumen.Trainer\ny = {'target': 'lumen.Callback', 'a': 'lightning.pytorch.cli'}"),
]  # fmt: skip

CLASSES = [
    ("task", "def step(self):\n    self.log('a', b, enable_graph=True, sync_dist=True)",
     "def step(self):\n    self.log('a', b, sync_dist=True)"),
    ("task", "def __init__(self, a):\n    self.hparams = a",
     "def __init__(self, a):\n    self.save_hyperparameters(a)"),
    ("task", "def __init__(self, a):\n    self.hparams = self.a = a",
     "def __init__(self, a):\n    self.hparams = self.a = a"),
    ("task", "def step(self):\n    self.log_dict(dictionary=a, enable_graph=True)",
     "def step(self):\n    self.log_dict(dictionary=a)"),
    ("task", "def on_train_batch_end(self, outputs, batch, batch_idx, unused): ...",
     "def on_train_batch_end(self, outputs, batch, batch_idx): ..."),
    ("callback", "def on_train_epoch_end(self, trainer, pl_module, outputs): ...",
     "def on_train_epoch_end(self, trainer, pl_module): ..."),
    ("callback", "def on_fit_end(self, trainer, net):\n    net.log('a', b, enable_graph=True)",
     "def on_fit_end(self, trainer, net):\n    net.log('a', b)"),
]  # fmt: skip

YAML = [
    ("trainer:\n  max_epochs: 3\n  use_distributed_sampler: true  # no\n", "trainer:\n  max_epochs: 3\n"),
    ("trainer: {max_epochs: 3, use_distributed_sampler: true}\n", "trainer: {max_epochs: 3}\n"),
    ("trainer: {use_distributed_sampler: true, max_epochs: 3}\n", "trainer: {max_epochs: 3}\n"),
    ("trainer:\n  gpus: 2\n  max_epochs: 3\n", "trainer:\n  accelerator: gpu\n  devices: 2\n  max_epochs: 3\n"),
    ("trainer: {num_processes: 1, devices: null, gpus: 2, accelerator: null}\n",
     "trainer: {accelerator: gpu, devices: 2}\n"),
    ("trainer:\n  gpus: 2\n  devices: 3\n  accelerator: cuda\n  max_epochs: 1\n",
     "trainer:\n  devices: 3\n  accelerator: cuda\n  max_epochs: 1\n"),
    ("trainer: {accelerator: null, gpus: null, num_processes: 2}\n", "trainer: {accelerator: null, devices: 2}\n"),
    ("trainer:\n  precision: null\n  logger: null\n", "trainer:\n  precision: null\n  logger: null\n"),
    ("trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.RichProgressBar\n    init_args:\n"
     "      leave: true\n      refresh_rate: 3\nmodel: {}\n",
     "trainer:\n  callbacks:\n  - class_path: lumen.ProgressBar\nmodel: {}\n"),
    ("trainer:\n  callbacks+:\n  - class_path: 'pytorch_lightning.callbacks.EarlyStopping'\n    init_args: {monitor: a}"
     "\n",
     "trainer:\n  callbacks+:\n  - class_path: 'lumen.EarlyStopping'\n    init_args: {monitor: a}\n"),
    ("trainer:\n  callbacks: [lightning.pytorch.callbacks.RichModelSummary]\n",
     "trainer:\n  callbacks: [lumen.ModelSummary]\n"),
    ("trainer: {}\nckpt_path: null\nweights_only: null\n", "trainer: {}\n"),
    ("trainer: {}\nlr_scheduler:\n  class_path: lightning.pytorch.cli.ReduceLROnPlateau\n  init_args:\n"
     "    monitor: a\n    patience: 3\nmodel: {}\n",
     "trainer: {}\nlr_scheduler:\n  class_path: torch.optim.lr_scheduler.ReduceLROnPlateau\n  init_args:\n"
     "    patience: 3\nlr_schedule: {monitor: a}\nmodel: {}\n"),
    ("fit:\n  trainer:\n    barebones: false\n    max_epochs: 2\n", "fit:\n  trainer:\n    max_epochs: 2\n"),
    ("_target_: lightning.pytorch.callbacks.ModelCheckpoint\nmonitor: a\nfilename: best\n",
     "_target_: lumen.ModelCheckpoint\nmonitor: a\n"),
    ("_target_: lightning.pytorch.Trainer\n_partial_: true\ngpus: 0\nmax_epochs: ${epochs}\n",
     "_target_: lumen.Trainer\n_partial_: true\naccelerator: cpu\nmax_epochs: ${epochs}\n"),
    ("target: pytorch_lightning.callbacks.ModelCheckpoint\nparams:\n  monitor: a\n  filename: b\n",
     "target: lumen.ModelCheckpoint\nparams:\n  monitor: a\n"),
    ("a: [1,   2]   # kept\nb: |\n  text\n", "a: [1,   2]   # kept\nb: |\n  text\n"),
]  # fmt: skip

SAID = [
    ("class A(L.LightningModule):\n    def validation_epoch_end(self, o):\n        f(o)", "on_validation_epoch_end"),
    ("class A(L.LightningModule):\n    def training_step(self, batch, batch_idx, optimizer_idx): ...", "optimizers()"),
    (
        "class A(L.LightningModule):\n    def lr_scheduler_step(self, scheduler, optimizer_idx, metric): ...",
        "lr_scheduler_step: the arguments are (self, scheduler, metric).",
    ),
    (
        "class A(L.LightningModule):\n    def configure_gradient_clipping(self, optimizer, optimizer_idx, a, b): ...",
        "to configure_gradient_clipping: the arguments",
    ),
    (
        "class A(L.LightningModule):\n    def optimizer_zero_grad(self, a, b, optimizer, optimizer_idx): ...",
        "(self, epoch, batch_idx, optimizer)",
    ),
    (
        "class A(L.LightningModule):\n    def backward(self, loss, optimizer, optimizer_idx): ...",
        "does not pass optimizer_idx to backward: ",
    ),
    (
        "class A(L.LightningModule):\n    def __init__(self, a):\n        self.a = self.hparams = a",
        "Write self.save_hyperparameters(a)",
    ),
    ("class A(L.LightningModule):\n    def configure_sharded_model(self): ...", "configure_model"),
    ("class A(L.Callback):\n    def on_pretrain_routine_start(self, trainer, m): ...", "on_fit_start"),
    ("class A(L.LightningModule):\n    truncated_bptt_steps = 2", "Split the sequence"),
    ("class A(L.LightningModule):\n    def get_progress_bar_dict(self): ...", "prog_bar=True"),
    ("class A(L.LightningModule):\n    def f(self):\n        self.automatic_optimization = False", "max_steps"),
    ("class A(L.LightningModule):\n    def f(self):\n        self.to_onnx('a')", "lumen export"),
    ("class A(L.LightningModule):\n    def f(self):\n        self.logger.experiment.add_scalar('a', 1)", "TensorBoard"),
    (
        "class A(L.LightningModule):\n    def on_train_epoch_end(self, outputs):\n        print(outputs)",
        "does not pass outputs",
    ),
    ("class A(L.LightningDataModule):\n    def on_save_checkpoint(self, c): ...", "Write state_dict"),
    ("class A(L.Callback):\n    def on_epoch_end(self, trainer, pl_module): ...", "on_train_epoch_end"),
    ("class A(L.Callback):\n    def on_save_checkpoint(self, trainer, pl_module, c):\n        return 3", "state_dict"),
    ("class A(L.Callback):\n    def on_load_checkpoint(self, trainer, m, c):\n        c['state_dict']", "init_from"),
    ("class A(L.pytorch.cli.LightningCLI):\n    def parse_arguments(self): ...", "before_instantiate_classes"),
    ("L.Trainer(auto_lr_find=True)", "lr_find"),
    ("L.Trainer(strategy='deepspeed_stage_2')", "fsdp"),
    ("L.Trainer(strategy='ddp_find_unused_parameters_true')", "write lumen.DDP(find_unused_parameters=True)"),
    ("L.Trainer(strategy='dp')", "Use ddp"),
    ("L.Trainer(plugins=[L.pytorch.plugins.environments.SLURMEnvironment()])", "is left out. Lumen detects SLURM"),
    ("L.Trainer(accelerator='tpu')", "tpu is not supported"),
    ("L.Trainer(val_check_interval=100)", "optimizer steps"),
    ("L.Trainer(precision='16-true')", "bf16-true"),
    ("L.Trainer(devices=[0, 1])", "CUDA_VISIBLE_DEVICES"),
    ("L.Trainer.from_argparse_args(a)", "lumen.CLI"),
    ("L.pytorch.callbacks.ModelCheckpoint(filename='a')", "by its step"),
    ("A.load_from_checkpoint('a.ckpt')", "lumen convert"),
    ("x = 'lightning_logs/version_0'", "runs/NAME"),
    ("L.Fabric()", "no Fabric"),
    ("from lightning.pytorch.utilities import measure_flops", "FlopCounterMode"),
    ("from lightning.pytorch import *", "one by one"),
    ("from lightning.pytorch.utilities.types import LRSchedulerConfig", "Write a dictionary"),
    ("def f(x, *L): ...", "L has a second meaning in a function of this file. Rename one"),
    ("from lightning.pytorch.cli import OptimizerCallable", "Write Callable[[Iterable], Optimizer]"),
    ("self.trainer.fit_loop.restarting = True", "trainer.progress"),
    ("x = {'target': 'pytorch_lightning.loggers.CometLogger'}", "Subclass lumen.Logger"),
    ("x = {'target': 'lightning.pytorch.loggers.WandbLogger'}", "lumen.WandbLogger: check the arguments"),
    ("x = parse(L.__version__) >= parse('1.4.0')", "Lumen has version numbers of its own."),
    ("x = getattr(L.pytorch.callbacks, name)", "The import stays: the file uses L in code that is not edited."),
]


def check(tmp_path, before, after):
    """Check that the edits are the given ones, are Python, and are made only once."""
    assert migrate_text(tmp_path, before)[0] == after
    ast.parse(after)
    assert migrate_text(tmp_path, after)[0] == after


@pytest.mark.parametrize(("before", "after"), IMPORTS)
def test_imports_and_names_become_lumens(tmp_path, before, after):
    check(tmp_path, f"{before}\n", f"{after}\n")


@pytest.mark.parametrize(("before", "after"), TRAINER)
def test_trainer_arguments_are_removed_renamed_or_replaced(tmp_path, before, after):
    check(tmp_path, f"import lightning as L\nL.Trainer({before})\n", f"import lumen\nlumen.Trainer({after})\n")


@pytest.mark.parametrize(("before", "after"), CALLS)
def test_other_calls_and_attributes_are_edited(tmp_path, before, after):
    check(tmp_path, f"import lightning as L\nx = {before}\n", f"import lumen\nx = {after}\n")


@pytest.mark.parametrize(("kind", "before", "after"), CLASSES)
def test_methods_of_classes_are_edited(tmp_path, kind, before, after):
    theirs, ours = {"task": ("LightningModule", "TaskModule"), "callback": ("Callback", "Callback")}[kind]
    check(
        tmp_path,
        f"import lightning as L\nclass A(L.{theirs}):\n{textwrap.indent(before, '    ')}\n",
        f"import lumen\nclass A(lumen.{ours}):\n{textwrap.indent(after, '    ')}\n",
    )


@pytest.mark.parametrize(("before", "after"), YAML)
def test_configs_are_edited_and_keep_their_comments(before, after):
    assert ConfigEditor(before).edit()[0] == after
    yaml.safe_load(after)
    assert ConfigEditor(after).edit()[0] == after


@pytest.mark.parametrize(("text", "said"), SAID)
def test_what_no_edit_can_do_is_said(tmp_path, text, said):
    _, notes = migrate_text(tmp_path, f"import lightning as L\n{text}\n")
    assert any(said in note for note in notes), notes


# ---------------------------------------------------------------------- whole projects


def test_base_class_in_another_file_is_resolved(tmp_path):
    (tmp_path / "base.py").write_text("import lightning as L\nclass Base(L.LightningModule): ...\n")
    (tmp_path / "net.py").write_text(
        "from base import Base\nclass Net(Base):\n    def f(self):\n        self.log('a', b, enable_graph=True)\n"
    )
    texts = {each.path.name: each.after for each in migrate_project(tmp_path)}
    assert "self.log('a', b)" in texts["net.py"]


def test_a_package_of_the_project_is_not_lightning(tmp_path):
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning/__init__.py").write_text("def f(): ...\n")
    (tmp_path / "a.py").write_text("import pytorch_lightning as pl\nfrom lightning import f\nx = pl.Callback\n")
    (found,) = migrate_project(tmp_path)
    assert found.after == "import lumen\nfrom lightning import f\nx = lumen.Callback\n"
    assert not found.notes


def test_names_behind_a_star_import_stay(tmp_path):
    (tmp_path / "base.py").write_text("import lightning as L\nx = L.Callback\n")
    (tmp_path / "a.py").write_text("from base import *\ny = L.LightningModule\n")
    star, base = migrate_project(tmp_path)
    assert base.after == "import lumen as L\nx = L.Callback\n"
    assert [note.line for note in star.notes] == [1]
    assert star.notes[0].sentence.startswith("Import the used names of Lightning one by one")


def test_config_groups_of_hydra_are_edited(tmp_path):
    """Arguments at a key, or in a folder, belong to the class that a different config has there."""
    before = {
        "callbacks/best.yaml": "best:\n  _target_: lightning.pytorch.callbacks.ModelCheckpoint\n  monitor: null\n",
        "callbacks/default.yaml": "defaults:\n  - best\nbest:\n  filename: a # of the file\n  mode: max\n",
        "experiment/a.yaml": "callbacks:\n  best: {filename: b}\ntrainer: {strategy: ddp_spawn}\n",
        "experiment/c.yaml": "callbacks: {best: {filename: b}, other: 1}\n",
        "experiment/b.yaml": "callbacks:\n  best:\n    filename: b\n# end\n",
        "trainer/default.yaml": "_target_: lightning.Trainer\n",
        "trainer/ddp.yaml": "defaults: [default]\nstrategy: ddp_spawn\n",
        "logger/csv.yaml": "_target_: lightning.pytorch.loggers.CSVLogger\n",
        "logger/tensorboard.yaml": "_target_: lightning.pytorch.loggers.TensorBoardLogger\n",
        "logger/own.yaml": "save_dir: there\n",
        "broken/best.yaml": "best: [\n",
    }
    for name, text in before.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {each.path.relative_to(tmp_path).as_posix(): each for each in migrate_project(tmp_path)}
    assert found["callbacks/default.yaml"].after == "defaults:\n  - best\nbest:\n  mode: max\n"
    assert "filename of ModelCheckpoint is left out" in found["callbacks/default.yaml"].notes[0].sentence
    assert found["experiment/a.yaml"].after == "callbacks:\n  best: {}\ntrainer: {strategy: ddp}\n"
    assert found["experiment/b.yaml"].after == "callbacks:\n  best:\n    {}\n# end\n"  # null would remove the callback
    assert found["experiment/c.yaml"].after == "callbacks: {best: {}, other: 1}\n"
    assert found["trainer/ddp.yaml"].after == "defaults: [default]\nstrategy: ddp\n"
    assert "logger/own.yaml" not in found


@pytest.mark.parametrize(
    ("code", "is_edited"),
    [
        ("import lightning as L\nL.Trainer(devices=config['trainer']['gpus'])\n", False),
        ("import lightning as L\nL.pytorch.cli.LightningCLI(Net)\n", True),
        ("from lightning.pytorch.cli import LightningCLI as CLI\nclass Own(CLI): ...\n", True),
    ],
)
def test_config_sections_need_a_cli(tmp_path, code, is_edited):
    """Code of the project may read other configs, so their keys stay."""
    (tmp_path / "main.py").write_text(code)
    (tmp_path / "base.yaml").write_text("trainer: {gpus: 2, own: false}\nckpt_path: null\n")
    edited = {each.path.name: each.after for each in migrate_project(tmp_path)}.get("base.yaml")
    assert edited == ("trainer: {accelerator: gpu, devices: 2, own: false}\n" if is_edited else None)


def test_unknown_arguments_that_are_off_stay():
    text = "trainer: {own: false, other: null, amp_level: null, max_epochs: 3}\n"
    after, notes = ConfigEditor(text).edit()
    assert after == "trainer: {own: false, other: null, max_epochs: 3}\n"
    assert [note.sentence for note in notes] == [
        "other of Trainer. Trainer has no argument other.", "own of Trainer. Trainer has no argument own."
    ]  # fmt: skip


def test_rank_of_lightning_utilities_becomes_lumens(tmp_path):
    module = "lightning_utilities.core.rank_zero"
    check(
        tmp_path,
        f"from {module} import rank_prefixed_message, rank_zero_only\ndef f(rank_zero_only): return rank_zero_only\n",
        f"from {module} import rank_prefixed_message\nfrom lumen import rank_zero_only\n"
        "def f(rank_zero_only): return rank_zero_only\n",
    )
    check(
        tmp_path,
        "from lightning_utilities import apply_to_collection\n",
        "from lightning_utilities import apply_to_collection\n",
    )


@pytest.mark.parametrize(
    ("returned", "after", "said"),
    [
        (["{'loss': 1}"], "o['loss']", False),
        (["{'loss': 1}", "a + b"], "o['loss']", True),
        (["a + b", "F.mse_loss(a, b) if a else None"], "o", False),
        (["loss"], "o['loss']", True),
        (["self.absent(b)"], "o['loss']", True),
        (["self.shared(b)\n    def shared(self, b):\n        out = {'loss': b}\n        return out"],
         "o['loss']", False),
        (["self.shared(b)\n    def shared(self, b):\n        loss = F.mse_loss(b, 1)\n        return loss"],
         "o", False),
        (["self.shared(b)\n    def shared(self, b):\n        return -b",
          "self.again(b)\n    def shared(self, b):\n        return {}\n    again = shared"], "o['loss']", True),
        ([], "o['loss']", True),
    ],
)  # fmt: skip
def test_outputs_are_read_as_steps_return_them(tmp_path, returned, after, said):
    """A callback's `outputs["loss"]` becomes `outputs` only if no step can return a dictionary."""
    step = "class A(L.LightningModule):\n    def training_step(self, b):\n        self.log_dict({})\n        return "
    hook = "class B(L.Callback):\n    def on_train_batch_end(self, t, m, o, *a):\n        "
    imports = "import lightning as L\nimport torch.nn.functional as F\n"
    text = "".join([imports, *(f"{step}{each}\n" for each in returned), f"{hook}o['loss']\n"])
    edited, notes = migrate_text(tmp_path, text)
    assert edited.endswith(f"        {after}\n")
    assert any("a loss and no dictionary" in note for note in notes) == said


def test_a_run_without_a_limit_keeps_lightnings(tmp_path):
    text = "import lightning as L\nt = L.Trainer(devices=2)\nt.fit(m)\n"
    assert "lumen.Trainer(devices=2, max_epochs=1000)" in migrate_text(tmp_path, text)[0]
    assert "Trainer(max_time=t)" in migrate_text(tmp_path, text.replace("devices=2", "max_time=t"))[0]
    assert "Trainer(**a)" in migrate_text(tmp_path, text.replace("devices=2", "**a"))[0]


@pytest.mark.parametrize("given", ["dict(gpus=0, max_epochs=2)", '{"gpus": 0, "max_epochs": 2}'])
def test_arguments_that_are_unpacked_are_edited(tmp_path, given):
    after, _ = migrate_text(tmp_path, f"import lightning as L\nargs = {given}\nL.Trainer(**args)\n")
    assert "gpus" not in after
    assert "max_epochs" in after


def test_user_class_gets_arguments_of_its_base(tmp_path):
    text = (
        "from lightning.pytorch.cli import LightningCLI\nclass C(LightningCLI): ...\nC(A, save_config_overwrite=True)\n"
    )
    assert migrate_text(tmp_path, text)[0].endswith("C(A)\n")
    own = text.replace("...", "\n    def __init__(self, a, save_config_overwrite): ...")
    assert migrate_text(tmp_path, own)[0].endswith("save_config_overwrite=True)\n")


def test_line_endings_encoding_and_other_bytes_are_kept(tmp_path):
    text = "# -*- coding: latin-1 -*-\r\nimport lightning as L\r\nx = 'é', L.Trainer  \r\n\x0cy = 1"
    (tmp_path / "a.py").write_bytes(text.encode("latin-1"))
    run_migrate_write(tmp_path, "--force")
    expected = text.replace("lightning as L", "lumen").replace("L.", "lumen.")
    assert (tmp_path / "a.py").read_bytes() == expected.encode("latin-1")


def test_columns_behind_letters_of_several_bytes_are_right(tmp_path):
    check(
        tmp_path,
        'import lightning as L\nx = "é😀", L.Trainer(barebones=False, name="é")\n',
        'import lumen\nx = "é😀", lumen.Trainer(name="é")\n',
    )


# ---------------------------------------------------------------------- the command


def test_without_git_nothing_is_written_unless_forced(tmp_path):
    (tmp_path / "a.py").write_text("import lightning\n")
    code, said = run_migrate_write(tmp_path)
    assert code == 2
    assert "is not in git" in said
    assert (tmp_path / "a.py").read_text() == "import lightning\n"


def test_unreadable_files_are_named_and_others_edited(tmp_path):
    (tmp_path / "bad.py").write_text("import lightning\nx = (\n")
    (tmp_path / "bytes.py").write_bytes(b"import lightning  # \xff\n")
    (tmp_path / "bad.yaml").write_text("a: [lightning\n")
    (tmp_path / "good.py").write_text("import lightning\n")
    (tmp_path / "empty.py").write_text("")
    code, said = run_migrate_write(tmp_path, "--force")
    assert code == 1
    assert "bad.py: not edited: line 2: not valid Python: '(' was never closed." in said
    assert "bytes.py: not edited:" in said
    assert "bad.yaml: not edited: not valid YAML" in said
    assert (tmp_path / "good.py").read_text() == "import lumen\n"


def test_equal_notes_are_printed_once(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 'lightning_logs/version_0'\n")
    code, diff, said = run_migrate(tmp_path)
    assert (code, diff) == (0, "")
    first, *rest = said.splitlines()[1:]
    assert first.startswith("a.py:1: The directory of a run")
    assert rest == ["    also: b.py:1", "nothing to edit; 2 places to check by hand"]


def test_a_project_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "a.py").write_text("import torch\nlightning = 3\ntrainer.fit(m, verbose=True)\n")
    (tmp_path / "c.yaml").write_text("trainer: {gpus: 2}\n")
    assert run_migrate(tmp_path)[:2] == (0, "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "there is no file or directory nowhere"),
        ([".", "--wriet"], "Did you mean --write?"),
        ([], "required: PATH"),
        ([".", "--write=3"], "--write"),
    ],
)
def test_a_wrong_command_line_is_an_error(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_migrate(*words)
    assert (code, out) == (2, "")
    assert said in err


def test_a_link_is_followed_to_no_other_place(tmp_path):
    outside = tmp_path / "outside.py"
    outside.write_text("import lightning\n")
    (tmp_path / "project").mkdir()
    os.symlink(outside, tmp_path / "project/link.py")
    run_migrate_write(tmp_path / "project", "--force")
    assert outside.read_text() == "import lightning\n"


# ---------------------------------------------------------------------- the tables


def test_what_names_become_exists():
    for full in (*RENAMED.values(), *ELSEWHERE.values()):
        module, _, name = full.rpartition(".")
        assert module == "lumen" or hasattr(import_module(module), name), full
    assert all(find_new_name(f"lightning.{name}") is not None for name in ("LightningModule", "STEP_OUTPUT", "Trainer"))


def test_what_arguments_become_is_taken():
    takes = inspect.signature(lumen.Trainer).parameters
    assert {*TABLES["renamed"]["Trainer"].values()} <= {*takes}
    for method, names in arguments.METHODS.items():
        for old, new in names.items():
            kept = new.removeprefix("Use ").removesuffix(".")
            assert [*arguments.get_method_change(method, old).arguments] == ([kept] if kept.isidentifier() else [])


def test_arguments_stand_where_lightning_has_them():
    callbacks = import_module("lightning.pytorch.callbacks")
    others = [import_module(f"lightning.pytorch.{name}") for name in ("loggers", "strategies", "profilers", "cli")]
    for name, order in TABLES["positions"].items():
        owner = next(getattr(module, name) for module in (callbacks, *others) if hasattr(module, name))
        theirs = [
            each.name for each in inspect.signature(owner.__init__).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ][1:]  # fmt: skip
        assert theirs[: len(order.split())] == order.split(), name


def test_items_are_those_of_the_call():
    source = EditableSource("f(a, *b, c=(1, 2), **d)(lambda x, y: 1, 'e,f', g=[i for i in (1,)],)")
    (node,) = [each.value for each in ast.parse(source.text).body]
    assert [source.text[each.start : each.end] for each in ItemEditor(source, node).all] == [
        "lambda x, y: 1", "'e,f'", "g=[i for i in (1,)]"
    ]  # fmt: skip
    assert [each.name for each in ItemEditor(source, node.func).all] == [None, None, "c", None]
