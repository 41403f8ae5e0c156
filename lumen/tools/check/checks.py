"""The check: starts a run, inspects its first steps, and discards the run."""

from __future__ import annotations

import math

from lumen.callbacks.model_summary import summarize
from lumen.errors import NonFiniteLoss
from lumen.run.run import Run
from lumen.tools.check.data import check_data, check_leaks
from lumen.tools.check.report import CheckReport, shorten_rows
from lumen.tools.check.schedule import RunLength, check_checkpoints, check_monitors, check_schedule, check_time
from lumen.tools.check.trial import CheckTrial

_MODEL, _STEP = "model", "first steps"
_NAMES_SHOWN, _MODULES_SHOWN = 6, 8
_MAX_NORM, _CHANCE_FACTOR = 1e3, 2.0


def check_model(report: CheckReport, trial: CheckTrial, run: Run) -> None:
    """Report the size of the model, and the parameters that are not trained."""
    summary = summarize(trial.task)
    rows = [[row.name, row.type, f"{row.parameters:,}"] for row in summary[1:] if row.parameters]
    total, frozen = summary.total_parameters, summary[0].frozen
    text = f"{total:,} parameters, {summary.model_size:.3g} MB" + (f"; {frozen:,} of them are frozen" if frozen else "")
    report.add(_MODEL, "ok", "model.size", text, rows=shorten_rows(rows, _MODULES_SHOWN))
    report.facts["model"] = {"parameters": total, "frozen": frozen, "mb": summary.model_size}
    trained = {name: each for name, each in trial.task.named_parameters() if each.requires_grad}
    held_groups = {id(each): group for group in run.optim.optimizer.param_groups for each in group["params"]}
    if unheld := [name for name, each in trained.items() if id(each) not in held_groups]:
        text = f"no optimizer holds {_format_names(unheld)}: these parameters never change"
        report.add(_MODEL, "suspicious", "parameters.unheld", text)
    decayed = {name: each for name, each in trained.items() if held_groups.get(id(each), {}).get("weight_decay")}
    if vectors := [name for name, each in decayed.items() if each.dim() < 2]:
        text = f"weight decay applies to {len(vectors)} norms and biases, such as {vectors[0]}"
        report.add(_MODEL, "note", "weight_decay", text, "Norms and biases are usually excluded: parameter_groups: "
                   "{no_decay: dimension}.")  # fmt: skip


def check_step(report: CheckReport, trial: CheckTrial, run: Run) -> None:
    """Report on the loss and the gradients of the first steps."""
    _check_loss(report, trial)
    if not trial.task.automatic_optimization:
        report.add(
            _STEP, "note", "manual",
            "training_step uses manual optimization: the check updated the parameters, only in memory, and did not "
            "check gradients or whether the loss depends on the input",
        )  # fmt: skip
        return
    _check_gradients(report, trial)
    _check_dependence(report, trial)


def _check_loss(report: CheckReport, trial: CheckTrial) -> None:
    losses = trial.observer.losses
    if not losses:
        report.add(_STEP, "note", "loss", "no loss was observed")
        return
    first, by_hand = losses[0], not trial.task.automatic_optimization
    report.facts["loss"] = first if math.isfinite(first) else str(first)
    if not math.isfinite(first):
        report.add(_STEP, "wrong", "loss.finite", f"the first loss is {first}")
        return
    text = f"{'first loss passed to backward' if by_hand else 'first loss'}: {first:.4g}"
    if (classes := _count_classes(trial)) is None:
        report.add(_STEP, "ok", "loss", f"{text}, finite")
        return
    expected = report.facts["loss_by_chance"] = math.log(classes)
    text = f"{text}; at chance level, of {classes} classes: {expected:.4g}"
    if first > _CHANCE_FACTOR * expected + 0.5 and trial.trainer.run.checkpoint is None:
        report.add(_STEP, "suspicious", "loss.by_chance", f"{text}: the model is confident in wrong classes")
    else:
        report.add(_STEP, "ok", "loss", text)


def _count_classes(trial: CheckTrial) -> int | None:
    """Return the number of classes if the task's loss is the plain loss of one classifier."""
    forwards, losses = trial.observer.forwards, trial.observer.losses
    if not forwards or len(forwards[0].losses) != 1 or not losses:
        return None
    loss = forwards[0].losses[0]
    is_whole_loss = loss.value is not None and math.isclose(loss.value, losses[0], rel_tol=1e-3)
    return loss.classes if loss.is_plain and is_whole_loss and loss.classes > 1 else None


