"""Example that fine-tunes BERT: padding, layer-wise rates, gradual unfreezing that resumes exactly, and the export."""

import json
import shutil

import pytest
import torch
from transformers import BertForSequenceClassification

import lumen
from datamodules.surnames import Surnames, pad
from lumen.cli import main
from models.bert import PAD, BertClassifier, GradualUnfreezing, MaskedNames, with_start
from tests.helpers.cli import run_model
from tests.helpers.tasks import quiet_trainer

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 48,
}
ORIGINS = Surnames().origins
LAYERS = ["bert.bert.encoder.layer.1", "bert.bert.encoder.layer.0", "bert.bert.embeddings"]


def make_classifier():
    torch.manual_seed(0)
    return BertClassifier(ORIGINS, CONFIG, warmup_steps=2)


def test_padding_does_not_change_the_logits():
    model = make_classifier().eval()
    names = ["Ek", "Hundertwasser", "Šimková"]
    for name, logits in zip(names, model(pad(names)[0]), strict=True):
        torch.testing.assert_close(model(pad([name])[0])[0], logits)


def test_only_hidden_letters_are_asked_for():
    torch.manual_seed(0)
    model = MaskedNames(CONFIG, hidden=0.99999).eval()
    letters, lengths = pad(["Ek", "Šimková"])
    loss, count = model.loss((letters, lengths, None))
    assert count == sum(lengths)
    hidden = with_start(letters).masked_fill(with_start(letters) > 2, 2)
    logits = model.bert(hidden, attention_mask=hidden != PAD).logits
    likelihood = logits.log_softmax(-1)[:, 1:].gather(-1, letters[..., None])[..., 0][letters != PAD]
    torch.testing.assert_close(loss, -likelihood.mean())


class Recording(GradualUnfreezing):
    def __init__(self, stop_at):
        super().__init__(LAYERS)
        self.seen, self.stop_at = [], stop_at

    def on_train_batch_end(self, trainer, task, *_):
        names = {name for name, each in task.named_parameters() if each.grad is not None}
        found = [any(name.startswith(layer) for name in names) for layer in LAYERS]
        self.seen.append((trainer.current_epoch, any("classifier" in name for name in names), found))

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == self.stop_at:
            raise RuntimeError("the power fails")


def train(folder, epochs, stop_at=None, callbacks=(), **options):
    task, recorded = make_classifier(), Recording(stop_at)
    trainer = quiet_trainer(folder, max_epochs=epochs, callbacks=[recorded, *callbacks], **options)
    trainer.fit(task, Surnames(labelled=24, batch_size=8))
    return task, trainer, recorded.seen


def test_learning_rates_decay_by_layer_and_matrices_decay(tmp_path):
    task, trainer, _ = train(tmp_path, 1, limit_val_batches=0)
    groups = {group["name"]: group for group in trainer.optimizers[0].param_groups}
    peaks = {name.rpartition("layer.")[2].split()[0]: group["initial_lr"] for name, group in groups.items()}
    assert peaks == pytest.approx({"embeddings": 1e-3 * 0.8**3, "0": 1e-3 * 0.8**2, "1": 1e-3 * 0.8, "head": 1e-3})
    names = {id(each): name for name, each in task.named_parameters()}
    decaying = {names[id(each)] for group in groups.values() if group["weight_decay"] for each in group["params"]}
    matrices = {name for name, each in task.named_parameters() if each.ndim == 2 and "embeddings" not in name}
    assert decaying == matrices


def test_one_more_layer_is_trained_with_every_epoch(tmp_path):
    _, _, seen = train(tmp_path, 4, limit_val_batches=0)
    expected = [[False] * 3, [True, False, False], [True, True, False], [True] * 3]
    assert seen == [(epoch, True, expected[epoch]) for epoch in range(4) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 6])
def test_resumed_run_unfreezes_like_an_uninterrupted_one(tmp_path, step):
    straight, _, seen = train(tmp_path / "straight", 4, limit_val_batches=0)
    saved = lumen.ModelCheckpoint(every_n_train_steps=1)
    with pytest.raises(RuntimeError, match="the power fails"):
        train(tmp_path, 4, stop_at=step, callbacks=[saved], limit_val_batches=0)
    saved = lumen.ModelCheckpoint(every_n_train_steps=1)
    resumed, _, rest = train(tmp_path, 4, callbacks=[saved], limit_val_batches=0, resume="auto")
    assert rest == seen[step:]
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), resumed.parameters(), strict=True))


# -------------------------------------------------------------------- the configs, through the command line


def accuracy(tmp_path, *arguments):
    from_pretrained = f"--trainer.init_from.path={tmp_path}/bert_pretrain"
    run_model("fit", "bert_finetune", tmp_path, *(arguments or [from_pretrained]))
    run_model(
        "validate", "bert_finetune", tmp_path, "--ckpt_path=best", f"--output={tmp_path}/values.json", *arguments[1:]
    )
    return json.loads((tmp_path / "values.json").read_text())[0]["val_acc"]


@pytest.mark.slow
def test_pretrained_model_is_finetuned_and_exported_for_transformers(tmp_path):
    run_model("fit", "bert_pretrain", tmp_path, "--trainer.max_steps=20", "--trainer.limit_val_batches=2")
    init_from = f"--trainer.init_from.path={tmp_path}/bert_pretrain"
    run_model("fit", "bert_finetune", tmp_path, init_from, "--trainer.max_steps=3", "--trainer.callbacks=null")
    begun = MaskedNames.load_from_checkpoint(tmp_path / "bert_pretrain").bert.bert.embeddings.word_embeddings.weight
    task = BertClassifier.load_from_checkpoint(tmp_path / "bert_finetune").eval()
    assert (task.bert.bert.embeddings.word_embeddings.weight - begun).abs().max() < 1e-3

    output = tmp_path / "names-bert"
    assert main(["export", str(tmp_path / "bert_finetune"), "--module=bert", f"--output={output}"]) == 0
    shutil.copy(tmp_path / "bert_finetune/config.json", output)
    read, notes = BertForSequenceClassification.from_pretrained(output, output_loading_info=True)
    assert not any(notes.values()), notes
    assert list(read.config.id2label.values()) == ORIGINS
    ids = with_start(pad(["Ek", "Hundertwasser"])[0])
    expected = task.bert(ids, attention_mask=ids != PAD).logits
    assert torch.equal(read.eval()(ids, attention_mask=ids != PAD).logits, expected)


@pytest.mark.slow
@pytest.mark.time_limit(400)
@pytest.mark.torture  # minutes of training: more than the time limit on a slow processor
def test_pretraining_improves_origin_accuracy_to_60_percent(tmp_path):
    run_model("fit", "bert_pretrain", tmp_path)
    tuned = accuracy(tmp_path)
    assert tuned >= 0.60
    assert accuracy(tmp_path, "--trainer.init_from=null", "--trainer.name=raw") <= tuned - 0.03
