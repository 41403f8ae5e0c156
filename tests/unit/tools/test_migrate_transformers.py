"""`lumen migrate` on scripts for transformers' `Trainer`: what each argument becomes, and the notes."""

import ast
import dataclasses
import json
import re
import tempfile
from pathlib import Path

import pytest
from transformers import Seq2SeqTrainingArguments, TrainerCallback

from lumen.tools.migrate.transformers import EVENTS, NEUTRAL, NOTED, NOTES, TRANSLATED
from tests.helpers import ROOT
from tests.helpers.migrate import make_notebook, migrate_text, run_migrate, run_migrate_write

PAGE = ROOT / "docs/migration/from-transformers.md"
NAMED = {name for names in NOTED for name in names.split()}
OLD = {
    "warmup_ratio", "group_by_length", "local_rank", "logging_dir", "overwrite_output_dir", "save_safetensors",
    "use_mps_device", "enable_jit_checkpoint",
}  # fmt: skip


def test_every_argument_is_translated_neutral_or_noted():
    """A new release of transformers shows its new arguments here."""
    fields = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    assert fields - TRANSLATED - NEUTRAL - NAMED == set()
    assert (TRANSLATED | NEUTRAL | NAMED) - fields <= OLD
    assert not TRANSLATED & NEUTRAL
    assert not (TRANSLATED | NEUTRAL) & NAMED


def test_every_event_has_a_hook_or_note():
    events = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    notes = {name for names in NOTES for name in names.split() if name.startswith("on_")}
    assert events == EVENTS.keys() | notes


def make_tables():
    """Return the generated tables of the page: arguments that are left out, and events."""
    left_out = [f"| `{'`, `'.join(names.split())}` | {sentence} |" for names, sentence in NOTED.items()]
    hooks = [f"| `{event}` | `{hook}` |" for event, hook in EVENTS.items()]
    notes = [f"| `{name}` | {text} |" for names, text in NOTES.items() for name in names.split()
             if name.startswith("on_")]  # fmt: skip
    head = "|---|---|"
    return ["\n".join(["| argument | what to write |", head, *left_out]),
            "\n".join(["| `TrainerCallback` | `lumen.Callback` |", head, *hooks, *notes])]  # fmt: skip


def make_parts(path):
    """Return the generated parts of the page: the example before, its task and its end, and the tables."""
    before = (ROOT / "tests/projects/hftrainer/classify.py").read_text()
    after, _ = migrate(path, text=before)
    task = after[after.index("class ModelTask") : after.index("def make_reviews")].rstrip() + "\n"
    return [before[before.index("training_args =") :], task, after[after.index("columns =") :], *make_tables()]


def write_page(text, parts):
    """Return the page with new blocks of code and new tables."""
    codes, tables = iter(parts[:3]), iter(parts[3:])
    text = re.sub(r"(?<=```text\n).*?(?=```)", lambda _: next(codes), text, flags=re.S)
    return re.sub(r"\| (argument|`TrainerCallback`) \| .*?(?=\n\n)", lambda _: next(tables), text, count=2, flags=re.S)


def test_the_guide_shows_what_the_command_writes(tmp_path):
    """`python -m tests.unit.tools.test_migrate_transformers` updates the guide."""
    text = PAGE.read_text()
    assert write_page(text, make_parts(tmp_path)) == text
    rows = re.findall(r"^\| (.*?) \|", text[text.index("| `TrainingArguments`") : text.index("## Left out")], re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"TrainingArguments"} == TRANSLATED


SCRIPT = """\
from transformers import AutoModelForSequenceClassification, {imports}

model = AutoModelForSequenceClassification.from_pretrained("bert")
args = TrainingArguments({arguments})
trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test{more})
trainer.train()
{after}
"""


def migrate(path, arguments="", more="", after="", imports="Trainer, TrainingArguments", text=None):
    """Return the new text of a script, and the notes."""
    file = path / "train.py"
    file.write_text(text or SCRIPT.format(arguments=arguments, more=more, after=after, imports=imports))
    code, said = run_migrate_write(file, "--force")
    assert code == 0
    ast.parse(file.read_text())
    return file.read_text(), said


def join_calls(text):
    """Return the text with each call of several lines in one line."""
    return re.sub(r",\n\s*\)", ")", re.sub(r"\(\n\s+", "(", re.sub(r",\n\s+(?=[\w\"])", ", ", text)))


