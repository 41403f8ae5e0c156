"""Layers built in `configure_model`: equal initial bits under every strategy, and no rank holds all of them."""

import gc
from copy import deepcopy

import numpy as np
import pytest
import torch
from torch import nn

import lumen
from lumen.errors import ConfigError
from tests.helpers.group import assert_equal
from tests.helpers.sharded import count_held_bytes, unshard
from tests.helpers.tasks import FEATURES, Saving, bare_trainer, loader, quiet_trainer


class Head(nn.Module):
    """Module that writes a parameter of a submodule, after the submodule's own values."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, 5), nn.Linear(5, 1)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.zeros_(self.second.bias)
        with torch.no_grad():
            self.first.weight.mul_(0.5)

    def forward(self, x):
        return self.second(self.first(x))


class Zoo(lumen.TaskModule):
    """Task with different ways of initialization, of sizes that no number of processes divides."""

    def __init__(self, width=7):
        super().__init__()
        self.save_hyperparameters()
        self.built = 0

    def configure_model(self):
        width = self.hparams.width
        self.built += 1
        self.embed = nn.Linear(FEATURES, width)
        self.tokens = nn.Embedding(11, width, padding_idx=3)
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 1, 9, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.norm = nn.BatchNorm1d(width)
        self.tied = nn.Linear(width, 11)
        self.tied.weight = self.tokens.weight
        self.rounded = nn.Linear(width, width).bfloat16()
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = Head(width)
        self.register_buffer("noise", torch.randn(width), persistent=False)

    def training_step(self, batch):
        x = self.frozen(self.embed(batch[0])).unsqueeze(1)
        x = x + self.attention(x, x, x)[0] + self.tied(x)[..., :1]
        x = self.recurrent(self.layers(x))[0].squeeze(1) + self.rounded(x.squeeze(1).bfloat16()).float()
        loss = nn.functional.mse_loss(self.head(self.norm(x) + self.noise), batch[1])
        self.log("loss", loss)
        return loss

    test_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def read_initial_state(folder, task, strategy, **options):
    """Return the initial weights and buffers of a training."""
    found = {}

    class Look(lumen.Callback):
        def on_fit_start(self, trainer, task):
            found.update({name: unshard(value).double().numpy() for name, value in task.state_dict().items()})
            found["noise"] = task.noise.double().numpy() if hasattr(task, "noise") else np.zeros(1)
            assert not any(tensor.is_meta for tensor in (*task.parameters(), *task.buffers()))

    strategy = getattr(lumen, strategy[0])(**strategy[1]) if isinstance(strategy, tuple) else strategy
    trainer = bare_trainer(folder, strategy=strategy, max_steps=1, callbacks=[Look()], **options)
    trainer.fit(task, loader())
    return found


def initialize_module(name, module):
    return name in ("rounded", "layers")


WAYS = {
    1: [("FSDP", {"wrap_if": initialize_module})],
    2: [
        "ddp",
        ("FSDP", {"wrap": ["TransformerEncoderLayer", "Linear"]}),
        ("FSDP", {"wrap": ["LSTM", "Linear"], "cpu_offload": True}),
    ],
    4: [
        ("FSDP", {"sharding_strategy": "hybrid_shard", "shard_size": 2, "wrap_if": initialize_module}),
        ("FSDP", {"wrap_min_parameters": 50}),
    ],
}


@pytest.mark.parametrize("world", WAYS)
def test_initial_weights_are_bit_equal_under_every_strategy(group, tmp_path, world):
    alone = read_initial_state(tmp_path, Zoo(), "single")
    assert len(alone) == len(list_zoo_names())
    for results in group(world).run(begin_in_every_way, tmp_path, world):
        for ours in results:
            assert_equal(ours, alone, 0.0)


def list_zoo_names():
    task = Zoo()
    task.configure_model()
    return [*task.state_dict(), "noise"]


def begin_in_every_way(folder, world):
    torch.manual_seed(torch.distributed.get_rank())
    return [read_initial_state(folder, Zoo(), way) for way in WAYS[world]]


def test_initial_values_depend_only_on_seed_and_names(tmp_path):
    class Longer(Zoo):
        def configure_model(self):
            torch.randn(3)
            self.more = nn.Linear(3, 3)
            super().configure_model()

    first, again, other = (read_initial_state(tmp_path, Zoo(), "single", seed=seed) for seed in (1, 1, 2))
    longer = read_initial_state(tmp_path, Longer(), "single", seed=1)
    assert_equal(first, again, 0.0)
    assert_equal(first | {"noise": longer["noise"]}, {name: longer[name] for name in first}, 0.0)
    drawn = [name for name, value in first.items() if name.endswith("weight") and "norm" not in name]
    assert all((first[name] != other[name]).any() for name in drawn)
    copies = [name for name in drawn if name.startswith("layers.layers.1.")]
    assert all(np.array_equal(first[name], first[name.replace("layers.1.", "layers.0.")]) for name in copies)
    assert len({first[name].tobytes() for name in drawn}) == len(drawn) - len(copies) - 1  # two parameters are tied


class Deep(lumen.TaskModule):
    def configure_model(self):
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(30))

    def training_step(self, batch):
        return sum(layer.weight.square().sum() for layer in self.layers)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Replacing(Deep):
    """Task whose configure_model replaces layers, whose ids new parameters then have."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(30))

    def configure_model(self):
        for index in range(30):
            self.layers[index] = None
            self.layers[index] = nn.Linear(3, 3)


