"""`lumen migrate`: hooks of Lightning 1 that receive the outputs of all steps of an epoch."""

import ast
import textwrap

import pytest
import torch
from torch.utils.data import DataLoader

import lumen
from lumen.tools.migrate.command import migrate_project
from tests.helpers.migrate import migrate_text

RENAMED = [
    ("def training_epoch_end(self, outputs):\n    self.log('a', self.sum)",
     "def on_train_epoch_end(self):\n    self.log('a', self.sum)"),
    ("def validation_epoch_end(self, outputs: list = None) -> None:\n    'Text.'",
     "def on_validation_epoch_end(self) -> None:\n    'Text.'"),
    ("@rank_zero_only\ndef test_epoch_end(self, outs):  # why\n    print('done')",
     "@rank_zero_only\ndef on_test_epoch_end(self):  # why\n    print('done')"),
]  # fmt: skip

MEANS = [
    # the step, the hook, the step after the edit
    ("loss = self(b)\nreturn loss",
     "avg = torch.stack([x['loss'] for x in outputs]).mean()\n"
     "self.log('train_loss', avg, prog_bar=True, on_epoch=True)",
     "loss = self(b)\nself.log('train_loss', loss, on_step=False, on_epoch=True, prog_bar=True)\nreturn loss"),
    ("loss = self(b)\nreturn {'loss': loss, 'n': 3}",
     "self.log('train_loss', torch.mean(torch.tensor([x['loss'].item() for x in outputs])), sync_dist=True)",
     "loss = self(b)\nself.log('train_loss', loss, on_step=False, on_epoch=True)\nreturn {'loss': loss, 'n': 3}"),
    ("loss = self(b)\nout = {'loss': loss, 'acc': acc.detach()}\nreturn out",
     "acc = sum(x['acc'] for x in outputs) / len(outputs)\nlogs = {'train_acc': acc}\nreturn {'log': logs}",
     "loss = self(b)\nout = {'loss': loss, 'acc': acc.detach()}\n"
     "self.log('train_acc', acc, on_step=False, on_epoch=True)\nreturn out"),
    ("loss = self(b)\nreturn dict(loss=loss)",
     "loss = np.mean([float(x['loss']) for x in outputs])\n"
     "self.logger.experiment.add_scalar('train/loss', loss, self.current_epoch)",
     "loss = self(b)\nself.log('train/loss', loss, on_step=False, on_epoch=True)\nreturn dict(loss=loss)"),
]  # fmt: skip

KEPT = [
    ("loss = self(b)\nreturn loss", "self.log('a', torch.stack([x['loss'] for x in outputs]).max())"),
    ("loss = self(b)\nreturn loss", "avg = torch.stack([x['loss'] for x in outputs]).mean()\nprint(avg)"),
    ("loss = self(b)\nreturn loss", "avg = torch.stack([x['loss'] for x in outputs if x]).mean()\nself.log('a', avg)"),
    ("loss = self(b)\nreturn loss", "self.log('a', torch.stack([x['other'] for x in outputs]).mean())"),
    ("return self.compute(b)", "self.log('a', torch.stack([x['loss'] for x in outputs]).mean())"),
    ("self.log('a', b)\nreturn b", "self.log('a', torch.stack([x['loss'] for x in outputs]).mean())"),
    ("loss = self(b)\nreturn loss", "for x in outputs:\n    print(x)"),
]  # fmt: skip


def write_task(*methods, base="L.LightningModule"):
    body = "\n\n".join(textwrap.indent(each, "    ") for each in methods)
    module = {"L.LightningModule": "lightning as L", "lumen.TaskModule": "lumen"}[base]
    return f"import {module}\n\nclass A({base}):\n{body}\n"


def write_method(head, body):
    return f"{head}\n{textwrap.indent(body, '    ')}"


@pytest.mark.parametrize(("before", "after"), RENAMED)
def test_hooks_without_use_of_outputs_are_renamed(tmp_path, before, after):
    edited, notes = migrate_text(tmp_path, write_task(before))
    assert edited == write_task(after, base="lumen.TaskModule")
    assert notes == []


