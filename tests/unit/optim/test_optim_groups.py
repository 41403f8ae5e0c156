"""Parameter groups: each trainable parameter exactly once, with the decay and the learning rate of its kind."""

import pytest
import torch
from torch import nn

import lumen
from lumen.errors import ConfigError
from lumen.optim import Lookahead, check_groups, cosine, decay_groups, layer_decay_groups
from models.gpt import GPT
from tests.helpers.tasks import Regression, loader, quiet_trainer


class RootMeanSquareNorm(nn.Module):
    """Norm that torch does not know."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Mixed(nn.Module):
    """Module with one parameter of each kind, nested, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 4))
        self.embed = nn.Embedding(5, 4)
        self.stem = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
        self.body = nn.ModuleDict(
            {
                "attention": nn.MultiheadAttention(4, 2),
                "drop": nn.Dropout(),
                "recurrent": nn.LSTM(4, 4),
                "rms": RootMeanSquareNorm(),
            }
        )
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def list_group_names(module, groups):
    """Return sorted first names of the parameters in each group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [sorted(names[id(parameter)] for parameter in group["params"]) for group in groups]


# ---------------------------------------------------------------------- weight decay by class

MATRICES_OF = {"decay": ["Linear", "_ConvNd", "MultiheadAttention", "LSTM", "Mixed"]}


def test_decay_by_class_supports_bases_and_tied_parameters():
    module = Mixed()
    kinds = MATRICES_OF | {"no_decay": ["BatchNorm1d", "RootMeanSquareNorm", "Embedding"]}
    decaying, other = list_group_names(module, decay_groups(module, 0.1, by=kinds))
    assert set(other) == BIASES | NORMS | {"embed.weight"}
    assert set(decaying) == {name for name, _ in module.named_parameters()} - set(other)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            MATRICES_OF | {"no_decay": ["BatchNorm1d", "Embedding"]},
            r"body\.rms\.weight of RootMeanSquareNorm is in neither",
        ),
        (MATRICES_OF | {"no_decay": ["Module"]}, r"token of Mixed is in both;.* stem\.0\.weight of Conv1d is in both"),
        ({"decay": ["Linear"], "spared": ["Embedding"]}, "expected a list of class names for decay"),
        ({"decay": "Linear", "no_decay": ["Embedding"]}, "expected a list of class names for decay"),
    ],
)
def test_decay_by_class_rejects_missing_or_ambiguous_parameters(kinds, message):
    with pytest.raises(ConfigError, match=message):
        decay_groups(Mixed(), 0.1, by=kinds)


class Stem(nn.Module):
    """Embeddings like minGPT's in pytorch/examples: the positions are a bare parameter."""

    def __init__(self):
        super().__init__()
        self.tok_emb = nn.Embedding(7, 4)
        self.pos_emb = nn.Parameter(torch.zeros(1, 5, 4))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(4), nn.MultiheadAttention(4, 2)
        self.mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))


def group_like_mingpt(model):
    """Return names that decay and names that do not, by the loop of minGPT's own `create_optimizer`."""
    decay, no_decay = set(), set()
    for module_name, module in model.named_modules():
        for own, _ in module.named_parameters():
            name = f"{module_name}.{own}" if module_name else own
            of_linear = own.endswith("weight") and isinstance(module, nn.Linear)
            spared = own.endswith("weight") and isinstance(module, (nn.LayerNorm, nn.Embedding))
            if own.endswith("bias"):
                no_decay.add(name)
            elif own.endswith("in_proj_weight") or of_linear:
                decay.add(name)
            elif spared or own.endswith("pos_emb"):
                no_decay.add(name)
    return [sorted(decay), sorted(no_decay)]


@pytest.mark.parametrize(
    "by", ["module type", {"decay": ["Linear", "MultiheadAttention"], "no_decay": ["LayerNorm", "Embedding"]}]
)
def test_groups_are_those_of_mingpts_own_loop(by):
    model = nn.ModuleDict({"stem": Stem(), "blocks": nn.Sequential(Layer(), Layer()), "head": nn.Linear(4, 7)})
    expected = group_like_mingpt(model)
    assert "stem.pos_emb" in expected[1]
    assert list_group_names(model, decay_groups(model, 0.1, by=by)) == expected