def test_layers_that_replace_others_begin_alike(tmp_path):
    assert_equal(*(read_initial_state(tmp_path, task, "single") for task in (Replacing(), Deep())), 0.0)


def test_they_are_those_of_the_modules_own_initialisers(tmp_path):
    weights = read_initial_state(tmp_path, Zoo(), "single")
    bound = 1 / np.sqrt(7)
    assert 0.7 * bound < np.abs(weights["frozen.weight"]).max() <= bound
    assert 0.2 * bound < np.abs(weights["head.first.weight"]).max() <= 0.5 * bound
    assert (weights["tokens.weight"][3] == 0).all()
    assert np.array_equal(weights["tied.weight"], weights["tokens.weight"])
    for zero in ("head.second.bias", "attention.in_proj_bias", "attention.out_proj.bias", "norm.bias"):
        assert (weights[zero] == 0).all(), zero
    assert (weights["norm.weight"] == 1).all()
    xavier = np.sqrt(6 / (7 + 21))
    assert 0.8 * xavier < np.abs(weights["attention.in_proj_weight"]).max() <= xavier


# ---------------------------------------------------------------------- initializers of the user


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.scale


class Own(Zoo):
    """Model that initializes all parameters in one place, as many models do."""

    def configure_model(self):
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), Scale(7), nn.Linear(7, 1))
        for module in self.net:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02 if name == "net.0" else 0.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Scale):
            nn.init.ones_(module.scale)

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def test_init_weights_initializes_modules_by_class_and_name(group, tmp_path):
    alone = read_initial_state(tmp_path, Own(), "single")
    assert 0.01 < alone["net.0.weight"].std() < 0.03
    assert 0.2 < alone["net.2.weight"].std() < 0.9
    assert (alone["net.1.scale"] == 1).all()
    for ours in group(2).run(read_initial_state, tmp_path, Own(), ("FSDP", {"wrap": "Linear"})):
        assert_equal(ours, alone, 0.0)


class Wrong(Zoo):
    def __init__(self, way):
        super().__init__()
        self.way = way

    def configure_model(self):
        self.net = nn.Sequential(nn.Linear(FEATURES, 1))
        getattr(self, self.way)()

    def constructor_only(self):
        self.net.append(Scale(1))

    def written_afterwards(self):
        nn.init.normal_(self.net[0].weight, std=0.02)

    def given(self):
        self.embedding = nn.Embedding.from_pretrained(torch.randn(4, 3))

    def loaded(self):
        state = {name: torch.ones_like(tensor, device="cpu") for name, tensor in self.net.state_dict().items()}
        with pytest.warns(UserWarning, match="meta parameter"):
            self.net.load_state_dict(state)

    def copied(self):
        with torch.no_grad():
            self.net.state_dict()["0.weight"].copy_(torch.randn(1, FEATURES))

    def assigned(self):
        self.net[0].weight.data = torch.randn(1, FEATURES)

    def read(self):
        self.mean = self.net[0].weight.detach().mean().item()

    def all_on_meta(self):
        with torch.device("meta"):
            self.norm = nn.BatchNorm1d(3)