ARGUMENTS = [
    ("", "lumen.Trainer(max_epochs=3, gradient_clip_val=1.0, seed=42)"),
    ("'out'", "default_root_dir='out'"),
    ("num_train_epochs=2.0", "max_epochs=2,"),
    ("max_steps=70", "lumen.Trainer(max_steps=70,"),
    ("num_train_epochs=epochs", "max_epochs=epochs"),
    ("seed=seed", "seed=seed"),
    ("per_device_train_batch_size=4", "DataLoader(train, batch_size=4, shuffle=True, collate_fn="),
    ("per_device_eval_batch_size=4", "DataLoader(test, batch_size=4, collate_fn="),
    ("dataloader_num_workers=2", "num_workers=2"),
    ("remove_unused_columns=False", "shuffle=True, collate_fn=default_data_collator)"),
    ("gradient_accumulation_steps=4", "accumulate_grad_batches=4"),
    ("max_grad_norm=0.0", "lumen.Trainer(max_epochs=3, seed=42)"),
    ("fp16=cuda", 'precision="fp16" if cuda else "fp32"'),
    ("bf16=cuda, fp16=not cuda", 'precision="bf16" if cuda else "fp16" if not cuda else "fp32"'),
    ("bf16=True", 'precision="bf16"'),
    ("use_cpu=True", 'accelerator="cpu"'),
    ("no_cuda=cpu", 'accelerator="cpu" if cpu else "auto"'),
    ("learning_rate=2e-5", "ModelTask(model=model, lr=2e-5)"),
    ("learning_rate=2e-5", "AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.0, fused=True)"),
    ("weight_decay=0.01", "groups = decay_groups(self, self.hparams.weight_decay)"),
    ("adam_beta2=0.95", "betas=(0.9, 0.95)"),
    ("lr_scheduler_type='cosine', warmup_steps=9", "('cosine', optimizer, self.hparams.warmup_steps, steps)"),
    ("warmup_ratio=0.1, warmup_steps=9", "optimizer, self.hparams.warmup_steps, steps)"),
    ("warmup_ratio=0.1", "warmup = math.ceil(self.hparams.warmup_ratio * steps)"),
    ("eval_strategy='epoch'", "trainer.fit(task, train_loader, eval_loader)"),
    ("evaluation_strategy='no'", "trainer.fit(task, train_loader)\n"),
    ("eval_strategy=IntervalStrategy.STEPS, eval_steps=10", "val_check_interval=10"),
    ("save_strategy='no'", "enable_checkpointing=False"),
    ("save_steps=10, save_total_limit=3", "lumen.ModelCheckpoint(every_n_train_steps=10, keep_last=3)"),
    ("eval_strategy='epoch', load_best_model_at_end=True",
     'trainer.validate(task, eval_loader, ckpt_path="best")  # loads the best weights'),
    ("eval_strategy='epoch', save_strategy='epoch', metric_for_best_model='f1'",
     'lumen.ModelCheckpoint(monitor="eval_f1", mode="max", every_n_epochs=1, keep_last=-1)'),
    ("report_to=['wandb', 'tensorboard']", 'logger=["wandb", "tensorboard"]'),
    ("gradient_checkpointing=True", "self.model.gradient_checkpointing_enable()"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), ARGUMENTS)
def test_an_argument_becomes(arguments, expected, tmp_path):
    text, said = migrate(tmp_path, arguments)
    assert expected in join_calls(text)
    assert "TrainingArguments" not in text
    assert "; 0 places" in said


CODE = [
    ({"after": "print(trainer.evaluate())"}, "print(trainer.validate(task, eval_loader)[0])"),
    ({"arguments": "'o'", "after": "trainer.save_model()"}, "model.save_pretrained('o')"),
    ({"after": "trainer.save_model('best')"}, "model.save_pretrained('best')"),
    ({"arguments": "'o'", "after": "print(args.output_dir)"}, "print('o')"),
    ({"more": ", tokenizer=tok"}, "RemoveColumnsCollator(DataCollatorWithPadding(tok), columns)"),
    ({"more": ", callbacks=[EarlyStoppingCallback(3, 0.1), mine]", "arguments": "metric_for_best_model='f1'",
      "imports": "EarlyStoppingCallback, Trainer, TrainingArguments"},
     'lumen.EarlyStopping(monitor="eval_f1", mode="max", patience=3, min_delta=0.1)'),
    ({"more": ", compute_metrics=score, preprocess_logits_for_metrics=cut"},
     'self.predictions.add(self.preprocess_logits(outputs.logits, batch["labels"]))'),
]  # fmt: skip


@pytest.mark.parametrize(("script", "expected"), CODE)
def test_a_use_of_the_trainer_becomes(script, expected, tmp_path):
    text, _ = migrate(tmp_path, **script)
    assert expected in text