class Experts(nn.Module):
    """Layer of the user with custom names for its matrices."""

    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Parameter(torch.randn(2, 4, 4)), nn.ReLU()


class LearnedPositionalEncoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.pe, self.drop = nn.Parameter(torch.zeros(5, 4)), nn.Dropout()


def test_module_type_excludes_embeddings_but_no_layer_matrices():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
    model = nn.Sequential(LearnedPositionalEncoding(), Experts(), normed)
    decaying = ["1.up", "2.parametrizations.weight.original0", "2.parametrizations.weight.original1"]
    assert list_group_names(model, decay_groups(model, 0.1, by="module type")) == [decaying, ["0.pe"]]


# ---------------------------------------------------------------------- weight decay

MATRICES = {
    "token",
    "embed.weight",
    "stem.0.weight",
    "body.attention.in_proj_weight",
    "body.attention.out_proj.weight",
    "body.recurrent.weight_ih_l0",
    "body.recurrent.weight_hh_l0",
}
BIASES = {
    "stem.0.bias",
    "stem.1.bias",
    "body.attention.in_proj_bias",
    "body.attention.out_proj.bias",
    "body.recurrent.bias_ih_l0",
    "body.recurrent.bias_hh_l0",
}
NORMS = {"stem.1.weight", "body.rms.weight"}


@pytest.mark.parametrize(
    ("by", "undecayed"),
    [
        ("dimension", BIASES | NORMS | {"scale"}),
        ("module type", BIASES | NORMS | {"embed.weight", "token", "scale"}),
        (["*.bias", "body.recurrent.*", "token"], {name for name in BIASES if name.endswith(".bias")}
         | {f"body.recurrent.{kind}_{way}_l0" for kind in ("weight", "bias") for way in ("ih", "hh")} | {"token"}),
        (["head.*"], {"embed.weight"}),
        ([], set()),
    ],
)  # fmt: skip
def test_decay_groups_by_dimension_module_type_or_name(by, undecayed):
    module = Mixed()
    groups = decay_groups(module, 0.3, by=by)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    everything = MATRICES | BIASES | NORMS | {"scale"}
    assert list_group_names(module, groups) == [sorted(everything - undecayed), sorted(undecayed)]
    check_groups(module, groups)


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.BatchNorm2d(4),
                                  nn.InstanceNorm3d(4, affine=True), nn.SyncBatchNorm(4)])  # fmt: skip
def test_norms_are_recognized_by_subclass(norm):
    class Standardise(type(norm)):
        pass

    standardise = Standardise.__new__(Standardise)
    standardise.__dict__.update(norm.__dict__)
    for module in (norm, standardise):
        decaying, other = decay_groups(nn.Sequential(nn.Linear(4, 4), module), 0.1, by="module type")
        assert (len(decaying["params"]), len(other["params"])) == (1, 1 + len(list(norm.parameters())))


def test_only_the_decaying_group_shrinks():
    module = Mixed()
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer = torch.optim.AdamW(decay_groups(module, 0.5), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if name in MATRICES else 1.0))


@pytest.mark.parametrize("by", ["dimension", "module type", ["*.bias"]])
def test_frozen_parameters_are_left_out(by):
    module = Mixed()
    module.body.requires_grad_(False)
    groups = decay_groups(module, 0.1, by=by)
    assert not any(name.startswith("body") for names in list_group_names(module, groups) for name in names)
    check_groups(module, groups)
    with pytest.raises(ConfigError, match=r"Mixed has no trainable parameter. Unfreeze some"):
        decay_groups(module.requires_grad_(False), 0.1, by=by)


def test_unmatched_name_raises_with_available_names():
    with pytest.raises(ConfigError, match=r"no parameter of Mixed is named '\*\.biass'.*token, .*stem\.0\.bias.*head"):
        decay_groups(Mixed(), 0.1, by=["*.bias", "*.biass"])
    with pytest.raises(ConfigError, match=r"by = 'module': expected \"dimension\", \"module type\" or a list"):
        decay_groups(Mixed(), 0.1, by="module")


# ---------------------------------------------------------------------- the check