class WrongWithOwn(Wrong):
    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)


class WrongWithSome(Wrong):
    """Model that initializes its embeddings, and leaves the rest to the modules, in two ways."""

    def init_weights(self, module, name):
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif name == "net.0":
            module.reset_parameters()
        else:
            super().init_weights(module, name)

    def zeroed(self):
        nn.init.zeros_(self.net[0].weight)

    def replaced(self):
        self.net.append(nn.Linear(1, 1))
        self.net[1].weight = nn.Parameter(torch.zeros(1, 1))

    def computed(self):
        self.net.append(nn.Linear(FEATURES, 1))
        self.net[1].weight = nn.Parameter(0.5 * self.net[0].weight.detach())

    def averaged(self):
        self.net.append(nn.Linear(FEATURES, 1))
        with torch.no_grad():
            self.net[1].weight.lerp_(self.net[0].weight, 0.5)

    def turned(self):
        self.net.append(nn.Linear(1, FEATURES))
        self.net[1].weight = nn.Parameter(self.net[0].weight.detach().t().clone())


class Meddling(Wrong):
    """Task that writes parameters of other modules."""

    def init_weights(self, module, name):
        super().init_weights(module, name)
        if name == "net.1":
            nn.init.zeros_(self.net[0].weight)

    def two(self):
        self.net.append(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("task", "way", "message"),
    [
        (Wrong, "constructor_only", "net.1.scale gets no values, or not all .Scale has no reset_parameters"),
        (
            Wrong,
            "written_afterwards",
            r"configure_model initialized net.0.weight by uniform_\(.*\) normal_\(0, 0.02\), but init_weights by",
        ),
        (Wrong, "given", "configure_model initialized embedding.weight by its constructor"),
        (Wrong, "loaded", r"2 parameters .* configure_model initialized net.0.weight by uniform_\(.*\) copy_\(\)"),
        (Wrong, "copied", "configure_model initialized net.0.weight by"),
        (Wrong, "assigned", "reads values of parameters"),
        (Wrong, "read", "reads values of parameters"),
        (Wrong, "all_on_meta", "3 buffers are on the meta device: norm.running_mean"),
        (WrongWithOwn, "constructor_only", "net.1.scale gets no values"),
        (WrongWithOwn, "loaded", r"configure_model copied data into net.0.weight by copy_\(\)"),
        (WrongWithOwn, "copied", r"configure_model copied data into net.0.weight by copy_\(\)"),
        (
            WrongWithSome,
            "zeroed",
            r"configure_model initialized net.0.weight by uniform_\(.*\) (zero|fill)_\(.*\), but init_weights",
        ),
        (WrongWithSome, "replaced", "initialized net.1.weight by its constructor, but init_weights by uniform_"),
        (WrongWithSome, "computed", r"initialized net.1.weight by mul\(0.5\) of weight, but init_weights by uniform_"),
        (
            WrongWithSome,
            "averaged",
            r"initialized net.1.weight by uniform_\(.*\) lerp_\(0.5\), but init_weights by uniform_",
        ),
        (WrongWithSome, "turned", "initialized net.1.weight by clone.* of weight, but init_weights by uniform_"),
        (
            Meddling,
            "two",
            "writes net.0.weight by zero_, but net.0.weight has its values already|writes net.0.weight by fill_",
        ),
    ],
)
def test_lost_initial_values_raise_one_clear_error(tmp_path, task, way, message):
    with pytest.raises(ConfigError, match=message):
        read_initial_state(tmp_path, task(way), "single")


# ---------------------------------------------------------------------- copies


