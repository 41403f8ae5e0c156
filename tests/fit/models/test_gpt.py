"""Example GPT: its sizes, its causality, its sampling, and its learning."""

import math

import pytest
import torch

import lumen
from datamodules.text import CharText
from lumen.cli import main
from lumen.errors import ConfigError, DataError
from models.gpt import GPT, PRESETS, Attention, decay_groups, warmup_cosine

VOCABULARY = 11


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return GPT(VOCABULARY, block_size=8, preset="gpt-nano").eval()


def make_tokens(*shape):
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))


def parameter_count(**options):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(**options).parameters())


# -------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    ("preset", "heads", "count"),
    [
        ("gpt2", 12, 124_439_808),
        ("gpt2-medium", 16, 354_823_168),
        ("gpt2-large", 20, 774_030_080),
        ("gpt2-xl", 25, 1_557_611_200),
    ],
)
def test_gpt2_has_the_published_parameters_and_heads(preset, heads, count):
    with torch.device("meta"):
        gpt = GPT(vocab_size=50257, block_size=1024, preset=preset)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == count
    assert {block.attention.head_size for block in gpt.transformer.blocks} == {
        gpt.transformer.tokens.embedding_dim // heads
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_the_expected_parameter_counts(preset):
    layers, _, width = PRESETS[preset]
    per_block = 12 * width**2 + 13 * width
    expected = layers * per_block + 2 * width + (1000 + 32) * width
    assert parameter_count(vocab_size=1000, block_size=32, preset=preset) == expected
    without_biases = expected - layers * 11 * width - width
    assert parameter_count(vocab_size=1000, block_size=32, preset=preset, bias=False) == without_biases


def test_preset_values_can_be_overridden():
    with torch.device("meta"):
        transformer = GPT(VOCABULARY, preset="gpt2", n_layer=2, n_head=3).transformer
    assert len(transformer.blocks) == 2
    assert transformer.blocks[0].attention.head_size == transformer.tokens.embedding_dim // 3
    assert transformer.norm.weight.shape == (768,)


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'gpt3'.*gpt2-medium"):
        GPT(VOCABULARY, preset="gpt3")


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(ConfigError, match=r"n_embd = 100 .* n_head = 3"):
        GPT(VOCABULARY, n_head=3, n_embd=100)


def test_a_sequence_longer_than_the_block_is_refused(gpt):
    with pytest.raises(ConfigError, match=r"9 tokens, but the model has 8 positions"):
        gpt(make_tokens(1, 9))


def test_logits_depend_only_on_earlier_tokens(gpt):
    ids = make_tokens(1, 8)
    before = gpt(ids)
    for position in range(8):
        changed = ids.clone()
        changed[0, position] = (ids[0, position] + 1) % VOCABULARY
        differs = (gpt(changed) != before).any(-1)[0]
        assert differs.tolist() == [other >= position for other in range(8)]


def test_an_untrained_model_knows_nothing(gpt):
    inputs, targets = make_tokens(64, 8), make_tokens(64, 8).flip(0)
    assert gpt.loss([inputs, targets]).item() == pytest.approx(math.log(VOCABULARY), rel=0.02)


def test_the_loss_is_the_mean_over_tokens(gpt):
    inputs, targets = make_tokens(3, 8), make_tokens(3, 8).flip(0)
    likelihood = gpt(inputs).softmax(-1).gather(-1, targets.unsqueeze(-1))
    torch.testing.assert_close(gpt.training_step([inputs, targets]), -likelihood.log().mean())


def test_weights_start_as_in_gpt2():
    torch.manual_seed(0)
    weights = dict(GPT(1000, preset="gpt-mini").transformer.named_parameters())
    for name, weight in weights.items():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 6) if name.endswith("project.weight") else 0.02
            assert weight.std().item() == pytest.approx(std, rel=0.03), name


def test_attention_is_the_softmax_over_what_came_before():
    torch.manual_seed(0)
    attention, x = Attention(8, 2, 0.5, bias=True).eval(), torch.randn(3, 5, 8)
    heads = [part.view(3, 5, 2, 4).transpose(1, 2) for part in attention.qkv(x).split(8, dim=-1)]
    scores = (heads[0] @ heads[1].mT / 4**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ heads[2]).transpose(1, 2).reshape(3, 5, 8)
    torch.testing.assert_close(attention(x), attention.project(mixed))


