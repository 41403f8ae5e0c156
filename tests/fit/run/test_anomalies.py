"""`detect_anomaly`: a loss or gradient that is not finite is one error with the line of the model that made it."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader

import lumen
from lumen.errors import NonFiniteLoss
from tests.helpers.tasks import Regression, bare_trainer, loader

PACKAGES = [f"{Path(package.__file__).parent}/" for package in (lumen, torch)]
MASK = torch.tensor([True, False])


class Broken(Regression):
    """Task that fails in its second step."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.steps = 0

    def training_step(self, batch):
        self.steps += 1
        outputs = self(batch[0])
        return WAYS[self.way](outputs) if self.steps == 2 else outputs.square().mean()


def log_of_less_than_nothing(outputs):
    return (outputs.abs() * -1).log().mean()  # the line of the NaN


def nothing_by_nothing(outputs):
    return (outputs * 0).div(0).mean()  # the line of the NaN


def log_of_nothing(outputs):
    infinite = (outputs * 0).log()  # the line of the infinite number
    return (infinite * 0).mean()  # the line of the NaN


def logarithm_in_place(outputs):
    return (outputs.abs() + 1).neg_().log_().mean()  # the line of the NaN


def overflow(outputs):
    return (outputs * 0 + 100).exp().mean()  # the line of the infinite number


def root_of_nothing(outputs):
    return (outputs * 0).sqrt().mean()  # the line of the backward


WAYS = {way.__name__: way for way in list(globals().values()) if callable(way) and way.__module__ == __name__}


def find_line(way, what):
    code = WAYS[way].__code__
    lines = Path(__file__).read_text().splitlines()
    return next(number for number in range(code.co_firstlineno, len(lines)) if f"# {what}" in lines[number - 1])


def catch_message(tmp_path, task, data=None, **options):
    trainer = bare_trainer(tmp_path, max_steps=3, detect_anomaly=True, **options)
    with pytest.raises(NonFiniteLoss) as caught:  # also no warning, which would be an error
        trainer.fit(task, data or loader())
    return str(caught.value)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("way", "operation"),
    [
        ("log_of_less_than_nothing", "aten.log.default"),
        ("nothing_by_nothing", "aten.div.Tensor"),
        ("log_of_nothing", "aten.mul.Tensor"),
        ("logarithm_in_place", "aten.log_.default"),
    ],
)
def test_operation_that_made_nan_is_named_with_line(tmp_path, way, operation, precision):
    message = catch_message(tmp_path, Broken(way), precision=precision)
    assert message.startswith("the loss of step 2 (epoch 0, micro-batch 1 of the run) is nan.")
    told = message.partition("The first NaN of its forward was made by ")[2]
    assert told.startswith(f"{operation} here:\n")
    assert told.splitlines()[-2].endswith(f'test_anomalies.py", line {find_line(way, "the line of the NaN")}, in {way}')
    assert "detect_anomaly" not in message
    assert not any(package in told for package in PACKAGES)


def test_first_infinity_and_resulting_nan_are_named(tmp_path):
    message = catch_message(tmp_path, Broken("log_of_nothing"))
    infinite, _, nan = message.partition("The first NaN")
    assert f"line {find_line('log_of_nothing', 'the line of the infinite number')}, in log_of_nothing" in infinite
    assert f"line {find_line('log_of_nothing', 'the line of the NaN')}, in log_of_nothing" in nan
    message = catch_message(tmp_path, Broken("overflow"))
    assert "is inf." in message
    assert f"The first infinite number of its forward was made by aten.exp.default here:\n{' ' * 2}File" in message


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_operation_with_nan_backward_is_named_with_line(tmp_path, precision, accumulate):
    message = catch_message(
        tmp_path, Broken("root_of_nothing"), precision=precision, accumulate_grad_batches=accumulate
    )
    assert message.startswith(f"the backward of step {3 - accumulate} (epoch 0, micro-batch 1 of the run): Function '")
    assert "returned nan values" in message
    assert "Its forward was called here:\n" in message
    assert "in root_of_nothing\n" in message or "in forward\n" in message
    assert not any(package in message for package in PACKAGES)


def test_masks_of_minus_infinity_are_nobodys_error(tmp_path):
    class Masked(Regression):
        def training_step(self, batch):
            scores = self(batch[0]).expand(-1, 2).masked_fill(MASK, float("-inf"))
            loss = (scores + torch.full((2,), float("-inf")).where(MASK, torch.zeros(()))).softmax(1).mean()
            return loss + (torch.full_like(loss, -1.0).log() if self.global_step == 2 else self(batch[0]).mean())

    message = catch_message(tmp_path, Masked())
    assert "step 3" in message
    assert "made by aten.log.default" in message
    assert "infinite" not in message


def test_non_finite_batch_is_distinguished_from_an_operation(tmp_path):
    inputs = torch.randn(8, 6)
    inputs[5, 3] = torch.nan

    class Given(Regression):
        def training_step(self, batch):
            return self(batch).mean()

    message = catch_message(tmp_path, Given(), DataLoader(inputs, 4))
    assert "is nan" in message
    assert "No operation of the forward made it from finite numbers: check this batch and the parameters" in message


def test_other_backward_errors_and_warnings_pass_through(tmp_path):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, inputs):
            return inputs.clone()

        @staticmethod
        def backward(context, gradient):
            warnings.warn("of the user's own", UserWarning, stacklevel=1)
            if failing:
                raise RuntimeError("of the user's own")
            return gradient

    class Task(Regression):
        def training_step(self, batch):
            return Failing.apply(self(batch[0])).mean()

    failing = False
    trainer = bare_trainer(tmp_path, max_steps=2, detect_anomaly=True)
    with pytest.warns(UserWarning, match="of the user's own"):
        trainer.fit(Task(), loader())
    assert trainer.global_step == 2
    failing = True
    with pytest.raises(RuntimeError, match="of the user's own"):
        trainer.fit(Task(), loader())


def test_finding_changes_no_bit(tmp_path):
    def trained(detect):
        task = Regression(dropout=0.2)
        bare_trainer(tmp_path, max_epochs=1, detect_anomaly=detect, precision="bf16").fit(task, loader())
        return nn.utils.parameters_to_vector(task.parameters())

    assert torch.equal(trained(True), trained(False))


def test_detect_anomaly_disables_compile_with_a_message(tmp_path, caplog):
    def trained(**options):
        caplog.clear()
        task, compiled = Regression(), CompileCounter()
        trainer = bare_trainer(tmp_path, max_steps=2, compile={"backend": compiled}, log_level="INFO", **options)
        trainer.fit(task, loader())
        return compiled.frame_count > 0, caplog.text.count("Lumen compiles no module in this run")

    assert trained() == (True, 0)
    assert trained(detect_anomaly=True) == (False, 1)