class Copying(Own):
    """Task that copies parameters before they have values, in every way; `init_weights` sets one `own_bias`."""

    own_bias = False

    def configure_model(self):
        self.student = nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, 1))
        self.teacher = deepcopy(self.student).requires_grad_(False)
        self.second = deepcopy(self.teacher)
        self.loaded = nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, 1))
        self.loaded.load_state_dict(self.student.state_dict())
        self.written = nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, 1))
        self.moved = nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, 1))
        with torch.no_grad():
            for parameter, moved, source in zip(
                self.written.parameters(), self.moved.parameters(), self.student.parameters(), strict=True
            ):
                parameter.copy_(source)
                moved.data = source.data.clone()
        self.rounded = deepcopy(self.student).bfloat16()
        self.widened = deepcopy(self.rounded).float()
        self.alone = nn.ParameterList([nn.Parameter(self.student[0].weight.detach().clone())])
        self.apart = nn.Sequential(nn.Linear(FEATURES, 7), nn.Linear(7, 1))
        self.gone = nn.ModuleList(deepcopy(nn.Linear(FEATURES, 3)) for _ in range(2))
        template = nn.Linear(FEATURES, 3)
        self.layers = nn.ModuleList(deepcopy(template) for _ in range(2))
        self.requires_grad_(False)
        self.student.requires_grad_(True)

    def init_weights(self, module, name):
        super(Own, self).init_weights(module, name)
        if name == "second.1" and self.own_bias:
            nn.init.ones_(module.bias)

    def training_step(self, batch):
        return nn.functional.mse_loss(self.student(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=1e-2)


class CopyingWithOwn(Copying):
    """Copying task that initializes all linear layers."""

    own_bias = True

    def init_weights(self, module, name):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if name == "second.1":
            nn.init.ones_(module.bias)


COPIES = ("teacher", "second", "loaded", "written", "moved")


def assert_copied(found, own_bias):
    for key in ("0.weight", "0.bias", "1.weight", "1.bias"):
        student = found[f"student.{key}"]
        for copy in COPIES:
            if own_bias and (copy, key) == ("second", "1.bias"):
                assert (found["second.1.bias"] == 1).all()
            else:
                assert np.array_equal(found[f"{copy}.{key}"], student), (copy, key)
        rounded = torch.from_numpy(student).bfloat16().double().numpy()
        assert np.array_equal(found[f"rounded.{key}"], rounded)
        assert np.array_equal(found[f"widened.{key}"], rounded)
    assert np.array_equal(found["alone.0"], found["student.0.weight"])
    assert np.array_equal(found["layers.0.weight"], found["layers.1.weight"])
    for one, other in (("student.0.weight", "apart.0.weight"), ("gone.0.weight", "gone.1.weight")):
        assert not np.array_equal(found[one], found[other])


@pytest.mark.parametrize("kind", [Copying, CopyingWithOwn])
def test_copies_begin_with_the_values_of_their_source(group, tmp_path, kind):
    alone = read_initial_state(tmp_path, kind(), "single")
    assert_copied(alone, kind.own_bias)
    for results in group(2).run(begin_as_copies, tmp_path, kind):
        for ours in results:
            assert_equal(ours, alone, 0.0)


def begin_as_copies(folder, kind):
    torch.manual_seed(torch.distributed.get_rank())
    ways = ["ddp", ("FSDP", {"wrap_if": is_copy})]
    return [read_initial_state(folder, kind(), way) for way in ways]


def is_copy(name, module):
    return name in ("second.0", "rounded", "widened", "layers.1")


# ---------------------------------------------------------------------- references and hooks


def quarter(parameter):
    parameter.grad.mul_(0.25)


class Referring(Own):
    """Task that keeps references to its parameters and puts hooks on them while they are built."""

    names = ("net.0.weight", "recurrent.weight_hh_l0")

    def configure_model(self):
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1))
        self.recurrent = nn.LSTM(FEATURES, 3, batch_first=True)
        self.kept = {"weights": [self.net[0].weight, self.recurrent.weight_hh_l0]}
        self.seen = []
        self.net[2].weight.register_hook(lambda gradient: self.seen.append(gradient.shape) or 0.5 * gradient)
        self.net[0].bias.register_post_accumulate_grad_hook(quarter)
        given = nn.Parameter(torch.empty(1, 7))
        given.register_hook(lambda gradient: 3 * gradient)
        self.net.add_module("3", nn.Linear(7, 1, bias=False))
        self.net[3].weight = given
        self.removed = self.net[0].weight.register_hook(lambda gradient: 0 * gradient)

    def init_weights(self, module, name):
        lumen.TaskModule.init_weights(self, module, name)
        if name == "net.3":
            nn.init.normal_(module.weight)

    def training_step(self, batch):
        self.removed.remove()
        hidden = self.net[1](self.net[0](batch[0]))
        output = self.net[2](hidden) + self.net[3](hidden) + self.recurrent(batch[0][:, None])[0].sum((1, 2))[:, None]
        penalty = sum(weight.square().sum() for weight in self.kept["weights"])
        return nn.functional.mse_loss(output, batch[1]) + 0.1 * penalty

    def configure_optimizers(self):
        others = [each for name, each in self.named_parameters() if name not in self.names]
        return torch.optim.SGD([{"params": self.kept["weights"], "lr": 0.05}, {"params": others, "lr": 0.1}])


