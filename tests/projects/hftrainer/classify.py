"""Classify reviews with BERT: compute_metrics, load_best_model_at_end, early stopping."""

import os

import numpy as np
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

OUTPUT = os.environ.get("OUTPUT", "out/classify")


def make_reviews(count, seed):
    """Reviews as numbers of words; words above 40 are praise. One in ten labels is wrong."""
    draw = np.random.default_rng(seed)
    reviews = []
    for number in range(count):
        words = draw.integers(1, 64, draw.integers(5, 12))
        label = int((words > 40).mean() > 0.35) ^ int(draw.random() < 0.1)
        reviews.append({"text": f"review {number}", "input_ids": words.tolist(), "label": label})
    return reviews


def collate(reviews):
    words = [torch.tensor(each["input_ids"]) for each in reviews]
    ids = torch.nn.utils.rnn.pad_sequence(words, batch_first=True)
    labels = torch.tensor([each["label"] for each in reviews])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    found = np.argmax(logits, axis=-1)
    hits = ((found == 1) & (labels == 1)).sum()
    f1 = 2 * hits / max(1, found.sum() + labels.sum())
    return {"accuracy": (found == labels).mean(), "f1": f1}


set_seed(7)
config = BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)

training_args = TrainingArguments(
    output_dir=OUTPUT,
    num_train_epochs=8,
    per_device_train_batch_size=32,
    per_device_eval_batch_size=64,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    weight_decay=0.1,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    logging_steps=1,
    report_to="none",
    train_sampling_strategy="sequential",
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=make_reviews(500, seed=0),
    eval_dataset=make_reviews(200, seed=1),
    data_collator=collate,
    compute_metrics=compute_metrics,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
trainer.train()

metrics = trainer.evaluate()
print("accuracy", metrics["eval_accuracy"])
trainer.save_model(training_args.output_dir + "/final")
