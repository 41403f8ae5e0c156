"""Chunked cross entropy: loss and gradients of the plain one, with the logits of one chunk of tokens in memory."""

import re
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError
from lumen.internals.tensors import TorchDispatchMode
from tests.helpers.tasks import bare_trainer, weights

pytestmark = pytest.mark.filterwarnings(  # torch's own code warns when it compiles
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)
TOKENS, WIDTH, WORDS = (3, 11), 5, 17
chunked = partial(lumen.chunked_cross_entropy, chunk_size=7)


def make_inputs(dtype=torch.float64):
    """Return the input of the head and targets; some are ignored, and one chunk of them entirely."""
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(WORDS, TOKENS, generator=generator)
    targets[0, 5:] = targets[1, :4] = -100
    return torch.randn(*TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_(), targets


def make_head(kind=nn.Linear, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return kind(WIDTH, WORDS, **options).to(dtype)


def plain(hidden, head, targets, **options):
    logits = head(hidden)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.flatten(), **options)


def differentiate(loss, *tensors):
    """Return the loss, and the gradients of three times the loss."""
    return [loss.detach(), *torch.autograd.grad(3 * loss, tensors)]


def assert_equal(ours, theirs, tolerance=1e-12):
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


class Adapted(nn.Linear):
    """Linear layer with a low-rank adapter, as peft adds."""

    def __init__(self, *args):
        super().__init__(*args)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WORDS, bias=False)

    def forward(self, hidden):
        return super().forward(hidden) + self.up(self.down(hidden))


