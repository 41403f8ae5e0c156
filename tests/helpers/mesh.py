"""Small language model with a plan for tensor parallelism, for trainings on meshes."""

import warnings
from collections import Counter

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lumen
from tests.helpers.tasks import bare_trainer, quiet_trainer

VOCAB, WIDTH, HEAD, TIME, SAMPLES = 24, 16, 4, 6, 22  # the last step of an epoch has fewer samples than the other steps
PLAN = {
    "blocks.*.mix.qkv": "packed_colwise",
    "blocks.*.mix.out": "rowwise",
    "blocks.*.mix.norm": "replicated_with_grad_allreduce",
    "blocks.*.mix.drop": "colwise:1",
    "blocks.*.cut": "colwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "tokens": "vocab",
    "head": "vocab",
}


class Mix(nn.Module):
    """Attention with query, key and value in one layer, a norm of heads, and dropout of probabilities.

    With `dropout`, torch's function draws instead.
    """

    def __init__(self, dropout=0.0, heads=-1):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.RMSNorm(HEAD), nn.Dropout(0.1)
        self.dropout, self.heads = dropout, heads

    def forward(self, x):
        shape = (self.heads, HEAD if self.heads < 0 else -1)
        q, k, v = (each.unflatten(-1, shape).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        if self.heads < 0:
            q = self.norm(q)
        if self.dropout:
            dropout = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        else:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-1, -2) / HEAD**0.5).masked_fill(future, -torch.inf)
            mixed = self.drop(scores.softmax(-1)) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers, with dropout of whole and of cut activations."""

    def __init__(self, **options):
        super().__init__()
        self.mix = Mix(**options)
        self.norm, self.drop, self.cut = nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Dropout(0.2, inplace=True)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.drop(self.mix(self.norm(x)))
        return x + self.drop(self.down(self.cut(F.gelu(self.up(x)))))


class Model(lumen.TaskModule):
    """Language model with tied embeddings, whose loss is a mean over tokens that are not 0."""

    parallel_plan = PLAN

    def __init__(self, plan=None, max_norm=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH, max_norm=max_norm), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.head.weight = self.tokens.weight
        self.parallel_plan = PLAN if plan is None else {name: word for name, word in plan.items() if word}
        self.double()

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch):
        ids, targets = batch
        loss = F.cross_entropy(self(ids).flatten(0, 1), targets.flatten(), ignore_index=0)
        self.log("samples", float(len(ids)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss, int((targets != 0).sum())

    def validation_step(self, batch):
        ids, targets = batch
        self.log("val_samples", float(len(ids)), reduce_fx="sum")
        self.log("val_loss", F.cross_entropy(self(ids).flatten(0, 1), targets.flatten()))

    def predict_step(self, batch):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Views(Model):
    """Model whose attention drops views of cut features, which are not contiguous, and heads."""

    def __init__(self):
        names = {"qkv": "packed_colwise", "out": "rowwise", "drop": "colwise", "heads": "colwise:1"}
        super().__init__({f"blocks.*.mix.{name}": word for name, word in names.items()})
        for block in self.blocks:
            block.mix = ViewMix().double()


class ViewMix(nn.Module):
    """Query, key and value in one layer, with dropout of each."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop, self.heads = nn.Dropout(0.5), nn.Dropout(0.5, inplace=True)

    def forward(self, x):
        q, k, v = self.qkv(x).tanh().chunk(3, dim=-1)
        v = self.heads(v.unflatten(-1, (-1, HEAD)).transpose(1, 2) * 1.0).transpose(1, 2).flatten(2)
        return self.out(self.drop(q) + self.drop(k.transpose(0, 1)).transpose(0, 1) + v)


def make_loader(shuffle):
    """Return blocks of tokens, in batches of 2."""
    ids = torch.randint(0, VOCAB, (SAMPLES, TIME + 1), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), 2, shuffle=shuffle)