@pytest.mark.parametrize(("step", "hook", "after"), MEANS)
def test_logged_means_move_into_the_step(tmp_path, step, hook, after):
    head = "def training_step(self, b, batch_idx):"
    text = write_task(write_method(head, step), write_method("def training_epoch_end(self, outputs):", hook))
    edited, (note,) = migrate_text(tmp_path, text)
    assert edited == write_task(write_method(head, after), base="lumen.TaskModule")
    assert note.startswith("training_step now logs 'train")
    ast.parse(edited)


@pytest.mark.parametrize(("step", "hook"), KEPT)
def test_other_uses_of_outputs_are_noted(tmp_path, step, hook):
    head = "def training_step(self, b, batch_idx):"
    text = write_task(write_method(head, step), write_method("def training_epoch_end(self, outputs):", hook))
    edited, notes = migrate_text(tmp_path, text)
    assert write_method("def training_epoch_end(self, outputs):", hook.split("\n")[0]).split("\n")[0] in edited
    assert any("Lumen does not call training_epoch_end" in note for note in notes)


@pytest.mark.parametrize(
    ("derived", "is_moved"),
    [
        (
            "from a import A as Base\nclass B(Base):\n    def training_step(self, b, batch_idx):\n        return b",
            False,
        ),
        ("from a import A\nclass A(A):\n    def training_step(self, b, batch_idx):\n        return b", False),
        ("from a import A\nclass C(A): ...\nclass B(C):\n    def training_step(self, b): return b", False),
        ("from a import A\nclass B(mix(A)):\n    def training_step(self, b): return b", False),
        ("from a import A\nclass B(A):\n    def validation_step(self, b): ...", True),
        ("import lightning as L\nclass B(L.LightningModule):\n    def training_step(self, b): return b", True),
    ],
)
def test_means_stay_for_classes_with_own_steps(tmp_path, derived, is_moved):
    step, hook, _ = MEANS[0]
    head = "def training_step(self, b, batch_idx):"
    text = write_task(write_method(head, step), write_method("def training_epoch_end(self, outputs):", hook))
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(f"{derived}\n")
    base, *_ = migrate_project(tmp_path)
    assert ("def training_epoch_end" not in base.after) == is_moved
    assert any("Lumen does not call training_epoch_end" in note.sentence for note in base.notes) == (not is_moved)


def test_a_hook_that_the_project_calls_stays(tmp_path):
    text = write_task("def validation_epoch_end(self, o): ...", "def test_epoch_end(self, o):\n"
                      "    self.validation_epoch_end(o)")  # fmt: skip
    edited, notes = migrate_text(tmp_path, text)
    assert "def validation_epoch_end(self, o): ..." in edited
    assert len(notes) == 2


def test_tabs_and_line_endings_are_kept(tmp_path):
    text = (
        "import lightning as L\nclass A(L.LightningModule):\n\tdef validation_step(self, b, i):\n\t\tif b:\n"
        "\t\t\treturn b\n\t\treturn i\n\n\tdef validation_epoch_end(self, o):\n\t\tself.log('a', torch.stack(o).mean())"
    )
    edited, _ = migrate_text(tmp_path, text.replace("\n", "\r\n"))
    assert edited == (
        "import lumen\nclass A(lumen.TaskModule):\n\tdef validation_step(self, b, i):\n\t\tif b:\n"
        "\t\t\tself.log('a', b)\n"
        "\t\t\treturn b\n\t\tself.log('a', i)\n\t\treturn i\n"
    ).replace("\n", "\r\n")


def test_a_moved_mean_is_the_mean_of_samples(tmp_path):
    text = write_task(
        "def __init__(self):\n    super().__init__()\n    self.w = torch.nn.Parameter(torch.zeros(1))",
        "def training_step(self, b, batch_idx):\n    loss = (b - self.w).square().mean()\n    return {'loss': loss}",
        "def training_epoch_end(self, outputs):\n"
        "    self.log('mean', torch.stack([x['loss'] for x in outputs]).mean())",
        "def configure_optimizers(self):\n    return torch.optim.SGD(self.parameters(), lr=0.0)",
    )
    names = {"torch": torch}
    exec(migrate_text(tmp_path, text)[0], names)
    trainer = lumen.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(names["A"](), DataLoader(torch.arange(5.0)[:, None], batch_size=2))
    assert trainer.callback_metrics["mean"] == torch.arange(5.0).square().mean()