def train_network(folder, strategy, task=None, accumulate=1, **options):
    task = Referring() if task is None else task
    strategy = getattr(lumen, strategy[0])(**strategy[1]) if isinstance(strategy, tuple) else strategy
    trainer = bare_trainer(
        folder, strategy=strategy, max_steps=3, precision="fp64", accumulate_grad_batches=accumulate, **options
    )
    trainer.fit(task, loader(24, 8, dtype=torch.float64))
    assert {tuple(shape) for shape in task.seen} == {(1, 7)}
    return {name: unshard(value).numpy() for name, value in task.state_dict().items()}


class Named(Referring):
    """Task without references and hooks that trains the same."""

    def configure_model(self):
        super().configure_model()
        self.seen.append((1, 7))
        for holder in (self.net[2].weight, self.net[3].weight):
            holder._backward_hooks.clear()
        self.net[0].bias._post_accumulate_grad_hooks.clear()

    def training_step(self, batch):
        self.kept = {"weights": [self.net[0].weight, self.recurrent.weight_hh_l0]}
        return super().training_step(batch)

    def on_before_optimizer_step(self, optimizer):
        self.net[2].weight.grad.mul_(0.5)
        self.net[3].weight.grad.mul_(3)
        self.net[0].bias.grad.mul_(0.25)

    def configure_optimizers(self):
        self.kept = {"weights": [self.net[0].weight, self.recurrent.weight_hh_l0]}
        return super().configure_optimizers()


def test_references_and_hooks_from_configure_model_stay_valid(group, tmp_path):
    expected = train_network(tmp_path, "single", Named())
    assert_equal(train_network(tmp_path, "single"), expected, 1e-12)
    expected = train_network(tmp_path, "single", Named(), accumulate=2)
    for results in group(2).run(train_in_every_way, tmp_path):
        for ours in results:
            assert_equal(ours, expected, 1e-12)


class Twice(Referring):
    """Task that distinguishes its parameters by their identity before sharding."""

    def configure_optimizers(self):
        kept = {id(weight) for weight in self.kept["weights"]}
        others = [each for each in self.parameters() if id(each) not in kept]
        return torch.optim.SGD([{"params": self.kept["weights"]}, {"params": others}], lr=0.1)


def test_duplicate_parameter_in_optimizer_raises_one_error(group, tmp_path):
    group(2).run(refuse_twice, tmp_path)


def refuse_twice(folder):
    with pytest.raises(ConfigError, match="the optimizer has 2 parameters twice"):
        train_network(folder, "fsdp", Twice())


def train_in_every_way(folder):
    refused = (Referring(), "uses net.0.weight through a reference"), (Named(), "uses parameters of a module")
    for task, message in refused:
        with pytest.raises(ConfigError, match=message):
            train_network(folder, "fsdp", task)
    ways = ({"wrap_if": is_last}, {"wrap_if": is_last, "cpu_offload": True}, {"wrap_min_parameters": 1000})
    return [train_network(folder, strategy) for strategy in ("ddp", *(("FSDP", options) for options in ways))]


