"""Example with an adapter of peft: frozen weights stay, peft reads the saved files, and training helps."""

import json
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel

import lumen
from datamodules.packed import PackedSurnames, request
from lumen.cli import main
from models.lora_gpt2 import LoraAnswers
from models.packed_gpt2 import Answers
from tests.helpers import ROOT
from tests.helpers.cli import run_model
from tests.helpers.tables import read_rows
from tests.helpers.tasks import quiet_trainer, weights
from tests.helpers.working_directory import find_commands

CONFIG = {"vocab_size": 256, "n_positions": 48, "n_embd": 16, "n_layer": 2, "n_head": 2}
NAMES = {r"^gpt\.": "gpt.base_model.model.", r"\.(c_attn|c_fc)\.": r".\1.base_layer."}
PEFT = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # a deprecated call of peft to transformers


def train(folder, task, **options):
    options = {"max_epochs": 2, "limit_val_batches": 0} | options
    trainer = quiet_trainer(folder, **options)
    trainer.fit(task, PackedSurnames(only="Finnish", labelled=48, batch_size=16, row=48))
    return trainer


def adapted():
    torch.manual_seed(1)
    return LoraAnswers(CONFIG, rank=2, warmup_steps=2)


def each_step():
    return lumen.ModelCheckpoint(every_n_train_steps=1)


@pytest.mark.filterwarnings(PEFT)
def test_base_stays_unchanged_and_peft_reads_resumed_adapter(tmp_path):
    torch.manual_seed(0)
    base = Answers(CONFIG, warmup_steps=2)
    train(tmp_path / "base", base, max_epochs=1)
    begun = lumen.Weights(tmp_path / "base/runs/run", rename=NAMES, ignore=[r".*\.lora_.*"])

    whole = adapted()
    trainer = train(tmp_path / "whole", whole, init_from=begun)
    frozen = {name: each for name, each in whole.gpt.named_parameters() if not each.requires_grad}
    plain = dict(base.gpt.named_parameters())
    assert len(frozen) == len(plain)
    for name, each in frozen.items():
        assert torch.equal(each, plain[name.removeprefix("base_model.model.").replace(".base_layer", "")])
    trained = {id(each) for each in whole.parameters() if each.requires_grad}
    assert {id(each) for each in trainer.optimizers[0].state} == trained

    options = {"init_from": begun, "resume": "auto"}
    with pytest.raises(RuntimeError, match="the power fails"):
        train(tmp_path / "parts", adapted(), callbacks=[Failing(3), each_step()], **options)
    resumed = adapted()
    trainer = train(tmp_path / "parts", resumed, callbacks=each_step(), **options)
    assert torch.equal(weights(resumed), weights(whole))

    ids = torch.tensor([request("Finnish")])
    alone = base.gpt.eval()(ids).logits
    read = PeftModel.from_pretrained(base.gpt, trainer.run_directory / "adapter").eval()
    assert torch.equal(read(ids).logits, whole.gpt.eval()(ids).logits)
    assert not torch.allclose(read(ids).logits, alone, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings(PEFT)
@pytest.mark.usefixtures("program_directory")
def test_commands_that_lora_runs_print_run(capsys):
    config = yaml.safe_load((ROOT / "models/lora_gpt2.yaml").read_text())
    config["model"]["init_args"]["config"] = CONFIG
    config["data"]["init_args"] |= {"labelled": 48, "row": 48}
    config["trainer"] |= {"init_from": None, "max_epochs": 1, "limit_val_batches": 1, "logger": True}
    Path("lora.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "lora.yaml"]) == 0
    printed = find_commands(capsys.readouterr().err)
    assert printed.keys() >= {"curves", "weights"}
    for command in printed.values():
        assert main(shlex.split(command)[1:]) == 0, command


class Failing(lumen.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == self.step:
            raise RuntimeError("the power fails")


def read_loss_nats(root, name):
    return [float(row["val_loss"]) for row in read_rows(root / name / "metrics.csv") if row["val_loss"]]


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_packed_model_learns_and_adapter_improves_finnish_names(tmp_path, capsys):
    run_model("fit", "packed_gpt2", tmp_path)
    assert read_loss_nats(tmp_path, "packed_gpt2")[-1] <= 2.0
    capsys.readouterr()
    run_model("predict", "packed_gpt2", tmp_path, "--ckpt_path=last")
    said = capsys.readouterr().out.splitlines()[-8:]
    assert [line.split(":")[0] for line in said] == PackedSurnames().origins

    values = tmp_path / "values.json"
    run_model("validate", "packed_gpt2", tmp_path, "--ckpt_path=last", "--data.only=Finnish", f"--output={values}")
    run_model("fit", "lora_gpt2", tmp_path, f"--trainer.init_from.path={tmp_path}/packed_gpt2")
    assert read_loss_nats(tmp_path, "lora_gpt2")[-1] <= json.loads(values.read_text())[0]["val_loss"] - 0.07
