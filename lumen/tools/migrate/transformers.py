"""Edits of scripts for transformers' `Trainer`: a task, loaders and a `lumen.Trainer` in place of its arguments."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from textwrap import indent
from typing import Any, final

from lumen.tools.migrate.names import get_short_name
from lumen.tools.migrate.project import ParsedFile
from lumen.tools.migrate.python import MigrationNote
from lumen.tools.migrate.source import EditableSource

#: Arguments of `TrainingArguments` that the command translates, by what they become.
TRANSLATED: Mapping[str, str] = {
    "output_dir": "`Trainer(default_root_dir=...)`",
    "run_name": "`Trainer(name=...)`",
    "num_train_epochs": "`max_epochs`; 3 there if left out",
    "max_steps": "`max_steps`; a step is an optimizer update in both",
    "per_device_train_batch_size per_device_eval_batch_size": "`batch_size` of the loaders; 8 there if left out",
    "dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers dataloader_drop_last": (
        "arguments of the loaders"
    ),
    "train_sampling_strategy": '`shuffle=True`, in another order; "sequential": no shuffling',
    "remove_unused_columns": "`RemoveColumnsCollator` in the loaders",
    "gradient_accumulation_steps": "`accumulate_grad_batches`, or `global_batch_size` for any hardware",
    "learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon optim": "AdamW in `configure_optimizers`",
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio": "`get_scheduler` in `configure_optimizers`",
    "max_grad_norm": "`gradient_clip_val`; 1.0 there if left out, no clipping here",
    "bf16 fp16": '`precision="bf16"`, `"fp16"`: autocast in both',
    "tf32": '`matmul_precision="high"`',
    "torch_compile": "`compile=True`",
    "gradient_checkpointing gradient_checkpointing_kwargs": "a call in the task's `__init__`",
    "eval_strategy eval_steps": "each epoch; `val_check_interval=500` counts steps",
    "save_strategy save_steps save_total_limit": "`lumen.ModelCheckpoint(every_n_train_steps=500, keep_last=2)`",
    "load_best_model_at_end metric_for_best_model greater_is_better": (
        '`ModelCheckpoint(monitor=..., mode="max")`, and `validate(ckpt_path="best")` after `fit`'
    ),
    "logging_steps": "`log_every_n_steps`; the value of that step, there the mean since the last",
    "report_to": '`logger=["tensorboard", "wandb"]`',
    "seed": "`seed`; 42 there if left out, drawn and recorded here",
    "full_determinism": "`deterministic=True`",
    "use_cpu": '`accelerator="cpu"`',
}
#: Arguments that the command leaves out with a note, unless their value is False or empty.
NOTED: Mapping[str, str] = {
    "optim_args optim_target_modules": "Build the optimizer in configure_optimizers.",
    "label_smoothing_factor": "Compute the loss with cross_entropy(..., label_smoothing=...) in training_step.",
    "activation_checkpointing activation_checkpointing_kwargs": "Call model.gradient_checkpointing_enable().",
    "torch_compile_backend torch_compile_mode": 'Write Trainer(compile={"backend": ..., "mode": ...}).',
    "use_liger_kernel liger_kernel_config": "Apply the kernels to the model before the task is built.",
    "neftune_noise_alpha": "Add the noise in a forward hook of the model's embeddings.",
    "auto_find_batch_size": "Write Trainer(halve_on_oom=True), which keeps the batch, or add lumen.BatchSizeFinder().",
    "logging_strategy": 'Write self.log("loss", loss, on_epoch=True) for values of epochs.',
    "include_num_input_tokens_seen": "Add lumen.ThroughputMonitor, which counts tokens.",
    "eval_delay eval_on_start": "Call trainer.validate(task, eval_loader) where an evaluation is wanted.",
    "include_for_metrics batch_eval_metrics eval_do_concat_batches": "Edit validation_step, which collects the outputs.",
    "prediction_loss_only label_names": "Edit validation_step, which collects the outputs and labels.",
    "predict_with_generate generation_max_length generation_num_beams generation_config": (
        "In validation_step, add self.model.generate(...) to self.predictions in place of the logits."
    ),
    "push_to_hub hub_model_id hub_strategy": "Call model.push_to_hub(...) after fit.",
    "ignore_data_skip": "A resumed run always continues at its position in the data.",
    "data_seed": "The trainer's seed also decides the order of the data.",
    "length_column_name group_by_length sortish_sampler": "Pass a sampler that groups by length to the DataLoader.",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout": (
        "Write Trainer(strategy=lumen.DDP(...)), with torch's names of arguments."
    ),
    "fsdp fsdp_config": 'Write Trainer(strategy=lumen.FSDP(wrap="BertLayer")), with the class of the model\'s layers.',
    "deepspeed parallelism_config accelerator_config": "Write Trainer(strategy=lumen.FSDP(...)); there is no DeepSpeed.",
    "resume_from_checkpoint": 'Write Trainer(resume="auto"), or resume with the path of a checkpoint of Lumen.',
    "fp16_full_eval bf16_full_eval": 'Write Trainer(precision="bf16-true"), or convert the model before validate.',
    "debug": "Write Trainer(detect_anomaly=True).",
}
#: Arguments that change no number, or that Lumen does without. Older versions have some of them.
NEUTRAL = frozenset(
    [
        "average_tokens_across_devices",
        "use_cache",
        "torch_empty_cache_steps",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
        "eval_use_gather_object",
        "eval_accumulation_steps",
        "save_only_model",
        "save_on_each_node",
        "enable_jit_checkpoint",
        "hub_token",
        "hub_private_repo",
        "hub_always_push",
        "hub_revision",
        "dataloader_pin_memory",
        "restore_callback_states_from_checkpoint",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "skip_memory_metrics",
        "do_train",
        "do_eval",
        "do_predict",
        "local_rank",
        "logging_dir",
        "overwrite_output_dir",
        "save_safetensors",
        "use_mps_device",
    ]
)
_OLD_NAMES = {"evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu", "tokenizer": "processing_class"}
_NOTE_OF = {name: sentence for names, sentence in NOTED.items() for name in names.split()}
_KNOWN = {name for names in TRANSLATED for name in names.split()}
_TRAINERS, _ARGUMENTS = ("Trainer", "Seq2SeqTrainer"), ("TrainingArguments", "Seq2SeqTrainingArguments")
_POSITIONAL = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
_TRAINER_NOTES = {
    "model_init": "Build the model, and pass it to the task.",
    "compute_loss_func": 'Write loss = compute_loss_func(outputs, batch["labels"]) in training_step.',
    "optimizers": "Return the optimizer and the schedule from configure_optimizers of the task.",
    "optimizer_cls_and_kwargs": "Build the optimizer in configure_optimizers of the task.",
}
_CALLBACKS = ("EarlyStoppingCallback", "TrainerCallback")
_METHOD_NOTES = {
    "predict": "Write predict_step in the task. trainer.predict(task, DataLoader(...)) returns its value per batch.",
    "state": "Read trainer.global_step, current_epoch and callback_metrics; metrics.csv in trainer.run_directory has "
    "all values.",
    "add_callback": "Pass the callback to Trainer(callbacks=[...]).",
    "push_to_hub": "Write model.push_to_hub(...).",
    "model": "Read task.model.",
    **dict.fromkeys(("log_metrics", "save_metrics"), "Lumen writes metrics.csv into trainer.run_directory."),
}
_OVERRIDE_NOTES = {
    **dict.fromkeys(("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler"),
                    "Write configure_optimizers."),
    **dict.fromkeys(("get_train_dataloader", "_get_train_sampler", "get_eval_dataloader", "_get_eval_sampler"),
                    "Build the DataLoader that fit receives."),
    **dict.fromkeys(("training_step", "prediction_step", "evaluate", "evaluation_loop", "predict"),
                    "Write training_step(self, batch), validation_step(self, batch) or predict_step(self, batch)."),
    **dict.fromkeys(("save_model", "_save", "_save_checkpoint"), "Write on_save_checkpoint."),
    "log": "Write a lumen.Logger with log_metrics(self, metrics, step).",
}  # fmt: skip
#: Events of `TrainerCallback` that are hooks of `lumen.Callback`.
EVENTS: Mapping[str, str] = {
    "on_train_begin": "on_train_start", "on_train_end": "on_train_end", "on_epoch_begin": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end", "on_step_begin": "on_train_batch_start", "on_step_end": "on_step_end",
    "on_pre_optimizer_step": "on_before_optimizer_step", "on_substep_end": "on_train_batch_end",
    "on_evaluate": "on_validation_end", "on_log": "on_step_end", "on_predict": "on_predict_end",
}  # fmt: skip
EVENT_NOTES: Mapping[str, str] = {
    "on_init_end": "Write setup(self, trainer, task, stage).",
    "on_optimizer_step": "Write on_step_end, or on_before_optimizer_step.",
    "on_prediction_step": "Write on_validation_batch_end.",
    "on_save": "Write on_save_checkpoint(self, trainer, task, checkpoint), or on_train_end.",
    "on_push_begin": "Call model.push_to_hub(...) after fit.",
}
_EVENT_VALUES = {
    "state.global_step": "trainer.global_step", "state.max_steps": "trainer.max_steps",
    "state.epoch": "trainer.current_epoch", "state.is_world_process_zero": "trainer.is_global_zero",
    "state.is_local_process_zero": "trainer.is_global_zero", "args.output_dir": "trainer.run_directory",
    "args.num_train_epochs": "trainer.max_epochs", "control.should_training_stop": "trainer.should_stop",
    "kwargs['model']": "pl_module.model", "kwargs.get('model')": "pl_module.model",
}  # fmt: skip
_EVENT_PARAMETERS = {
    "model": "pl_module.model", "metrics": "trainer.newest_values", "logs": "trainer.newest_values",
    "optimizer": "trainer.optimizers[0]", "lr_scheduler": "trainer.lr_scheduler_configs[0].scheduler",
}  # fmt: skip
_UNKNOWN = object()
_CAUSAL, _TOKENS = r"ForCausalLM|LMHeadModel", r"For(MaskedLM|TokenClassification|Seq2SeqLM|ConditionalGeneration)"
_WIDTH = 100


def uses_trainer(file: ParsedFile) -> bool:
    """Return True if a file uses the `Trainer` of transformers, its arguments or its callbacks."""
    names = (*_TRAINERS, *_ARGUMENTS, *_CALLBACKS)
    return any(_get_class(file, node) in names for node in ast.walk(file.tree))


def _get_class(file: ParsedFile, node: ast.AST) -> str | None:
    """Return the short name of the object of transformers that a name or attribute refers to, or None."""
    full = file.names.get_full_name(node) if isinstance(node, ast.Name | ast.Attribute) else None
    return get_short_name(full) if full is not None and full.startswith("transformers.") else None


def _binds(function: ast.FunctionDef, name: str | None) -> bool:
    """Return True if a function has a parameter or a local variable of a name."""
    names = {each.arg for each in ast.walk(function.args) if isinstance(each, ast.arg)}
    stored = (each for each in ast.walk(function) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
    return name in names | {each.id for each in stored}


@final
class TrainerEditor:
    """Editor of one file that uses transformers' `Trainer`.

    Args:
        file: The text and syntax tree of the file.
    """

    def __init__(self, file: ParsedFile) -> None:
        self._file, self._source = file, EditableSource(file.text)
        self._notes: dict[MigrationNote, None] = {}
        self._imports: set[str] = set()  # full names to import; a module for a name without a dot
        self._values: dict[str, str] = {}  # the texts of the arguments
        self._task = self._find_free_name("ModelTask")
        classes = [node for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
        bases = {node: {_get_class(file, base) for base in node.bases} for node in classes}
        self._trainers = {node.name: node for node in classes if bases[node] & {*_TRAINERS}}
        self._callbacks = [node for node in classes if "TrainerCallback" in bases[node]]

    def edit(self) -> tuple[str, list[MigrationNote]]:
        """Return the text with all edits, and the notes."""
        calls = [node for node in ast.walk(self._file.tree) if isinstance(node, ast.Call)]
        trainers = [node for node in calls if self._is_trainer(node.func)]
        assigned = {node.value: node for node in ast.walk(self._file.tree) if isinstance(node, ast.Assign)}
        if len(trainers) == 1 and trainers[0] in assigned:
            self._edit_run(assigned[trainers[0]], trainers[0])
        for each in trainers if len(trainers) > 1 or not self._values else ():
            self._note(each, "not edited: write the script so that one statement assigns the only Trainer of the file.")
        for each in self._trainers.values() if not trainers else ():
            self._note(each, "not edited: move this class into the file that builds the trainer.")
        for node in self._callbacks:
            self._edit_callback(node)
        for call in calls:
            if _get_class(self._file, call.func) == "EarlyStoppingCallback":
                self._edit_early_stopping(call)
        self._edit_imports()
        return self._source.apply_edits(), sorted(self._notes)

    def _note(self, node: ast.AST, sentence: str) -> None:
        self._notes[MigrationNote(self._source.get_line_number(self._source.get_span(node)[0]), sentence)] = None

    def _is_trainer(self, node: ast.expr) -> bool:
        return _get_class(self._file, node) in _TRAINERS or getattr(node, "id", "") in self._trainers

    def _find_free_name(self, name: str) -> str:
        """Return the name, with underscores if the file binds it already."""
        return self._find_free_name(f"{name}_") if name in self._file.names.bound else name

    def _get_text(self, node: ast.AST) -> str:
        text = self._source.get_text(node)
        return ast.unparse(node) if "\n" in text else text

    def _use(self, *names: str) -> None:
        self._imports.update(names)

    def _walk_scope(self, node: ast.AST, name: str | None) -> Iterator[ast.AST]:
        """Yield the nodes of the scope that binds a name for a node: its function, or the module without others."""
        functions = [each for each in ast.walk(self._file.tree) if isinstance(each, ast.FunctionDef)]
        binding = [each for each in functions if _binds(each, name)]
        holding = [each for each in binding if any(part is node for part in ast.walk(each))]
        scope = holding[-1] if holding else self._file.tree
        others = {part for each in binding if each not in holding for part in ast.walk(each)}
        yield from (each for each in ast.walk(scope) if each not in others)

    # ------------------------------------------------------------------ arguments

    def _get(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or `_UNKNOWN` if it is no literal."""
        text = self._values.get(name, repr(default))
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found = re.fullmatch(r"(?:\w+\.)*(?:\w+Strategy|SchedulerType)\.(\w+)", text)
            return found[1].lower() if found else _UNKNOWN

    def _read_arguments(self, trainer: ast.Call) -> dict[str, ast.expr]:
        """Read the arguments of the trainer and of its `TrainingArguments`, and note those that are left out."""
        given: dict[str, ast.expr] = dict(zip(_POSITIONAL, trainer.args, strict=False))
        given |= {_OLD_NAMES.get(each.arg, each.arg): each.value for each in trainer.keywords if each.arg}
        source = given.get("args")
        name = getattr(source, "id", None)
        found = [each for each in self._walk_scope(trainer, name) if isinstance(each, ast.Assign)
                 and name in [getattr(target, "id", None) for target in each.targets]]  # fmt: skip
        call = found[0].value if len(found) == 1 else source
        is_known = isinstance(call, ast.Call) and _get_class(self._file, call.func) in _ARGUMENTS
        if isinstance(call, ast.Call) and is_known and all(each.arg for each in call.keywords):
            self._values = {"output_dir": self._get_text(each) for each in call.args[:1]}
            for item in call.keywords:
                key = _OLD_NAMES.get(str(item.arg), str(item.arg))
                self._values[key] = self._get_text(item.value)
                if key not in _KNOWN | NEUTRAL and (self._get(key) or key not in _NOTE_OF):
                    self._note(item.value, f"{key} is left out. {_NOTE_OF.get(key, 'Lumen has no such argument.')}")
            if found and name is not None:
                self._edit_reads(name, found[0])
        elif source is not None:
            text = self._get_text(source)
            of_run = (
                "seed output_dir max_grad_norm learning_rate weight_decay gradient_accumulation_steps logging_steps"
            )
            batches = "per_device_train_batch_size per_device_eval_batch_size bf16 fp16"
            self._values = {key: f"{text}.{key}" for key in f"{of_run} {batches}".split()}
            self._values["num_train_epochs"] = f"int({text}.num_train_epochs)"
            self._note(
                source, f"{text} is known when the script runs. Its other arguments (strategies, schedule, metric) are "
                "not read: write them here, or write a config for lumen fit."
            )  # fmt: skip
        else:
            self._values = {"output_dir": '"tmp_trainer"'}
        return given

    def _edit_reads(self, name: str, statement: ast.Assign) -> None:
        """Replace reads of `TrainingArguments` by their values, and remove the statement if no other use is left."""
        nodes = [*self._walk_scope(statement, name)]
        uses = [each for each in nodes if getattr(each, "id", None) == name]
        reads = [each for each in nodes if getattr(getattr(each, "value", None), "id", None) == name
                 and isinstance(each, ast.Attribute) and each.attr in self._values]  # fmt: skip
        for each in reads:
            self._source.replace_node(each, self._values[each.attr])
        if len(uses) == len(reads) + 2:  # The others are the assignment and the argument of the trainer.
            start, end = self._source.get_span(statement)
            self._source.replace(self._source.find_line_start(start), self._source.find_line_end(end - 1), "")
        else:
            self._note(statement, f"{name} is read in other places, but not by Lumen.")

    # ------------------------------------------------------------------ the run

    def _edit_run(self, statement: ast.Assign, call: ast.Call) -> None:
        """Replace the statement that builds the trainer, and the calls of the trainer."""
        given = self._read_arguments(call)
        texts = {name: self._get_text(each) for name, each in given.items()}
        for name, sentence in _TRAINER_NOTES.items():
            if name in given:
                self._note(given[name], f"{name} is left out. {sentence}")
        own = getattr(call.func, "id", "") if getattr(call.func, "id", "") in self._trainers else None
        model = texts.get("model", "model")
        evaluates = "eval_dataset" in texts and texts["eval_dataset"] != "None"
        metrics = texts.get("compute_metrics") if evaluates else None
        hyper = self._list_hyperparameters()
        task, train, evaluation = map(self._find_free_name, ("task", "train_loader", "eval_loader"))
        at = self._source.get_indent(self._source.get_span(statement)[0])
        lines: list[str] = []

        def add(head: str, arguments: Mapping[str, str] | list[str], tail: str = ")") -> None:
            items = arguments if isinstance(arguments, list) else [f"{key}={value}" for key, value in arguments.items()]
            lines.extend(_write_call(head, items, tail, _WIDTH - len(at)))

        if not isinstance(given.get("model"), ast.Name | ast.Attribute):
            lines.append(f"model = {model}")
            model = "model"
        more = {"compute_metrics": metrics, "preprocess_logits": texts.get("preprocess_logits_for_metrics")}
        arguments = [f"{'model=' if own else ''}{model}", *(f"{key}={value}" for key, value in hyper.items())]
        arguments += [f"{key}={value}" for key, value in more.items() if value and evaluates]
        known = {*_POSITIONAL, *more, *_TRAINER_NOTES, "callbacks", "processing_class", "preprocess_logits_for_metrics"}
        arguments += [f"{name}={text}" for name, text in texts.items() if name not in known]
        collator = self._write_collator(texts, model, add)
        task_class = re.sub("Trainer$", "Task", own) if own else self._task
        add(f"{task} = {task_class}(", arguments)
        add(f"{train} = DataLoader(", self._list_loader_arguments(texts.get("train_dataset", "None"), collator, True))
        loader = self._list_loader_arguments(texts.get("eval_dataset", "None"), collator, False)
        if evaluates:
            add(f"{evaluation} = DataLoader(", loader)
        validates = evaluates and self._get("eval_strategy", "no") not in ("no", None)
        target = self._get_text(statement.targets[0])
        add(f"{target} = lumen.Trainer(", self._list_trainer_arguments(given.get("callbacks"), validates))
        self._use("lumen", "torch", "torch.utils.data.DataLoader")
        self._source.replace_node(statement, f"{self._source.newline}{at}".join(lines))
        words = f"{task}, {train}{f', {evaluation}' if validates else ''}"
        best = f'{target}.validate({task}, {evaluation}, ckpt_path="best")  # loads the best weights'
        after = f"{{}}{best}" if validates and self._get("load_best_model_at_end") else ""
        for each in ast.walk(self._file.tree):
            if isinstance(each, ast.Expr | ast.Assign | ast.Return) and isinstance(each.value, ast.Call):
                self._edit_train(each, each.value, target, words, after)
            if isinstance(each, ast.Call):
                self._edit_call(each, target, f"{task}, {evaluation}" if evaluates else None, texts, model)
            if isinstance(each, ast.Attribute) and self._get_text(each.value) == target and each.attr in _METHOD_NOTES:
                self._note(each, f"{target}.{each.attr}: {_METHOD_NOTES[each.attr]}")
        owner = self._trainers[own] if own else None
        self._insert_task(
            self._write_task(hyper, metrics, more["preprocess_logits"], evaluates, owner, given), statement
        )
        if owner is not None and own is not None:
            self._edit_subclass(owner, own, task_class)

    def _edit_train(self, statement: ast.stmt, call: ast.Call, target: str, words: str, after: str) -> None:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "train":
            return
        if self._get_text(call.func.value) != target:
            return
        if call.args or call.keywords:
            self._note(call, f"{_NOTE_OF['resume_from_checkpoint']} The arguments of train are left out.")
        if not isinstance(statement, ast.Expr):
            self._note(call, "fit returns None. Read trainer.callback_metrics.")
        at = self._source.get_indent(self._source.get_span(statement)[0])
        self._source.replace_node(call, f"{target}.fit({words})" + after.format(f"{self._source.newline}{at}"))

    def _edit_call(self, call: ast.Call, target: str, words: str | None, texts: Mapping[str, str], model: str) -> None:
        """Edit a call of `evaluate` or `save_model`."""
        method = call.func
        if not isinstance(method, ast.Attribute) or self._get_text(method.value) != target:
            return
        if method.attr == "evaluate":
            if call.args or call.keywords or words is None:
                self._note(call, f"Write {target}.validate(task, DataLoader(...))[0].")
            else:
                self._source.replace_node(call, f"{target}.validate({words})[0]")
        elif method.attr == "save_model":
            where = [self._get_text(each) for each in (*call.args, *(item.value for item in call.keywords))][:1]
            start, end = self._source.get_span(method)
            self._source.replace(start, end, f"{model}.save_pretrained")
            if not where:
                self._source.replace(end, self._source.get_span(call)[1], f"({self._values['output_dir']})")
            if "processing_class" in texts:
                self._note(call, f"Also write {texts['processing_class']}.save_pretrained(...).")

    def _list_hyperparameters(self) -> dict[str, str]:
        """Return the arguments of the task that configure its optimizer."""
        values = self._values
        found = {"lr": values.get("learning_rate", "5e-5")}
        if self._get("weight_decay", 0.0):
            found["weight_decay"] = values["weight_decay"]
        if {"adam_beta1", "adam_beta2"} & values.keys():
            found["betas"] = f"({values.get('adam_beta1', '0.9')}, {values.get('adam_beta2', '0.999')})"
        if "adam_epsilon" in values:
            found["eps"] = values["adam_epsilon"]
        warmup = self._get("warmup_steps", 0)
        if self._get("warmup_ratio", 0):
            found["warmup_ratio"] = values["warmup_ratio"]
        elif isinstance(warmup, float) and 0 < warmup < 1:
            found["warmup_ratio"] = values["warmup_steps"]
        elif warmup:
            found["warmup_steps"] = values["warmup_steps"]
        return found

    def _write_collator(self, texts: Mapping[str, str], model: str, add: Any) -> str:
        """Add the statement that builds the collator, if one is needed, and return the collator."""
        collator = texts.get("data_collator", "None")
        if collator == "None":
            is_padding = "processing_class" in texts
            self._use(f"transformers.{'DataCollatorWithPadding' if is_padding else 'default_data_collator'}")
            collator = (
                f"DataCollatorWithPadding({texts['processing_class']})" if is_padding else "default_data_collator"
            )
        if self._get("remove_unused_columns", True) is False:
            return collator
        self._use("inspect", "transformers.trainer_utils.RemoveColumnsCollator")
        columns = self._find_free_name("columns")
        base = f"{model}.get_base_model()" if "get_peft_model" in self._file.names.imported else model
        add(f"{columns} = [", [f"*inspect.signature({base}.forward).parameters", '"label"', '"label_ids"'], "]")
        name = self._find_free_name("collate_columns")
        add(f"{name} = RemoveColumnsCollator(", [collator, columns])
        return name

    def _list_loader_arguments(self, dataset: str, collator: str, is_training: bool) -> list[str]:
        size = self._values.get(f"per_device_{'train' if is_training else 'eval'}_batch_size", "8")
        found = [dataset, f"batch_size={size}"]
        if is_training and self._get("train_sampling_strategy", "random") != "sequential":
            found.append("shuffle=True")
        names = ["num_workers", "prefetch_factor", "persistent_workers", "drop_last"]
        texts = ((name, self._values.get(f"dataloader_{name}")) for name in names)
        return [*found, f"collate_fn={collator}", *(f"{name}={text}" for name, text in texts if text is not None)]

    def _list_trainer_arguments(self, callbacks: ast.expr | None, validates: bool) -> dict[str, str]:
        """Return the arguments of `lumen.Trainer`."""
        values, found = self._values, dict[str, str]()
        epochs = self._get("num_train_epochs", 3)
        if self._get("max_steps", -1) not in (-1, 0):
            found["max_steps"] = values["max_steps"]
        else:
            is_number = isinstance(epochs, int | float)
            found["max_epochs"] = str(-int(-epochs // 1)) if is_number else values["num_train_epochs"]
        for name, ours in {"use_cpu": 'accelerator="cpu"', "tf32": 'matmul_precision="high"',
                           "torch_compile": "compile=True", "full_determinism": "deterministic=True"}.items():  # fmt: skip
            if self._get(name):
                found.update([ours.split("=")])
        kinds = {name: self._get(name, False) for name in ("bf16", "fp16")}
        unsure = [f'"{name}" if {values[name]} else ' for name, value in kinds.items() if value is _UNKNOWN]
        sure = next((name for name, value in kinds.items() if value is True), "fp32")
        if unsure or sure != "fp32":
            found["precision"] = f'{"".join(unsure)}"{sure}"'
        if self._get("gradient_accumulation_steps", 1) != 1:
            found["accumulate_grad_batches"] = values["gradient_accumulation_steps"]
        if self._get("max_grad_norm", 1.0):
            found["gradient_clip_val"] = values.get("max_grad_norm", "1.0")
        if validates and self._get("eval_strategy") == "steps":
            found["val_check_interval"] = values.get("eval_steps", values.get("logging_steps", "500"))
        if validates:
            found["num_sanity_val_steps"] = "0"
        if "logging_steps" in values:
            found["log_every_n_steps"] = values["logging_steps"]
        items = [*self._list_callbacks(callbacks), *self._list_checkpoint_callbacks(validates)]
        if items:
            found["callbacks"] = f"[{', '.join(items)}]"
        if self._get("save_strategy", "steps") in ("no", None):
            found["enable_checkpointing"] = "False"
        self._add_loggers(found)
        found |= {ours: values[name] for name, ours in (("output_dir", "default_root_dir"), ("run_name", "name"))
                  if self._get(name) is not None}  # fmt: skip
        return found | {"seed": values.get("seed", "42")}

    def _add_loggers(self, found: dict[str, str]) -> None:
        loggers = self._get("report_to", "none")
        loggers = [loggers] if isinstance(loggers, str) else list(loggers or ()) if loggers is not _UNKNOWN else ["all"]
        ours = [f'"{name}"' for name in loggers if name in ("tensorboard", "wandb", "mlflow", "aim")]
        if ours:
            found["logger"] = f"[{', '.join(ours)}]"
        if rest := {*loggers} - {"none", *(name.strip('"') for name in ours)}:
            line = next(node for node in ast.walk(self._file.tree) if getattr(node, "arg", "") == "report_to")
            self._note(line, f"report_to={', '.join(rest)}: write Trainer(logger=[...]) with names that Lumen has.")

    def _list_callbacks(self, callbacks: ast.expr | None) -> list[str]:
        """Return the texts of the callbacks that were passed to the trainer."""
        if not isinstance(callbacks, ast.List | ast.Tuple):
            return [] if callbacks is None else [f"*{self._get_text(callbacks)}"]
        calls = [(each, _get_class(self._file, getattr(each, "func", each))) for each in callbacks.elts]
        for each, name in calls:
            if name not in (None, "EarlyStoppingCallback"):
                self._note(each, f"{name} is left out. Lumen has loggers and a progress bar.")
        kept = [(each, name) for each, name in calls if name in (None, "EarlyStoppingCallback")]
        return [self._write_early_stopping(each) if name and isinstance(each, ast.Call) else self._get_text(each)
                for each, name in kept]  # fmt: skip

    def _get_monitor(self) -> tuple[str, str]:
        """Return the text of the monitor's name, and the mode."""
        metric = self._get("metric_for_best_model", "loss")
        is_greater = self._get("greater_is_better", None)
        if not isinstance(metric, str):
            return f'f"eval_{{{self._values["metric_for_best_model"]}}}"', "max"
        mode = "max" if is_greater or (is_greater is None and not metric.endswith("loss")) else "min"
        return f'"eval_{metric.removeprefix("eval_")}"', mode

    def _write_early_stopping(self, call: ast.Call) -> str:
        given = dict(zip(("patience", "min_delta"), map(self._get_text, call.args), strict=False))
        given |= {{"early_stopping_patience": "patience"}.get(str(each.arg), "min_delta"): self._get_text(each.value)
                  for each in call.keywords}  # fmt: skip
        monitor, mode = self._get_monitor()
        words = [monitor, f'mode="{mode}"', *(f"{key}={value}" for key, value in ({"patience": "1"} | given).items())]
        return f"lumen.EarlyStopping({', '.join(words)})"

    def _list_checkpoint_callbacks(self, validates: bool) -> list[str]:
        """Return a `ModelCheckpoint`, if the arguments say when to save or which checkpoint is best."""
        strategy, needs_best = self._get("save_strategy", "steps"), self._get("load_best_model_at_end")
        named = {"save_strategy", "save_steps", "save_total_limit"} & self._values.keys()
        if strategy in ("no", None) or not (named or needs_best):
            return []
        words = []
        if validates and (needs_best or strategy == "best" or "metric_for_best_model" in self._values):
            monitor, mode = self._get_monitor()
            words = [f"monitor={monitor}", f'mode="{mode}"']
        if strategy in ("steps", "epoch"):
            steps = self._values.get("save_steps", "500")
            words.append(f"every_n_train_steps={steps}" if strategy == "steps" else "every_n_epochs=1")
        words.append(f"keep_last={self._values.get('save_total_limit', '-1')}")
        return [f"lumen.ModelCheckpoint({', '.join(words)})"]

    # ------------------------------------------------------------------ the task

    def _write_task(
        self, hyper: Mapping[str, str], metrics: str | None, preprocess: str | None, evaluates: bool,
        owner: ast.ClassDef | None, given: Mapping[str, ast.expr],
    ) -> str:  # fmt: skip
        """Return the class of the task."""
        uses = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(self._file.tree)}
        is_model = any(re.search(r"^AutoModel|For[A-Z]|LMHead", name) for name in uses)
        loss, logits = (".loss", ".logits") if is_model else ('["loss"]', '["logits"]')
        names = [*hyper, *(["compute_metrics"] if metrics else []), *(["preprocess_logits"] if preprocess else [])]
        quoted = ", ".join(f'"{name}"' for name in hyper)
        lines = [
            f"class {self._task}(lumen.TaskModule):",
            f"    def __init__(self, model, {', '.join(names)}):",
            "        super().__init__()",
            f"        self.save_hyperparameters({quoted})",
            "        self.model = model.train()",
            *(f"        self.{name} = {name}" for name in names if name not in hyper),
        ]
        if self._get("gradient_checkpointing"):
            words = self._values.get("gradient_checkpointing_kwargs", "")
            lines.append(f"        self.model.gradient_checkpointing_enable({words})")
        compute = any(getattr(each, "name", "") == "compute_loss" for each in (owner.body if owner else ()))
        step = "self.compute_loss(self.model, dict(batch){})" if compute else f"self.model(**batch){loss}"
        weight = ""
        if not compute and any(re.search(_CAUSAL, name) for name in uses):
            weight = ', (batch["labels"][:, 1:] != -100).sum()'
        elif not compute and any(re.search(_TOKENS, name) for name in uses):
            weight = ', (batch["labels"] != -100).sum()'
        if compute and "super().compute_loss" in self._source.get_text(owner or self._file.tree):
            lines += [
                "",
                "    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):",
                "        outputs = model(**inputs)",
                f"        return (outputs{loss}, outputs) if return_outputs else outputs{loss}",
            ]
        lines += [
            "",
            "    def training_step(self, batch):",
            f"        loss = {step.format('')}",
            '        self.log("loss", loss, prog_bar=True)',
            f"        return loss{weight}" + ("  # The mean covers all tokens of a step." if weight else ""),
        ]
        if evaluates:
            lines += self._list_validation_lines(metrics, preprocess, compute, step, loss, logits)
        groups, decay = ("self.parameters()", "weight_decay=0.0, ")
        if "weight_decay" in hyper:
            self._use("lumen.optim.decay_groups")
            groups, decay = ("groups", "")
        words = "".join(f", {name}=self.hparams.{name}" for name in ("betas", "eps") if name in hyper)
        fused = "fused=True" if self._get("optim", "adamw_torch_fused") == "adamw_torch_fused" else "fused=False"
        if "optim" in self._values and self._get("optim") not in ("adamw_torch", "adamw_torch_fused"):
            self._note(given["args"], f"optim={self._values['optim']}: build this optimizer in configure_optimizers.")
        if (
            self._get("warmup_ratio" if "warmup_ratio" in self._values else "warmup_steps", 0)
            and "warmup_ratio" in hyper
        ):
            self._use("math")
        warmup = {
            "warmup_ratio": "math.ceil(self.hparams.warmup_ratio * steps)",
            "warmup_steps": "self.hparams.warmup_steps",
        }
        count = next((warmup[name] for name in warmup if name in hyper), "0")
        more = self._values.get("lr_scheduler_kwargs")
        kind = self._values.get("lr_scheduler_type", '"linear"')
        if self._get("lr_scheduler_type", "linear") == "reduce_lr_on_plateau":
            self._note(given["args"], 'Return {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "eval_loss"}.')
        self._use("transformers.get_scheduler")
        lines += [
            "",
            "    def configure_optimizers(self):",
            *(["        groups = decay_groups(self, self.hparams.weight_decay)"] if groups == "groups" else []),
            f"        optimizer = torch.optim.AdamW({groups}, lr=self.hparams.lr{words}, {decay}{fused})",
            "        steps = self.trainer.estimated_stepping_batches",
            f"        schedule = get_scheduler({kind}, optimizer, {count}, steps{f', {more}' if more else ''})",
            '        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}',
        ]
        return "\n".join(lines)

    def _list_validation_lines(
        self, metrics: str | None, preprocess: str | None, compute: bool, step: str, loss: str, logits: str
    ) -> list[str]:
        """Return the lines of the evaluation: the loss, and the metrics of all predictions."""
        if metrics is None:
            text = step.format("")
            return ["", "    def validation_step(self, batch):", f'        self.log("eval_loss", {text})']
        self._use("transformers.EvalPrediction", "transformers.trainer_pt_utils.EvalLoopContainer")
        forward = ["outputs = self.model(**batch)", f'self.log("eval_loss", outputs{loss})']
        if compute:
            forward = [f"loss, outputs = {step.format(', return_outputs=True')}", 'self.log("eval_loss", loss)']
        found = f"outputs{logits}"
        added = f'self.preprocess_logits({found}, batch["labels"])' if preprocess else found
        body = f"""
def on_validation_epoch_start(self):
    self.predictions, self.labels = EvalLoopContainer(), EvalLoopContainer()

def validation_step(self, batch):
    {forward[0]}
    {forward[1]}
    self.predictions.add({added})
    self.labels.add(batch["labels"])

def on_validation_epoch_end(self):
    # With several processes, each computes the metrics of its own samples.
    found = EvalPrediction(self.predictions.get_arrays(), self.labels.get_arrays())
    metrics = self.compute_metrics(found)
    self.log_dict({{f"eval_{{name}}": value for name, value in metrics.items()}})
"""
        return indent(body.rstrip(), "    ").split("\n")

    def _insert_task(self, text: str, statement: ast.stmt) -> None:
        """Insert the class before the first class, function or guard, or before the statement that builds the trainer."""
        start, _ = self._source.get_span(statement)
        kinds = ast.FunctionDef | ast.ClassDef | ast.If
        for node in self._file.tree.body:
            begin, end = self._source.get_span(node)
            if isinstance(node, kinds) or begin <= start < end:
                begin = self._source.get_span((getattr(node, "decorator_list", None) or [node])[0])[0]
                at = self._source.find_line_start(begin)
                while self._source.text[:at].endswith("\n") and self._source.lines[
                    self._source.get_line_number(at) - 2
                ].startswith("#"):
                    at = self._source.find_line_start(at - 1)
                blank = len(self._source.text[:at]) - len(self._source.text[:at].rstrip("\n"))
                newline = self._source.newline
                self._source.replace(at, at, newline * max(0, 3 - blank) + text.replace("\n", newline) + newline * 3)
                return

    def _edit_subclass(self, node: ast.ClassDef, name: str, new: str) -> None:
        """Turn a subclass of the trainer into a subclass of the task, which calls its `compute_loss`."""
        self._source.replace_node(node.bases[0], self._task)
        start = self._source.get_span(node)[0]
        self._source.replace(start + len("class "), start + len(f"class {name}"), new)
        for each in node.body:
            method = getattr(each, "name", "")
            if method in _OVERRIDE_NOTES:
                self._note(each, f"{method} is never called. {_OVERRIDE_NOTES[method]}")
            target = getattr(each.targets[0], "id", "") if isinstance(each, ast.Assign) else ""
            if target == "loss_is_scaled_for_ga":
                line = self._source.get_span(each)
                end = self._source.find_line_end(line[1] - 1)
                blank = self._source.text[end:].startswith(self._source.newline)
                end += len(self._source.newline) * blank
                self._source.replace(self._source.find_line_start(line[0]), end, "")
            if method == "compute_loss" and "loss_is_scaled_for_ga" not in self._source.get_text(node):
                if self._get("gradient_accumulation_steps", 1) != 1:
                    self._note(each, "transformers may add the losses of a step's batches; Lumen takes their mean.")
                if self._source.get_text(each).count("num_items_in_batch") > 1:
                    self._note(each, "num_items_in_batch is None. Return (loss, tokens) from training_step.")
        for each in ast.walk(node):
            owner = getattr(each, "value", None)
            if (
                isinstance(each, ast.Attribute)
                and getattr(owner, "id", "") == "self"
                and each.attr in ("args", "state")
            ):
                self._note(each, f"self.{each.attr} does not exist. Pass the value to __init__, or read self.trainer.")
            if isinstance(each, ast.Call) and self._get_text(each.func) == "self.log" and len(each.args) == 1:
                self._source.replace_node(each.func, "self.log_dict")

    # ------------------------------------------------------------------ callbacks

    def _edit_callback(self, node: ast.ClassDef) -> None:
        """Turn a `TrainerCallback` into a `lumen.Callback`."""
        self._use("lumen")
        for base in node.bases:
            if _get_class(self._file, base) == "TrainerCallback":
                self._source.replace_node(base, "lumen.Callback")
        events = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        names = [EVENTS.get(each.name, each.name) for each in events]
        for event in events:
            if event.name in EVENT_NOTES:
                self._note(event, f"{event.name} is never called. {EVENT_NOTES[event.name]}")
            elif names.count(EVENTS.get(event.name, "")) > 1:
                self._note(event, f"not edited: write one {EVENTS[event.name]}(self, trainer, pl_module).")
            elif event.name in EVENTS:
                self._edit_event(event)

    def _edit_event(self, event: ast.FunctionDef) -> None:
        source, arguments = self._source, event.args
        names = [each.arg for each in (*arguments.args, *arguments.kwonlyargs)]
        start, first = source.get_span(event)[0], event.body[0]
        start = source.text.index("(", start)
        end = source.text.rindex(":", start, source.get_span(first)[0])
        source.replace(source.text.rindex(event.name, 0, start), end, f"{EVENTS[event.name]}(self, trainer, pl_module)")
        body = [each for statement in event.body for each in ast.walk(statement)]
        at = source.get_span(first)[0]
        newline = f"{source.newline}{source.get_indent(at)}"
        lines = []
        if event.name == "on_log":
            lines = ["if trainer.global_step % trainer.log_every_n_steps:", "    return"]
        read = {each.id for each in body if isinstance(each, ast.Name)}
        lines += [f"{name} = {_EVENT_PARAMETERS[name]}" for name in names if name in _EVENT_PARAMETERS and name in read]
        source.replace(at, at, "".join(f"{line}{newline}" for line in lines))
        edited: set[ast.AST] = set()
        for each in body:
            if isinstance(each, ast.Return) and getattr(each.value, "id", "") == "control":
                edited.add(each.value or each)
                whole = (
                    source.find_line_start(source.get_span(each)[0]),
                    source.find_line_end(source.get_span(each)[1] - 1),
                )
                is_last = each is event.body[-1] and len(event.body) > 1
                source.replace(*(whole if is_last else source.get_span(each)), "" if is_last else "return")
            if isinstance(each, ast.Attribute | ast.Subscript | ast.Call) and ast.unparse(each) in _EVENT_VALUES:
                source.replace_node(each, _EVENT_VALUES[ast.unparse(each)])
                edited |= {*ast.walk(each)}
        rest = {"args", "state", "control", "kwargs", *names[4:]} - _EVENT_PARAMETERS.keys()
        for each in body:
            if isinstance(each, ast.Name) and each.id in rest and each not in edited:
                self._note(each, f"{each.id} is no argument of {EVENTS[event.name]}. Read trainer or pl_module.")
        if event.name == "on_log":
            self._note(event, "logs has the newest logged values: loss and eval_*, but no learning_rate or epoch.")

    def _edit_early_stopping(self, call: ast.Call) -> None:
        self._use("lumen")
        self._source.replace_node(call, self._write_early_stopping(call))

    # ------------------------------------------------------------------ imports

    def _edit_imports(self) -> None:
        """Remove the imports that are not used any more, and add those of the new code."""
        edited = ast.parse(self._source.apply_edits())
        used = {each.id for each in ast.walk(edited) if isinstance(each, ast.Name)}
        present = {f"{each.module}.{alias.name}" if isinstance(each, ast.ImportFrom) else alias.name
                   for each in self._file.tree.body if isinstance(each, ast.Import | ast.ImportFrom)
                   for alias in each.names if alias.asname is None}  # fmt: skip
        wanted: dict[str, list[str]] = {}
        for full in sorted(self._imports - present):
            wanted.setdefault(full.rpartition(".")[0] or full, []).append(full.rpartition(".")[2])
        statements = [each for each in self._file.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        ours = [each for each in statements if isinstance(each, ast.ImportFrom)
                and (each.module or "").split(".")[0] == "transformers"]  # fmt: skip
        for each in ours:
            kept = [alias for alias in each.names if (alias.asname or alias.name) in used
                    or alias.name not in (*_TRAINERS, *_ARGUMENTS, *_CALLBACKS, "TrainerControl", "TrainerState")]  # fmt: skip
            more = wanted.pop("transformers", []) if each.module == "transformers" else []
            names = sorted(
                {*(f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in kept), *more}
            )
            if len(kept) < len(each.names) or more:
                self._source.replace_node(each, _write_import(str(each.module), names) if names else "")
        anchors = ours or statements
        for module, names in wanted.items():
            text = f"import {module}" if names == [module] else _write_import(module, names)
            key = (names != [module], module)
            is_standard = module in sys.stdlib_module_names
            rest = [each for each in statements if (_get_module(each).split(".")[0] in sys.stdlib_module_names)
                    == is_standard and _get_module(each) != "__future__"]  # fmt: skip
            behind = [each for each in rest if (isinstance(each, ast.ImportFrom), _get_module(each)) > key]
            if behind or not rest:
                at = self._source.get_span((behind or statements or anchors)[0])[0]
                gap = self._source.newline * (1 if behind else 2)
                self._source.replace(at, at, f"{text}{gap}")
            else:
                at = self._source.get_span(rest[-1])[1]
                self._source.replace(at, at, f"{self._source.newline}{text}")


def _write_call(head: str, items: list[str], tail: str, width: int) -> list[str]:
    """Return the lines of a call or a list, with one item per line if it is long."""
    whole = f"{head}{', '.join(items)}{tail}"
    if len(whole) <= width:
        return [whole]
    lines = []
    for item in items:
        name, opening, rest = item.partition("=[")
        parts = rest.removesuffix("]").split(", lumen.")
        inner = [parts[0], *(f"lumen.{part}" for part in parts[1:])]
        is_long = bool(opening) and len(item) + 5 > width
        lines += _write_call(f"{name}=[", inner, "],", width - 4) if is_long else [f"{item},"]
    return [head, *(f"    {line}" for line in lines), tail]


def _get_module(statement: ast.Import | ast.ImportFrom) -> str:
    return (statement.module or "") if isinstance(statement, ast.ImportFrom) else statement.names[0].name


def _write_import(module: str, names: list[str]) -> str:
    """Return an import statement, with one name per line if it is long."""
    short = f"from {module} import {', '.join(names)}"
    return (
        short
        if len(short) <= _WIDTH
        else f"from {module} import (\n" + "".join(f"    {each},\n" for each in names) + ")"
    )
