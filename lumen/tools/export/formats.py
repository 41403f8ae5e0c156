"""Other formats of `lumen export`: a torch.export program, ONNX, or directories for transformers and peft.

These formats need the model, not only its tensors. The model is built from the run's config. Also safetensors of merged
weights need the model.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from safetensors.torch import load_file
from torch import nn

from lumen.checkpoint.format.safetensors_file import write_safetensors
from lumen.checkpoint.format.storage import make_temporary_path
from lumen.checkpoint.load.weights_source import SINGLE
from lumen.cli.command_line import CLI
from lumen.cli.command_words import find_run_config
from lumen.data.nested import iterate_tensors, map_leaves, move_batch
from lumen.errors import CheckpointMismatch, ConfigError
from lumen.internals.compiler import unwrap_compiled
from lumen.internals.tensors import EXTRA_STATE
from lumen.task.data_module import DataModule
from lumen.task.hooks import is_overridden
from lumen.task.task_module import TaskModule
from lumen.tools.export.merge import find_adapted, find_outermost, merge_adapters, merge_parametrizations
from lumen.tools.terminal import check_output_free

_ON_ONE_CPU = (
    "--trainer.devices=1", "--trainer.num_nodes=1", "--trainer.accelerator=cpu", "--trainer.strategy=auto",
    "--trainer.precision=fp32", "--trainer.sync_batchnorm=false", "--trainer.logger=false", "--trainer.callbacks=null",
    "--trainer.init_from=null",
)  # fmt: skip
_LOADERS = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader",
            "fit": "train_dataloader"}  # fmt: skip
_CLOSE = {torch.float64: 1e-10, torch.float32: 1e-5}  # other dtypes: 1e-2


@final
class ForwardCall(NamedTuple):
    """Arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@final
class ExportedModel(NamedTuple):
    """A task with the weights to export.

    Attributes:
        task: The whole task, in eval mode.
        part: The module of the task to export.
        data: The data module of the run, or None.
        dtype: The dtype of the written floating-point tensors, or None to keep their dtypes.
    """

    task: TaskModule
    part: nn.Module
    data: DataModule | None
    dtype: torch.dtype | None

    def make_call(self) -> ForwardCall:
        """Return example arguments of the part, from `example_input_array` or a batch of the data."""
        example = getattr(self.task, "example_input_array", None)
        batch = self._read_batch() if example is None else example
        call = _make_call(self.task, move_batch(batch, torch.device("cpu"), next(self.task.parameters()).dtype))
        return call if self.part is self.task else _capture_call(self.part, self.task, call)

    def _read_batch(self) -> Any:
        for owner in (self.data, self.task):
            for stage, name in _LOADERS.items():
                if owner is not None and is_overridden(owner, name):
                    owner.prepare_data()
                    owner.setup(stage)
                    loader = getattr(owner, name)()
                    return next(iter(loader[0] if isinstance(loader, list | tuple) else loader))
        raise ConfigError(
            f"--format: the input of {type(self.task).__name__} is unknown. Set example_input_array in the task, such "
            "as self.example_input_array = torch.zeros(1, 3)."
        )


_SUFFIXES = {"torch-export": ".pt2", "onnx": ".onnx", "huggingface": "", "peft": ""}


def check_format(kind: str, output: Path) -> None:
    """Raise early if the output cannot be written.

    Raises:
        ConfigError: The output exists or has the wrong suffix, or packages are missing.
    """
    suffix = _SUFFIXES.get(kind, output.suffix)
    if output.suffix != suffix and (suffix or output.suffix in (".safetensors", ".pt2", ".onnx")):
        expected = f"a {suffix} file" if suffix else "a directory"
        raise ConfigError(f"--output {output}: --format {kind} writes {expected}. Change --output.")
    check_output_free(output, f"--output {output}")
    needed = {"onnx": ("onnx", "onnxscript"), "huggingface": ("transformers",), "peft": ("peft",)}.get(kind, ())
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ConfigError(f"--format {kind} needs {' and '.join(missing)}. Run: pip install {' '.join(missing)}")


