"""Mesh with context: processes that compute parts of sequences train as one process, and other tasks are refused."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError, TrainingError
from lumen.run.loss_weighting import LossWeighting
from tests.helpers.checkpoints import read_tensors
from tests.helpers.mesh import count_step_collectives
from tests.helpers.tasks import bare_trainer, quiet_trainer

VOCAB, WIDTH, TIME, SAMPLES = 24, 16, 8, 22  # the last step of an epoch has fewer samples than the other steps
#: Sizes of meshes: replicate, shard, tensor, context.
SHAPES = [(1, 1, 1, 2), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 2, 2), (1, 1, 1, 4)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.cut = nn.Dropout(0.2, inplace=True)

    def mix(self, x, documents):
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return lumen.attention(q, k, v, is_causal=True, document_ids=documents)

    def forward(self, x, documents):
        x = x + self.drop(self.out(self.mix(x, documents).transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(self.cut(F.gelu(self.up(self.norm(x))))))


class Model(lumen.TaskModule):
    """Language model of packed documents, whose loss is a mean over tokens that are not 0."""

    sequence_dim = 1
    parallel_plan = {f"blocks.*.{name}": "colwise" for name in ["q", "k", "v", "up", "cut"]} | {
        "blocks.*.out": "rowwise",
        "blocks.*.down": "rowwise",
    }
    block = Block

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.double()

    def get_positions(self, ids):
        return lumen.position_ids(ids.shape[1])

    def forward(self, ids, documents):
        x = self.tokens(ids) + self.positions(self.get_positions(ids))
        for block in self.blocks:
            x = block(x, documents)
        return self.head(x)

    def get_loss(self, batch):
        logits = self(batch["ids"], batch["documents"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=0, reduction="sum")
        tokens = int((batch["targets"] != 0).sum())
        return total / max(tokens, 1), tokens

    def training_step(self, batch):
        loss, tokens = self.get_loss(batch)
        self.log("tokens", float(tokens), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss, tokens

    def validation_step(self, batch):
        loss, _ = self.get_loss(batch)
        self.log("val_samples", float(len(batch["ids"])), reduce_fx="sum")
        self.log("val_loss", loss)

    def predict_step(self, batch):
        return self(batch["ids"], batch["documents"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def collate(rows):
    ids, documents = (torch.stack(each) for each in zip(*rows, strict=True))
    return {
        "ids": ids[:, :-1], "targets": ids[:, 1:], "documents": documents, "labels": ids[:, -1],
        "names": ["a"] * len(ids),
    }  # fmt: skip


def make_loader(shuffle, time=TIME):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (SAMPLES, time + 1), generator=generator)
    documents = torch.randint(0, 2, (SAMPLES, time), generator=generator).cumsum(1)
    return DataLoader(TensorDataset(ids, documents), 2, shuffle=shuffle, collate_fn=collate)


def make_strategy(shape):
    names = ("replicate", "shard", "tensor", "context")
    return "single" if shape is None else lumen.Mesh(**dict(zip(names, shape, strict=True)))


def train(folder, shape, task=None, max_steps=7, **options):
    """Return the logged values, the predictions and the path of the newest checkpoint of a run."""
    task = task or Model()
    trainer = quiet_trainer(
        folder, max_steps=max_steps, global_batch_size=8, gradient_clip_val=0.05, resume="auto",
        strategy=make_strategy(shape), **options,
    )  # fmt: skip
    trainer.fit(task, make_loader(shuffle=True), make_loader(shuffle=False))
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(task, make_loader(shuffle=False))
    return values, torch.cat(predictions), sorted((folder / "runs/run/checkpoints").glob("step-*"))[-1]


def assert_close(path, expected):
    ours, theirs = (read_tensors(each, "model", "optimizer") for each in (path, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-11)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the results of one process: of a run, and of a longer run."""
    return train(tmp_path_factory.mktemp("single"), None), train(tmp_path_factory.mktemp("long"), None, max_steps=11)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_context_parts_equal_one_process(group, tmp_path, single, shape):
    """With packed documents, dropout, clipping, accumulation, token weights and a ragged last window."""
    values, predictions, checkpoint = single[0]
    ranks = group(shape[0] * shape[1] * shape[2] * shape[3]).run(train, tmp_path, shape, limit_s=180)
    for theirs, their_predictions, _ in ranks:
        assert theirs == pytest.approx(values, rel=1e-11)
        torch.testing.assert_close(their_predictions, predictions, rtol=0, atol=1e-11)
    assert_close(ranks[0][2], checkpoint)


