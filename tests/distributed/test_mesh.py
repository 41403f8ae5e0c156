"""Mesh: layers cut over processes train as on one process, and plans that would not are refused."""

import logging
import os
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.distributed.dtensor import gather_full_tensor
from lumen.errors import ConfigError
from tests.helpers.checkpoints import read_tensors
from tests.helpers.communication import VOTE
from tests.helpers.mesh import (
    HEAD,
    PLAN,
    SAMPLES,
    TIME,
    VOCAB,
    WIDTH,
    Built,
    Frozen,
    Half,
    Hooked,
    Llama,
    Manual,
    Model,
    Momentum,
    Penalized,
    PenalizedInPart,
    Taught,
    Views,
    Whole,
    count_step_collectives,
    make_loader,
    train_model,
)
from tests.helpers.tasks import Regression, bare_trainer, loader

SHAPES = [(1, 1, 2), (1, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (1, 4, 1)]


def make_strategy(shape):
    return "single" if shape is None else lumen.Mesh(replicate=shape[0], shard=shape[1], tensor=shape[2])


def train(folder, shape, max_steps=7, losses=None):
    """Return the logged values, the predictions and the path of the newest checkpoint of a run."""
    trainer, task = train_model(folder, make_strategy(shape), max_steps)
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    predictions = trainer.predict(task, make_loader(shuffle=False))
    return values, torch.cat(predictions), sorted((folder / "runs/run/checkpoints").glob("step-*"))[-1]


def assert_close(one, other, tolerance=1e-11):
    one, other = (read_tensors(path, "model", "optimizer", "extra") for path in (one, other))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=tolerance, msg=lambda text, name=name: name + text)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return the results of one process: of a run, and of a longer run."""
    folder, other = tmp_path_factory.mktemp("single"), tmp_path_factory.mktemp("longer")
    return train(folder, None), train(other, None, 11)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_mesh_equals_one_process(group, tmp_path, single, shape):
    """With clipping, accumulation, token weights, dropout, a ragged last window and an average of parameters."""
    values, predictions, checkpoint = single[0]
    processes = shape[0] * shape[1] * shape[2]
    ranks = group(processes).run(train, tmp_path, shape, limit_s=180)
    for theirs, their_predictions, _ in ranks:
        assert theirs == pytest.approx(values, rel=1e-11)
        assert theirs["val_samples"] == SAMPLES
        torch.testing.assert_close(their_predictions, predictions, rtol=0, atol=1e-11)
    assert_close(ranks[0][2], checkpoint)


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 2, 2), (1, 2, 2)), ((1, 2, 2), (1, 1, 2)), ((1, 1, 4), (2, 1, 2)), ((1, 1, 2), None), (None, (1, 2, 2))],
)
def test_any_mesh_resumes_any_other(group, tmp_path, single, before, after):
    for shape, max_steps in ((before, 7), (after, 11)):
        if shape is None:
            train(tmp_path, None, max_steps)
        else:
            group(shape[0] * shape[1] * shape[2]).run(train, tmp_path, shape, max_steps, limit_s=180)
    path = sorted((tmp_path / "runs/run/checkpoints").glob("step-*"))[-1]
    assert_close(path, single[1][2])


def train_as_fsdp(folder):
    paths = []
    for strategy in (lumen.FSDP(), lumen.Mesh(shard=2), lumen.Mesh(), "mesh"):
        name = strategy if isinstance(strategy, str) else f"{type(strategy).__name__}{len(paths)}"
        train_model(folder / name, strategy, 3)
        paths.append(next((folder / name / "runs/run/checkpoints").glob("step-*")))
    return paths


def test_mesh_without_tensor_is_fsdp(group, tmp_path):
    first, *others = group(2).run(train_as_fsdp, tmp_path, limit_s=120)[0]
    for path in others:
        assert_close(first, path, 0)


FEATURES = {
    "anomalies": (Momentum, {}, {"detect_anomaly": True}),
    "built": (Built, {}, {}),
    "compiled": (Momentum, {}, {"compile": {"backend": "aot_eager", "blocks": ["Block"]}}),
    "checkpointing": (Momentum, {"activation_checkpointing": "Block"}, {}),
    "frozen": (Frozen, {}, {}),
    "hooked": (Hooked, {}, {}),
    "views": (Views, {}, {}),
    "llama": (Llama, {}, {}),
    "penalty": (Penalized, {}, {}),
    "offload": (Momentum, {"cpu_offload": True}, {}),
    "taught": (Taught, {}, {}),
    "unused": (Momentum, {"find_unused_parameters": True}, {}),
    "whole": (Whole, {}, {}),
    "bf16": (Half, {}, {"precision": "bf16"}),
    "fp16": (Half, {}, {"precision": "fp16"}),
}


def train_twice(folder, name):
    if name == "compiled":
        warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's compiler inspects without need
    make_task, options, trainer_options = FEATURES[name]
    found = []
    for index, strategy in enumerate((lumen.Mesh(shard=2, **options), lumen.Mesh(tensor=2, **options))):
        lumen.seed_everything(0, verbose=False)
        task, trainer_options = make_task(), {"max_steps": 3, "global_batch_size": 8} | trainer_options
        trainer = bare_trainer(folder / str(index), strategy=strategy, **trainer_options)
        trainer.fit(task, make_loader(shuffle=True))
        found.append([gather_full_tensor(each.detach(), each) for each in task.parameters()])
    return found


@pytest.mark.parametrize("name", FEATURES)
def test_cut_layers_work_with_each_feature(group, tmp_path, name):
    sharded, cut = group(2).run(train_twice, tmp_path, name, limit_s=120)[0]
    for one, other in zip(sharded, cut, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3 if name in ("bf16", "fp16") else 1e-11)


ALONE = {
    "compile": (Momentum, {"compile": {"backend": "aot_eager"}}),
    "manual": (Manual, {"global_batch_size": None}),
    "one micro-batch": (Momentum, {"global_batch_size": 2}),
}


def train_cut(folder, name, strategy):
    warnings.filterwarnings("ignore", message="The .grad attribute")  # torch's compiler inspects functions without need
    make_task, options = ALONE[name]
    lumen.seed_everything(0, verbose=False)
    task = make_task()
    trainer = bare_trainer(folder, strategy=strategy, **{"max_steps": 3, "global_batch_size": 8} | options)
    trainer.fit(task, make_loader(shuffle=True))
    return {name: gather_full_tensor(each.detach(), each) for name, each in task.named_parameters()}


@pytest.mark.parametrize("name", ALONE)
def test_steps_of_cut_layers_equal_one_process(group, tmp_path, name):
    alone = train_cut(tmp_path / "alone", name, "single")
    for found in group(2).run(train_cut, tmp_path, name, lumen.Mesh(tensor=2), limit_s=120):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-11)


def catch_part(folder):
    trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(tensor=2))
    with pytest.raises(ConfigError, match=r"the weight of a layer that parallel_plan cuts.* weight\.full_tensor\(\)"):
        trainer.fit(PenalizedInPart(), make_loader(shuffle=True))


def test_a_loss_of_a_part_is_refused(group, tmp_path):
    group(2).run(catch_part, tmp_path)


def catch_adapter(folder):
    trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(tensor=2))
    with pytest.raises(ConfigError, match=r"q_proj is a peft\.tuners\.lora\.layer\.Linear"):
        trainer.fit(Llama(lora=True), make_loader(shuffle=True))


def test_layers_with_adapters_are_refused(group, tmp_path):
    group(2).run(catch_adapter, tmp_path)


def catch_error(folder, match, plan, options):
    plan = None if plan is None else PLAN | plan
    trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(tensor=2))
    with pytest.raises(ConfigError, match=match):
        trainer.fit(Model(plan, **options), make_loader(shuffle=True))


QKV, NORM, DROP, CUT = "blocks.*.mix.qkv", "blocks.*.mix.norm", "blocks.*.mix.drop", "blocks.*.cut"
REFUSED = {
    "typo": ({"blocks.*.mix.qkw": "colwise"}, {}, r"qkw is no module of Model. Did you mean blocks.\*.mix.qkv"),
    "word": ({"head": "colwize"}, {}, "'colwize' is not supported.* Did you mean colwise"),
    "class": ({"blocks.*.norm": "colwise"}, {}, "cuts an nn.Linear or nn.Dropout, but blocks.0.norm is a nn.LayerNorm"),
    "tied": ({"head": None}, {}, "head.weight is the parameter tokens.weight, which the plan cuts. Give head a word"),
    "open": ({"blocks.*.down": None}, {}, r"blocks.0 fails with layers cut over 2 processes"),
    "end": ({"head": "colwise"}, {}, "head gives cut features, but no module of the task holds head and a rowwise"),
    "fused": ({QKV: "colwise"}, {}, r"blocks.0.mix computes other values.*output 0.*packed_colwise"),
    "parts": ({QKV: "packed_colwise:1"}, {}, "number of parts"),
    "size": ({QKV: "packed_colwise:16"}, {}, "48 features of 16 matrices .* cannot share equally"),
    "heads": ({NORM: None}, {"heads": 4}, "blocks.0.mix computes other values.*the number of heads"),
    "norm": ({NORM: None}, {}, "blocks.0.mix computes other values.*its gradient of norm.weight differ"),
    "norm of rows": ({}, {"max_norm": 1.0}, "tokens: an embedding with max_norm"),
    "dropout": ({}, {"dropout": 0.1}, "values are equal without dropout.*inside a function.* set its probability to 0"),
    "dropped": ({CUT: None}, {}, "blocks.0 computes other values.* Give each nn.Dropout .* the word colwise"),
    "whole": ({"blocks.*.drop": "colwise"}, {}, "blocks.0 computes other values.* no word if its input is whole"),
    "probabilities": ({DROP: "colwise"}, {}, "blocks.0.mix computes other values.* colwise:1"),
    "dimension": ({DROP: "colwise:4"}, {}, "mix.drop: colwise:4 names dimension 4, but the input has 4 dimensions"),
    "number": (
        {"blocks.*.up": "colwise:1"},
        {},
        "up: colwise:1 is not a word. A number follows .*or colwise of an nn",
    ),
    "rowwise": ({CUT: "rowwise"}, {}, "rowwise cuts an nn.Linear, but blocks.0.cut is a nn.Dropout"),
    "sequence": ({"blocks.*.norm": "sequence_parallel"}, {}, "does not cut activations between layers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_plan_is_refused(group, tmp_path, case):
    plan, options, match = REFUSED[case]
    group(2).run(catch_error, tmp_path, match, plan, options)


def catch_ids(folder):
    ids = torch.tensor([[-1, VOCAB]])  # one for the error of each process
    trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(tensor=2))
    with pytest.raises(IndexError):
        trainer.fit(Model(), DataLoader(TensorDataset(ids, ids)))


def test_ids_outside_of_an_embedding_are_refused(group, tmp_path):
    group(2).run(catch_ids, tmp_path)


def catch_sizes(folder):
    for options, match in (
        ({"tensor": 3}, r"1 \* 1 \* 3 \* 1 = 3, but 2 processes run"),
        ({"tensor": 2, "shard": 2}, r"1 \* 2 \* 2 \* 1 = 4, but 2 processes run"),
    ):
        with pytest.raises(ConfigError, match=match):
            bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(**options)).fit(Model(), make_loader(shuffle=True))
    trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(tensor=2))
    with pytest.raises(ConfigError, match="Regression has none"):
        trainer.fit(Regression(), loader())


def test_sizes_must_match_the_processes(group, tmp_path):
    group(2).run(catch_sizes, tmp_path)
    with pytest.raises(ConfigError, match="tensor must be at least 1"):
        lumen.Mesh(tensor=0)
    with pytest.raises(ConfigError, match=r"shard_size is an option of FSDP\. Set shard"):
        lumen.Mesh(shard_size=2)
    with pytest.raises(ConfigError, match=r"no argument wrapp\. Did you mean wrap"):
        lumen.Mesh(wrapp="Block")


def train_over_nodes(folder):
    """Return the warnings of a tensor group of two nodes with one process each."""
    said, rank = [], os.environ["RANK"]
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lumen").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        of_node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank, "GROUP_WORLD_SIZE": "2"}
        for name, value in of_node.items():
            patch.setenv(name, value)
        trainer = bare_trainer(folder, max_steps=1, strategy=lumen.Mesh(tensor=2), log_level="WARNING")
        trainer.fit(Model(), make_loader(shuffle=True))
    logging.getLogger("lumen").removeHandler(handler)
    return said


def test_a_tensor_group_over_nodes_warns(group, tmp_path):
    for said in group(2).run(train_over_nodes, tmp_path):
        assert [each for each in said if "tensor = 2 does not divide the number of processes of a node, 1" in each]


def count_collectives(folder, shape):
    """Return the collectives of two further steps, by name and shape, and the parameters of a block on this process."""
    found, task = count_step_collectives(folder, Momentum, make_strategy(shape), make_loader(shuffle=True))
    return found, sum(each.to_local().numel() for each in task.blocks[0].parameters())


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2)], ids=str)
def test_cut_layers_communicate_as_documented(group, tmp_path, shape):
    """A region sums its output and its input's gradient; embedding and head add two sums and a gather of logits."""
    blocks, activations, logits = 2, f"[2, {TIME}, {WIDTH}]", f"[2, {TIME}, {VOCAB // 2}]"
    for found, part in group(2 * shape[1]).run(count_collectives, tmp_path, shape, limit_s=120):
        assert found.pop(("all_reduce", activations)) == 2 * (2 * 2 * blocks + 2)
        assert found.pop(("all_gather", logits)) == 2
        assert found.pop(("all_reduce", f"[{HEAD}]")) == 2 * blocks  # norms of heads
        if shape[1] > 1:
            assert found.pop(("all_gather", f"[{part}]")) == 2 * 2 * blocks
            assert found.pop(("all_reduce", f"[{part * shape[1]}]")) == 2 * blocks  # gloo has no reduce-scatter
            tied = VOCAB * WIDTH // 4
            assert found.pop(("all_gather", f"[{tied}]")) == found.pop(("all_reduce", f"[{tied * 2}]")) == 2
        found.pop(("all_reduce", f"[{VOTE}]"), None)  # more often if the machine stalls
        # The norm of 17 planned gradients over each dimension of the mesh, the norm of 6 others over shard, and the 6
        # numbers of a step.
        assert found == {("all_reduce", "[17]"): 2 * shape[1], ("all_reduce", "[6]"): 2 * shape[1]}