def test_dropout_works_in_training_only():
    gpt = GPT(VOCABULARY, preset="gpt-nano", dropout=0.5)
    ids = make_tokens(1, 8)
    assert not torch.equal(gpt(ids), gpt(ids))
    gpt.eval()
    assert torch.equal(gpt(ids), gpt(ids))


def test_dropout_probabilities_are_set_separately():
    parts = {"embd_pdrop": 0.1, "resid_pdrop": 0.2, "attn_pdrop": 0.3}

    def probabilities(**options):
        network = GPT(VOCABULARY, preset="gpt-nano", **options).transformer
        found = {(block.drop.p, block.attention.dropout) for block in network.blocks}
        return network.drop.p, *found

    assert probabilities() == (0.0, (0.0, 0.0))
    assert probabilities(dropout=0.4) == (0.4, (0.4, 0.4))
    assert probabilities(**parts) == (0.1, (0.2, 0.3))
    assert probabilities(dropout=0.4, resid_pdrop=0.0) == (0.4, (0.0, 0.4))


@pytest.mark.parametrize("part", ["embd_pdrop", "resid_pdrop", "attn_pdrop"])
def test_each_dropout_alone_draws(part):
    ids, same = make_tokens(1, 8), GPT(VOCABULARY, preset="gpt-nano")
    gpt = GPT(VOCABULARY, preset="gpt-nano", **{part: 0.5})
    gpt.load_state_dict(same.state_dict())
    assert not torch.equal(gpt(ids), gpt(ids))
    assert torch.equal(gpt.eval()(ids), same(ids))


def test_each_dropout_acts_where_gpt2_has_it():
    """A probability of 1 drops a part completely, so that the rest can be computed by hand."""
    ids = make_tokens(2, 8)

    def transformer(**parts):
        torch.manual_seed(0)
        return GPT(VOCABULARY, block_size=8, preset="gpt-nano", **parts).transformer

    residual = transformer(resid_pdrop=1.0)
    embedded = residual.tokens(ids) + residual.positions.weight
    torch.testing.assert_close(residual(ids), residual.head(residual.norm(embedded)))
    assert not transformer(embd_pdrop=1.0)(ids).any()  # all biases begin at 0
    other = ids.clone()
    other[:, :-1] = (ids[:, :-1] + 1) % VOCABULARY
    for probability in (0.0, 1.0):
        attention = transformer(attn_pdrop=probability)
        same = torch.equal(attention(ids)[:, -1], attention(other)[:, -1])
        assert same == (probability == 1.0)


def test_ignored_targets_count_nothing(gpt):
    inputs, targets = make_tokens(3, 8), make_tokens(3, 8).flip(0)
    padded = targets.clone()
    padded[0, 3:] = padded[2, 1:] = -1
    skipping = GPT(VOCABULARY, block_size=8, preset="gpt-nano", ignore_index=-1).eval()
    skipping.load_state_dict(gpt.state_dict())
    loss, count = skipping.training_step([inputs, padded])
    likelihood = gpt(inputs).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    assert count.item() == 3 + 8 + 1
    torch.testing.assert_close(loss, -likelihood[padded != -1].mean())
    loss, count = skipping.training_step([inputs, torch.full_like(targets, -1)])
    assert (loss.item(), count.item()) == (0.0, 0)


# -------------------------------------------------------------------- the optimizer


def test_only_linear_weights_decay():
    gpt = GPT(VOCABULARY, preset="gpt-nano")
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    groups = decay_groups(gpt, 0.1, by={"decay": ["Linear"], "no_decay": ["LayerNorm", "Embedding"]})
    decaying, other = (
        {names[id(parameter)].removeprefix("transformer.") for parameter in group["params"]} for group in groups
    )
    assert decaying == {
        f"blocks.{block}.{layer}.weight"
        for block in range(3)
        for layer in ("attention.qkv", "attention.project", "expand", "project")
    }
    assert {"tokens.weight", "positions.weight", "norm.weight", "norm.bias"} < other
    assert len(decaying) + len(other) == len(names)


def test_optimizer_uses_the_given_arguments(tmp_path):
    (tmp_path / "book.txt").write_text("abc" * 100)
    data = CharText(str(tmp_path / "book.txt"), block_size=8)
    gpt = GPT(
        data.vocab_size, block_size=8, preset="gpt-nano", learning_rate=3e-4, betas=(0.9, 0.95), weight_decay=0.2,
        warmup_steps=0, min_lr_ratio=1.0,
    )  # fmt: skip
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(gpt, data)
    decaying, other = trainer.optimizers[0].param_groups
    assert (decaying["lr"], decaying["betas"], decaying["weight_decay"]) == (3e-4, (0.9, 0.95), 0.2)
    assert (other["lr"], other["betas"], other["weight_decay"]) == (3e-4, (0.9, 0.95), 0.0)