@pytest.mark.parametrize("head", [make_head(), make_head(bias=False), make_head(Adapted)], ids=["bias", "none", "lora"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("chunk_size", [1, 7, 33, 100])
def test_chunked_loss_equals_plain_loss(head, reduction, smoothing, chunk_size):
    hidden, targets = make_inputs()
    options = {"reduction": reduction, "label_smoothing": smoothing}
    tensors = hidden, *head.parameters()
    ours = chunked(hidden, head, targets, chunk_size=chunk_size, **options)
    assert_equal(differentiate(ours, *tensors), differentiate(plain(hidden, head, targets, **options), *tensors))
    with torch.no_grad():
        assert torch.equal(chunked(hidden, head, targets, chunk_size=chunk_size, **options), ours)


@pytest.mark.parametrize("kind", [nn.Linear, Adapted])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_chunked_loss_without_counted_tokens_equals_plain(kind, reduction):
    """All targets ignored, with a different `ignore_index`; one such token without a batch; no tokens."""
    (hidden, targets), head = make_inputs(), make_head(kind)
    for batch, answers in ((hidden, targets.fill_(-1)), (hidden[0, 0], targets[0, 0]), (hidden[:0], targets[:0])):
        losses = [
            loss(batch, head, answers, ignore_index=-1, reduction=reduction, label_smoothing=0.1)
            for loss in (chunked, plain)
        ]
        assert_equal(*(differentiate(loss, batch, *head.parameters()) for loss in losses))


def test_chunked_loss_takes_a_tied_weight_twice():
    """The weight embeds the tokens, is the head of two losses, and is used directly."""
    _, targets = make_inputs()
    embedding = nn.Embedding(WORDS, WIDTH).double()
    bias = torch.ones(WORDS, dtype=torch.float64, requires_grad=True)

    def compute(loss):
        hidden = embedding(targets.clamp(min=0))
        first, second = loss(hidden, targets), loss(hidden.tanh(), targets.flip(0))
        return differentiate(first + second + embedding.weight.square().sum(), embedding.weight, bias)

    ours = compute(lambda hidden, targets: chunked(hidden, embedding.weight, targets, bias=bias))
    head = partial(F.linear, weight=embedding.weight, bias=bias)
    assert_equal(ours, compute(lambda hidden, targets: plain(hidden, head, targets)))


@pytest.mark.parametrize("kind", [nn.Linear, Adapted])
def test_chunked_loss_skips_gradients_of_frozen_inputs(kind):
    (hidden, targets), head = make_inputs(), make_head(kind)
    bias, parameters = head.bias, [*head.parameters()]
    for trained in ([hidden], [bias], parameters, []):
        for tensor in (hidden, *parameters):
            tensor.requires_grad_(any(tensor is each for each in trained))
        losses = chunked(hidden, head, targets), plain(hidden, head, targets)
        assert losses[0].requires_grad is losses[1].requires_grad is bool(trained)
        if trained:
            assert_equal(*(differentiate(loss, *trained) for loss in losses))


def test_chunked_loss_under_autocast_is_accurate():
    """The dtypes are equal too, and a later use of the weight in the same context keeps its gradient."""
    (hidden, targets), head = make_inputs(torch.float32), make_head(dtype=torch.float32)
    tensors = hidden, *head.parameters()
    exact = differentiate(plain(hidden, head, targets) + head(hidden).square().mean(), *tensors)
    with torch.autocast("cpu", torch.bfloat16):
        ours = differentiate(chunked(hidden, head, targets) + head(hidden).float().square().mean(), *tensors)
        theirs = differentiate(plain(hidden, head, targets) + head(hidden).float().square().mean(), *tensors)
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    for one, other, right in zip(ours, theirs, exact, strict=True):
        assert (one - right).norm() <= 1.5 * (other - right).norm() + 1e-4 * right.norm()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_chunked_loss_in_pure_bfloat16_returns_float32(is_compiled):
    (hidden, targets), head = make_inputs(torch.bfloat16), make_head(dtype=torch.bfloat16)
    loss = torch.compile(chunked, backend="aot_eager") if is_compiled else chunked
    ours = differentiate(loss(hidden, head, targets), hidden, *head.parameters())
    assert [each.dtype for each in ours] == [torch.float32] + 3 * [torch.bfloat16]
    theirs = differentiate(plain(hidden, head, targets), hidden, *head.parameters())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.03, atol=0.01)


def test_chunked_loss_in_float16_keeps_small_gradients():
    """The factor of the gradient scaler reaches the logits before float16 can underflow."""
    (hidden, targets), head = make_inputs(torch.float32), make_head(dtype=torch.float32)
    head.weight.data *= 1e-3
    small = head.bias.data.zero_().scatter_(0, targets[2], 15.0)
    targets[:2], targets[2], small[targets[2, 0]] = -100, targets[2, 0], 18.0
    exact = differentiate(plain(hidden, head, targets), hidden)[1]
    with torch.autocast("cpu", torch.float16):
        scaled = chunked(hidden, head, targets) * 2**16
    (ours,) = torch.autograd.grad(scaled, hidden)
    torch.testing.assert_close(3 * ours / 2**16, exact, rtol=0.02, atol=1e-3 * exact.abs().max().item())


def test_chunked_loss_calls_hooks_on_each_chunk():
    (hidden, targets), head = make_inputs(), make_head()
    expected = differentiate(plain(hidden, head, targets), hidden)
    shapes = []
    head.register_forward_hook(lambda module, args, logits: shapes.append(tuple(logits.shape)))
    ours = chunked(hidden, head, targets)
    assert shapes == [(7, WORDS)] * 4 + [(5, WORDS)]
    assert_equal(differentiate(ours, hidden), expected)


def test_chunked_loss_allows_a_second_backward():
    (hidden, targets), head = make_inputs(), make_head()
    loss = chunked(hidden, head, targets)
    first = torch.autograd.grad(2 * loss, [hidden, head.weight], retain_graph=True)
    assert_equal(torch.autograd.grad(2 * loss, [hidden, head.weight]), first)


def test_chunked_loss_runs_in_activation_checkpointing():
    (hidden, targets), head = make_inputs(), make_head()
    ours = checkpoint(chunked, hidden, head, targets, use_reentrant=False)
    theirs = plain(hidden, head, targets)
    assert_equal(*(differentiate(loss, hidden, *head.parameters()) for loss in (ours, theirs)))


@pytest.mark.parametrize("kind", [nn.Linear, Adapted])
def test_chunked_loss_compiles_without_graph_breaks(kind):
    (hidden, targets), head = make_inputs(), make_head(kind)
    compiled = torch.compile(chunked, backend="aot_eager", fullgraph=True)
    ours, theirs = compiled(hidden, head, targets), plain(hidden, head, targets)
    assert_equal(*(differentiate(loss, hidden, *head.parameters()) for loss in (ours, theirs)))


# ---------------------------------------------------------------------- memory


class PeakMemory(TorchDispatchMode):
    """Counter of the bytes of all storages that operations allocate and that are alive at once."""

    def __init__(self, *inputs):
        super().__init__()
        self.live, self.now, self.peak = {each.untyped_storage()._cdata for each in inputs}, 0, 0

    def free(self, key, size):
        self.live.discard(key)
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for each in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(each, torch.Tensor) and (key := (storage := each.untyped_storage())._cdata) not in self.live:
                self.live.add(key)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, key, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return results


def measure_peak(compute, dtype=torch.float64):
    """Return the peak in multiples of the logits of 32 tokens."""
    tokens, words, width, chunk = 256, 1000, 8, 32
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    head, targets = nn.Linear(width, words).to(dtype), torch.randint(words, (tokens,))
    with PeakMemory(hidden, targets, *head.parameters()) as memory:
        loss = compute(hidden, head, targets)
        if loss.requires_grad:
            loss.backward()
    return memory.peak / (chunk * words * dtype.itemsize)


def test_chunked_loss_holds_logits_of_one_chunk():
    """The peak is one chunk of logits, and once the gradients."""
    of_32 = partial(chunked, chunk_size=32)
    assert 1 < measure_peak(of_32) < 1.05 + (1000 + 256) * (8 + 1) / (32 * 1000)
    with torch.no_grad():
        assert 1 < measure_peak(of_32) < 1.05
    assert measure_peak(plain) > 16
    assert measure_peak(of_32, torch.float16) < 16


# ---------------------------------------------------------------------- training


class Language(lumen.TaskModule):
    """Language model of one layer, with the head tied to the embedding."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.loss = loss

    def training_step(self, batch):
        (ids,) = batch
        return self.loss(self.layer(self.embed(ids[:, :-1])).tanh(), self.head, ids[:, 1:])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"precision": "fp64", "accumulate_grad_batches": 2}, 1e-12),
        ({"precision": "fp64", "compile": {"backend": "aot_eager"}}, 1e-12),
        ({"precision": "bf16"}, 1e-2),
        ({"precision": "fp16"}, 1e-2),
    ],
    ids=["accumulated", "compiled", "bf16", "fp16"],
)
def test_training_with_chunked_loss_equals_plain(tmp_path, options, tolerance):
    ids = torch.randint(WORDS, (24, 9), generator=torch.Generator().manual_seed(2))
    trained = []
    for loss in (chunked, plain):
        task = Language(loss)
        bare_trainer(tmp_path, max_steps=4, **options).fit(task, DataLoader(TensorDataset(ids), 4))
        trained.append(weights(task))
    assert_equal(trained[:1], trained[1:], tolerance)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": [1.0]}, "expected hidden and targets to be tensors; found list and Tensor"),
        ({"hidden": torch.ones(3, 4, dtype=torch.int64)}, "hidden to be floats of shape (..., features); found torch"),
        ({"targets": torch.zeros(3)}, "targets to be int64 of shape (3,); found torch.float32 of shape (3,)"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, "targets to be int64 of shape (3,)"),
        ({"head": "head"}, "head to be a module or a weight; found head"),
        ({"head": nn.Linear(5, 9)}, "the weight of head to have the shape (vocabulary, 4)"),
        ({"head": torch.ones(4)}, "the weight of head to have the shape (vocabulary, 4)"),
        ({"head": nn.Linear(4, 9).double()}, "hidden in the dtype of the weight, torch.float64, or autocast"),
        ({"head": nn.Sequential(nn.Linear(4, 9), nn.Flatten(0))}, "head to return logits of shape (3, vocabulary)"),
        ({"bias": torch.ones(9)}, "bias only if head is a weight"),
        ({"reduction": "none"}, "reduction to be mean or sum; found none"),
        ({"label_smoothing": 2.0}, "label_smoothing to be from 0 to 1; found 2.0"),
        ({"chunk_size": 0}, "chunk_size to be at least 1; found 0"),
    ],
)
def test_chunked_loss_refuses_wrong_arguments(changes, message):
    arguments = {"hidden": torch.ones(3, 4), "head": nn.Linear(4, 9), "targets": torch.zeros(3, dtype=torch.int64)}
    with pytest.raises(ConfigError, match=re.escape(message)):
        lumen.chunked_cross_entropy(**arguments | changes)
