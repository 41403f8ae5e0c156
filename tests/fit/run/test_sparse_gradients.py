"""`nn.Embedding(sparse=True)`: training equals a dense embedding on one device, in every kind of step."""

import pytest
import torch
from torch import nn
from torch.optim import SGD, SparseAdam
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError
from lumen.optim import MultiOptimizer
from tests.helpers.group import assert_equal
from tests.helpers.tasks import bare_trainer, quiet_trainer

WORDS = 12


class Words(lumen.TaskModule):
    """Task with bags of words. The loss is a weighted mean, and some micro-batches are skipped."""

    def __init__(self, sparse, *, weighted=False, left_out=(), kind="sgd"):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 4, sparse=sparse, dtype=torch.float64)
        self.bags = nn.EmbeddingBag(WORDS, 4, mode="sum", sparse=sparse, dtype=torch.float64)
        self.head = nn.Linear(4, 1, dtype=torch.float64)
        self.weighted, self.left_out, self.kind = weighted, left_out, kind

    def training_step(self, batch, batch_idx):
        words, targets = batch
        features = self.words(words).mean(1) + self.bags(words)
        loss = 5 * nn.functional.mse_loss(self.head(features), targets)
        if batch_idx in self.left_out:
            return None
        return (loss, words.double().sum()) if self.weighted else loss

    def configure_optimizers(self):
        embeddings = [self.words.weight, self.bags.weight]
        if self.kind == "sgd":
            return SGD(self.parameters(), lr=0.002, momentum=0.9)
        return MultiOptimizer([SparseAdam(embeddings, lr=0.02), SGD(self.head.parameters(), lr=0.01)])


def make_data(samples=45):
    """Return words that repeat within a sample and a batch; many words are in no batch."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 5, (samples, 3), generator=generator) * 2
    return DataLoader(TensorDataset(words, words.sum(1, keepdim=True).double().sin()), 4, shuffle=True)


def read_state(task):
    return {name: value.detach().numpy() for name, value in task.state_dict().items()}


STEPS = {
    "plain": ({}, {}),
    "by weights": ({"weighted": True}, {}),
    "clipped by norm": ({"weighted": True}, {"gradient_clip_val": 0.3}),
    "clipped by value": ({}, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    "some left out": ({"left_out": (0, 3), "weighted": True}, {"gradient_clip_val": 0.3}),
}


def fit(folder, sparse, task, options):
    task = Words(sparse, **task)
    bare_trainer(folder, max_epochs=3, accumulate_grad_batches=4, **options).fit(task, make_data())
    return read_state(task)


@pytest.mark.parametrize(("task", "options"), STEPS.values(), ids=STEPS)
def test_sparse_gradients_train_what_dense_ones_train(tmp_path, task, options):
    assert_equal(fit(tmp_path, True, task, options), fit(tmp_path, False, task, options))


@pytest.mark.parametrize("clip", [None, 0.3])
def test_sparse_adam_equals_hand_written_loop(tmp_path, clip):
    task = {"weighted": True, "kind": "sparse adam", "left_out": (0, 3)}
    options = {} if clip is None else {"gradient_clip_val": clip}
    alone = fit(tmp_path, True, task, options)
    assert_equal(alone, train_by_hand(tmp_path, task, clip))
    unseen = torch.arange(1, WORDS, 2)
    assert (alone["words.weight"][unseen] == Words(True).words.weight.detach().numpy()[unseen]).all()


def train_by_hand(folder, options, clip):
    seen = []

    class Looking(Words):
        def training_step(self, batch, batch_idx):
            seen.append((batch, batch_idx))
            return super().training_step(batch, batch_idx)

    bare_trainer(folder, max_epochs=3, accumulate_grad_batches=4).fit(Looking(True, **options), make_data())
    task = Words(True, **options)
    optimizer = task.configure_optimizers()
    for start in (0, 4, 8, 12, 16, 20, 24, 28, 32):
        outputs = [task.training_step(*each) for each in seen[start : start + 4]]
        given = [output for output in outputs if output is not None]
        optimizer.zero_grad()
        (sum(loss * weight for loss, weight in given) / sum(weight for _, weight in given)).backward()
        if clip is not None:
            squares = sum(each.grad.to_dense().square().sum() for each in task.parameters())
            for each in task.parameters():
                each.grad = each.grad * min(1.0, clip / (squares.sqrt().item() + 1e-6))
        optimizer.step()
    return read_state(task)


def test_a_sparse_run_goes_on_exactly(tmp_path):
    ends = []
    for name, cuts in (("whole", (9,)), ("parts", (4, 9))):
        for max_steps in cuts:
            task = Words(True, weighted=True, kind="sparse adam")
            options = {"max_steps": max_steps, "resume": "auto", "gradient_clip_val": 0.3}
            quiet_trainer(tmp_path / name, **options).fit(task, make_data())
        ends.append(read_state(task))
    assert_equal(*ends, tolerance=0.0)


@pytest.mark.parametrize("strategy", [lumen.DDP, lumen.FSDP])
def test_several_devices_refuse_sparse_gradients(tmp_path, strategy):
    with pytest.raises(ConfigError, match=f"{strategy.__name__}: .*sparse=True.* strategy: single"):
        bare_trainer(tmp_path, max_epochs=1, strategy=strategy()).fit(Words(True), make_data())