@pytest.mark.parametrize("bias", [True, False])
def test_every_parameter_is_in_exactly_one_group(bias):
    gpt = GPT(VOCABULARY, preset="gpt-nano", bias=bias)
    decaying, other = decay_groups(gpt, 0.1)
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.1, 0.0)
    grouped = [id(parameter) for group in (decaying, other) for parameter in group["params"]]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(parameter) for parameter in gpt.parameters()}
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in other["params"])
    assert all(names[id(p)].endswith("weight") and "norm" not in names[id(p)] for p in decaying["params"])


def test_a_tied_parameter_is_optimized_once(gpt):
    assert gpt.transformer.head.weight is gpt.transformer.tokens.weight
    decaying, _ = decay_groups(gpt, 0.1)
    assert sum(parameter is gpt.transformer.tokens.weight for parameter in decaying["params"]) == 1


def test_frozen_parameters_are_not_optimized(gpt):
    gpt.transformer.positions.requires_grad_(False)
    grouped = [parameter for group in decay_groups(gpt, 0.1) for parameter in group["params"]]
    assert not any(parameter is gpt.transformer.positions.weight for parameter in grouped)
    assert len(grouped) == len(list(gpt.parameters())) - 1


def test_learning_rate_warms_up_and_follows_a_cosine():
    rates = [warmup_cosine(step, warmup_steps=100, decay_steps=500, min_ratio=0.1) for step in range(700)]
    assert rates[0] == 1 / 101
    assert max(rates) == rates[100] == 1
    assert rates[:101] == sorted(rates[:101])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[300] == pytest.approx(0.55)
    assert rates[500:] == pytest.approx([0.1] * 200)


# -------------------------------------------------------------------- sampling


def test_greedy_generation_is_most_likely_and_deterministic(gpt):
    prompt = make_tokens(2, 3)
    text = gpt.generate(prompt, 20, greedy=True)
    assert text.shape == (2, 23)
    assert torch.equal(text[:, :3], prompt)
    assert torch.equal(gpt.generate(prompt, 20, greedy=True), text)
    for end in range(3, 23):
        assert torch.equal(gpt(text[:, max(0, end - 8) : end])[:, -1].argmax(-1), text[:, end])


def test_only_the_last_block_of_a_prompt_counts(gpt):
    prompt = make_tokens(1, 30)
    text = gpt.generate(prompt, 10, greedy=True)
    assert torch.equal(text[:, :30], prompt)
    assert torch.equal(text[:, 30:], gpt.generate(prompt[:, -8:], 10, greedy=True)[:, 8:])


def test_sampling_follows_the_probabilities(gpt):
    gpt.transformer.tokens.weight.data.mul_(20)  # far from uniform
    prompt = make_tokens(1, 4)
    torch.manual_seed(0)
    drawn = gpt.generate(prompt.expand(4000, 4), 1, temperature=2.0)[:, -1]
    expected = (gpt(prompt)[0, -1] / 2).softmax(-1)
    found = torch.bincount(drawn, minlength=VOCABULARY) / 4000
    assert expected.max() > 2 / VOCABULARY
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


def test_top_k_leaves_only_the_k_likeliest(gpt):
    prompt = make_tokens(1, 4)
    drawn = gpt.generate(prompt.expand(1000, 4), 1, top_k=3)[:, -1]
    assert set(drawn.tolist()) == set(gpt(prompt)[0, -1].topk(3).indices.tolist())
    assert torch.equal(gpt.generate(prompt, 9, top_k=1), gpt.generate(prompt, 9, greedy=True))
    assert gpt.generate(prompt, 1, top_k=1000).shape == (1, 5)


def test_the_same_random_state_writes_the_same_text(gpt):
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(gpt.generate(make_tokens(1, 1), 50))
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_a_temperature_of_zero_is_refused(gpt):
    with pytest.raises(ConfigError, match="set greedy"):
        gpt.generate(make_tokens(1, 1), 1, temperature=0.0)


# -------------------------------------------------------------------- training