def count_step_collectives(folder, make_task, strategy, loader):
    """Return the collectives of two further steps of a run, by name and shape, and its task."""
    found = []
    for steps in (1, 2, 4):  # the first run opens the groups
        task = make_task()
        trainer = bare_trainer(folder, max_steps=steps, strategy=strategy, gradient_clip_val=1.0)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as record:
            trainer.fit(task, loader)
        events = [each for each in record.events() if each.name.startswith("gloo:")]
        found.append(Counter((each.name.removeprefix("gloo:"), str(each.input_shapes[0])) for each in events))
    return dict(found[2] - found[1]), task


def train_model(folder, strategy, max_steps=7, **options):
    """Return the trainer and the task of a run that resumes if the folder has a checkpoint.

    Steps have clipped gradients of several batches, and an average of the parameters follows them.
    """
    task = Model()
    trainer = quiet_trainer(
        folder, max_steps=max_steps, global_batch_size=8, gradient_clip_val=0.05, resume="auto", strategy=strategy,
        callbacks=[lumen.EMA(decay=0.8)], **options,
    )  # fmt: skip
    trainer.fit(task, make_loader(shuffle=True), make_loader(shuffle=False))
    return trainer, task


class Momentum(Model):
    """Model with an optimizer whose update is proportional to the gradient, so that rounding is not amplified."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class Penalized(Momentum):
    """Model with a penalty of the weight of a cut layer."""

    gathers = True

    def training_step(self, batch):
        loss, tokens = super().training_step(batch)
        weight = self.head.weight
        if self.gathers and isinstance(weight, DTensor):
            weight = weight.full_tensor()
        return loss + 0.1 * weight.square().sum(), tokens


class PenalizedInPart(Penalized):
    gathers = False


class Whole(Model):
    """Model whose optimizer needs unsharded matrices."""

    def configure_optimizers(self):
        return lumen.optim.WholeMatrices(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))


class Built(Momentum):
    """Model whose layers are built on the meta device."""

    def configure_model(self):
        torch.set_default_dtype(torch.float64)
        self.tokens, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        torch.set_default_dtype(torch.float32)


class Frozen(Momentum):
    """Model with a frozen block, and a frozen bias of a cut layer."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].mix.qkv.bias.requires_grad_(False)


class Hooked(Momentum):
    """Model whose optimizer and gradient hook exist before the parameters are cut."""

    def __init__(self):
        super().__init__()
        self.blocks[0].mix.qkv.weight.register_hook(lambda gradient: gradient * 2)
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self):
        return self.optimizer


class Half(Momentum):
    """Model in float32, for mixed precision, without the norm of heads, for which torch warns there."""

    def __init__(self):
        super().__init__({name: word for name, word in PLAN.items() if "norm" not in name})
        for block in self.blocks:
            block.mix.norm = nn.Identity()
        self.float()


class Manual(Momentum):
    """Model with manual optimization, whose update has the clipped gradients of two batches."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False).double()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, _ = super().training_step(batch)
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.05)
            self.optimizers().step()
            self.optimizers().zero_grad()


class Taught(Momentum):
    """Model whose blocks have a teacher, which the plan does not name."""

    def __init__(self):
        super().__init__()
        self.teachers = nn.ModuleList(lumen.Teacher(block, 0.5) for block in self.blocks)

    def training_step(self, batch):
        loss, weight = super().training_step(batch)
        x = self.tokens(batch[0])
        for block, teacher in zip(self.blocks, self.teachers, strict=True):
            loss = loss + F.mse_loss(block(x), teacher(x))
        return loss, weight


class Llama(lumen.TaskModule):
    """Model from transformers, which has a plan of its own."""

    def __init__(self, lora=False):
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config).double()
        if lora:
            from peft import LoraConfig, get_peft_model

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft uses a name that transformers has replaced
                self.model = get_peft_model(self.model, LoraConfig(r=2, target_modules=["q_proj"]))

    def training_step(self, batch):
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)
