"""Edits of scripts for transformers' `Trainer`: a task, loaders and a `lumen.Trainer` in its place."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from string import Template
from typing import Any, final

from lumen.tools.migrate.names import get_short_name
from lumen.tools.migrate.notebook import CELL
from lumen.tools.migrate.project import ParsedFile
from lumen.tools.migrate.source import TABLES, EditableSource, MigrationNote, get_last_name, read_tables

_TABLES = read_tables("transformers")
#: Arguments of `TrainingArguments` that the command translates, and arguments that change no number.
TRANSLATED, NEUTRAL = (frozenset(_TABLES[name].split()) for name in ("translated", "neutral"))
#: Notes on arguments of `TrainingArguments`, and on all other names. A key may hold several names.
NOTED: Mapping[str, str] = _TABLES["noted"]
NOTES: Mapping[str, str] = _TABLES["notes"]
#: Events of `TrainerCallback`, with the hooks of `lumen.Callback`.
EVENTS: Mapping[str, str] = _TABLES["events"]
_SENTENCES = {name: sentence for names, sentence in {**NOTED, **NOTES}.items() for name in names.split()}
_TRAINERS, _ARGUMENTS = ("Trainer", "Seq2SeqTrainer"), ("TrainingArguments", "Seq2SeqTrainingArguments")
_REPLACED = (*_TRAINERS, *_ARGUMENTS, "TrainerCallback", "EarlyStoppingCallback")
_GONE = {*_REPLACED, "TrainerControl", "TrainerState"}
_POSITIONAL = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
_OF_TRAINER = (*_POSITIONAL, "processing_class", "compute_metrics", "callbacks", "preprocess_logits_for_metrics")
_EARLY_STOPPING = {"early_stopping_patience": "patience", "early_stopping_threshold": "min_delta"}
#: Objects that the new code may import.
_IMPORTED = (
    "inspect", "lumen", "math", "torch", "lumen.optim.decay_groups", "torch.utils.data.DataLoader",
    "transformers.DataCollatorWithPadding", "transformers.EvalPrediction", "transformers.default_data_collator",
    "transformers.get_scheduler", "transformers.trainer_pt_utils.EvalLoopContainer",
    "transformers.trainer_utils.RemoveColumnsCollator",
)  # fmt: skip
_NOT_EDITED = "not edited: a file needs one statement that assigns its only Trainer, with a model."
_UNKNOWN = object()  # the value of an argument that is no literal
_WIDTH = 100


def uses_trainer(file: ParsedFile) -> bool:
    """Return True if a file uses the `Trainer` of transformers, its arguments or its callbacks."""
    return any(_get_class(file, node) in _REPLACED for node in ast.walk(file.tree))


def _get_class(file: ParsedFile, node: ast.AST) -> str | None:
    """Return the short name of the object of transformers that a name or attribute refers to, or None."""
    full = file.names.get_full_name(node) if isinstance(node, ast.Name | ast.Attribute) else None
    return get_short_name(full) if full is not None and full.startswith("transformers.") else None


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
        self._given: dict[str, ast.expr] = {}  # the trainer's arguments, by name
        self._set: dict[str, ast.expr] = {}  # the arguments that `TrainingArguments` receives
        self._values: dict[str, str] = dict(_TABLES["defaults"])  # texts of the arguments of `TrainingArguments`
        self._task = self._find_free_name("ModelTask")
        classes = [node for node in self._nodes if isinstance(node, ast.ClassDef)]
        bases = {node: {_get_class(file, base) for base in node.bases} for node in classes}
        self._trainers = {node.name: node for node in classes if bases[node] & {*_TRAINERS}}
        self._callbacks = [node for node in classes if "TrainerCallback" in bases[node]]

    def edit(self) -> tuple[str, list[MigrationNote]]:
        """Return the text with all edits, and the notes."""
        trainers = [node for node in self._nodes if isinstance(node, ast.Call) and self._is_trainer(node.func)]
        assigned = {node.value: node for node in self._nodes if isinstance(node, ast.Assign)}
        if len(trainers) == 1 and trainers[0] in assigned and "model" in _list_arguments(trainers[0], _POSITIONAL):
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

    def _get_text(self, node: ast.AST | None) -> str:
        """Return the text of a node in one line, or "None" without a node."""
        text = self._source.get_text(node) if node is not None else "None"
        return ast.unparse(node) if node is not None and "\n" in text else text

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

    # ------------------------------------------------------------------ arguments

    def _get(self, name: str) -> Any:
        """Return the value of an argument of `TrainingArguments`, or `_UNKNOWN` if it is no literal."""
        return _read_literal(self._values[name]) if name in self._values else None

    def _get_strategy(self, name: str, default: str) -> str:
        """Return a strategy; "steps" or "epoch" if the script decides when it runs."""
        found = self._get(name) if name in self._values else default
        if found is _UNKNOWN:
            return "steps" if "steps" in self._values[name] else "epoch"
        return str(found or "no").lower()

    def _read_arguments(self, trainer: ast.Call) -> None:
        """Read the arguments of the trainer and its `TrainingArguments`, and note those that are left out."""
        self._given = _list_arguments(trainer, _POSITIONAL)
        source = self._given.get("args")
        for item in trainer.keywords:
            if item.arg is None:
                self._note(item.value, f"**{self._get_text(item.value)} is left out. Write its arguments one by one.")
        for key, value in self._given.items():
            if key in _SENTENCES and key != "model":
                self._note(value, f"{key} is left out. {_SENTENCES[key]}")
        if source is None:
            self._values["output_dir"] = '"tmp_trainer"'
            return
        name = self._get_text(source)
        nodes = [*self._iterate_scope(trainer, name)]
        found = [each for each in nodes if isinstance(each, ast.Assign) and name in map(self._get_text, each.targets)]
        call = found[0].value if len(found) == 1 else source
        is_made_here = isinstance(call, ast.Call) and _get_class(self._file, call.func) in _ARGUMENTS
        if not isinstance(call, ast.Call) or not is_made_here or any(item.arg is None for item in call.keywords):
            self._values |= {key: f"{name}.{key}" for key in _TABLES["parsed"].split()}
            self._values["num_train_epochs"] = f"int({name}.num_train_epochs)"
            self._note(source, f"{name} is known when the script runs: write its strategies, schedule and metric here.")
            return
        self._set = _list_arguments(call, ("output_dir",))
        self._values |= {key: self._get_text(value) for key, value in self._set.items()}
        for key, node in self._set.items():
            value = self._get(key)
            if value is _UNKNOWN and key in _TABLES["decided"].split():
                self._note(node, f"{key} is known when the script runs. Check the trainer's arguments.")
            if key.endswith("_steps") and isinstance(value, float) and key != "warmup_steps":
                self._note(node, f"{key}={value} is a share of all steps. Write a number of steps.")
            if key not in TRANSLATED | NEUTRAL and value not in (False, None, "", "no", "steps"):
                self._note(node, f"{key} is left out. {_SENTENCES.get(key, 'Lumen has no such argument.')}")
        if found:
            self._replace_reads(name, nodes, found[0])

    def _replace_reads(self, name: str, nodes: list[ast.AST], statement: ast.Assign) -> None:
        """Replace reads of `TrainingArguments` by their values, and remove the statement if no other use is left."""
        kinds = ast.Name | ast.Attribute
        names: list[ast.expr] = [each for each in nodes if isinstance(each, kinds) and self._get_text(each) == name]
        for each in nodes:
            if isinstance(each, ast.Attribute) and each.value in names and each.attr in self._values:
                names.remove(each.value)
                self._source.replace_node(each, self._values[each.attr])
        if len(names) == 2:  # These are the assignment and the argument of the trainer.
            self._source.remove_statement(statement)
        else:
            self._note(statement, f"{name} is read in other places, but not by Lumen.")

    def _note_argument(self, name: str, sentence: str) -> None:
        self._note(self._set.get(name, self._given.get("args", self._given["model"])), sentence)

    # ------------------------------------------------------------------ the run

    def _edit_run(self, statement: ast.Assign, call: ast.Call) -> None:
        """Replace the statement that builds the trainer, and the calls of the trainer; insert the task."""
        self._read_arguments(call)
        own = self._trainers.get(getattr(call.func, "id", ""))
        at, target = self._source.get_indent(self._source.get_span(statement)[0]), self._get_text(statement.targets[0])
        texts = self._make_texts(target, own)
        lines = _fill("run", texts)
        for kind in ("train", "eval") if texts["evaluates"] else ("train",):
            found, unless = self._given.get(f"{kind}_dataset"), ""
            if isinstance(found, ast.IfExp) and self._get_text(found.orelse) == "None":
                unless, found = f" if {self._get_text(found.test)} else None", found.body
            shuffles = kind == "train" and self._get("train_sampling_strategy") != "sequential"
            row = {"loader": texts[f"{kind}_loader"], "dataset": self._get_text(found), "unless": unless}
            lines += _fill("loader", texts | row | {
                "batch_size": self._values[f"per_device_{kind}_batch_size"], "shuffles": shuffles})  # fmt: skip
        lines = _join_lines([*lines, *_fill("trainer", texts)], _WIDTH - len(at))
        self._source.replace_node(statement, f"{self._source.newline}{at}".join(lines))
        scope = {*self._iterate_scope(statement, target)}
        for each in self._nodes:
            if isinstance(each, ast.Attribute) and self._get_text(each.value) == target:
                if each in scope:
                    self._edit_use(each, texts)
                elif each.attr in ("train", "evaluate", "save_model"):
                    self._note(each, f"not edited: {target} is built in another function, with its task and loaders.")
        self._insert_task(_join_lines(_fill("task", texts), _WIDTH), own or statement)
        if own is not None:
            self._edit_subclass(own)
        for node in self._trainers.values():
            if node is not own:
                self._note(node, _NOT_EDITED)

    def _make_texts(self, target: str, own: ast.ClassDef | None) -> dict[str, Any]:
        """Return the texts and conditions of the templates."""
        given, value_of = {key: self._get_text(node) for key, node in self._given.items()}, self._get
        prefix, dot, _ = target.rpartition(".")
        names = {word: f"{prefix}{dot}{self._find_free_name(word)}" for word in ("task", "train_loader", "eval_loader")}
        builds_model = not isinstance(self._given["model"], ast.Name | ast.Attribute)
        model = self._find_free_name("model") if builds_model else given["model"]
        texts: dict[str, Any] = {key: text if value_of(key) else "" for key, text in self._values.items()}
        texts |= {"seed": self._values["seed"], "target": target, "model": model, "built_model": given["model"],
                  "builds_model": builds_model, **names}  # fmt: skip
        texts |= self._describe_task(own, given)
        texts |= self._describe_loaders(model, given)
        texts["evaluates"] = given.get("eval_dataset", "None") != "None"
        texts["validates"] = texts["evaluates"] and self._get_strategy("eval_strategy", "no") != "no"
        functions = {"compute_metrics": "compute_metrics", "preprocess_logits": "preprocess_logits_for_metrics"}
        functions = {name: given[key] for name, key in functions.items() if key in given and texts["evaluates"]}
        texts |= {"metrics": "compute_metrics" in functions, "preprocesses": "preprocess_logits" in functions}
        hyper = _fill("hyperparameters", texts)
        words = [text.partition("=")[0] for text in hyper]
        rest = [f"{key}={text}" for key, text in given.items() if key not in {*_OF_TRAINER, *_SENTENCES}]
        arguments = [*hyper, *(f"{name}={text}" for name, text in functions.items()), *rest]
        texts |= {"parameters": ",\n        ".join([*words, *functions]), "arguments": ",\n    ".join(arguments),
                  "hyperparameters": ",\n            ".join(f'"{word}"' for word in words)}  # fmt: skip
        return texts | self._describe_trainer(validates=texts["validates"])

    def _describe_task(self, own: ast.ClassDef | None, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the texts and conditions of the task: its loss and its optimizer."""
        used, optim = {get_last_name(each) for each in self._nodes}, self._get("optim")
        is_ours = any(re.search(r"^AutoModel|For[A-Z]|LMHead", name) for name in used)
        loss, logits = (".loss", ".logits") if is_ours else ('["loss"]', '["logits"]')
        own_loss = own is not None and any(getattr(each, "name", "") == "compute_loss" for each in own.body)
        counts = (text for name, text in _TABLES["tokens"].items() if any(re.search(name, each) for each in used))
        tokens = None if own_loss else next(counts, None)
        if tokens and any("LMHeadModel" in name for name in used):
            self._note(self._given["model"], TABLES["notes"]["head"])
        if optim not in (None, "adamw_torch", "adamw_torch_fused"):
            self._note_argument("optim", f"optim={self._values['optim']}: {_SENTENCES['optimizers']} The new task has "
                                "AdamW.")  # fmt: skip
        if "plateau" in self._values["lr_scheduler_type"].lower():
            kind = self._values["lr_scheduler_type"]
            self._note_argument("lr_scheduler_type", f'add "monitor": "eval_loss" and "interval": "epoch" for {kind}.')
        warmup = next((name for name in ("warmup_steps", "warmup_ratio") if self._get(name)), "")
        is_share = isinstance(self._get(warmup), float) and self._get(warmup) < 1
        class_name = getattr(own, "name", "")
        return {
            "class": re.sub("Trainer$", "Task", class_name) or self._task, "task_class": self._task, "loss": loss,
            "logits": logits, "own_loss": own_loss, "tokens": tokens, "fused": optim in (None, "adamw_torch_fused"),
            "calls_super": own_loss and "super().compute_loss(" in self._get_text(own),
            "betas": {"adam_beta1", "adam_beta2"} & self._set.keys(), "warmup": self._values.get(warmup, ""),
            "warmup_ratio": warmup == "warmup_ratio" or is_share, "warmup_steps": warmup == "warmup_steps"
            and not is_share, "gradient_checkpointing_kwargs": self._values.get("gradient_checkpointing_kwargs", ""),
        }  # fmt: skip

    def _describe_loaders(self, model: str, given: Mapping[str, str]) -> dict[str, Any]:
        """Return the texts and conditions of the collator."""
        collator, tokenizer = given.get("data_collator", "None"), given.get("processing_class")
        if collator == "None":
            collator = f"DataCollatorWithPadding({tokenizer})" if tokenizer else "default_data_collator"
        if self._get("train_sampling_strategy") not in (None, "random", "sequential"):
            self._note_argument("train_sampling_strategy", f"train_sampling_strategy: {_SENTENCES['group_by_length']}")
        if self._get("remove_unused_columns") is False:
            return {"collate": collator}
        base = f"{model}.get_base_model()" if "get_peft_model" in self._file.names.imported else model
        columns, collate = map(self._find_free_name, ("columns", "collate_columns"))
        return {"collator": collator, "columns": columns, "collate": collate, "base_model": base}

    def _describe_trainer(self, *, validates: bool) -> dict[str, Any]:
        """Return the texts and conditions of the trainer."""
        values, epochs, steps = self._values, self._get("num_train_epochs"), self._get("max_steps")
        if is_number := isinstance(epochs, int | float):
            if epochs % 1:
                self._note_argument("num_train_epochs", f"num_train_epochs={epochs}: epochs are whole. Set max_steps.")
            epochs = -int(-epochs // 1)
        precision = '"fp32"'
        for name in ("fp16", "bf16"):
            if value := self._get(name):
                precision = f'"{name}"' if value is True else f'"{name}" if {values[name]} else {precision}'
        loggers = self._get("report_to") or []
        loggers = [loggers] if isinstance(loggers, str) else loggers if isinstance(loggers, list) else [None]
        ours = [f'"{name}"' for name in loggers if name in ("tensorboard", "wandb", "mlflow", "aim")]
        if len(ours) + loggers.count("none") < len(loggers):
            self._note_argument("report_to", f"report_to={values['report_to']}: Trainer(logger=...) has other names.")
        callbacks = [*self._list_callbacks(), *self._list_checkpoint_callbacks(validates=validates)]
        use_cpu = values.get("use_cpu", "")
        return {
            "max_steps": "" if steps in (None, -1, 0) else values["max_steps"],
            "epochs": (str(epochs) if is_number else values["num_train_epochs"])
            if steps in (None, -1, 0) or (steps is _UNKNOWN and "num_train_epochs" in self._set) else "",
            "accelerator": '"cpu"' if use_cpu == "True" else f'"cpu" if {use_cpu} else "auto"',
            "precision": precision, "is_half": precision != '"fp32"', "loggers": ", ".join(ours),
            "accumulates": self._get("gradient_accumulation_steps") not in (None, 1),
            "gradient_accumulation_steps": values.get("gradient_accumulation_steps", ""),
            "by_steps": validates and self._get_strategy("eval_strategy", "no") == "steps",
            "eval_steps": values.get("eval_steps", values.get("logging_steps", "500")),
            "saves": self._get_strategy("save_strategy", "steps") != "no", "callbacks": ",\n        ".join(callbacks),
        }  # fmt: skip

    def _list_callbacks(self) -> list[str]:
        """Return the texts of the callbacks that were passed to the trainer."""
        callbacks = self._given.get("callbacks")
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
        metric, is_greater = self._get("metric_for_best_model") or "loss", self._get("greater_is_better")
        if metric is _UNKNOWN:
            return [f'monitor="eval_" + {self._values["metric_for_best_model"]}', 'mode="max"']
        if is_greater is None:
            is_greater = not metric.endswith("loss")
        return [f'monitor="eval_{metric.removeprefix("eval_")}"', f'mode="{"max" if is_greater else "min"}"']

    def _write_early_stopping(self, call: ast.Call) -> str:
        given = {"early_stopping_patience": "1"} | {
            name: self._get_text(node) for name, node in _list_arguments(call, (*_EARLY_STOPPING,)).items()
        }
        words = (f"{_EARLY_STOPPING[name]}={text}" for name, text in given.items() if name in _EARLY_STOPPING)
        return f"lumen.EarlyStopping({', '.join([*self._list_monitor(), *words])})"

    def _list_checkpoint_callbacks(self, *, validates: bool) -> list[str]:
        """Return a `ModelCheckpoint`, if the arguments say when to save or which checkpoint is best."""
        strategy, values = self._get_strategy("save_strategy", "steps"), self._values
        needs_best = validates and (self._get("load_best_model_at_end") or "metric_for_best_model" in values)
        says_when = {"save_strategy", "save_steps", "save_total_limit"} & self._set.keys()
        if strategy == "no" or not (needs_best or says_when):
            return []
        when = {"steps": f"every_n_train_steps={values['save_steps']}", "epoch": "every_n_epochs=1"}
        words = [*(self._list_monitor() if needs_best else []), *([when[strategy]] if strategy in when else [])]
        words.append(f"keep_last={values['save_total_limit']}")
        return [f"lumen.ModelCheckpoint({', '.join(words)})"]

    def _edit_use(self, node: ast.Attribute, texts: Mapping[str, Any]) -> None:
        """Edit or note a use of the trainer."""
        call = next((each for each in self._nodes if isinstance(each, ast.Call) and each.func is node), None)
        words = [] if call is None else [*call.args, *(item.value for item in call.keywords)]
        start, validate = self._source.get_span(node)[0], "{target}.validate({task}, {eval_loader})[0]"
        if node.attr == "train" and call is not None:
            if any(self._get_text(word) != "None" for word in words):
                self._note(node, f"the arguments of train are left out. {_SENTENCES['resume_from_checkpoint']}")
            if self._source.text[self._source.find_line_start(start) : start].strip():
                self._note(node, "fit returns None. Read trainer.callback_metrics.")
            newline = f"{self._source.newline}{self._source.get_indent(start)}"
            self._source.replace_node(call, newline.join(_fill("fit", texts)))
        elif node.attr == "evaluate" and call is not None and texts["evaluates"] and not words:
            self._source.replace_node(call, validate.format_map(texts))
        elif node.attr == "save_model" and call is not None:
            self._source.replace_node(node, f"{texts['model']}.save_pretrained")
            if not words:
                self._source.replace_node(call, f"{texts['model']}.save_pretrained({self._values['output_dir']})")
            if tokenizer := self._given.get("processing_class"):
                self._note(node, f"also write {self._get_text(tokenizer)}.save_pretrained(...).")
        elif node.attr in _SENTENCES:
            self._note(node, f"{node.attr}: {_SENTENCES[node.attr]}")

    def _insert_task(self, lines: list[str], statement: ast.stmt) -> None:
        """Insert the class after the imports: before the first class or function there, or before a statement."""
        source, last = self._source, self._source.get_span(statement)[0]
        kinds, body = ast.FunctionDef | ast.ClassDef | ast.If, self._file.tree.body
        imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        first = max((end for end in (source.get_span(each)[1] for each in imports) if end < last), default=0)
        node = next(each for each in body if source.get_span(each)[1] > last
                    or (isinstance(each, kinds) and source.get_span(each)[0] >= first))  # fmt: skip
        decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        at = source.find_line_start(source.get_span([*decorators, node][0])[0])
        above = source.text[:at].splitlines(keepends=True)
        while above and above[-1].startswith("#") and not above[-1].startswith(CELL):
            at -= len(above.pop())  # Comments belong to the statement below.
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
                source.remove_statement(each)
            elif isinstance(each, ast.FunctionDef) and name == "__init__" and each.args.kwarg is None:
                self._note(each, "__init__ gets the keyword arguments of the task: accept **kwargs, and pass them on.")
            elif name == "compute_loss":
                if self._get("gradient_accumulation_steps") not in (None, 1) and (
                    "scaled_for_ga" not in source.get_text(node)
                ):
                    self._note(each, "transformers may add the losses of a step's batches; Lumen takes their mean.")
                if source.get_text(each).count("num_items_in_batch") > 1:
                    self._note(each, "num_items_in_batch is None. Return (loss, tokens) from training_step.")
            elif name in _SENTENCES:
                self._note(each, f"{name} is not called as before. {_SENTENCES[name]}")
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
            if event.name in _SENTENCES:
                self._note(event, f"{event.name} is never called. {_SENTENCES[event.name]}")
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
        read, parameters = {each.id for each in body if isinstance(each, ast.Name)}, _TABLES["event_parameters"]
        lines = [f"{name} = {text}" for name, text in parameters.items() if name in names and name in read]
        if event.name == "on_log":
            lines = ["if trainer.global_step % trainer.log_every_n_steps:", "    return", *lines]
            self._note(event, "logs has the newest logged values: loss and eval_*, but no learning_rate or epoch.")
        source.replace(at, at, "".join(f"{line}{source.newline}{source.get_indent(at)}" for line in lines))
        rest = {"args", "state", "control", "kwargs", *names} - parameters.keys()
        known: set[ast.AST] = set()
        for each in body:
            new = _TABLES["event_values"].get(ast.unparse(each)) if isinstance(each, ast.expr) else None
            if new is not None:
                known |= {*ast.walk(each)}
                source.replace_node(each, new)
            elif isinstance(each, ast.Return) and getattr(each.value, "id", "") == "control":
                known |= {*ast.walk(each)}
                if each is event.body[-1] and each is not first:
                    source.remove_statement(each)
                else:
                    source.replace_node(each, "return")
            elif isinstance(each, ast.Name) and each.id in rest and each not in known:
                self._note(each, f"{each.id} is no argument of {hook}. Read trainer or pl_module.")

    # ------------------------------------------------------------------ imports

    def _edit_imports(self) -> None:
        """Remove the imports that are not used any more, and add those of the new code."""
        source, names, wanted = self._source, self._file.names, dict[str, list[str]]()
        used = {each.id for each in ast.walk(ast.parse(source.apply_edits())) if isinstance(each, ast.Name)}
        for full in _IMPORTED:
            if (short := get_short_name(full)) in used - names.bound:
                wanted.setdefault(full.rpartition(".")[0], []).append(short)
        imports = [each for each in self._file.tree.body if isinstance(each, ast.Import | ast.ImportFrom)]
        for each in imports:
            if isinstance(each, ast.ImportFrom) and _get_module(each).split(".")[0] == "transformers":
                gone = {alias.name for alias in each.names if (alias.asname or alias.name) not in used} & _GONE
                more = wanted.pop(_get_module(each), [])
                if not (kept := {ast.unparse(alias) for alias in each.names if alias.name not in gone} | {*more}):
                    source.remove_statement(each)
                elif gone or more:
                    source.replace_node(each, _write_import(_get_module(each), kept))
        for module, several in wanted.items():
            for text in [_write_import(module, several)] if module else [f"import {name}" for name in several]:
                self._add_import(imports, text, _get_order(ast.parse(text).body[0]))

    def _add_import(self, imports: list[Any], text: str, order: tuple[bool, bool, str]) -> None:
        """Add an import before the first that follows in the order, or behind the last of its kind."""
        alike = [each for each in imports if _get_order(each)[0] == order[0]]
        later, newline = [each for each in alike if _get_order(each) > order], self._source.newline
        if later or not alike:
            at = self._source.get_span((later or imports)[0])[0]
            self._source.replace(at, at, text + newline * (1 if later else 2))
        else:
            at = self._source.get_span(alike[-1])[1]
            self._source.replace(at, at, newline + text)


def _list_arguments(call: ast.Call, positional: Iterable[str]) -> dict[str, ast.expr]:
    """Return the arguments of a call by their present names, without unpacked arguments."""
    named = {each.arg: each.value for each in call.keywords if each.arg is not None}
    renamed = _TABLES["renamed"]
    return dict(zip(positional, call.args, strict=False)) | {renamed.get(key, key): named[key] for key in named}


def _fill(name: str, texts: Mapping[str, Any]) -> list[str]:
    """Return the lines of a template whose conditions hold, with its texts."""
    lines, indent, hidden = list[str](), 0, False
    for row in _TABLES["templates"][name].splitlines():
        code, _, conditions = row.partition("#? ")
        if hidden and (len(code) - len(code.lstrip()) > indent):
            continue
        hidden = any(bool(texts.get(each.strip("!"))) is each.startswith("!") for each in conditions.split())
        if hidden:
            indent = len(code) - len(code.lstrip()) if code.strip() else sys.maxsize
        else:
            lines += Template(code.rstrip()).substitute(texts).split("\n")
    return lines


def _join_lines(lines: list[str], width: int) -> list[str]:
    """Return the lines, with each bracket in one line if it fits, as a formatter does."""
    done, rest = list[str](), [*lines]
    while rest:
        line = rest.pop(0)
        if not line.endswith(("(", "[")):
            done.append(line)
            continue
        indent = len(line) - len(line.lstrip())
        end = next(number for number, each in enumerate(rest) if len(each) - len(each.lstrip()) <= indent)
        inner, last = _join_lines(rest[:end], width), rest[end].strip()
        short = f"{line}{', '.join(each.strip().removesuffix(',') for each in inner)}{last}"
        is_flat = not any(each.endswith(("(", "[")) for each in inner)
        done += [short] if is_flat and len(short) <= width else [line, *inner, rest[end]]
        del rest[: end + 1]
    return done


def _write_import(module: str, names: Iterable[str]) -> str:
    short = f"from {module} import {', '.join(sorted(names))}"
    rows = [f"from {module} import (", *(f"    {name}," for name in sorted(names)), ")"]
    return short if len(short) <= _WIDTH else "\n".join(rows)


def _get_module(statement: ast.Import | ast.ImportFrom) -> str:
    return (statement.module or "") if isinstance(statement, ast.ImportFrom) else statement.names[0].name


def _get_order(statement: Any) -> tuple[bool, bool, str]:
    """Return the sort key of an import: third-party packages come last, and `import` comes before `from`."""
    module = _get_module(statement)
    return module.split(".")[0] not in sys.stdlib_module_names, isinstance(statement, ast.ImportFrom), module
