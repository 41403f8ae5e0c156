"""Small trainings with one mistake each, for tests of `lumen check`."""

import json
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import lumen
from lumen.cli import main

CLASSES = 5


class Classifier(lumen.TaskModule):
    """Correct task, whose arguments add mistakes."""

    def __init__(self, lr=1e-2, classes=CLASSES, scale=1.0, mistake=""):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(6, classes)
        self.mistake = mistake
        if mistake == "unused":
            self.extra = nn.Linear(2, 2)
        if mistake == "unheld":
            self.shift = nn.Parameter(torch.zeros(classes))

    def training_step(self, batch):
        inputs, labels = batch[:2]
        if self.mistake == "fails":
            raise RuntimeError("this model cannot count")
        if self.mistake == "ignores":
            inputs = torch.ones_like(inputs)
        outputs = self.net(inputs) * self.hparams.scale
        if self.mistake == "unheld":
            outputs = outputs + self.shift
        loss = functional.cross_entropy(outputs, labels)
        if self.mistake == "dead":
            loss = (outputs - 1e6).relu().sum()
        if self.mistake == "nan":
            loss = loss * float("nan")
        if self.mistake == "prints":
            print("a word of the user's")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch):
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        parameters = [each for name, each in self.named_parameters() if name != "shift"]
        return torch.optim.Adam(parameters, lr=self.hparams.lr)


class Scheduled(Classifier):
    """Task with the user's schedule."""

    def __init__(self, kind="cosine", length=20, interval="step"):
        super().__init__()
        self.kind, self.length, self.interval = kind, length, interval

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        factor = {
            "warmup": lambda step: min(1.0, step / 5),
            "sound": lambda step: min(1.0, (step + 1) / 5),
            "idle": lambda step: max(0.0, 1 - step / 10),
        }.get(self.kind)
        if self.kind == "own":
            scheduler = lumen.optim.cosine(optimizer, self.length, warmup=5)
        elif factor is None:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.length)
        else:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


class Unvalidated(lumen.TaskModule):
    """Task without a `validation_step`."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, CLASSES)

    def training_step(self, batch):
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Two(lumen.TaskModule):
    """Task with two optimizers in manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = nn.Linear(6, 1), nn.Linear(6, 1)

    def training_step(self, batch):
        for optimizer, net in zip(self.optimizers(), (self.one, self.other), strict=True):
            loss = (net(batch[0]) - 1).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.one, self.other)]


class Labelled(lumen.DataModule):
    """Data of six inputs and five classes, whose arguments add mistakes."""

    def __init__(self, samples=80, batch_size=8, shuffle=True, mistake=""):
        self.samples, self.batch_size, self.shuffle, self.mistake = samples, batch_size, shuffle, mistake
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(2 * samples, 6, generator=generator)
        labels = torch.randint(CLASSES, (2 * samples,), generator=generator)
        if mistake == "scale":
            inputs = inputs * 70 + 120
        if mistake == "constant inputs":
            inputs = torch.full_like(inputs, 3.0)
        if mistake == "nan":
            inputs[:samples, 0] = float("nan")
        if mistake == "labels from 1":
            labels = labels + 1
        if mistake == "one label":
            labels = torch.full_like(labels, 3)
        self.all = TensorDataset(inputs, labels)

    def train_dataloader(self):
        data = Subset(self.all, range(self.samples))
        if self.mistake == "slow":
            data = Slow(data)
        return DataLoader(data, self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self):
        inputs, labels = self.all.tensors
        if self.mistake == "leaks numbers":
            return DataLoader(Subset(self.all, range(self.samples - 5, 2 * self.samples)), 8)
        if self.mistake == "leaks contents":
            return DataLoader(TensorDataset(inputs[self.samples - 20 :], labels[self.samples - 20 :]), 8)
        if self.mistake == "copies":
            return DataLoader(TensorDataset(inputs[self.samples :], labels[self.samples :]), 8)
        if self.mistake == "long":
            return DataLoader(Long(inputs[self.samples :], labels[self.samples :]), 8)
        return DataLoader(Subset(self.all, range(self.samples, 2 * self.samples)), 8)


class Long(TensorDataset):
    """Data set with more samples than memory holds numbers."""

    def __len__(self):
        return 90_000_000_000

    def __getitem__(self, index):
        return super().__getitem__(index % super().__len__())


class Slow(Dataset):
    """Slow data module."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(0.03)
        return self.data[index]


class NoValidation(Labelled):
    """Data module without validation data."""

    val_dataloader = lumen.DataModule.val_dataloader


class Several(Labelled):
    """Data module with two training loaders, read together, and two validation loaders."""

    def train_dataloader(self):
        return [super().train_dataloader(), super().train_dataloader()]

    def val_dataloader(self):
        return {"one": super().val_dataloader(), "other": super().val_dataloader()}


class Both(Classifier):
    """Classifier that takes a batch of each of two loaders."""

    def training_step(self, batch):
        return super().training_step([torch.cat(parts) for parts in zip(*batch, strict=True)])


class Numbers(IterableDataset):
    """A stream without a length."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(400):
            yield torch.randn(6, generator=generator), torch.randint(CLASSES, (), generator=generator)


class Stream(lumen.DataModule):
    """Data module whose loader reads a stream."""

    def train_dataloader(self):
        return DataLoader(Numbers(), 8)

    def val_dataloader(self):
        return DataLoader(Numbers(), 8)


def make_config(task="Classifier", data="Labelled", *, model=None, of_data=None, **trainer):
    """Return the settings of a training of one of these classes."""
    here = __name__
    return {
        "seed_everything": 1,
        "model": {"class_path": f"{here}.{task}", "init_args": model or {}},
        "data": {"class_path": f"{here}.{data}", "init_args": of_data or {}},
        "trainer": {"accelerator": "cpu", "max_epochs": 2} | trainer,
    }


class Checked:
    """Result of a check: exit code, findings by name, facts, and the whole text."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err
        said = json.loads(out) if out.startswith("{") else {"sections": {}, "facts": {}}
        self.findings = [each for findings in said["sections"].values() for each in findings]
        self.facts = said["facts"]

    def named(self, *marks):
        return {each["name"] for each in self.findings if each["mark"] in marks}

    @property
    def suspicious(self):
        return self.named("suspicious", "wrong")

    def text(self, name):
        return " ".join(each["text"] + " " + each["advice"] for each in self.findings if each["name"] == name)


def check(path, capsys, *words):
    """Run `lumen check --json` on a config."""
    capsys.readouterr()
    code = main(["check", "--config", str(path), "--json", *words])
    out, err = capsys.readouterr()
    return Checked(code, out, err)
