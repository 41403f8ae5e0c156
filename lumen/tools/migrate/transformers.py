"""Edits of scripts for transformers' `Trainer`: a task, loaders and a `lumen.Trainer` in its place."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, final

from lumen.tools.migrate.names import get_short_name
from lumen.tools.migrate.project import ParsedFile
from lumen.tools.migrate.python import MigrationNote
from lumen.tools.migrate.source import EditableSource

_TRANSLATED = (
    "output_dir run_name num_train_epochs max_steps per_device_train_batch_size per_device_eval_batch_size seed bf16 "
    "fp16 tf32 torch_compile use_cpu full_determinism gradient_accumulation_steps max_grad_norm learning_rate optim "
    "weight_decay adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio "
    "gradient_checkpointing gradient_checkpointing_kwargs eval_strategy eval_steps save_strategy save_steps "
    "save_total_limit load_best_model_at_end metric_for_best_model greater_is_better logging_steps report_to "
    "dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers dataloader_drop_last "
    "remove_unused_columns train_sampling_strategy "
)
_NEUTRAL = (
    "average_tokens_across_devices use_cache torch_empty_cache_steps logging_first_step log_on_each_node log_level "
    "logging_nan_inf_filter log_level_replica disable_tqdm project trackio_space_id trackio_bucket_id hub_token "
    "trackio_static_space_id eval_use_gather_object eval_accumulation_steps save_only_model save_on_each_node "
    "enable_jit_checkpoint hub_private_repo hub_always_push hub_revision dataloader_pin_memory dataloader_in_order "
    "restore_callback_states_from_checkpoint dataloader_multiprocessing_context skip_memory_metrics do_train do_eval "
    "do_predict local_rank logging_dir overwrite_output_dir save_safetensors use_mps_device "
)
#: Arguments of `TrainingArguments` that the command translates; older versions of the class have some of them.
TRANSLATED = frozenset(_TRANSLATED.split())
#: Arguments that change no number, or that Lumen does without.
NEUTRAL = frozenset(_NEUTRAL.split())
#: Arguments that the command leaves out with this note, unless their value is False or empty.
NOTED: Mapping[str, str] = {
    "optim_args optim_target_modules": "Build the optimizer in configure_optimizers.",
    "label_smoothing_factor": "Compute the loss with cross_entropy(..., label_smoothing=...).",
    "activation_checkpointing activation_checkpointing_kwargs": "Call model.gradient_checkpointing_enable().",
    "torch_compile_backend torch_compile_mode": 'Write Trainer(compile={"backend": ..., "mode": ...}).',
    "use_liger_kernel liger_kernel_config": "Apply the kernels to the model before the task is built.",
    "neftune_noise_alpha": "Add the noise in a forward hook of the model's embeddings.",
    "auto_find_batch_size": "Write Trainer(halve_on_oom=True), or add lumen.BatchSizeFinder().",
    "logging_strategy": "Write self.log(..., on_epoch=True) for values of epochs.",
    "include_num_input_tokens_seen": "Add lumen.ThroughputMonitor(), which counts tokens.",
    "eval_delay eval_on_start": "Call trainer.validate(task, eval_loader) for one more evaluation.",
    "include_for_metrics batch_eval_metrics eval_do_concat_batches": "Edit validation_step.",
    "prediction_loss_only label_names": "Edit validation_step.",
    "predict_with_generate generation_max_length generation_num_beams generation_config": (
        "In validation_step, add the result of self.model.generate to self.predictions."
    ),
    "push_to_hub hub_model_id hub_strategy": "Call model.push_to_hub(...) after fit.",
    "ignore_data_skip": "A resumed run continues at its position in the data.",
    "data_seed": "The trainer's seed also decides the order of the data.",
    "length_column_name group_by_length sortish_sampler": "Pass a sampler to the DataLoader.",
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph": (
        "Write Trainer(strategy=lumen.DDP(...)), with torch's arguments."
    ),
    "ddp_backend ddp_timeout": "Write Trainer(strategy=lumen.DDP(timeout_s=...)). The device decides the backend.",
    "fsdp fsdp_config": 'Write Trainer(strategy=lumen.FSDP(wrap="BertLayer")), with your layer.',
    "deepspeed parallelism_config accelerator_config": "Write Trainer(strategy=lumen.FSDP(...)).",
    "resume_from_checkpoint": 'Write Trainer(resume="auto"), or the path of a checkpoint of Lumen.',
    "fp16_full_eval bf16_full_eval": "Convert the model before trainer.validate.",
    "debug": "Write Trainer(detect_anomaly=True).",
}
#: Events of `TrainerCallback`, with the hooks of `lumen.Callback`; for the others, the note.
EVENTS: Mapping[str, str] = {
    "on_train_begin": "on_train_start", "on_train_end": "on_train_end", "on_epoch_begin": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end", "on_step_begin": "on_train_batch_start", "on_step_end": "on_step_end",
    "on_pre_optimizer_step": "on_before_optimizer_step", "on_substep_end": "on_train_batch_end",
    "on_evaluate": "on_validation_end", "on_log": "on_step_end", "on_predict": "on_predict_end",
}  # fmt: skip
_EVENT_VALUES = {
    "state.global_step": "trainer.global_step", "state.max_steps": "trainer.max_steps",
    "state.epoch": "trainer.current_epoch", "state.is_world_process_zero": "trainer.is_global_zero",
    "state.is_local_process_zero": "trainer.is_global_zero", "args.output_dir": "trainer.run_directory",
    "args.num_train_epochs": "trainer.max_epochs", "control.should_training_stop": "trainer.should_stop",
    "kwargs['model']": "pl_module.model", "kwargs.get('model')": "pl_module.model",
}  # fmt: skip
_EVENT_PARAMETERS = {"model": "pl_module.model", **dict.fromkeys(("metrics", "logs"), "trainer.newest_values")}
_BUILD = "Write configure_optimizers, which builds the optimizer and the schedule."
_PREDICT = "Write predict_step in the task. trainer.predict(task, DataLoader(...)) returns its values."
_LOADER = "Build the DataLoader, and pass it to fit or validate."
#: Notes on other arguments, methods and attributes of the trainer, and on events.
NOTES: Mapping[str, str] = {
    "model_init": "Build the model, and pass it to the task.",
    "compute_loss_func": 'Write loss = compute_loss_func(outputs, batch["labels"]) in training_step.',
    "optimizers optimizer_cls_and_kwargs create_optimizer create_scheduler create_optimizer_and_scheduler": _BUILD,
    "predict": _PREDICT,
    "training_step prediction_step": "Write training_step(self, batch) and validation_step(self, batch).",
    "evaluate get_train_dataloader get_eval_dataloader _get_train_sampler": _LOADER,
    "log": "Write a lumen.Logger with log_metrics(self, metrics, step).",
    "state": "Read trainer.global_step and trainer.callback_metrics. metrics.csv in the run directory has all values.",
    "log_metrics save_metrics": "Lumen writes metrics.csv into trainer.run_directory.",
    "add_callback": "Pass the callback to Trainer(callbacks=[...]).",
    "push_to_hub on_push_begin": "Call model.push_to_hub(...) after fit.",
    "model": "Read task.model.",
    "on_init_end": "Write setup(self, trainer, pl_module, stage).",
    "on_optimizer_step": "Write on_step_end, or on_before_optimizer_step.",
    "on_prediction_step": "Write on_validation_batch_end.",
    "on_save": "Write on_save_checkpoint(self, trainer, pl_module, checkpoint), or on_train_end.",
}
_PARSED = (
    "learning_rate weight_decay per_device_train_batch_size per_device_eval_batch_size bf16 fp16 max_grad_norm "
    "gradient_accumulation_steps logging_steps output_dir seed"
)
_CHOICES = ("eval_strategy", "save_strategy", "metric_for_best_model", "greater_is_better", "max_steps", "report_to")
_OLD_NAMES = {"evaluation_strategy": "eval_strategy", "no_cuda": "use_cpu", "tokenizer": "processing_class"}
_TRAINERS, _ARGUMENTS = ("Trainer", "Seq2SeqTrainer"), ("TrainingArguments", "Seq2SeqTrainingArguments")
_REPLACED = (*_TRAINERS, *_ARGUMENTS, "TrainerCallback", "EarlyStoppingCallback")
_POSITIONAL = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
_OF_TRAINER = (*_POSITIONAL, "processing_class", "compute_metrics", "callbacks", "preprocess_logits_for_metrics")
_NOT_EDITED = "not edited: a file needs one statement that assigns its only Trainer, with a model."
_HEAD_NOTE = (
    "the loss is the mean over the predicted tokens. For an LMHeadModel, transformers also counts the first label of "
    "each row, so its loss is smaller."
)
_TOKEN_COUNTS = {
    r"ForCausalLM|LMHeadModel": '(batch["labels"][:, 1:] != -100).sum()',
    r"For(MaskedLM|TokenClassification|Seq2SeqLM|ConditionalGeneration)$": '(batch["labels"] != -100).sum()',
}
_UNKNOWN = object()  # the value of an argument that is no literal
_WIDTH = 100
_METRICS = """
    def on_validation_epoch_start(self):
        self.predictions, self.labels = EvalLoopContainer(), EvalLoopContainer()

    def validation_step(self, batch):
        loss, outputs = {0}
        self.log("eval_loss", loss)
        self.predictions.add({1})
        self.labels.add(batch["labels"])

    def on_validation_epoch_end(self):
        # Each process computes the metrics of its own samples, and Lumen averages them.
        found = EvalPrediction(self.predictions.get_arrays(), self.labels.get_arrays())
        metrics = self.compute_metrics(found)
        self.log_dict({{f"eval_{{name}}": value for name, value in metrics.items()}})"""


def uses_trainer(file: ParsedFile) -> bool:
    """Return True if a file uses the `Trainer` of transformers, its arguments or its callbacks."""
    return any(_get_class(file, node) in _REPLACED for node in ast.walk(file.tree))


def _get_class(file: ParsedFile, node: ast.AST) -> str | None:
    """Return the short name of the object of transformers that a name or attribute refers to, or None."""
    full = file.names.get_full_name(node) if isinstance(node, ast.Name | ast.Attribute) else None
    return get_short_name(full) if full is not None and full.startswith("transformers.") else None


def _find_note(notes: Mapping[str, str], name: str) -> str | None:
    return next((sentence for names, sentence in notes.items() if name in names.split()), None)


def _read_literal(text: str) -> Any:
    """Return the value of a literal or of an enumeration's member, or `_UNKNOWN`."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        found = re.fullmatch(r"(?:\w+\.)*(?:\w+Strategy|SchedulerType)\.(\w+)", text)
        return found[1].lower() if found else _UNKNOWN