def test_invalid_groups_raise_one_error_for_all_faults():
    module = Mixed()
    groups = [{"params": list(module.stem.parameters())}, {"params": list(module.body.parameters())}]
    groups += [{"params": [module.token, module.stem[0].bias, *nn.Linear(2, 2).parameters()]}]
    with pytest.raises(ConfigError) as error:
        check_groups(module, groups)
    assert str(error.value) == (
        "parameters in no group: scale, embed.weight; in several groups: stem.0.bias; not of Mixed: 2. "
        "Put each trainable parameter into exactly one group."
    )
    module.scale.requires_grad_(False)
    groups = [{"params": [*module.stem.parameters(), *module.body.parameters()]}]
    groups += [{"params": [module.token, module.head.weight]}]
    check_groups(module, groups)
    check_groups(module, torch.optim.SGD(groups, lr=0.1).param_groups)


# ---------------------------------------------------------------------- layer-wise learning rates


def list_rates(module, groups):
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(parameter)]: (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]
    }


@pytest.mark.parametrize("blocks", ["transformer.blocks", [f"transformer.blocks.{number}" for number in range(3)]])
@pytest.mark.parametrize("embeddings", [None, ["transformer.tokens", "transformer.positions"]])
def test_layer_rates_decay_from_head_to_embeddings(blocks, embeddings):
    gpt = GPT(11, preset="gpt-nano")
    groups = layer_decay_groups(gpt, 0.8, 0.5, blocks, weight_decay=0.1, embeddings=embeddings)
    check_groups(gpt, groups)
    assert [group["lr"] for group in groups] == [0.05, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.8]
    for name, (rate, decay) in list_rates(gpt, groups).items():
        layer = name.split(".")[1:3]
        expected = {"tokens": 0.05, "positions": 0.05, "norm": 0.8}.get(layer[0]) or 0.1 * 2 ** int(layer[1])
        assert rate == pytest.approx(expected), name
        assert decay == (0.1 if gpt.get_parameter(name).ndim >= 2 else 0.0), name


def test_blocks_can_be_listed_for_other_networks():
    module = Mixed()
    groups = layer_decay_groups(module, 1.0, 0.1, ["stem", "body.recurrent"], weight_decay=0.2, by="module type",
                                embeddings=["token", "head"])  # fmt: skip
    found = list_rates(module, groups)
    check_groups(module, groups)
    assert found["token"] == pytest.approx((0.001, 0.0))
    assert found["embed.weight"] == pytest.approx((0.001, 0.0))
    assert found["stem.0.weight"] == pytest.approx((0.01, 0.2))
    assert found["stem.1.weight"] == pytest.approx((0.01, 0.0))
    assert found["body.recurrent.weight_hh_l0"] == pytest.approx((0.1, 0.2))
    assert found["body.attention.in_proj_weight"] == (1.0, 0.2)
    assert found["scale"] == (1.0, 0.0)


def test_a_stack_counts_the_blocks_that_have_parameters():
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    found = list_rates(net, layer_decay_groups(net, 1.0, 0.5, "1", weight_decay=0.0))
    assert [found[name][0] for name in ("0.weight", "1.1.weight", "1.3.bias")] == [0.125, 0.25, 0.5]


def test_shared_layer_learns_at_its_lowest_rate():
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.Linear(2, 2), shared, nn.Linear(2, 1))
    groups = layer_decay_groups(net, 1.0, 0.5, ["0", "1", "2"], weight_decay=0.0)
    check_groups(net, groups)
    assert {name: rate for name, (rate, _) in list_rates(net, groups).items() if "weight" in name} == {
        "0.weight": 0.125,
        "1.weight": 0.25,
        "3.weight": 1.0,
    }


def test_each_group_has_a_name_of_its_own():
    def names(*arguments, **options):
        return [group["name"] for group in layer_decay_groups(*arguments, weight_decay=0.1, **options)]

    assert [group["name"] for group in decay_groups(Mixed(), 0.1)] == ["decay", "no decay"]
    gpt = GPT(11, preset="gpt-nano")
    inner = [f"transformer.blocks.{block} {kind}" for block in range(3) for kind in ("decay", "no decay")]
    assert names(gpt, 0.8, 0.5, "transformer.blocks") == ["embeddings decay", *inner, "head no decay"]
    net = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("first", "embeddings", "head", "last")})
    assert names(net, 0.8, 0.5, ["embeddings", "head"]) == [
        "embeddings decay", "block embeddings decay", "block head decay", "head decay"
    ]  # fmt: skip