def _check_gradients(report: CheckReport, trial: CheckTrial) -> None:
    found = trial.observer.gradients
    if found is None:
        report.add(_STEP, "note", "gradients", "no gradients were observed")
        return
    report.facts["gradients"] = vars(found)
    if found.odd:
        report.add(_STEP, "wrong", "gradients.finite", f"NaN or infinite gradients in {_format_names(found.odd)}")
    elif found.norm is not None:
        _check_norm(report, trial, found.norm)
    if found.without:
        report.add(_STEP, "suspicious", "gradients.none", f"no gradient reaches {_format_names(found.without)}")


def _check_norm(report: CheckReport, trial: CheckTrial, norm: float) -> None:
    clip = trial.plan.clip_norm
    clipped = f", clipped to {clip:g}" if clip is not None and norm > clip else ""
    text = f"gradient norm: {norm:.4g}{clipped}"
    if norm == 0.0:
        report.add(_STEP, "suspicious", "gradients.zero", "all gradients are 0: the model would learn nothing")
    elif norm > _MAX_NORM and not (clipped or trial.plan.clip_value):
        report.add(_STEP, "suspicious", "gradients.explode", text)
    else:
        report.add(_STEP, "ok", "gradients", text)


def _check_dependence(report: CheckReport, trial: CheckTrial) -> None:
    observer = trial.observer
    if len(observer.losses) >= 3 and len(set(observer.losses)) == 1 and observer.losses[0] != 0.0:
        report.add(_STEP, "suspicious", "loss.constant", f"the loss is {observer.losses[0]:.6g} for each of the first "
                   f"{len(observer.losses)} batches: the loss ignores the batch")  # fmt: skip
    elif observer.paired_losses is not None and observer.paired_losses[0] == observer.paired_losses[1]:
        text = (
            f"the loss stays {observer.paired_losses[0]:.6g} when {observer.changed} of the batch is changed: the loss "
            "ignores this part"
        )
        report.add(_STEP, "suspicious", "loss.input", text)
    elif observer.paired_losses is None:
        report.add(_STEP, "note", "loss.input", "the check could not test whether the loss depends on the input")


def _format_names(names: list[str]) -> str:
    hidden = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


#: Warnings to leave out: not mistakes, or reported by another check.
_INFORMATIONAL = ("Lumen did not draw these batches", "the optimizer does not hold")


def check_training(report: CheckReport, trial: CheckTrial, samples: int) -> None:
    """Check a training and write nothing. The task, the data and the trainer cannot be used afterwards.

    Args:
        report: Report that receives the findings, also those before an error.
        trial: The run to start.
        samples: Largest number of training and validation samples to compare, 0 for none.

    Raises:
        LumenError: An error that `fit` would raise too.
        Exception: An error of the user's own code.
    """
    try:
        with trial.open_run() as run:
            try:
                trial.begin(run)
            except NonFiniteLoss:
                if run.step.loss is not None:
                    trial.observer.losses[:1] = [float(run.step.loss.detach())]
                _check_beginning(report, trial, run, samples)
                raise
            except Exception:
                if trial.observer.batch is not None or trial.observer.validation:
                    check_data(report, trial, run)
                raise
            if trial.observer.batch is None:
                report.add("first steps", "note", "finished", "the run is finished, so there is nothing to do")
                return
            _check_beginning(report, trial, run, samples)
            _check_rest_of_run(report, trial, run)
    finally:
        for text in trial.warnings:
            if not any(each in text for each in _INFORMATIONAL):
                report.add("what fit warns of", "suspicious", "warning", text)


def _check_beginning(report: CheckReport, trial: CheckTrial, run: Run, samples: int) -> None:
    check_data(report, trial, run)
    if samples:
        check_leaks(report, run, samples)
    check_model(report, trial, run)
    check_step(report, trial, run)


def _check_rest_of_run(report: CheckReport, trial: CheckTrial, run: Run) -> None:
    run_length = RunLength(trial.plan, run)
    check_schedule(report, trial, run, run_length)
    check_monitors(report, trial, run)
    check_checkpoints(report, trial, run, run_length, check_time(report, trial, run, run_length))
    if trial.finders:
        text = f"fit runs {' and '.join(trial.finders)} first; lumen check does not"
        report.add("schedule", "note", "finders", text)
