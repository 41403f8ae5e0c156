"""Example that fine-tunes GPT-2: a loss per letter, and tied weights in groups, frozen, and exported."""

import json
import math
import shutil

import pytest
import torch
from transformers import GPT2LMHeadModel

from datamodules.surnames import Surnames, collate, pad
from lumen.cli import main
from models.bert import GradualUnfreezing
from models.gpt2 import NameWriter
from tests.helpers.cli import run_model
from tests.helpers.tasks import quiet_trainer

CONFIG = {"vocab_size": 256, "n_positions": 48, "n_embd": 16, "n_layer": 2, "n_head": 2}
STILL = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}


def writer(**options):
    torch.manual_seed(0)
    return NameWriter(CONFIG | STILL, warmup_steps=2, **options)


def test_loss_is_mean_over_letters_without_padding():
    model, names = writer(), ["Ek", "Hundertwasser", "Mäkelä"]
    loss, count = model.loss(collate([(name, 0) for name in names]))
    assert count == sum(len(name.encode()) + 1 for name in names)
    likelihoods = []
    for name in names:
        letters = list(name.encode())
        logits = model.gpt(torch.tensor([[1, *letters]])).logits[0].log_softmax(-1)
        likelihoods += [logits[i, letter] for i, letter in enumerate([*letters, 0])]
    torch.testing.assert_close(loss, -torch.stack(likelihoods).mean())


def train(folder, epochs, callbacks=(), **options):
    task = writer(layer_decay=0.5)
    trainer = quiet_trainer(folder, max_epochs=epochs, callbacks=callbacks, **options)
    trainer.fit(task, Surnames(only="Finnish", labelled=24, batch_size=8))
    return task, trainer


def test_tied_head_trains_with_the_embedding(tmp_path):
    task, trainer = train(tmp_path, 1, limit_val_batches=0)
    groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
    assert {name: group["initial_lr"] for name, group in groups.items() if name.endswith("no decay")} == pytest.approx(
        {
            "embeddings no decay": 2e-3 * 0.5**3,
            "gpt.transformer.h.0 no decay": 2e-3 * 0.5**2,
            "gpt.transformer.h.1 no decay": 2e-3 * 0.5,
            "head no decay": 2e-3,
        }
    )
    assert task.gpt.lm_head.weight is task.gpt.transformer.wte.weight
    assert any(each is task.gpt.lm_head.weight for each in groups["embeddings no decay"]["params"])
    names = {id(each): name for name, each in task.named_parameters()}
    decaying = {names[id(each)] for group in groups.values() if group["weight_decay"] for each in group["params"]}
    assert decaying == {
        name for name in names.values() if ".h." in name and name.endswith("weight") and "ln" not in name
    }


def test_freezing_the_embedding_freezes_the_tied_head(tmp_path):
    before = writer().gpt.lm_head.weight
    freezing = [GradualUnfreezing(["gpt.transformer.wte"], every_n_epochs=1)]
    frozen, _ = train(tmp_path / "1", 1, freezing, limit_val_batches=0)
    assert torch.equal(frozen.gpt.lm_head.weight, before)
    thawed, _ = train(tmp_path / "2", 2, freezing, limit_val_batches=0)
    assert not torch.equal(thawed.gpt.lm_head.weight, before)
    assert thawed.gpt.lm_head.weight is thawed.gpt.transformer.wte.weight


# -------------------------------------------------------------------- the configs, through the command line


@pytest.mark.slow
def test_tied_weights_are_finetuned_and_exported_for_transformers(tmp_path, capsys):
    run_model("fit", "gpt2_pretrain", tmp_path, "--trainer.max_steps=5", "--trainer.limit_val_batches=1")
    init_from = f"--trainer.init_from.path={tmp_path}/gpt2_pretrain"
    run_model("fit", "gpt2_finetune", tmp_path, init_from, "--trainer.max_steps=2", "--trainer.callbacks=null")
    begun = NameWriter.load_from_checkpoint(tmp_path / "gpt2_pretrain").gpt.lm_head.weight
    task = NameWriter.load_from_checkpoint(tmp_path / "gpt2_finetune").eval()
    assert 0 < (task.gpt.lm_head.weight - begun).abs().max() < 1e-3

    output = tmp_path / "finnish-gpt2"
    assert main(["export", str(tmp_path / "gpt2_finetune"), "--module=gpt", f"--output={output}"]) == 0
    assert "lm_head.weight is tied to transformer.wte.weight" in capsys.readouterr().out
    shutil.copy(tmp_path / "gpt2_finetune/config.json", output)
    read, notes = GPT2LMHeadModel.from_pretrained(output, output_loading_info=True)
    assert not any(notes.values()), notes
    assert read.lm_head.weight is read.transformer.wte.weight
    assert torch.equal(read.lm_head.weight, task.gpt.lm_head.weight)
    ids = pad(["\x01Ek", "\x01Hundertwasser"])[0]
    assert torch.equal(read.eval()(ids, attention_mask=ids != 0).logits, task(ids[:, 1:]))

    capsys.readouterr()
    run_model("predict", "gpt2_finetune", tmp_path, init_from, "--ckpt_path=last", "--data.names=[Mar, Ka]")
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said[0].startswith("Mar")
    assert said[1].startswith("Ka")


def nats_per_letter(name, tmp_path, *arguments):
    output = tmp_path / "values.json"
    run_model("validate", name, tmp_path, "--data.only=Finnish", f"--output={output}", *arguments)
    return json.loads(output.read_text())[0]["val_loss"]


@pytest.mark.slow
@pytest.mark.time_limit(600)
def test_finetuning_reaches_perplexity_below_six(tmp_path):
    full = "--trainer.precision=fp32"  # bfloat16 takes four times as long on a processor without support
    run_model("fit", "gpt2_pretrain", tmp_path, full, "--trainer.max_epochs=5")
    before = nats_per_letter("gpt2_pretrain", tmp_path, full, "--ckpt_path=last")
    init_from = f"--trainer.init_from.path={tmp_path}/gpt2_pretrain"
    run_model("fit", "gpt2_finetune", tmp_path, full, init_from)
    after = nats_per_letter("gpt2_finetune", tmp_path, full, init_from, "--ckpt_path=best")
    assert math.exp(after) < 6
    assert math.exp(after - before) < 0.65