def write_format(
    kind: str, source: str, output: Path, module: str | None, weights: Callable[[Path], Any], *, merge: bool
) -> str:
    """Build the model, load its weights, and write the model.

    Args:
        kind: torch-export, onnx, huggingface, peft, or safetensors for merged weights.
        source: The checkpoint or run, from whose config the model is built.
        output: The file or directory to write. The output appears complete or not at all.
        module: Name of the submodule of the task to write, or None for the task.
        weights: Function that writes the tensors of this submodule into a safetensors file.
        merge: Merge adapters and parametrizations into the weights. The format huggingface merges as needed.

    Returns:
        The check that was made, in words.

    Raises:
        ConfigError: The run has no config, or the model cannot be written in this format.
        CheckpointMismatch: The model built from the config has other tensors.
    """
    temporary = make_temporary_path(output)
    temporary.mkdir()
    try:
        weights(temporary / "weights.safetensors")
        model = _fill_model(source, module, load_file(temporary / "weights.safetensors"))
        written = temporary / output.name
        with torch.no_grad():
            call = model.make_call() if kind in _CALLED else ForwardCall((), {})
            if merge:
                model = model._replace(part=merge_adapters(model.part))
            if merge or kind in _CALLED:  # torch.export warns about the hooks of old parametrizations.
                merge_parametrizations(model.part)
            if kind != "huggingface":  # This format merges before it casts.
                model.part.to(model.dtype)
            checked = _WRITERS[kind](
                model, ForwardCall(*move_batch(tuple(call), torch.device("cpu"), model.dtype)), written
            )
        check_format(kind, output)  # Another process may have created the output meanwhile.
        os.rename(written, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return checked


def _fill_model(source: str, module: str | None, saved: dict[str, torch.Tensor]) -> ExportedModel:
    files = find_run_config(source)
    if not files:
        raise ConfigError(
            f"{source} has no config.yaml, so Lumen cannot build the model. Give a run with a config.yaml, "
            "or load the model in Python with load_from_checkpoint and export it there."
        )
    made = CLI(args=["--config", *files, *_ON_ONE_CPU], run=False, save_config_callback=None)
    task = made.model.eval()
    task.configure_model()
    unwrap_compiled(task)
    floating = {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()}
    if floating == {torch.float64}:
        task.double()  # A float32 model would round the weights.
    part = task if module is None else task.get_submodule(module)
    try:
        different = [name for names in part.load_state_dict(saved, strict=False) for name in names]
        different = [name for name in different if name in saved or not name.endswith(EXTRA_STATE)]
        reason = f"only one of the two models has {', '.join(different[:3])}." if different else ""
    except RuntimeError as error:
        reason = str(error)
    if reason:
        raise CheckpointMismatch(f"the model of {files[0]} does not match the weights in {source}: {reason}")
    return ExportedModel(task, part, made.datamodule, floating.pop() if len(floating) == 1 else None)


def _make_call(module: nn.Module, batch: Any) -> ForwardCall:
    """Return a batch as arguments of `forward`: only the leading elements or the keys that `forward` takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if isinstance(batch, dict):
        known = {each.name for each in parameters if each.kind is not each.VAR_POSITIONAL}
        named = {name: value for name, value in batch.items() if name in known}
        return ForwardCall((), named) if named else ForwardCall((batch,), {})
    if not isinstance(batch, list | tuple):
        return ForwardCall((batch,), {})
    if any(each.kind is each.VAR_POSITIONAL for each in parameters):
        return ForwardCall(tuple(batch), {})
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return ForwardCall(tuple(batch[: max(1, len(needed))]), {})


def _capture_call(part: nn.Module, task: nn.Module, call: ForwardCall) -> ForwardCall:
    """Return the arguments that a part receives when the task is called."""
    calls: list[ForwardCall] = []
    handle = part.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(ForwardCall(args, kwargs)), with_kwargs=True
    )
    with handle, torch.no_grad():
        task(*call.args, **call.kwargs)
    if not calls:
        raise ConfigError(
            "--module: the task does not call this module in forward, so the input of the module is unknown."
        )
    return calls[0]


# ---------------------------------------------------------------------- formats


def _write_program(model: ExportedModel, call: ForwardCall, output: Path) -> str:
    program = torch.export.export(
        model.part, call.args, call.kwargs, dynamic_shapes=_make_dynamic_shapes(model.part, call)
    )
    torch.export.save(program, output)
    return _describe_difference(model.part(*call.args, **call.kwargs), program.module()(*call.args, **call.kwargs))


def _write_onnx(model: ExportedModel, call: ForwardCall, output: Path) -> str:
    shapes = _make_dynamic_shapes(model.part, call)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about its own code
        program = torch.onnx.export(
            model.part, call.args, kwargs=call.kwargs, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
    assert program is not None  # With `dynamo`, export always returns a program.
    program.save(str(output), external_data=False)
    if find_spec("onnxruntime") is None:
        return "not checked, because onnxruntime is not installed"
    return _describe_difference(model.part(*call.args, **call.kwargs), program(*call.args, **call.kwargs))


def _make_dynamic_shapes(part: nn.Module, call: ForwardCall) -> dict[str, Any]:
    """Return dynamic shapes for the arguments: the first dimension is the batch and may change."""
    arguments = inspect.signature(part.forward).bind(*call.args, **call.kwargs).arguments

    def shape(value: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.ndim else None

    return {name: map_leaves(value, shape) for name, value in arguments.items()}


def _describe_difference(ours: Any, theirs: Any) -> str:
    """Compare the outputs of the written program with the model's, and describe the difference.

    Raises:
        ConfigError: The outputs differ too much.
    """
    pairs = list(zip(iterate_tensors(ours), iterate_tensors(theirs), strict=True))
    furthest = max((float((one - two).abs().max()) for one, two in pairs if one.numel()), default=0.0)
    for one, two in pairs:
        close = _CLOSE.get(one.dtype, 1e-2)
        if one.shape != two.shape or not torch.allclose(one, two.to(one.dtype), rtol=close, atol=close, equal_nan=True):
            raise ConfigError(f"--format: the outputs of the program differ from the model's by {furthest:.3g}.")
    return f"checked: outputs differ from the model's by at most {furthest:.3g}"


def _write_pretrained(model: ExportedModel, _: ForwardCall, output: Path) -> str:
    transformers = import_module("transformers")
    chosen = _choose_only(find_outermost(model.part, transformers.PreTrainedModel), "huggingface")
    expected = _call_with_dummy(chosen)
    merge_adapters(model.part)
    with torch.device("meta"):
        plain = type(chosen)(chosen.config)
    if plain.state_dict().keys() != chosen.state_dict().keys():
        merge_parametrizations(chosen)
    if different := plain.state_dict().keys() ^ chosen.state_dict().keys():
        raise ConfigError(
            f"--format huggingface: {type(chosen).__name__}.from_pretrained builds a different model. Only one of the "
            f"two models has {', '.join(sorted(different)[:3])}. Export the weights: leave --format out."
        )
    with suppress(AttributeError, NotImplementedError):  # Models without embeddings raise these errors.
        if chosen.get_output_embeddings().weight is not chosen.get_input_embeddings().weight:
            chosen.config.tie_word_embeddings = False
    chosen.to(model.dtype)
    import_module("transformers.utils.logging").disable_progress_bar()
    chosen.save_pretrained(output)
    for owner in (model.task, model.data):
        for value in vars(owner).values() if owner is not None else ():
            if isinstance(value, transformers.PreTrainedTokenizerBase):
                value.save_pretrained(output)
    read = type(chosen).from_pretrained(output, dtype=chosen.dtype)
    values = read.state_dict()
    if not all(torch.equal(value, values[name]) for name, value in chosen.state_dict().items()):
        raise ConfigError("--format huggingface: from_pretrained reads different values than the model has.")
    checked = f"checked: {type(chosen).__name__}.from_pretrained reads bitwise identical values"
    if expected is None:
        return checked
    found = _call_with_dummy(read.float())
    difference = math.inf if found is None else float((found - expected).abs().max() / expected.abs().max())
    if difference > (1e-3 if chosen.dtype.itemsize > 2 else 0.1):
        built = {name: type(module).__name__ for name, module in read.named_modules()}
        replaced = [name for name, module in chosen.named_modules() if built.get(name) != type(module).__name__]
        reason = f" It lacks the task's module {replaced[0]}." if replaced else ""
        raise ConfigError(
            f"--format huggingface: the outputs of {type(chosen).__name__}.from_pretrained differ from the task's by "
            f"{difference:.2g} of the largest output.{reason} Export the weights: leave --format out."
        )
    return f"{checked}, and its outputs differ from the task's by {difference:.2g} of the largest output"


def _call_with_dummy(model: Any) -> torch.Tensor | None:
    """Return the first output of a transformers model for its dummy inputs, or None if the model does not take them."""
    try:
        output: torch.Tensor = model(**model.dummy_inputs)[0]
    except Exception:  # The dummy inputs of most models without text are wrong.
        return None
    return output.float()


def _write_adapter(model: ExportedModel, _: ForwardCall, output: Path) -> str:
    peft = import_module("peft")
    adapted = _choose_only(find_adapted(model.part), "peft")
    adapted.save_pretrained(output)
    name = adapted.active_adapter
    expected = peft.get_peft_model_state_dict(adapted, adapter_name=name)
    base = adapted.unload() if hasattr(adapted, "unload") else adapted.get_base_model()
    folder = output if name == "default" else output / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft uses a deprecated name of transformers.
        found = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, folder))
    if found.keys() != expected.keys() or not all(torch.equal(value, found[key]) for key, value in expected.items()):
        raise ConfigError("--format peft: PeftModel.from_pretrained reads different values than the adapter has.")
    return f"checked: PeftModel.from_pretrained reads {len(found)} bitwise identical tensors"


def _choose_only(found: dict[str, Any], library: str) -> Any:
    if len(found) == 1:
        return next(iter(found.values()))
    kind = {"huggingface": "transformers"}.get(library, library)
    listed = ", ".join(name.removesuffix(".base_model.model") for name in found)  # with the adapter around a model
    names = f"{listed}. Choose one by --module" if found else "none. Export the weights: leave --format out"
    raise ConfigError(f"--format {library}: expected one model of {kind} in the task, found {names}.")


def _write_weights(model: ExportedModel, _: ForwardCall, output: Path) -> str:
    tensors = {name: each for name, each in model.part.state_dict().items() if isinstance(each, torch.Tensor)}
    if not output.suffix:
        output.mkdir()
    write_safetensors(output if output.suffix else output / SINGLE, tensors)
    return f"{len(tensors)} tensors, with adapters and parametrizations merged into the weights"


_CALLED = ("torch-export", "onnx")  # These formats trace a call of the model.
_WRITERS = {
    "safetensors": _write_weights,
    "torch-export": _write_program,
    "onnx": _write_onnx,
    "huggingface": _write_pretrained,
    "peft": _write_adapter,
}
