"""Other formats of `lumen export`: a torch.export program, ONNX, or a directory for `from_pretrained`.

These formats need the model, not only its tensors. The model is built from the run's config.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from safetensors.torch import load_file
from torch import nn

from lumen.checkpoint.format.storage import make_temporary_path
from lumen.cli.command_line import CLI
from lumen.cli.command_words import find_run_config
from lumen.data.nested import iterate_tensors, map_leaves, move_batch
from lumen.errors import CheckpointMismatch, ConfigError
from lumen.internals.tensors import EXTRA_STATE
from lumen.task.data_module import DataModule
from lumen.task.hooks import is_overridden
from lumen.task.task_module import TaskModule
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
        call = _make_call(self.task, self._read_batch() if example is None else example)
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


_SUFFIXES = {"torch-export": ".pt2", "onnx": ".onnx", "huggingface": ""}


def check_format(kind: str, output: Path) -> None:
    """Raise early if the output cannot be written.

    Raises:
        ConfigError: The output exists or has the wrong suffix, or packages are missing.
    """
    if output.suffix != _SUFFIXES[kind] and (_SUFFIXES[kind] or output.suffix in (".safetensors", ".pt2", ".onnx")):
        expected = f"a {_SUFFIXES[kind]} file" if _SUFFIXES[kind] else "a directory"
        raise ConfigError(f"--output {output}: --format {kind} writes {expected}. Change --output.")
    check_output_free(output, f"--output {output}")
    needed = {"onnx": ("onnx", "onnxscript"), "huggingface": ("transformers",)}.get(kind, ())
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ConfigError(f"--format {kind} needs {' and '.join(missing)}. Run: pip install {' '.join(missing)}")


def write_format(kind: str, source: str, output: Path, module: str | None, weights: Callable[[Path], Any]) -> str:
    """Build the model, load its weights, and write the model.

    Args:
        kind: torch-export, onnx or huggingface.
        source: The checkpoint or run, from whose config the model is built.
        output: The file or directory to write. The output appears complete or not at all.
        module: Name of the submodule of the task to write, or None for the task.
        weights: Function that writes the tensors of this submodule into a safetensors file.

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
            f"--format: {source} has no config.yaml, so Lumen cannot build the model. Give a run with a config.yaml, "
            "or load the model in Python with load_from_checkpoint and export it there."
        )
    made = CLI(args=["--config", *files, *_ON_ONE_CPU], run=False, save_config_callback=None)
    task = made.model.eval()
    task.configure_model()
    part = task if module is None else task.get_submodule(module)
    try:
        different = [name for names in part.load_state_dict(saved, strict=False) for name in names]
        different = [name for name in different if name in saved or not name.endswith(EXTRA_STATE)]
        reason = f"only one of the two models has {', '.join(different[:3])}." if different else ""
    except RuntimeError as error:
        reason = str(error)
    if reason:
        raise CheckpointMismatch(f"the model of {files[0]} does not match the weights in {source}: {reason}")
    floating = {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()}
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
    kind = import_module("transformers").PreTrainedModel
    found = {name: each for name, each in model.part.named_modules() if isinstance(each, kind)}
    outermost = [name for name in found if sum(f"{name}.".startswith(above and f"{above}.") for above in found) == 1]
    if len(outermost) != 1:
        names = f"{', '.join(outermost)}. Choose one by --module" if found else "none"
        raise ConfigError(f"--format huggingface: expected one model of transformers in the task, found {names}.")
    chosen: Any = _merge_adapter(model.part, found[outermost[0]])
    chosen.save_pretrained(output)
    for owner in (model.task, model.data):
        for value in vars(owner).values() if owner is not None else ():
            if isinstance(value, import_module("transformers").PreTrainedTokenizerBase):
                value.save_pretrained(output)
    read = type(chosen).from_pretrained(output, dtype=chosen.dtype).state_dict()
    if not all(torch.equal(value, read[name]) for name, value in chosen.state_dict().items()):
        raise ConfigError("--format huggingface: from_pretrained reads different values than the model has.")
    return f"checked: {type(chosen).__name__}.from_pretrained reads bitwise identical values"


def _merge_adapter(part: nn.Module, chosen: nn.Module) -> nn.Module:
    """Return a transformers model, with its peft adapter, if any, merged into the weights."""
    wraps = getattr(sys.modules.get("peft"), "PeftModel", ())
    for each in part.modules():
        if isinstance(each, wraps) and chosen in each.modules():
            if not hasattr(each, "merge_and_unload"):
                raise ConfigError(
                    "--format huggingface: the peft adapter cannot be merged into the model. Write only the adapter, "
                    "by its method save_pretrained."
                )
            return each.merge_and_unload()  # type: ignore[no-any-return]
    return chosen


_CALLED = ("torch-export", "onnx")  # These formats trace a call of the model.
_WRITERS = {"torch-export": _write_program, "onnx": _write_onnx, "huggingface": _write_pretrained}