HELD = """\
from transformers import HfArgumentParser, Trainer, TrainingArguments
def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    trainer = Trainer(model=model, args=args, train_dataset=train if args.do_train else None)
    trainer.train()
"""
NOTES_OF = [
    ({"arguments": "neftune_noise_alpha=5"}, "neftune_noise_alpha is left out. Add the noise"),
    ({"arguments": "push_to_hub=True"}, "push_to_hub is left out. Call model.push_to_hub"),
    ({"arguments": "made_up=5"}, "made_up is left out. Lumen has no such argument."),
    ({"arguments": "optim='adafactor'"}, "optim='adafactor': Write configure_optimizers"),
    ({"arguments": "report_to='comet_ml'"}, "report_to='comet_ml'"),
    ({"arguments": "eval_strategy='steps' if test else 'no'"}, "eval_strategy is known when the script runs."),
    ({"arguments": "num_train_epochs=2.5"}, "num_train_epochs=2.5"),
    ({"arguments": "eval_steps=0.1"}, "eval_steps=0.1 is a share of all steps."),
    ({"arguments": "train_sampling_strategy='group_by_length'"}, "train_sampling_strategy: Pass a sampler"),
    ({"arguments": "gradient_checkpointing=saves"}, "gradient_checkpointing is known when the script runs."),
    ({"more": ", **rest"}, "**rest is left out. Write its arguments one by one."),
    ({"more": ", optimizers=(a, b)"}, "optimizers is left out. Write configure_optimizers"),
    ({"after": "trainer.predict(test)"}, "predict: Write predict_step"),
    ({"after": "result = trainer.train(resume_from_checkpoint=True)"}, "fit returns None."),
    ({"after": "print(args)"}, "args is read in other places"),
    ({"after": "Trainer(model=model).train()"}, "not edited: a file needs one statement that assigns its only Trainer"),
    ({"text": HELD}, "args is known when the script runs: write its strategies, schedule and metric here."),
]  # fmt: skip


@pytest.mark.parametrize(("script", "note"), NOTES_OF)
def test_what_is_left_out_has_a_note(script, note, tmp_path):
    _, said = migrate(tmp_path, **script)
    assert note in said


def test_parsed_arguments_are_read_when_the_script_runs(tmp_path):
    text, _ = migrate(tmp_path, text=HELD)
    assert "lr=args.learning_rate" in text
    assert "max_epochs=int(args.num_train_epochs)" in text
    assert ") if args.do_train else None" in text


def test_a_second_run_prints_no_edit(tmp_path):
    migrate(tmp_path, "'out', eval_strategy='epoch'", ", compute_metrics=score")
    code, diff, said = run_migrate(tmp_path)
    assert (code, diff) == (0, "")
    assert said == "nothing to edit; 0 places to check by hand\n"


def test_a_notebook_gets_the_task_after_the_imports(tmp_path):
    sources = ["def f(): ...", SCRIPT.format(imports="Trainer, TrainingArguments", arguments="", more="", after="")]
    text, notes = migrate_text(tmp_path, make_notebook(*sources), "a.ipynb")
    code = ["".join(cell["source"]) for cell in json.loads(text)["cells"]]
    assert code[0] == "def f(): ..."
    assert code[1].index("import lumen") < code[1].index("class ModelTask") < code[1].index("trainer = lumen.Trainer(")
    assert notes == []


CALLBACK = """\
from transformers import TrainerCallback, TrainerControl

class Mine(TrainerCallback):
    def on_step_end(self, args, state, control: TrainerControl, model=None, tokenizer=None, **kwargs):
        if state.global_step > 3:
            print(args.learning_rate, tokenizer, state.epoch, model)
            return control

    def on_save(self, args, state, control, **kwargs):
        pass
"""


MIGRATED = """\
import lumen

class Mine(lumen.Callback):
    def on_step_end(self, trainer, pl_module):
        model = pl_module.model
        if trainer.global_step > 3:
            print(args.learning_rate, tokenizer, trainer.current_epoch, model)
            return
"""


def test_a_callback_gets_the_hooks_of_lumen(tmp_path):
    text, said = migrate(tmp_path, text=CALLBACK)
    assert text.startswith(MIGRATED)
    assert "train.py:6: args is no argument of on_step_end. Read trainer or pl_module." in said
    assert "train.py:6: tokenizer is no argument of on_step_end." in said
    assert "train.py:9: on_save is never called. Write on_save_checkpoint" in said


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(write_page(PAGE.read_text(), make_parts(Path(directory))))