def is_last(name, module):
    return name in ("net.2", "net.3")


# ---------------------------------------------------------------------- stages, checkpoints, number formats


def test_layers_are_built_once_per_task(tmp_path):
    task = Zoo()
    trainer = bare_trainer(tmp_path, max_epochs=1)
    trainer.fit(task, loader())
    trained = {name: value.clone() for name, value in task.state_dict().items()}
    trainer.test(task, loader())
    bare_trainer(tmp_path).test(task, loader())
    assert task.built == 1
    assert all(torch.equal(value, trained[name]) for name, value in task.state_dict().items())


def train_and_save(folder, strategy, resume=None, max_steps=4):
    task = Zoo()
    trainer = quiet_trainer(
        folder, max_steps=max_steps, strategy=strategy, accumulate_grad_batches=1 if strategy != "single" else 2,
        callbacks=[Saving(2, folder / "at-2")], logger=False, resume=resume,
    )  # fmt: skip
    trainer.fit(task, loader())
    return {name: unshard(value).double().numpy() for name, value in task.state_dict().items()}


def test_a_checkpoint_fills_layers_that_are_built_late(tmp_path):
    trained = train_and_save(tmp_path, "single", max_steps=2)
    task = Zoo.load_from_checkpoint(tmp_path / "at-2")
    assert_equal({name: value.detach().double().numpy() for name, value in task.state_dict().items()}, trained, 0.0)
    bare_trainer(tmp_path).test(task, loader())
    assert_equal({name: value.detach().double().numpy() for name, value in task.state_dict().items()}, trained, 0.0)


def wrapped():
    return lumen.FSDP(wrap_if=initialize_module)


def save_and_go_on(folder):
    undisturbed = train_and_save(folder / "one", wrapped())
    train_and_save(folder / "two", wrapped(), max_steps=2)
    return undisturbed, train_and_save(folder / "three", wrapped(), resume=str(folder / "two" / "at-2"))


def test_sharded_run_resumes_exactly(group, tmp_path):
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
    for undisturbed, resumed in group(2).run(save_and_go_on, tmp_path):
        assert_equal(resumed, undisturbed, 0.0)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-true", torch.bfloat16), ("fp64", torch.float64)])
def test_values_are_drawn_in_layer_dtype_then_cast(tmp_path, precision, dtype):
    class Plain(Own):
        def init_weights(self, module, name):
            if isinstance(module, nn.Linear):
                assert module.weight.dtype == torch.float32
            super().init_weights(module, name)

    exact, task = read_initial_state(tmp_path, Plain(), "single"), Plain()
    cast = read_initial_state(tmp_path, task, "single", precision=precision)
    assert {parameter.dtype for parameter in task.parameters()} == {dtype}
    for name, value in exact.items():
        assert np.array_equal(torch.from_numpy(value).to(dtype).double().numpy(), cast[name]), name


# ---------------------------------------------------------------------- memory


class Large(lumen.TaskModule):
    """Task that records the bytes of tensors of this process whenever a module gets its values."""

    BLOCKS, WIDTH = 12, 64

    def __init__(self):
        super().__init__()
        gc.collect()
        self.before, self.peak = count_held_bytes(), 0

    def configure_model(self):
        self.net = nn.Sequential(*(nn.Linear(self.WIDTH, self.WIDTH) for _ in range(self.BLOCKS)))

    def init_weights(self, module, name):
        super().init_weights(module, name)
        self.peak = max(self.peak, count_held_bytes() - self.before)

    def training_step(self, batch):
        return self.net(batch[0].repeat(1, 11)[:, : self.WIDTH]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_hold_their_shard_and_one_module(group, tmp_path, world):
    module = 4 * (Large.WIDTH**2 + Large.WIDTH)
    for peak in group(world).run(build_large, tmp_path):
        assert module < peak <= 1.05 * (Large.BLOCKS * module / world) + module + 4096


def build_large(folder):
    task = Large()
    bare_trainer(folder, max_steps=1, strategy="fsdp").fit(task, loader())
    return task.peak