@pytest.mark.parametrize(("before", "after"), [((1, 1, 1, 4), (1, 2, 1, 2)), ((1, 1, 2, 2), None)], ids=str)
def test_context_parts_resume_on_other_meshes(group, tmp_path, single, before, after):
    path = group(4).run(train, tmp_path, before, limit_s=180)[0][2]
    path = (
        train(tmp_path, None, max_steps=11)[2]
        if after is None
        else group(4).run(train, tmp_path, after, None, 11)[0][2]
    )
    assert_close(path, single[1][2])


def count_collectives(folder):
    return count_step_collectives(folder, Model, lumen.Mesh(context=2), make_loader(shuffle=True))[0]


def test_context_parts_communicate_as_documented(group, tmp_path):
    """Each attention gathers keys and values, and numbers of documents; the rest is FSDP's."""
    for found in group(2).run(count_collectives, tmp_path, limit_s=120):
        assert found.pop(("all_gather", "[2, 4, 4, 8]")) == 2 * 2  # keys and values: 2 samples, 4 heads, half the time
        assert found.pop(("all_reduce", "[4, 4, 4, 8]")) == 2 * 2  # their gradients; gloo has no reduce-scatter
        assert found.pop(("all_gather", "[2, 4]")) == 2 * 2  # numbers of documents
        assert sum(count for (name, _), count in found.items() if name == "all_gather") == 2 * (2 * 2 + 1)
        assert {name for name, _ in found} == {"all_gather", "all_reduce"}


# ---------------------------------------------------------------------- faults that are refused


class Counting(Model):
    def get_positions(self, ids):
        return torch.arange(ids.shape[1])


class LocalBlock(Block):
    def mix(self, x, documents):
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Local(Model):
    block = LocalBlock


class FunctionBlock(Block):
    def forward(self, x, documents):
        return super().forward(F.dropout(x, 0.1, self.training), documents)


class Functional(Model):
    block = FunctionBlock


class Rotary(Model):
    """Model whose keys are rotated by positions that begin at 0 in each part, which hardly changes an early loss."""

    class block(Block):
        def mix(self, x, documents):
            q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
            angles = 0.01 * torch.arange(x.shape[1], dtype=x.dtype)[:, None]
            q, k = (torch.cat([t * angles.cos(), t * angles.sin()], -1) for t in (q, k))
            return lumen.attention(q, k, v, is_causal=True)


class Unweighted(Model):
    def training_step(self, batch):
        return self.get_loss(batch)[0]


class Shifting(Model):
    def training_step(self, batch):
        return super().training_step(
            batch
            | {"ids": batch["ids"][:, :-1], "targets": batch["ids"][:, 1:], "documents": batch["documents"][:, 1:]}
        )


class DroppingBlock(Block):
    def mix(self, x, documents):
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return lumen.attention(q, k, v, dropout_p=0.1, is_causal=True)


class Dropping(Model):
    block = DroppingBlock


class Masking(Model):
    class block(Block):
        def mix(self, x, documents):
            q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
            return lumen.attention(q, k, v, torch.ones(x.shape[1], x.shape[1]).tril().bool())


class NoDimension(Model):
    sequence_dim = None


class LastDimension(Model):
    sequence_dim = -1


