"""`lumen migrate` leaves nothing out without a note, and edits no object that is not Lightning's."""

import ast
import inspect

import pytest
import yaml

import lumen
from lumen.tools.migrate.arguments import get_change
from lumen.tools.migrate.command import migrate_project
from tests.helpers.migrate import migrate_text, run_migrate

SAID = [
    ("L.pytorch.loggers.WandbLogger(log_model='all')", "log_model of WandbLogger is left out. Checkpoints are in"),
    ("L.pytorch.loggers.WandbLogger(resume='must')", "resume of WandbLogger is left out. A resumed run"),
    ("L.Trainer(use_distributed_sampler=False)", "use_distributed_sampler of Trainer is left out. Lumen divides"),
    ("L.Trainer(terminate_on_nan=False)", "terminate_on_nan of Trainer is left out."),
    ("L.pytorch.strategies.DDPStrategy(process_group_backend='gloo')", "process_group_backend of DDP is left out."),
    ("class A(L.LightningModule):\n    def f(self):\n        self.log('a', 1, enable_graph=True)",
     "enable_graph of log is left out. Logged values have"),
    ("trainer.save_checkpoint(p, weights_only=True)", "weights_only of save_checkpoint is left out."),
    ("A.load_from_checkpoint(p, hparams_file='a.yaml')", "hparams_file of load_from_checkpoint is left out."),
    ("class A(L.LightningModule):\n    def configure_optimizers(self):\n"
     "        return {'optimizer': o, 'scheduler': s}",
     "Write lr_scheduler in its place"),
    ("class A(L.LightningModule):\n    def training_step(self, b):\n        return {'loss': b, 'log': logs}",
     "Write self.log_dict(logs) before the return"),
    ("class A(L.LightningModule):\n    def f(self):\n        return len(self.train_dataloader())",
     "In configure_optimizers read self.trainer.estimated_stepping_batches"),
    ("w = torch.load(path)['state_dict']", "lumen convert"),
    ("L.Trainer(**config['trainer'])", "**config['trainer']: check its keys."),
    ("L.Trainer.from_argparse_args(args, logger=a)", "write lumen.Trainer(NAME=args.NAME, ...)"),
    ("class D(L.LightningDataModule): ...\nD.add_argparse_args(p)", "write D(NAME=args.NAME, ...)"),
    ("x = L.pytorch.core.decorators.auto_move_data", ".to(self.device)"),
    ("from pytorch_lightning.metrics import Accuracy", 'Accuracy(task="multiclass", num_classes=10)'),
]  # fmt: skip

SILENT = [
    "L.pytorch.loggers.WandbLogger(job_type='train', log_model=False, settings=s)",
    "L.Trainer(use_distributed_sampler=True, terminate_on_nan=None, plugins=[])",
    "L.pytorch.loggers.CSVLogger(version=None, prefix='', flush_logs_every_n_steps=100)",
    "x = cfg.trainer.accelerator, self.config.trainer.gpus, hparams.trainer.max_time",
    "from transformers import Trainer\ntrainer = Trainer()\ntrainer.accelerator",
    "self.logger.experiment.log_image(key='a')\nx = L.pytorch.loggers.WandbLogger()",
    "x = {'optimizer': o, 'lr_scheduler': {'scheduler': s}}",
    "L.Trainer(logger=L.pytorch.loggers.CSVLogger(), **dict(max_epochs=1))",
]

EDITS = [
    ("class A(L.LightningModule):\n    def __init__(self, a):\n        self.hparams = a",
     "class A(lumen.TaskModule):\n    def __init__(self, a):\n        self.save_hyperparameters(a)"),
    ("class A(L.pytorch.loggers.base.LightningLoggerBase):\n    @property\n"
     "    @L.pytorch.loggers.base.rank_zero_experiment\n    def experiment(self): ...",
     "class A(lumen.Logger):\n    @property\n    def experiment(self): ..."),
    ("x = functools.partial(L.Trainer, gpus=2)", 'x = functools.partial(lumen.Trainer, accelerator="gpu", devices=2)'),
    ("x = lazy_instance(L.pytorch.callbacks.ModelCheckpoint, filename='a')",
     "x = lazy_instance(lumen.ModelCheckpoint)"),
    ("x = L.pytorch.callbacks.GPUStatsMonitor()", "x = lumen.DeviceStatsMonitor()"),
    ("p.add_lightning_class_args(L.pytorch.callbacks.ModelCheckpoint, 'best')\n"
     "p.set_defaults({'best.filename': 'a', 'best.monitor': 'b', 'trainer.gpus': 2})",
     "p.add_lightning_class_args(lumen.ModelCheckpoint, 'best')\n"
     "p.set_defaults({'best.monitor': 'b', 'trainer.accelerator': \"gpu\", 'trainer.devices': 2})"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), SAID)