class RecordRates(lumen.Callback):
    def __init__(self):
        self.rates = []

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def quiet_trainer(tmp_path, **options):
    return lumen.Trainer(
        default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False, log_level="ERROR", **options
    )


@pytest.mark.slow
def test_a_gpt_learns_a_text_and_continues_it(tmp_path):
    sentence = "the quick brown fox jumps over the lazy dog; "
    (tmp_path / "book.txt").write_text(sentence * 60)
    data = CharText(str(tmp_path / "book.txt"), block_size=16, batch_size=32, prompt="the quick")
    torch.manual_seed(0)
    gpt = GPT(data.vocab_size, block_size=16, preset="gpt-nano", learning_rate=1e-2, warmup_steps=10, greedy=True)
    trainer = quiet_trainer(tmp_path, max_steps=120, seed=1, gradient_clip_val=1.0)
    trainer.fit(gpt, data)
    assert trainer.callback_metrics["val_loss"] < 0.3

    fresh = GPT(data.vocab_size, block_size=16, preset="gpt-nano", greedy=True, max_new_tokens=90)
    predictions = quiet_trainer(tmp_path, name="gpt").predict(fresh, data, ckpt_path="last")
    assert predictions == [[(sentence * 3)[: 9 + 90]]]


def test_learning_rate_follows_steps_of_the_run(tmp_path):
    (tmp_path / "book.txt").write_text("abc" * 100)
    data = CharText(str(tmp_path / "book.txt"), block_size=8)
    recorded = RecordRates()
    gpt = GPT(data.vocab_size, block_size=8, preset="gpt-nano", learning_rate=0.5, warmup_steps=3)
    quiet_trainer(tmp_path, max_steps=9, callbacks=recorded).fit(gpt, data)
    assert recorded.rates == [0.5 * warmup_cosine(step, 3, 9, 0.1) for step in range(9)]


def test_a_checkpoint_of_another_vocabulary_is_not_continued(tmp_path):
    for name, content in (("one.txt", "abcd" * 50), ("other.txt", "wxyz" * 50)):
        (tmp_path / name).write_text(content)
    data = CharText(str(tmp_path / "one.txt"), block_size=8)
    gpt = GPT(data.vocab_size, block_size=8, preset="gpt-nano")
    quiet_trainer(tmp_path, max_steps=1).fit(gpt, data)
    with pytest.raises(DataError, match="'abcd'"):
        quiet_trainer(tmp_path, name="gpt").predict(
            gpt, CharText(str(tmp_path / "other.txt"), block_size=8), ckpt_path="last"
        )


# -------------------------------------------------------------------- the config, through the command line


def test_config_trains_and_generates_from_best_checkpoint(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("only nine" * 100)
    arguments = ["--config", "models/gpt.yaml", "--data.path", str(tmp_path / "book.txt")]
    arguments += ["--trainer.default_root_dir", str(tmp_path)]
    assert main(["fit", *arguments, "--trainer.max_steps", "2", "--trainer.val_check_interval", "1"]) == 0
    gpt = GPT.load_from_checkpoint(tmp_path / "gpt")
    assert gpt.hparams.vocab_size == gpt.transformer.head.out_features == 7

    writing = ["--data.prompt", "only", "--model.max_new_tokens", "20", "--model.temperature", "0.5"]
    capsys.readouterr()
    assert main(["predict", *arguments, "--ckpt_path", "best", *writing]) == 0
    text = capsys.readouterr().out.rstrip("\n")
    assert text.startswith("only")
    assert len(text) == 4 + 20
    assert set(text) <= set("only nine")


def test_prompt_with_unknown_characters_is_rejected(tmp_path, capsys):
    (tmp_path / "book.txt").write_text("only nine" * 100)
    arguments = ["--config", "models/gpt.yaml", "--data.path", str(tmp_path / "book.txt"), "--data.prompt", "zero"]
    assert main(["predict", *arguments, "--trainer.default_root_dir", str(tmp_path)]) == 1
    assert "'rz' in 'zero' does not occur" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.time_limit(240)
def test_config_reaches_loss_2_05_in_500_steps(tmp_path):
    assert main(["fit", "--config", "models/gpt.yaml", "--trainer.default_root_dir", str(tmp_path)]) == 0
    gpt = GPT.load_from_checkpoint(tmp_path / "gpt")
    (metrics,) = quiet_trainer(tmp_path).validate(gpt, CharText())
    assert metrics["val_loss"] <= 2.05
