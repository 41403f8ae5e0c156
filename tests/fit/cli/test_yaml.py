# ruff: noqa: E501 - a message is on one line with its cause
"""YAML that would lose a setting or use up the memory: one error, wherever Lumen reads YAML."""

from pathlib import Path

import pytest
import yaml

from lumen.cli import main, yaml_text
from lumen.cli.yaml_text import MAX_LEVELS, dump_yaml, load_yaml
from tests.helpers.cli_tasks import Spy
from tests.helpers.working_directory import LINE as CONFIG

pytestmark = pytest.mark.usefixtures("config_directory")


@pytest.fixture
def catch_error(capsys):
    """Return the error of the command line, on one line, for a config file, an included file, or an argument."""

    def run(*words, config=None):
        if config is not None:
            Path("second.yaml").write_text(config)
            words = ("--config", "second.yaml", *words)
        assert main(["fit", "--config", "line.yaml", *words]) == 2
        out, message = capsys.readouterr()
        assert (out, message.count("\n"), message[:7]) == ("", 1, "error: ")
        assert not Path("runs").exists()
        return message.removeprefix("error: ").rstrip("\n")

    return run


def make_bomb(levels, width=9):
    """Return nine lines of YAML that expand to a billion values."""
    lines = ["l0: &l0 [" + ", ".join(["lol"] * width) + "]"]
    for level in range(1, levels):
        lines.append(f"l{level}: &l{level} [" + ", ".join([f"*l{level - 1}"] * width) + "]")
    return "model: {init_args: {widths:\n  {" + ",\n   ".join(lines) + "}}}\n"


# ---------------------------------------------------------------------- duplicate keys


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("trainer:\n  max_steps: 3\n  min_steps: 1\n  max_steps: 4\n", "trainer.max_steps is set twice, in lines 2 and 4"),
        ("trainer: {min_steps: 1}\nmodel: {}\ntrainer: {max_steps: 3}\n", "trainer is set twice, in lines 1 and 3"),
        ("trainer:\n  callbacks:\n  - class_path: x\n    'class_path': y\n", "trainer.callbacks.0.class_path is set twice, in lines 3 and 4"),
        ("trainer: {max_steps: 3, max_steps: 3}\n", "trainer.max_steps is set twice, in line 1"),
        ("model: {init_args: {of: {yes: 1,\n true: 2}}}\n", "model.init_args.of.true is set twice, in lines 1 and 2"),
    ],
)  # fmt: skip
def test_duplicate_key_names_both_lines(catch_error, config, said):
    assert catch_error(config=config) == f"cannot read the config file second.yaml: {said}. Delete one of the two."


def test_duplicate_key_in_a_value_is_named(catch_error, monkeypatch):
    said = "trainer.callbacks: early.patience is set twice, in line 1. Delete one of the two."
    value = "{early: {class_path: EarlyStopping, patience: 1, patience: 2}}"
    assert catch_error("--trainer.callbacks", value) == said
    monkeypatch.setenv("LUMEN_FIT__TRAINER__CALLBACKS", value)
    assert catch_error() == said


def test_duplicate_key_in_saved_config_is_named(capsys):
    assert main(["fit", "--config", "line.yaml"]) == 0
    config = Path("runs/line/config.yaml")
    config.write_text(config.read_text() + "seed_everything: 8\n")
    for command in (["fit", "--config", str(config)], ["validate", "--ckpt_path", "runs/line"]):
        capsys.readouterr()
        assert main(command) == 2
        assert "runs/line/config.yaml: seed_everything is set twice, in lines 1 and " in capsys.readouterr().err
    assert main(["fit", "--config", "line.yaml", "--trainer.resume", "auto", "--trainer.max_steps", "3"]) == 0
    assert load_yaml(config.read_text())["trainer"]["max_steps"] == 3
    assert Path("runs/line/config-1.yaml").read_text().endswith("seed_everything: 8\n")  # kept like any other value


def test_merge_keys_and_aliases_follow_yaml():
    text = "base: &base {lr: 1, width: 2}\nmore: &more {lr: 3}\nmodel: {<<: *base, <<: *more, width: 4}\nagain: *base\n"
    assert load_yaml(text) == yaml.safe_load(text)
    assert load_yaml(text)["model"]["width"] == 4
    shared = CONFIG.replace("{lr: 0.05}", "&given {lr: 0.25}").replace("trainer:\n", "trainer: &trainer\n")
    shared += "optimizer: {class_path: SGD, init_args: *given}\n"
    Path("shared.yaml").write_text(shared)
    assert main(["fit", "--config", "shared.yaml"]) == 0
    assert (Spy.task.hparams.lr, Spy.trainer.optimizers[0].param_groups[0]["lr"]) == (0.25, 0.25)


# ---------------------------------------------------------------------- too many values


def test_alias_bombs_raise_before_expansion(catch_error):
    assert catch_error(config=make_bomb(9)).startswith(
        "cannot read the config file second.yaml: the aliases expand to more than 100,000 values (line "
    )
    merged = "a: &a {x0: 1}\n" + "".join(
        f"{letter}: &{letter} {{<<: [{', '.join([f'*{before}'] * 30)}]}}\n" for before, letter in zip("abcde", "bcdef", strict=True)
    )  # fmt: skip
    assert "the aliases expand to more than 100,000 values" in catch_error(config=merged)
    in_words = make_bomb(9).replace("\n", " ").removeprefix("model: {init_args: {widths:").strip()[:-2]
    assert "the aliases expand to more than 100,000 values" in catch_error("--model.widths", in_words)