def test_group_names_survive_checkpoint_and_resume_is_exact(tmp_path):
    class Layered(Regression):
        def configure_optimizers(self):
            groups = layer_decay_groups(self, 0.1, 0.5, ["net.0"], weight_decay=0.1)
            return Lookahead(torch.optim.AdamW(groups), k=3)

    def run(folder, steps):
        task = Layered()
        options = {"max_steps": steps, "resume": "auto", "log_every_n_steps": 1}
        trainer = quiet_trainer(tmp_path / folder, callbacks=[lumen.LearningRateMonitor()], **options)
        trainer.fit(task, loader())
        return task, [group["name"] for group in trainer.optimizers[0].param_groups]

    whole, names = run("whole", 9)
    run("parts", 4)
    resumed, kept = run("parts", 9)
    assert kept == names == ["net.0 decay", "net.0 no decay", "head decay", "head no decay"]
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    metrics = [(tmp_path / folder / "runs/run/metrics.csv").read_text() for folder in ("whole", "parts")]
    assert metrics[0] == metrics[1]
    assert {f"lr/{name}" for name in names} <= set(metrics[0].splitlines()[0].split(","))


def test_frozen_layers_have_no_group_and_no_effect():
    gpt = GPT(11, preset="gpt-nano")
    everything = list_rates(gpt, layer_decay_groups(gpt, 0.8, 0.5, "transformer.blocks", weight_decay=0.1))
    gpt.transformer.blocks[:2].requires_grad_(False)
    gpt.transformer.tokens.requires_grad_(False)
    groups = layer_decay_groups(gpt, 0.8, 0.5, "transformer.blocks", weight_decay=0.1)
    check_groups(gpt, groups)
    found = list_rates(gpt, groups)
    assert found == {name: everything[name] for name in found}
    assert len(groups) == 1 + 2 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"blocks": "transformer.block"},
            r"below 'transformer\.block'\. transformer has tokens, positions, blocks, norm",
        ),
        ({"blocks": "layers"}, r"no parameter of GPT has a name below 'layers'\. GPT has transformer\."),
        ({"blocks": ["transformer.blocks.0", "transformer.blocks.7.norm_1"]}, r"transformer\.blocks has 0, 1, 2\."),
        ({"blocks": "transformer.head"}, r"blocks: transformer\.head has no blocks"),
        ({"blocks": []}, r"blocks: \[\] has no blocks"),
        ({"embeddings": ["transformer.wte"]}, r"'transformer\.wte'\. transformer has tokens"),
        ({"decay": 0.0}, r"decay = 0\.0: decay must be in \(0, 1\]"),
        ({"decay": 1.1}, r"decay = 1\.1"),
    ],
)
def test_invalid_arguments_raise_with_available_choices(arguments, message):
    options = {"lr": 0.1, "decay": 0.9, "blocks": "transformer.blocks", "weight_decay": 0.1} | arguments
    with pytest.raises(ConfigError, match=message):
        layer_decay_groups(GPT(11, preset="gpt-nano"), **options)


def test_schedule_keeps_rate_ratios_of_layers(tmp_path):
    seen = []

    class Layered(Regression):
        def configure_optimizers(self):
            groups = layer_decay_groups(self, 0.1, 0.5, ["net.0"], weight_decay=0.0, embeddings=[])
            optimizer = torch.optim.AdamW(groups)
            schedule = cosine(optimizer, self.trainer.estimated_stepping_batches, warmup=2)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def on_before_optimizer_step(self, optimizer):
            seen.append([group["lr"] for group in optimizer.param_groups])

    quiet_trainer(tmp_path, max_epochs=1, logger=False, enable_checkpointing=False).fit(Layered(), loader())
    assert len({rates[-1] for rates in seen}) > 4
    for lower, lower_bias, head, head_bias in seen:
        assert lower == lower_bias == pytest.approx(head / 2)
        assert head == head_bias