@final
class TrainerEditor:
    """Editor of one file that uses transformers' `Trainer`.

    Args:
        file: The text and syntax tree of the file.
    """

    def __init__(self, file: ParsedFile) -> None:
        self._file, self._source = file, EditableSource(file.text)
        self._nodes = [*ast.walk(file.tree)]
        self._notes: dict[MigrationNote, None] = {}
        self._imports = {"lumen"}  # full names to import, or a module
        self._values: dict[str, str] = {}  # the texts of the arguments, by name
        self._texts: dict[str, str] = {}  # the texts of the trainer's arguments
        self._task = self._find_free_name("ModelTask")
        classes = [node for node in self._nodes if isinstance(node, ast.ClassDef)]
        bases = {node: {_get_class(file, base) for base in node.bases} for node in classes}
        self._trainers = {node.name: node for node in classes if bases[node] & {*_TRAINERS}}
        self._callbacks = [node for node in classes if "TrainerCallback" in bases[node]]

    def edit(self) -> tuple[str, list[MigrationNote]]:
        """Return the text with all edits, and the notes."""
        trainers = [node for node in self._nodes if isinstance(node, ast.Call) and self._is_trainer(node.func)]
        assigned = {node.value: node for node in self._nodes if isinstance(node, ast.Assign)}
        has_model = any(each.args or "model" in [item.arg for item in each.keywords] for each in trainers)
        if len(trainers) == 1 and trainers[0] in assigned and has_model:
            self._edit_run(assigned[trainers[0]], trainers[0])
        else:
            for node in trainers or self._trainers.values():
                self._note(node, _NOT_EDITED)
        for owner in self._callbacks:
            self._edit_callback(owner)
        for call in self._nodes:
            if isinstance(call, ast.Call) and _get_class(self._file, call.func) == "EarlyStoppingCallback":
                self._source.replace_node(call, self._write_early_stopping(call))
        try:
            self._edit_imports()
        except SyntaxError:
            return self._file.text, [MigrationNote(1, "not edited: the layout of this file is not supported.")]
        return self._source.apply_edits(), sorted(self._notes)

    def _is_trainer(self, node: ast.expr) -> bool:
        return _get_class(self._file, node) in _TRAINERS or getattr(node, "id", "") in self._trainers

    def _note(self, node: ast.AST, sentence: str) -> None:
        self._notes[MigrationNote(self._source.get_line_number(self._source.get_span(node)[0]), sentence)] = None

    def _find_free_name(self, name: str) -> str:
        """Return the name, with underscores if the file binds the name already."""
        return self._find_free_name(f"{name}_") if name in self._file.names.bound else name

    def _get_text(self, node: ast.AST) -> str:
        text = self._source.get_text(node)
        return ast.unparse(node) if "\n" in text else text

    def _remove_statement(self, node: ast.stmt) -> None:
        source, (start, end) = self._source, self._source.get_span(node)
        start, end = source.find_line_start(start), source.find_line_end(end - 1)
        if source.text[:start].endswith(source.newline * 2) and source.text[end:].startswith(source.newline):
            end += len(source.newline)
        source.replace(start, end, "")

    # ------------------------------------------------------------------ arguments

    def _get(self, name: str, default: Any = None) -> Any:
        """Return the value of an argument, or `_UNKNOWN` if it is no literal."""
        return _read_literal(self._values[name]) if name in self._values else default

    def _get_strategy(self, name: str, default: str) -> str:
        """Return a strategy; "steps" or "epoch" if the script decides when it runs."""
        found = self._get(name, default)
        if found is _UNKNOWN:
            return "steps" if "steps" in self._values[name] else "epoch"
        return str(found or "no").lower()

    def _read_arguments(self, trainer: ast.Call) -> dict[str, ast.expr]:
        """Read the arguments of the trainer and its `TrainingArguments`, and note those that are left out."""
        given: dict[str, ast.expr] = dict(zip(_POSITIONAL, trainer.args, strict=False))
        given |= {_OLD_NAMES.get(each.arg, each.arg): each.value for each in trainer.keywords if each.arg}
        self._texts = {name: self._get_text(node) for name, node in given.items()}
        source, name = given.get("args"), self._texts.get("args", "")
        nodes = [*self._iterate_scope(trainer, name)]
        found = [each for each in nodes if isinstance(each, ast.Assign) and name in map(self._get_text, each.targets)]
        call = found[0].value if len(found) == 1 else source
        if source is None:
            self._values = {"output_dir": '"tmp_trainer"'}
        elif (
            isinstance(call, ast.Call)
            and _get_class(self._file, call.func) in _ARGUMENTS
            and all(item.arg for item in call.keywords)
        ):
            self._values = {"output_dir": self._get_text(call.args[0])} if call.args else {}
            for item in call.keywords:
                key = _OLD_NAMES.get(str(item.arg), str(item.arg))
                self._values[key] = self._get_text(item.value)
                sentence = _find_note(NOTED, key) or "Lumen has no such argument."
                if key in _CHOICES and self._get(key) is _UNKNOWN:
                    self._note(item.value, f"{key} is known when the script runs. Check the trainer's arguments.")
                if key.endswith("_steps") and isinstance(value := self._get(key), float) and key != "warmup_steps":
                    self._note(item.value, f"{key}={value} is a share of all steps. Write a number of steps.")
                if key not in TRANSLATED | NEUTRAL and self._get(key) not in (False, None, "", "no", "steps"):
                    self._note(item.value, f"{key} is left out. {sentence}")
            if found:
                self._replace_reads(name, nodes, found[0])
        else:
            self._values = {key: f"{name}.{key}" for key in _PARSED.split()}
            self._values["num_train_epochs"] = f"int({name}.num_train_epochs)"
            self._note(source, f"{name} is known when the script runs: write its strategies, schedule and metric here.")
        return given

    def _replace_reads(self, name: str, nodes: list[ast.AST], statement: ast.Assign) -> None:
        """Replace reads of `TrainingArguments` by their values, and remove the statement if no other use is left."""
        kinds = ast.Name | ast.Attribute
        names: list[ast.expr] = [each for each in nodes if isinstance(each, kinds) and self._get_text(each) == name]
        reads = [each for each in nodes if isinstance(each, ast.Attribute) and each.value in names]
        for each in reads:
            if each.attr in self._values:
                names.remove(each.value)
                self._source.replace_node(each, self._values[each.attr])
        if len(names) == 2:  # These are the assignment and the argument of the trainer.
            self._remove_statement(statement)
        else:
            self._note(statement, f"{name} is read in other places, but not by Lumen.")

    def _iterate_scope(self, node: ast.AST, name: str) -> Iterator[ast.AST]:
        """Yield the nodes of the function that binds a name at a node, or of the module without such functions."""
        functions = {each: {*ast.walk(each)} for each in self._nodes if isinstance(each, ast.FunctionDef)}
        binding = [parts for parts in functions.values() if any(
            (isinstance(each, ast.arg) and each.arg == name)
            or (isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store) and each.id == name)
            for each in parts)]  # fmt: skip
        scope = [parts for parts in binding if node in parts]
        others = set().union(*(parts for parts in binding if node not in parts))
        yield from (each for each in self._nodes if each not in others and (not scope or each in scope[-1]))

    # ------------------------------------------------------------------ the run

    def _edit_run(self, statement: ast.Assign, call: ast.Call) -> None:
        """Replace the statement that builds the trainer, and the calls of the trainer; insert the task."""
        given = self._read_arguments(call)
        known = {name for names in NOTES for name in names.split()}
        for name in known & given.keys() - {"model"}:
            self._note(given[name], f"{name} is left out. {_find_note(NOTES, name)}")
        own = getattr(call.func, "id", "") if getattr(call.func, "id", "") in self._trainers else ""
        evaluates = self._texts.get("eval_dataset", "None") != "None"
        validates = evaluates and self._get_strategy("eval_strategy", "no") != "no"
        prefix, dot, _ = self._get_text(statement.targets[0]).rpartition(".")
        words = map(self._find_free_name, ("task", "train_loader", "eval_loader"))
        task, train, evaluation = (f"{prefix}{dot}{word}" for word in words)
        at = self._source.get_indent(self._source.get_span(statement)[0])
        newline, target = f"{self._source.newline}{at}", self._get_text(statement.targets[0])
        lines: list[str] = []

        def add(head: str, items: list[str], tail: str = ")") -> None:
            lines.extend(_write_call(head, items, tail, _WIDTH - len(at)))

        if isinstance(given["model"], ast.Name | ast.Attribute):
            model = self._texts["model"]
        else:
            model = self._find_free_name("model")
            lines.append(f"{model} = {self._texts['model']}")
        collator = self._write_collator(model, add)
        arguments = {"model": model, **self._list_hyperparameters()}
        if evaluates:
            named = {"compute_metrics": "compute_metrics", "preprocess_logits": "preprocess_logits_for_metrics"}
            arguments |= {name: self._texts[key] for name, key in named.items() if key in self._texts}
        arguments |= {key: text for key, text in self._texts.items() if key not in {*_OF_TRAINER, *known}}
        task_class = re.sub("Trainer$", "Task", own) or self._task
        add(f"{task} = {task_class}(", [f"{key}={text}" for key, text in arguments.items()])
        for name, kind in ((train, "train"), (evaluation, "eval")):
            dataset = given.get(f"{kind}_dataset")
            optional = (isinstance(dataset, ast.IfExp) and self._get_text(dataset.orelse) == "None" and dataset) or None
            texts = [self._get_text(optional.body if optional else dataset or call)]
            tail = f") if {self._get_text(optional.test)} else None" if optional else ")"
            if kind == "train" or evaluates:
                add(f"{name} = DataLoader(", [*texts, *self._list_loader_arguments(kind, collator)], tail)
        add(f"{target} = lumen.Trainer(", self._list_trainer_arguments(given.get("callbacks"), validates=validates))
        self._imports |= {"torch", "torch.utils.data.DataLoader"}
        self._source.replace_node(statement, newline.join(lines))
        fit = f"{target}.fit({', '.join([task, train, *([evaluation] if validates else [])])})"
        if validates and self._get("load_best_model_at_end"):
            fit += f'{{newline}}{target}.validate({task}, {evaluation}, ckpt_path="best")  # loads the best weights'
        validate = f"{target}.validate({task}, {evaluation})[0]" if evaluates else ""
        scope = {*self._iterate_scope(statement, target)}
        for each in self._nodes:
            if isinstance(each, ast.Attribute) and self._get_text(each.value) == target:
                if each in scope:
                    self._edit_use(each, fit, validate, model)
                elif each.attr in ("train", "evaluate", "save_model"):
                    self._note(each, f"not edited: {target} is built in another function, with its task and loaders.")
        owner = self._trainers.get(own)
        self._insert_task(self._write_task(given, arguments, owner, evaluates=evaluates), statement)
        if owner is not None:
            self._edit_subclass(owner)
        for node in self._trainers.keys() - {own}:
            self._note(self._trainers[node], _NOT_EDITED)

    def _edit_use(self, node: ast.Attribute, fit: str, validate: str, model: str) -> None:
        """Edit or note a use of the trainer."""
        call = next((each for each in self._nodes if isinstance(each, ast.Call) and each.func is node), None)
        words = [] if call is None else [*call.args, *(item.value for item in call.keywords)]
        start = self._source.get_span(node)[0]
        if node.attr == "train" and call is not None:
            if any(self._get_text(word) != "None" for word in words):
                self._note(node, f"the arguments of train are left out. {NOTED['resume_from_checkpoint']}")
            line = self._source.text[self._source.find_line_start(start) : start].strip()
            if line:
                self._note(node, "fit returns None. Read trainer.callback_metrics.")
            self._source.replace_node(
                call, fit.format(newline=f"{self._source.newline}{self._source.get_indent(start)}")
            )
        elif node.attr == "evaluate" and call is not None and validate and not words:
            self._source.replace_node(call, validate)
        elif node.attr == "save_model" and call is not None:
            self._source.replace_node(node, f"{model}.save_pretrained")
            if not words:
                self._source.replace_node(call, f"{model}.save_pretrained({self._values['output_dir']})")
            if "processing_class" in self._texts:
                self._note(node, f"also write {self._texts['processing_class']}.save_pretrained(...).")
        elif sentence := _find_note(NOTES, node.attr):
            self._note(node, f"{node.attr}: {sentence}")

    def _list_hyperparameters(self) -> dict[str, str]:
        """Return the arguments of the task that configure its optimizer and schedule."""
        values = self._values
        found = {"lr": values.get("learning_rate", "5e-5")}
        if self._get("weight_decay", 0.0):
            found["weight_decay"] = values["weight_decay"]
        if {"adam_beta1", "adam_beta2"} & values.keys():
            found["betas"] = f"({values.get('adam_beta1', '0.9')}, {values.get('adam_beta2', '0.999')})"
        if "adam_epsilon" in values:
            found["eps"] = values["adam_epsilon"]
        for name in ("warmup_ratio", "warmup_steps"):
            if value := self._get(name):
                is_share = name == "warmup_ratio" or (isinstance(value, float) and value < 1)
                found["warmup_ratio" if is_share else name] = values[name]
        return found

    def _write_collator(self, model: str, add: Any) -> str:
        """Add the statements that build the collator, if they are needed, and return the collator."""
        collator, tokenizer = self._texts.get("data_collator", "None"), self._texts.get("processing_class")
        if collator == "None":
            name = "DataCollatorWithPadding" if tokenizer else "default_data_collator"
            self._imports.add(f"transformers.{name}")
            collator = f"{name}({tokenizer})" if tokenizer else name
        if self._get("remove_unused_columns") is False:
            return collator
        self._imports |= {"inspect", "transformers.trainer_utils.RemoveColumnsCollator"}
        columns, result = map(self._find_free_name, ("columns", "collate_columns"))
        base = f"{model}.get_base_model()" if "get_peft_model" in self._file.names.imported else model
        add(f"{columns} = [", [f"*inspect.signature({base}.forward).parameters", '"label"', '"label_ids"'], "]")
        add(f"{result} = RemoveColumnsCollator(", [collator, columns])
        return result

    def _list_loader_arguments(self, kind: str, collator: str) -> list[str]:
        found = [f"batch_size={self._values.get(f'per_device_{kind}_batch_size', '8')}"]
        if kind == "train" and self._get("train_sampling_strategy", "random") != "sequential":
            found.append("shuffle=True")
            if self._get("train_sampling_strategy", "random") != "random":
                self._note(self._file.tree.body[0], f"train_sampling_strategy: {_find_note(NOTED, 'group_by_length')}")
        names = ("num_workers", "prefetch_factor", "persistent_workers", "drop_last")
        more = [(name, self._values.get(f"dataloader_{name}")) for name in names]
        return [*found, f"collate_fn={collator}", *(f"{name}={text}" for name, text in more if text is not None)]

    def _list_trainer_arguments(self, callbacks: ast.expr | None, *, validates: bool) -> list[str]:
        """Return the arguments of `lumen.Trainer`."""
        values, epochs, found = self._values, self._get("num_train_epochs", 3), list[str]()
        steps = self._get("max_steps", -1)
        if steps not in (-1, 0):
            found.append(f"max_steps={values['max_steps']}")
        if steps in (-1, 0) or (steps is _UNKNOWN and "num_train_epochs" in values):
            is_number = isinstance(epochs, int | float)
            found.append(f"max_epochs={-int(-epochs // 1) if is_number else values['num_train_epochs']}")
            if is_number and epochs % 1:
                self._note(self._file.tree.body[0], f"num_train_epochs={epochs}: epochs are whole. Set max_steps.")
        flags = {"use_cpu": 'accelerator="cpu"', "tf32": 'matmul_precision="high"', "torch_compile": "compile=True",
                 "full_determinism": "deterministic=True"}  # fmt: skip
        found += [text for name, text in flags.items() if self._get(name)]
        kinds = {name: self._get(name) for name in ("bf16", "fp16")}
        precision = next((f'"{name}"' for name in kinds if kinds[name] is True), '"fp32"')
        for name in ("fp16", "bf16"):
            precision = f'"{name}" if {values[name]} else {precision}' if kinds[name] is _UNKNOWN else precision
        loggers = self._get("report_to", "none")
        names = [loggers] if isinstance(loggers, str) else loggers if isinstance(loggers, list) else []
        ours = [f'"{name}"' for name in names if name in ("tensorboard", "wandb", "mlflow", "aim")]
        items = [*self._list_callbacks(callbacks), *self._list_checkpoint_callbacks(validates=validates)]
        if len(ours) + names.count("none") < len(names):
            self._note(
                self._file.tree.body[0], f"report_to={values['report_to']}: Trainer(logger=...) has other names."
            )
        rows = {
            f"precision={precision}": precision != '"fp32"',
            f"accumulate_grad_batches={values.get('gradient_accumulation_steps')}": (
                self._get("gradient_accumulation_steps", 1) != 1
            ),
            f"gradient_clip_val={values.get('max_grad_norm', '1.0')}": self._get("max_grad_norm", 1.0),
            f"val_check_interval={values.get('eval_steps', values.get('logging_steps', '500'))}": (
                validates and self._get_strategy("eval_strategy", "no") == "steps"
            ),
            "num_sanity_val_steps=0": validates,
            f"log_every_n_steps={values.get('logging_steps')}": "logging_steps" in values,
            f"callbacks=[{', '.join(items)}]": items,
            "enable_checkpointing=False": self._get_strategy("save_strategy", "steps") == "no",
            f"logger=[{', '.join(ours)}]": ours,
            f"default_root_dir={values.get('output_dir')}": self._get("output_dir") is not None,
            f"name={values.get('run_name')}": self._get("run_name") is not None,
            f"seed={values.get('seed', '42')}": True,
        }
        return [*found, *(text for text, is_set in rows.items() if is_set)]

    def _list_callbacks(self, callbacks: ast.expr | None) -> list[str]:
        """Return the texts of the callbacks that were passed to the trainer."""
        if not isinstance(callbacks, ast.List | ast.Tuple):
            return [f"*{self._get_text(callbacks)}"] if callbacks is not None else []
        found = []
        for each in callbacks.elts:
            name = _get_class(self._file, each.func if isinstance(each, ast.Call) else each)
            if name == "EarlyStoppingCallback" and isinstance(each, ast.Call):
                found.append(self._write_early_stopping(each))
            elif name is None:
                found.append(self._get_text(each))
            else:
                self._note(each, f"{name} is left out. Lumen has loggers and a progress bar.")
        return found

    def _list_monitor(self) -> list[str]:
        """Return the texts of the arguments `monitor` and `mode`."""
        metric, is_greater = self._get("metric_for_best_model", "loss"), self._get("greater_is_better")
        if metric is _UNKNOWN:
            return [f'monitor="eval_" + {self._values["metric_for_best_model"]}', 'mode="max"']
        if is_greater is None:
            is_greater = not metric.endswith("loss")
        return [f'monitor="eval_{metric.removeprefix("eval_")}"', f'mode="{"max" if is_greater else "min"}"']

    def _write_early_stopping(self, call: ast.Call) -> str:
        names = {"early_stopping_patience": "patience", "early_stopping_threshold": "min_delta"}
        given = {"patience": "1"} | dict(zip(names.values(), map(self._get_text, call.args), strict=False))
        given |= {names[str(item.arg)]: self._get_text(item.value) for item in call.keywords if item.arg in names}
        words = [*self._list_monitor(), *(f"{name}={text}" for name, text in given.items())]
        return f"lumen.EarlyStopping({', '.join(words)})"

    def _list_checkpoint_callbacks(self, *, validates: bool) -> list[str]:
        """Return a `ModelCheckpoint`, if the arguments say when to save or which checkpoint is best."""
        strategy, values = self._get_strategy("save_strategy", "steps"), self._values
        needs_best = validates and (self._get("load_best_model_at_end") or "metric_for_best_model" in values)
        says_when = {"save_strategy", "save_steps", "save_total_limit"} & values.keys()
        if strategy == "no" or not (needs_best or says_when):
            return []
        when = {"steps": f"every_n_train_steps={values.get('save_steps', '500')}", "epoch": "every_n_epochs=1"}
        words = [*(self._list_monitor() if needs_best else []), *([when[strategy]] if strategy in when else [])]
        keep = values.get("save_total_limit", "-1")
        return [f"lumen.ModelCheckpoint({', '.join([*words, f'keep_last={keep}'])})"]

    # ------------------------------------------------------------------ the task

    def _write_task(
        self, given: Mapping[str, ast.expr], words: Mapping[str, str], owner: ast.ClassDef | None, *, evaluates: bool
    ) -> list[str]:
        """Return the lines of the task's class."""
        values, used = self._values, {getattr(each, "attr", getattr(each, "id", "")) for each in self._nodes}
        is_ours = any(re.search(r"^AutoModel|For[A-Z]|LMHead", name) for name in used)
        loss, logits = (".loss", ".logits") if is_ours else ('["loss"]', '["logits"]')
        has_compute = owner is not None and any(getattr(each, "name", "") == "compute_loss" for each in owner.body)
        counts = (text for name, text in _TOKEN_COUNTS.items() if any(re.search(name, each) for each in used))
        count = None if has_compute else next(counts, None)
        if count and any("LMHeadModel" in name for name in used):
            self._note(given["model"], _HEAD_NOTE)
        functions = [name for name in ("compute_metrics", "preprocess_logits") if name in words]
        hyper = [*self._list_hyperparameters()]
        step = "self.compute_loss(self.model, dict(batch){})" if has_compute else f"self.model(**batch){loss}"
        lines = [
            f"class {self._task}(lumen.TaskModule):",
            f"    def __init__(self, model, {', '.join([*hyper, *functions])}):",
            "        super().__init__()",
            "        self.save_hyperparameters({})".format(", ".join(f'"{name}"' for name in hyper)),
            "        self.model = model.train()",
            *(f"        self.{name} = {name}" for name in functions),
        ]
        if self._get("gradient_checkpointing"):
            text = values.get("gradient_checkpointing_kwargs", "")
            lines.append(f"        self.model.gradient_checkpointing_enable({text})")
        if has_compute and "super().compute_loss(" in self._source.get_text(owner or given["model"]):
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
            *([f"        tokens = {count}"] if count else []),
            f'        self.log("loss", loss, prog_bar=True{", weight=tokens" if count else ""})',
            "        return loss, tokens  # The mean covers all tokens of a step." if count else "        return loss",
        ]
        if evaluates and "compute_metrics" in words:
            self._imports |= {"transformers.EvalPrediction", "transformers.trainer_pt_utils.EvalLoopContainer"}
            call = f'self.preprocess_logits(outputs{logits}, batch["labels"])'
            found = call if "preprocess_logits" in words else f"outputs{logits}"
            text = _METRICS.format(step.format(", return_outputs=True"), found)
            if not has_compute:
                text = text.replace("loss, outputs = " + step, "outputs = self.model(**batch)")
                text = text.replace('"eval_loss", loss', f'"eval_loss", outputs{loss}')
            lines += text.split("\n")
        elif evaluates:
            lines += ["", "    def validation_step(self, batch):", f'        self.log("eval_loss", {step.format("")})']
        return [*lines, "", *self._write_configure_optimizers(given, hyper)]

    def _write_configure_optimizers(self, given: Mapping[str, ast.expr], hyper: list[str]) -> list[str]:
        """Return the lines of `configure_optimizers`, with the numbers of transformers."""
        values, optim = self._values, self._get("optim", "adamw_torch_fused")
        lines, at = ["    def configure_optimizers(self):"], "        "
        decays = "weight_decay" in hyper
        if decays:
            self._imports.add("lumen.optim.decay_groups")
            lines.append(f"{at}groups = decay_groups(self, self.hparams.weight_decay)")
        words = ["groups" if decays else "self.parameters()", "lr=self.hparams.lr"]
        words += [f"{name}=self.hparams.{name}" for name in ("betas", "eps") if name in hyper]
        words += [] if decays else ["weight_decay=0.0"]
        words += ["fused=True"] if optim == "adamw_torch_fused" else []
        if optim not in ("adamw_torch", "adamw_torch_fused"):
            self._note(given["args"], f"optim={values['optim']}: {_BUILD} The new task has AdamW.")
        lines += [f"{at}{line}" for line in _write_call("optimizer = torch.optim.AdamW(", words, ")", _WIDTH - 8)]
        lines.append(f"{at}steps = self.trainer.estimated_stepping_batches")
        warmup = "self.hparams.warmup_steps" if "warmup_steps" in hyper else "0"
        if "warmup_ratio" in hyper:
            self._imports.add("math")
            lines.append(f"{at}warmup = math.ceil(self.hparams.warmup_ratio * steps)")
            warmup = "warmup"
        self._imports.add("transformers.get_scheduler")
        words = [values.get("lr_scheduler_type", '"linear"'), "optimizer", warmup, "steps"]
        words += [values["lr_scheduler_kwargs"]] if "lr_scheduler_kwargs" in values else []
        lines += [f"{at}{line}" for line in _write_call("schedule = get_scheduler(", words, ")", _WIDTH - 8)]
        if "plateau" in words[0].lower():
            self._note(given["args"], f'add "monitor": "eval_loss" and "interval": "epoch" for {words[0]}.')
        result = '{"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}'
        return [*lines, f"{at}return {result}"]

    def _insert_task(self, lines: list[str], statement: ast.stmt) -> None:
        """Insert the class after the imports: before the first class, function or use of the trainer."""
        source, last = self._source, self._source.get_span(statement)[0]
        kinds = ast.FunctionDef | ast.ClassDef | ast.If
        node = next(each for each in self._file.tree.body
                    if isinstance(each, kinds) or source.get_span(each)[1] > last)  # fmt: skip
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        at = source.find_line_start(source.get_span([*decorators, node][0])[0])
        above = source.text[:at].splitlines(keepends=True)
        while above and above[-1].startswith("#"):  # Comments belong to the statement below.
            at -= len(above.pop())
        blank = len(above) - len("".join(above).rstrip().splitlines())
        source.replace(at, at, source.newline.join([*[""] * (2 - min(2, blank)), *lines, "", "", ""]))

    def _edit_subclass(self, node: ast.ClassDef) -> None:
        """Turn a subclass of the trainer into a subclass of the task, which calls its `compute_loss`."""
        source, start = self._source, self._source.get_span(node)[0]
        source.replace_node(node.bases[0], self._task)
        source.replace(start, start + len(f"class {node.name}"), f"class {re.sub('Trainer$', 'Task', node.name)}")
        for each in node.body:
            name = getattr(each, "name", "")
            if isinstance(each, ast.Assign) and source.get_text(each).startswith("loss_is_scaled_for_ga"):
                self._remove_statement(each)
            elif isinstance(each, ast.FunctionDef) and name == "__init__" and each.args.kwarg is None:
                self._note(each, "__init__ gets the keyword arguments of the task: accept **kwargs, and pass them on.")
            elif name == "compute_loss":
                if self._get("gradient_accumulation_steps", 1) != 1 and "scaled_for_ga" not in source.get_text(node):
                    self._note(each, "transformers may add the losses of a step's batches; Lumen takes their mean.")
                if source.get_text(each).count("num_items_in_batch") > 1:
                    self._note(each, "num_items_in_batch is None. Return (loss, tokens) from training_step.")
            elif sentence := _find_note(NOTES, name):
                self._note(each, f"{name} is not called as before. {sentence}")
        for part in ast.walk(node):
            text = source.get_text(part) if isinstance(part, ast.Attribute) else ""
            if text in ("self.args", "self.state"):
                self._note(part, f"{text} does not exist. Pass the value to __init__, or read self.trainer.")
            if text == "self.log":
                source.replace_node(part, "self.log_dict")

    # ------------------------------------------------------------------ callbacks

    def _edit_callback(self, owner: ast.ClassDef) -> None:
        """Turn a `TrainerCallback` into a `lumen.Callback`."""
        for base in owner.bases:
            if _get_class(self._file, base) == "TrainerCallback":
                self._source.replace_node(base, "lumen.Callback")
        events = [each for each in owner.body if isinstance(each, ast.FunctionDef)]
        names = [EVENTS.get(each.name, each.name) for each in events]
        for event in events:
            if sentence := _find_note(NOTES, event.name):
                self._note(event, f"{event.name} is never called. {sentence}")
            elif names.count(EVENTS.get(event.name, "")) > 1:
                self._note(event, f"not edited: write one {EVENTS[event.name]}(self, trainer, pl_module).")
            elif event.name in EVENTS:
                self._edit_event(event)

    def _edit_event(self, event: ast.FunctionDef) -> None:
        """Edit the signature and the body of one event."""
        source, first, hook = self._source, event.body[0], EVENTS[event.name]
        body = [each for statement in event.body for each in ast.walk(statement)]
        names = [each.arg for each in (*event.args.args[4:], *event.args.kwonlyargs)]
        start, at = source.get_span(event)[0], source.get_span(first)[0]
        source.replace(source.text.index(event.name, start), source.text.rindex(":", start, at),
                       f"{hook}(self, trainer, pl_module)")  # fmt: skip
        read = {each.id for each in body if isinstance(each, ast.Name)}
        lines = [f"{name} = {text}" for name, text in _EVENT_PARAMETERS.items() if name in names and name in read]
        if event.name == "on_log":
            lines = ["if trainer.global_step % trainer.log_every_n_steps:", "    return", *lines]
            self._note(event, "logs has the newest logged values: loss and eval_*, but no learning_rate or epoch.")
        source.replace(at, at, "".join(f"{line}{source.newline}{source.get_indent(at)}" for line in lines))
        known = {part for each in body if isinstance(each, ast.expr) and ast.unparse(each) in _EVENT_VALUES
                 for part in ast.walk(each)}  # fmt: skip
        rest = {"args", "state", "control", "kwargs", *names} - _EVENT_PARAMETERS.keys()
        for each in body:
            if isinstance(each, ast.expr) and ast.unparse(each) in _EVENT_VALUES:
                source.replace_node(each, _EVENT_VALUES[ast.unparse(each)])
            elif isinstance(each, ast.Return) and getattr(each.value, "id", "") == "control":
                known |= {*ast.walk(each)}
                if each is event.body[-1] and each is not first:
                    self._remove_statement(each)
                else:
                    source.replace_node(each, "return")
            elif isinstance(each, ast.Name) and each not in known and each.id in rest:
                self._note(each, f"{each.id} is no argument of {hook}. Read trainer or pl_module.")

    # ------------------------------------------------------------------ imports

    def _edit_imports(self) -> None:
        """Remove the imports that are not used any more, and add those of the new code."""
        source, wanted = self._source, dict[str, list[str]]()
        used = {each.id for each in ast.walk(ast.parse(source.apply_edits())) if isinstance(each, ast.Name)}
        imports = [each for each in self._file.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        present = {f"{_get_module(each)}.{alias.name}" if isinstance(each, ast.ImportFrom) else alias.name
                   for each in imports for alias in each.names if alias.asname is None}  # fmt: skip
        for full in sorted(self._imports - present):
            if get_short_name(full) in used:
                wanted.setdefault(full.rpartition(".")[0], []).append(get_short_name(full))
        for each in imports:
            if isinstance(each, ast.ImportFrom) and _get_module(each).split(".")[0] == "transformers":
                gone = {alias.name for alias in each.names if (alias.asname or alias.name) not in used}
                gone &= {*_REPLACED, "TrainerControl", "TrainerState"}
                more = wanted.pop(_get_module(each), [])
                names = sorted({*(ast.unparse(alias) for alias in each.names if alias.name not in gone), *more})
                if not names:
                    self._remove_statement(each)
                elif gone or more:
                    source.replace_node(each, _write_import(_get_module(each), names))
        for module, names in wanted.items():
            for text in [f"import {name}" for name in names] if not module else [_write_import(module, names)]:
                self._add_import(imports, text, (bool(module), module or text.removeprefix("import ")))

    def _add_import(self, imports: list[ast.Import | ast.ImportFrom], text: str, key: tuple[bool, str]) -> None:
        """Add an import before the first that follows in alphabetical order, or behind the last of its kind."""

        def is_standard(module: str) -> bool:
            return module.split(".")[0] in sys.stdlib_module_names

        alike = [each for each in imports if is_standard(_get_module(each)) == is_standard(key[1])]
        later = [each for each in alike if (isinstance(each, ast.ImportFrom), _get_module(each)) > key]
        newline = self._source.newline
        if later or not alike:
            at = self._source.get_span((later or imports)[0])[0]
            self._source.replace(at, at, text + newline * (1 if later else 2))
        else:
            at = self._source.get_span(alike[-1])[1]
            self._source.replace(at, at, newline + text)


def _write_call(head: str, items: list[str], tail: str, width: int) -> list[str]:
    """Return the lines of a call or a list, with one item per line if it is long."""
    if len(whole := f"{head}{', '.join(items)}{tail}") <= width:
        return [whole]
    lines = []
    for item in items:
        name, opening, rest = item.partition("=[")
        inner = re.split(r", (?=lumen\.)", rest.removesuffix("]"))
        is_long = opening and len(item) + 5 > width
        lines += _write_call(f"{name}=[", inner, "],", width - 4) if is_long else [f"{item},"]
    return [head, *(f"    {line}" for line in lines), tail]


def _write_import(module: str, names: list[str]) -> str:
    short = f"from {module} import {', '.join(names)}"
    return short if len(short) <= _WIDTH else "\n".join(_write_call(f"from {module} import (", names, ")", _WIDTH))


def _get_module(statement: ast.Import | ast.ImportFrom) -> str:
    return (statement.module or "") if isinstance(statement, ast.ImportFrom) else statement.names[0].name
