"""Example that packs texts: each text counts alike next to any other text and in any batch."""

import pytest
import torch
from torch.nn import functional as F

from datamodules.packed import END, PackedSurnames, pack, request
from lumen.errors import DataError
from models.packed_gpt2 import Answers, alone
from tests.helpers.tasks import bare_trainer, weights

CONFIG = {"vocab_size": 256, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
STILL = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
NAMES = ["Ek", "Hundertwasser", "Mäkelä", "Li", "Kipchoge", "Šimková", "Vivaldi"]


def make_answers(**config):
    torch.manual_seed(0)
    return Answers(CONFIG | STILL | config, warmup_steps=2)


def read_texts(names=NAMES):
    return [(request("Finnish"), [*name.encode(), END]) for name in names]


def compute_gradients(task):
    return {name: each.grad.clone() for name, each in task.named_parameters()}


@pytest.mark.parametrize("request_weight", [0.0, 0.25])
@pytest.mark.parametrize("row", [24, 40, 64])
def test_packing_keeps_loss_and_gradients(row, request_weight):
    task = make_answers().double()
    packed = pack(read_texts(), row, request_weight)
    assert len(packed["ids"]) < len(NAMES) or row == 24
    loss = task.loss(packed)
    loss.backward()
    found = compute_gradients(task)

    task.zero_grad()
    total, count = 0.0, 0.0
    for asked, answer in read_texts():
        ids = torch.tensor([asked + answer])
        nats = F.cross_entropy(task.gpt(ids[:, :-1]).logits[0], ids[0, 1:], reduction="none")
        counts = torch.tensor([request_weight] * (len(asked) - 1) + [1.0] * len(answer), dtype=torch.float64)
        total, count = total + (nats * counts).sum(), count + counts.sum()
    (total / count).backward()
    assert packed["weight"] == pytest.approx(count.item())
    torch.testing.assert_close(loss, total / count, rtol=0, atol=1e-12)
    for name, gradient in compute_gradients(task).items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)


def test_no_text_is_lost_and_little_is_padding():
    data = PackedSurnames(batch_size=64)
    data.setup("fit")
    samples = [data.train[i] for i in range(64)]
    batch = data.collate(samples)
    said = set()
    for ids, targets, which in zip(batch["ids"], batch["targets"], batch["texts"], strict=True):
        for number in range(1, which.max() + 1):
            here = which == number
            said.add(bytes([*ids[here][:1].tolist(), *targets[here].tolist()]).decode())
    assert said == {f"{data.origins[origin]}: {name}\0" for name, origin in samples}
    assert (batch["texts"] == 0).double().mean() < 0.2
    padded = 1 - sum(map(len, said)) / (64 * max(map(len, said)))
    assert (batch["texts"] == 0).double().mean() < padded
    assert batch["weight"] == sum(len(name.encode()) + 1 for name, _ in samples)


def test_tokens_attend_only_within_their_text():
    mask = alone(torch.tensor([[1, 1, 2, 2, 0]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_text_longer_than_a_row_raises():
    with pytest.raises(DataError, match=r"a text has 22 tokens, a row has 20\. Make data\.row larger"):
        pack(read_texts(), 20)


def train(folder, batch_size, accumulate, **options):
    task = make_answers().double()
    trainer = bare_trainer(folder, accumulate_grad_batches=accumulate, limit_val_batches=0, **options)
    trainer.fit(task, PackedSurnames(batch_size=batch_size, row=64, labelled=96, request_weight=0.25))
    return weights(task)


def test_step_is_independent_of_micro_batches_and_rows(tmp_path):
    whole = train(tmp_path, 32, 1, max_epochs=1)
    torch.testing.assert_close(train(tmp_path, 8, 4, max_epochs=1), whole, rtol=0, atol=1e-10)