class Scalar(Model):
    """Model with a parameter that cannot be sharded, which is an error of FSDP under its own name."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


class Manual(Model):
    automatic_optimization = False


REFUSED = [
    (Counting, "has other gradients"),
    (Local, "has other gradients"),
    (Functional, "has other gradients"),
    (Rotary, "has other gradients"),
    (Unweighted, "has other gradients"),
    (Shifting, "has other gradients"),
    (Dropping, r"dropout_p is 0\.1"),
    (Masking, "needs a mask of this process's 4 queries and all 8 keys"),
    (NoDimension, "sequence_dim of NoDimension is None"),
    (LastDimension, "sequence_dim of LastDimension is -1"),
    (Scalar, r"^Mesh: scale has no dimension"),
    (Manual, "needs automatic optimization"),
]


def collate_unevenly(rows):
    return collate(rows) | {"mask": torch.ones(len(rows), TIME + 1)}


def refuse(folder, task, loader, message, context=2, **sizes):
    trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(context=context, **sizes))
    with pytest.raises(ConfigError, match=message):
        trainer.fit(task.float(), loader)
    assert trainer.global_step == 0


@pytest.mark.parametrize(("kind", "message"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_tasks_that_context_would_change_are_refused(group, tmp_path, kind, message):
    group(2).run(refuse, tmp_path, kind(), make_loader(shuffle=True), message)


def test_sequences_of_wrong_length_are_refused(group, tmp_path):
    group(2).run(refuse, tmp_path, Model(), make_loader(shuffle=True, time=9), "found the lengths 9")
    uneven = DataLoader(make_loader(shuffle=True).dataset, 2, collate_fn=collate_unevenly)
    group(2).run(refuse, tmp_path, Model(), uneven, "found the lengths 8, 9")


def refuse_later(folder):
    task, loader = Model(), make_loader(shuffle=True)
    bare_trainer(folder, max_steps=1, strategy=lumen.Mesh()).fit(task, loader)
    with pytest.raises(ConfigError, match="already sharded, by a strategy with different options"):
        bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(context=2)).fit(task, loader)


def test_context_of_a_sharded_task_is_refused(group, tmp_path):
    """Its dropout is not cut."""
    group(2).run(refuse_later, tmp_path)


class Skipping(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch) if batch_idx else None


def skip(folder, task):
    with pytest.raises(TrainingError, match=r"To skip a batch, return \(loss, 0\)"):
        bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(context=2)).fit(task, make_loader(shuffle=True))


def test_first_step_without_a_loss_is_refused(group, tmp_path):
    group(2).run(skip, tmp_path, Skipping())


class Long(Local):
    """Model with a fault, whose batches have a loss only behind the positions that the first step compares first."""

    def get_positions(self, ids):
        return lumen.position_ids(ids.shape[1]) % TIME


def collate_prompts(rows):
    batch = collate(rows)
    batch["targets"][:, :1030] = 0
    return batch


def test_faults_are_found_behind_long_prompts(group, tmp_path):
    loader = DataLoader(make_loader(shuffle=True, time=1040).dataset, 2, collate_fn=collate_prompts)
    group(2).run(refuse, tmp_path, Long(), loader, "has other gradients")


def train_alike(folder):
    found = []
    for index, shape in enumerate([(1, 2, 1, 1), (1, 1, 1, 2)]):
        for precision in ("fp32", "bf16", "fp16"):
            task = Model().float()
            trainer = bare_trainer(
                folder / f"{index}{precision}", max_steps=3, strategy=make_strategy(shape), precision=precision,
                global_batch_size=8,
            )  # fmt: skip
            trainer.fit(task, make_loader(shuffle=True))
            found.append(next(iter(task.parameters())).full_tensor().detach())
    return found


def test_context_trains_in_each_precision(group, tmp_path):
    found = group(2).run(train_alike, tmp_path, limit_s=120)[0]
    for one, other in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3)


# ---------------------------------------------------------------------- features


def attend(module, query, key, value, attention_mask, scaling=None, **options):
    assert attention_mask is None
    mixed = lumen.attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return mixed.transpose(1, 2).contiguous(), None


class Llama(Model):
    """Model from transformers, with the weight of a batch from the task."""

    def __init__(self):
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

        lumen.TaskModule.__init__(self)
        torch.manual_seed(0)
        AttentionInterface.register("lumen", attend)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, attn_implementation="lumen",
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).double()

    def forward(self, ids, documents):
        return self.model(input_ids=ids, position_ids=lumen.position_ids(ids.shape[1])[None]).logits

    def training_step(self, batch):
        return self.get_loss(batch)[0]

    def batch_weight(self, batch):
        return int((batch["targets"] != 0).sum())


class Plain(Model):
    """Model whose loss is a plain mean over tokens of equal number in each part."""

    def training_step(self, batch):
        logits = self(batch["ids"], batch["documents"])
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class Augmented(Model):
    """Model whose hooks draw numbers, and make the targets from whole sequences."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        noise = torch.rand(batch["ids"].shape) < 0.2
        return batch | {"ids": batch["ids"].masked_fill(noise, 0), "targets": batch["ids"].roll(-1, 1)}

    def on_train_batch_start(self, batch, batch_idx):
        torch.rand(3)


class VectorDropout(Model):
    """Model with dropout of a vector, which has no sequence."""

    def __init__(self):
        super().__init__()
        self.vector_drop = nn.Dropout(0.5)

    def training_step(self, batch):
        loss, tokens = super().training_step(batch)
        return loss + self.vector_drop(self.head.bias).square().sum(), tokens


class Classifier(Model):
    """Classifier of whole sequences: of their first position, and of the mean of their positions."""

    def training_step(self, batch):
        x = self.tokens(batch["ids"]) + self.positions(self.get_positions(batch["ids"]))
        for block in self.blocks:
            x = block(x, batch["documents"])
        pooled = lumen.attention(torch.zeros_like(x[:, None, :1]), x[:, None], x[:, None])[:, 0, 0]
        pooled = F.dropout(pooled, 0.1, self.training)
        return F.cross_entropy(self.head(pooled), batch["labels"])