def test_as_many_as_are_said_may_be_repeated(monkeypatch):
    monkeypatch.setattr(yaml_text, "MAX_REPEATED_VALUES", 100)
    half = f"a: &a [{', '.join(['1'] * 49)}]\nb: *a\nc: *a\n"
    found = load_yaml(half)
    assert found["a"] == found["b"] == found["c"]
    with pytest.raises(yaml.YAMLError, match="aliases expand to more than 100 values"):
        load_yaml(half + "d: &d 1\ne: *d\n")
    assert load_yaml(f"[{', '.join(['1'] * 1000)}]") == [1] * 1000  # any number without aliases


@pytest.mark.parametrize("config", ["a: &a [*a]\n", "a: &a {b: {c: *a}}\n", "model: &m {init_args: *m}\n"])
def test_recursive_alias_raises(catch_error, config):
    said = catch_error(config=config)
    assert said.startswith("cannot read the config file second.yaml: the alias *")
    assert "refers to a value that contains the alias (line 1, column " in said


@pytest.mark.parametrize("nested", ["[" * 10_000, "{a: " * 10_000, "- " * 10_000, "? " * 10_000])
def test_deep_nesting_raises_before_stack_overflow(catch_error, nested):
    said = "the text is nested more than 100 levels deep (line 1, column "
    assert catch_error(config=nested).startswith(f"cannot read the config file second.yaml: {said}")
    if nested[0] in "[{":
        assert said in catch_error("--trainer.callbacks", nested)
        widths = catch_error("--model.widths", nested)  # jsonargparse reads "[", and takes the value for text
        assert "expected a list of int" in widths if nested[0] == "[" else said in widths


def test_nesting_by_aliases_counts_too(catch_error):
    steps = 40
    chain = "a0: &a0 " + "[" * steps + "]" * steps + "\n"
    chain += "".join(f"a{k}: &a{k} {'[' * steps}*a{k - 1}{']' * steps}\n" for k in range(1, 50))
    assert "the aliases are nested more than 100 levels deep (line 3, column " in catch_error(config=chain)


def test_nesting_at_the_limit_is_accepted(capsys):
    levels = MAX_LEVELS - 4  # model, init_args, label and the scalar
    value = "[" * levels + "1" + "]" * levels
    Path("second.yaml").write_text(f"model: {{class_path: deep.Deep, init_args: {{label: {value}}}}}\n")
    Path("deep.py").write_text(
        "from tests.helpers.cli_tasks import Line\n\nclass Deep(Line):\n"
        "    def __init__(self, width: int, label=None):\n        super().__init__(width)\n"
    )
    words = ["fit", "--config", "line.yaml", "--config", "second.yaml"]
    assert main([*words, "--print_config"]) == 0
    assert load_yaml(capsys.readouterr().out)["model"]["init_args"]["label"] == load_yaml(value)
    assert main(words) == 0
    assert load_yaml(Path("runs/line/config.yaml").read_text())["model"]["init_args"]["label"] == load_yaml(value)


# ---------------------------------------------------------------------- text that is not YAML


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"trainer:\n\tmax_steps: 3\n", "while scanning for the next token: found character '\\t' that cannot start any token (line 2, column 1). YAML is indented by spaces, not by tabs."),
        (b"name: \xff\xfe\n", "'utf-8' codec can't decode byte 0xff in position 6: invalid start byte. Save it as UTF-8."),
        (b"a: b: c\n", "mapping values are not allowed here (line 1, column 5)."),
        (b"a: \x00\n", "unacceptable character #x0000: special characters are not allowed in \"<unicode string>\", position 3."),
        (b"a: 1\n---\nb: 2\n", "expected a single document in the stream: but found another document (line 2, column 1)."),
        (b"a: !!int x\n", "invalid literal for int() with base 10: 'x'."),
        (b"a: *b\n", "found undefined alias 'b' (line 1, column 4)."),
    ],
)  # fmt: skip
def test_invalid_yaml_is_one_line_with_its_place(catch_error, content, said):
    Path("second.yaml").write_bytes(content)
    assert catch_error("--config", "second.yaml") == f"cannot read the config file second.yaml: {said}"


@pytest.mark.parametrize("content", ["- a\n", "3\n", "0\n", "false\n", "text\n", "[]\n", '""\n'])
def test_config_without_keys_is_rejected(catch_error, content):
    said = catch_error(config=content)
    assert said.startswith("the config file second.yaml: expected `key: value` lines, found ")


def test_an_empty_file_sets_nothing():
    for content in ("", "# nothing\n", "---\n", "null\n"):
        Path("second.yaml").write_text(content)
        assert main(["fit", "--config", "line.yaml", "--config", "second.yaml"]) == 0


def test_missing_config_file_is_one_line(catch_error):
    Path("folder").mkdir()
    assert catch_error("--config", "folder") == "cannot read the config file folder: Is a directory."
    assert catch_error("--config", "nothing") == "cannot read the config file nothing: No such file or directory."
    assert catch_error("--config") == "--config: no file is named. Write --config FILE."


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    "value",
    ["1e-4", "010", "08", "00:15:00", "2026-01-31", "yes", "null", "~", "1_000", "0x1F", "1.", ".5", "<<", "=", "*a"],
)
def test_ambiguous_text_round_trips_as_text(value):
    assert load_yaml(dump_yaml({"a": value})) == yaml.safe_load(dump_yaml({"a": value})) == {"a": value}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("010", 10), ("08", 8), ("1_000", 1000), ("-3", -3), ("00:15:00", "00:15:00"),
     ("2026-01-31", "2026-01-31"), (".inf", float("inf")), ("yes", True), ("~", None)],
)  # fmt: skip
def test_values_are_those_of_yaml_1_2(text, value):
    assert load_yaml(text) == value
    assert type(load_yaml(text)) is type(value)
