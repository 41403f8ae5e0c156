"""Train GPT-2 to write names: a Trainer with its own loss, and a callback."""

import json
import os
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

NAMES = "ada alan alonzo barbara dana donald edsger emmy grace john leslie manuel"


class Names(torch.utils.data.Dataset):
    """Names with an end, as codes of letters; padding has the label -100."""

    def __init__(self, copies, length=10):
        self.names, self.length = NAMES.split() * copies, length

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        codes = torch.tensor([ord(letter) - 96 for letter in self.names[index]] + [0])
        ids = nn.functional.pad(codes, (0, self.length - len(codes)))
        labels = nn.functional.pad(codes, (0, self.length - len(codes)), value=-100)
        return {"input_ids": ids, "labels": labels}


class WeightedTrainer(Trainer):
    """Trainer in which the end of a name counts more than a letter."""

    loss_is_scaled_for_ga = False

    def __init__(self, *args, end_weight=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.weights = torch.ones(27)
        self.weights[0] = end_weight

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        weights = self.weights.to(logits.device, logits.dtype)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weights)
        return (loss, outputs) if return_outputs else loss


class History(TrainerCallback):
    """Writes the losses, and stops when the evaluation is good enough."""

    def __init__(self, path, target):
        self.path, self.target = Path(path), target

    def on_train_begin(self, args, state, control, **kwargs):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs and state.is_world_process_zero:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, "loss": logs["loss"]}) + "\n")

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        if metrics["eval_loss"] < self.target:
            control.should_training_stop = True
        return control


def main(output):
    transformers.set_seed(3)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=27, n_positions=16, n_embd=32, n_layer=2, n_head=2, **dropout)
    model = GPT2LMHeadModel(config)
    args = TrainingArguments(
        output,
        max_steps=24,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,  # three batches per epoch: the second step has one
        learning_rate=1e-2,
        warmup_steps=0.1,  # a fraction of all steps
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=0.5,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        seed=3,
        train_sampling_strategy="sequential",
    )
    trainer = WeightedTrainer(
        model=model,
        args=args,
        train_dataset=Names(2),
        eval_dataset=Names(1),
        end_weight=2.0,
        callbacks=[History(f"{output}/history.jsonl", target=1.5)],
    )
    trainer.train()
    return trainer, model


if __name__ == "__main__":
    trainer, model = main(os.environ.get("OUTPUT", "out/names"))