class FirstClassifier(Classifier):
    def training_step(self, batch):
        x = self.tokens(batch["ids"]) + self.positions(self.get_positions(batch["ids"]))
        for block in self.blocks:
            x = block(x, batch["documents"])
        is_first = int(lumen.position_ids(1)[0] == 0)
        return F.cross_entropy(self.head(x[:, 0]), batch["labels"]), is_first * len(x)


FEATURES = {
    "llama": (Llama, {}, {}),
    "hooks": (Augmented, {}, {}),
    "dropout of vectors": (VectorDropout, {}, {}),
    "pooling": (Classifier, {}, {}),
    "first position": (FirstClassifier, {}, {}),
    "plain": (Plain, {}, {}),
    "checkpointing": (Model, {"activation_checkpointing": "Block"}, {}),
    "compiled": (Model, {}, {"compile": {"backend": "aot_eager", "blocks": ["Block"]}}),
    "uneven": (Model, {}, {"global_batch_size": 6, "gradient_clip_val": 0.1}),
}


def train_twice(folder, name):
    kind, sizes, options = FEATURES[name]
    found = []
    for index, parts in enumerate(({"shard": 2}, {"context": 2})):
        trainer = bare_trainer(
            folder / str(index),
            strategy=lumen.Mesh(**parts, **sizes),
            max_steps=4,
            **{"global_batch_size": 8, **options},
        )
        task = kind()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # torch.compile reads it
            trainer.fit(task, make_loader(shuffle=True))
        found.append(
            [each.full_tensor().detach() for each in task.parameters()] + [torch.tensor(trainer.run.progress.units)]
        )
    return found


@pytest.mark.parametrize("name", FEATURES)
def test_context_works_with_each_feature(group, tmp_path, name):
    for one, other in zip(*group(2).run(train_twice, tmp_path, name, limit_s=120)[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


class Remembering(Model):
    """Model that keeps state in Python, and logs a mean over tokens as a mean over samples."""

    def __init__(self):
        super().__init__()
        self.calls, self.losses, self.sums = 0, [], {}

    def training_step(self, batch):
        loss, tokens = super().training_step(batch)
        self.calls += 1
        self.losses.append(float(loss.detach()))
        self.sums["tokens"] = self.sums.get("tokens", 0) + tokens
        self.newest = self.__dict__.get("newest", 0) + 1
        self.log("loss", loss)
        self.log("weighted", loss, batch_size=tokens)
        return loss, tokens


def remember(folder):
    task, records = Remembering(), []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lumen").addHandler(handler)
    try:
        strategy = lumen.Mesh(context=2)
        trainer = bare_trainer(folder, max_steps=3, strategy=strategy, global_batch_size=2, log_level="WARNING")
        trainer.fit(task, make_loader(shuffle=True))
    finally:
        logging.getLogger("lumen").removeHandler(handler)
    return task.calls, len(task.losses), task.newest, task.sums["tokens"], trainer.run.progress.units, records


def test_first_step_leaves_no_trace_in_the_task(group, tmp_path):
    """The step calls `training_step` three times, and warns of values that parts of sequences log differently."""
    ranks = group(2).run(remember, tmp_path)
    assert [each[:3] for each in ranks] == [(3, 3, 3)] * 2
    assert sum(each[3] for each in ranks) == ranks[0][4]
    (warning,) = [each for each in ranks[0][5] if "over parts of sequences" in each]
    assert "logs 'loss' as" in warning


class Frozen(Model):
    """Model with frozen layers in 16 bits, which needs autocast."""

    def __init__(self):
        super().__init__()
        self.float()
        for block in self.blocks:
            block.up.requires_grad_(False).bfloat16()


def train_frozen(folder):
    trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(context=2), precision="bf16")
    trainer.fit(Frozen(), make_loader(shuffle=True))


def test_context_trains_with_layers_of_16_bits(group, tmp_path):
    group(2).run(train_frozen, tmp_path)


def test_first_guess_counts_all_parts():
    """The first part may have no weight, such as a prompt; a guess of 1 would let fp16 overflow."""
    parts = [(0, 0.0), (0, 10.0)]
    options = {"data_world_size": 2, "context_size": 2, "uses_scaler": True, "gather": lambda first: parts}
    for number, weight in parts:
        weighting = LossWeighting(is_set_by_task=False, **options)
        weighting.begin_step(2.0, 1, 0.0)
        weighting.set_first_guess(number, weight)
        weighting.get_loss_factor(2.0, weight)
        assert weighting.planned == 16.0