def test_a_lost_effect_has_a_note(tmp_path, text, said):
    _, notes = migrate_text(tmp_path, f"import lightning as L\n{text}\n")
    assert any(said in note for note in notes), notes


@pytest.mark.parametrize("text", SILENT)
def test_code_without_a_loss_has_no_note(tmp_path, text):
    after, notes = migrate_text(tmp_path, f"import lightning as L\n{text}\n")
    assert notes == []
    ast.parse(after)


@pytest.mark.parametrize("text", SILENT[3:5])
def test_objects_that_are_no_trainer_stay(tmp_path, text):
    assert text in migrate_text(tmp_path, f"import lightning as L\n{text}\n")[0]


@pytest.mark.parametrize(("before", "after"), EDITS)
def test_old_names_and_indirect_calls_are_edited(tmp_path, before, after):
    edited, _ = migrate_text(tmp_path, f"import lightning as L\n{before}\n")
    assert edited == f"import lumen\n{after}\n"
    assert migrate_text(tmp_path, edited)[0] == edited


@pytest.mark.parametrize("name", [name for name in lumen.__all__ if hasattr(getattr(lumen, name), "INSTEAD")])
def test_every_removed_argument_has_a_note(name):
    """A value that is not neutral is never removed silently."""
    kind = getattr(lumen, name)
    for argument in set(kind.INSTEAD) - {*inspect.signature(kind).parameters, "*"}:
        for value in ("given", 7):
            change = get_change(name, argument, value)
            assert change.sentence or change.arguments != {}, argument


def test_classes_of_the_project_in_configs_are_edited(tmp_path):
    (tmp_path / "best.py").write_text(
        "import lightning as L\nclass Best(L.pytorch.callbacks.ModelCheckpoint): ...\n"
        "class C(L.pytorch.cli.LightningCLI):\n    def add_arguments_to_parser(self, parser):\n"
        "        parser.add_lightning_class_args(Best, 'best')\n"
    )
    (tmp_path / "a.yaml").write_text(
        "trainer:\n  callbacks:\n    - class_path: best.Best\n      init_args: {filename: a, monitor: b}\n"
        "best:\n  filename: a\n  monitor: b\n"
    )
    (found,) = [each for each in migrate_project(tmp_path) if each.path.suffix == ".yaml"]
    assert yaml.safe_load(found.after) == {
        "trainer": {"callbacks": [{"class_path": "best.Best", "init_args": {"monitor": "b"}}]}, "best": {"monitor": "b"}
    }  # fmt: skip
    assert [note.line for note in found.notes] == [4, 6]


def test_environment_plugins_of_a_config_are_left_out(tmp_path):
    name = "lightning.pytorch.plugins.environments.SLURMEnvironment"
    text = f"trainer:\n  plugins:\n    - class_path: {name}\n  max_epochs: 2\n"
    assert migrate_text(tmp_path, text, "a.yaml") == (
        "trainer:\n  max_epochs: 2\n",
        ["SLURMEnvironment is left out. Lumen detects SLURM. SIGUSR1 saves, and exits with code 75 to requeue."],
    )


def test_names_that_a_project_reexports_stay(tmp_path):
    (tmp_path / "base.py").write_text("from lightning import LightningModule\nimport lightning as pl\n")
    (tmp_path / "net.py").write_text(
        "from base import LightningModule, pl\nclass A(LightningModule):\n    def test_epoch_end(self, o): ...\n"
    )
    base, net = migrate_project(tmp_path)
    assert base.after == "import lumen as pl\nfrom lumen import TaskModule as LightningModule\n"
    assert "def on_test_epoch_end(self): ..." in net.after
    assert "base.pl is now lumen" in net.notes[0].sentence


def test_an_edit_that_breaks_python_is_refused(tmp_path):
    (tmp_path / "a.py").write_text('import lightning as L\nx = f"{L.Trainer(gpus=2)}"\n')
    (tmp_path / "b.py").write_text("import lightning\n")
    code, diff, said = run_migrate(tmp_path)
    if "a.py" not in diff:  # before Python 3.12 a quote ends the string
        assert code == 1
        assert "a.py: not edited: the edits would not be valid Python: line 2" in said
    assert "+import lumen" in diff
