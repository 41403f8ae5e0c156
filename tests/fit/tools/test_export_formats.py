"""`lumen export --format`: programs of torch.export and ONNX, and directories for `from_pretrained`."""

import ast
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import HfApi, ModelCard
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import GPT2Config, GPT2LMHeadModel

import lumen
from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Line
from tests.helpers.pages import run_programs

CONFIG = {
    "seed_everything": 7,
    "model": {"class_path": "tests.helpers.cli_tasks.Line"},
    "data": {"class_path": "tests.helpers.cli_tasks.Points"},
    "trainer": {"max_steps": 2, "enable_progress_bar": False, "enable_model_summary": False},
}
pytestmark = pytest.mark.usefixtures("config_directory")
X = torch.tensor([[1.0, -2.0, 3.0], [0.5, 0.25, 4.0], [7.0, 8.0, 9.0], [1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])


class Within(Line):
    """Task whose network is a submodule of a line task."""

    def __init__(self, width: int = 3):
        super().__init__(width)
        self.net = torch.nn.Sequential(self.layer, torch.nn.Tanh())
        self.example_input_array = torch.ones(2, width)

    def forward(self, x):
        return self.net(x * 2) * 3


class Writer(lumen.TaskModule):
    """Task with a model of transformers, whose weights are tied."""

    def __init__(self, layers: int = 1):
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=4, n_layer=layers, n_head=2))

    def training_step(self, batch):
        ids = batch[0].abs().long() % 11
        return self.gpt(ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Adapted(Writer):
    """Task with a model of transformers and an adapter of peft."""

    def __init__(self, target: str = "c_attn"):
        super().__init__()
        lora = LoraConfig(r=2, target_modules=[target], fan_in_fan_out=target == "c_attn", init_lora_weights=False)
        self.gpt = get_peft_model(self.gpt, lora)


class Changed(Writer):
    """Task that changes modules within a model of transformers."""

    def __init__(self, kind: str):
        super().__init__()
        self.save_hyperparameters()
        block = self.gpt.transformer.h[0]
        if kind == "weight norm":
            parametrizations.weight_norm(block.mlp.c_fc)
        elif kind == "weight norm of a tied head":
            parametrizations.weight_norm(self.gpt.lm_head)
        elif kind == "compiled blocks":
            self.gpt.transformer.h[0] = torch.compile(block, backend="eager")
        elif kind == "compiled adapter":
            lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
            self.gpt = torch.compile(get_peft_model(self.gpt, lora), backend="eager")
        elif kind == "new head":
            self.gpt.lm_head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 11))
        else:
            block.mlp.act = nn.ReLU()


NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "adapter": lambda layer: None,
}


def make_plain_net():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class Reparametrized(Line):
    """Task whose layers compute their weights."""

    def __init__(self, kind: str):
        super().__init__(3)
        self.save_hyperparameters()
        self.net = make_plain_net()
        if kind == "adapter":
            self.net = get_peft_model(self.net, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
        elif kind == "compiled":
            self.net = torch.compile(self.net, backend="eager")
        else:
            NORMS[kind](self.net[0]), NORMS[kind](self.net[2])

    def forward(self, x):
        return self.net(x)


class Prompted(Writer):
    """Task with a model of transformers and a trained prompt of peft."""

    def __init__(self, layers: int = 1):
        super().__init__(layers)
        self.gpt = get_peft_model(self.gpt, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def fit(model=None, *words):
    words = [] if model is None else ["--model", f"tests.fit.tools.test_export_formats.{model}", *words]
    with torch.compiler.set_stance("force_eager"):  # Compilation takes seconds, and exports do not depend on it.
        assert main(["fit", "--config", "line.yaml", *words]) == 0


def export(*words, code=0):
    return main(["export", "runs/line", *words]) == code


def train_model(kind, **arguments):
    return kind.load_from_checkpoint("runs/line", **arguments).eval()


def catch_error(capsys, *words):
    capsys.readouterr()
    assert export(*words, code=2)
    assert not [path for path in Path().iterdir() if ".tmp-" in path.name]
    return capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # of torch.export.load in torch 2.11
def test_exported_program_is_exact_for_any_batch_size(capsys):
    fit()
    capsys.readouterr()
    assert export("--format", "torch-export", "--output", "line.pt2")
    assert capsys.readouterr().out == (
        "line.pt2: torch-export, from runs/line; checked: outputs differ from the model's by at most 0\n"
    )
    program, task = torch.export.load("line.pt2").module(), train_model(Line)
    for count in (2, 5):
        assert torch.equal(program(X[:count]), task(X[:count]))


def test_module_is_exported_with_example_inputs_and_dtype():
    fit("Within")
    assert export("--format", "torch-export", "--output", "net.pt2", "--module", "net", "--dtype", "bfloat16")
    net = train_model(Within).net.to(torch.bfloat16)
    program = torch.export.load("net.pt2").module()
    assert torch.equal(program(X.to(torch.bfloat16)), net(X.to(torch.bfloat16)))


def test_a_directory_is_what_from_pretrained_reads(capsys):
    fit("Writer")
    assert export("--format", "huggingface", "--output", "gpt")
    assert "GPT2LMHeadModel.from_pretrained reads bitwise identical values" in capsys.readouterr().out
    read, notes = GPT2LMHeadModel.from_pretrained("gpt", output_loading_info=True)
    assert not any(notes.values())
    task = train_model(Writer)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(read.eval()(ids).logits, task.gpt(ids).logits)
    assert "lm_head.weight" not in load_file("gpt/model.safetensors")  # tied, and written only once
    assert export("--format", "huggingface", "--output", "half", "--module", "gpt", "--dtype", "bfloat16")
    assert GPT2LMHeadModel.from_pretrained("half", dtype="auto").dtype == torch.bfloat16


def test_recipe_for_the_hub_runs_until_the_upload(capsys):
    fit("Writer")
    assert export("--format", "huggingface", "--output", "finnish-gpt2")
    list(run_programs("docs/guides/export.md"))
    assert "parameters" in capsys.readouterr().out
    card = ModelCard.load("finnish-gpt2/README.md")
    assert (card.data.license, card.text.strip()[:15]) == ("mit", "# Finnish GPT-2")
    (upload,) = re.findall(r"```text\n(.*?)```", (ROOT / "docs/guides/export.md").read_text(), re.S)
    calls = [
        node
        for node in ast.walk(ast.parse(upload))
        if isinstance(node, ast.Call) and node.func.__class__ is ast.Attribute
    ]
    for call in calls:
        words = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
        inspect.signature(getattr(HfApi(), call.func.attr)).bind(*map(ast.literal_eval, call.args), **words)
    assert [call.func.attr for call in calls] == ["create_repo", "upload_folder"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_merged_into_its_model(capsys):
    fit("Adapted")
    assert export("--format", "huggingface", "--output", "gpt")
    read, notes = GPT2LMHeadModel.from_pretrained("gpt", output_loading_info=True)
    assert not any(notes.values())
    ids = torch.tensor([[1, 2, 3]])
    task = train_model(Adapted).eval()
    torch.testing.assert_close(read.eval()(ids).logits, task.gpt(ids).logits)
    with task.gpt.disable_adapter():
        assert not torch.allclose(read(ids).logits, task.gpt(ids).logits, atol=1e-3)
    assert export("--format", "huggingface", "--output", "part", "--module", "gpt")
    fit("Prompted")
    capsys.readouterr()
    assert main(["export", "runs/line-2", "--format", "huggingface", "--output", "prompted"]) == 2
    assert "gpt: PROMPT_TUNING of peft cannot be merged into the weights. Write only the adapter: --format peft." in (
        capsys.readouterr().err
    )
    assert main(["export", "runs/line-2", "--format", "peft", "--output", "prompt"]) == 0
    assert "PeftModel.from_pretrained reads 1 bitwise identical tensors" in capsys.readouterr().out


IDS = torch.tensor([[1, 2, 3], [10, 0, 5]])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_written_alone():
    fit("Adapted")
    assert export("--format", "peft", "--output", "adapter")
    task = train_model(Adapted)
    assert sorted(path.name for path in Path("adapter").iterdir()) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    base = Writer().gpt
    names = {name: name.replace("base_model.model.", "").replace("base_layer.", "") for name in task.gpt.state_dict()}
    base.load_state_dict({names[n]: value for n, value in task.gpt.state_dict().items() if "lora_" not in n})
    read = PeftModel.from_pretrained(base, "adapter").eval()
    assert torch.equal(read(IDS).logits, task.gpt(IDS).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings:UserWarning")
def test_adapter_of_tied_head_changes_only_the_head():
    fit("Adapted", "--model.target", "lm_head")
    assert export("--format", "huggingface", "--output", "gpt")
    read, task = GPT2LMHeadModel.from_pretrained("gpt").eval(), train_model(Adapted)
    torch.testing.assert_close(read(IDS).logits, task.gpt(IDS).logits)
    assert torch.equal(read.transformer.wte.weight, task.gpt.base_model.model.transformer.wte.weight)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["weight norm", "weight norm of a tied head", "compiled blocks", "compiled adapter"])
def test_changed_models_are_read_as_plain_models(kind, capsys):
    fit("Changed", "--model.kind", kind)
    capsys.readouterr()
    assert export("--format", "huggingface", "--output", "gpt")
    assert capsys.readouterr().err == ""  # no progress bars
    read, notes = GPT2LMHeadModel.from_pretrained("gpt", output_loading_info=True)
    assert not any(notes.values())
    with torch.compiler.set_stance("force_eager"):
        expected = train_model(Changed).gpt(IDS).logits
    torch.testing.assert_close(read.eval()(IDS).logits, expected)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("new head", "builds a different model. Only one of the two models has lm_head.0.bias,"),
        ("activation", "of the largest output. It lacks the task's module transformer.h.0.mlp.act. Export the weights"),
    ],
)
def test_models_that_from_pretrained_cannot_build_are_rejected(kind, message, capsys):
    fit("Changed", "--model.kind", kind)
    assert message in catch_error(capsys, "--format", "huggingface", "--output", "gpt")


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", [*NORMS, "compiled"])
def test_merged_weights_load_into_a_plain_module(kind):
    fit("Reparametrized", "--model.kind", kind)
    words = [] if kind == "compiled" else ["--merge"]
    assert export("--module", "net", "--output", "net.safetensors", *words)
    net, task = make_plain_net(), train_model(Reparametrized)
    net.load_state_dict(load_file("net.safetensors"))
    torch.testing.assert_close(net(X), task(X), rtol=0, atol=1e-6)
    assert export("--format", "torch-export", "--output", "net.pt2")
    assert torch.equal(torch.export.load("net.pt2").module()(X), task(X))
    assert export("--merge", "--output", "whole")
    assert sorted(load_file("whole/model.safetensors")) == sorted(
        [*(f"net.{name}" for name in net.state_dict()), "layer.weight", "layer.bias"]
    )


def test_weights_of_float64_are_not_rounded():
    fit("Reparametrized", "--model.kind=weight_norm", "--trainer.precision=fp64")
    assert export("--merge", "--module", "net", "--output", "net.safetensors")
    assert export("--format", "torch-export", "--output", "net.pt2")
    net = make_plain_net().double()
    net.load_state_dict(load_file("net.safetensors"))
    expected = train_model(Reparametrized)(X.double())
    assert torch.equal(net(X.double()), expected)
    assert torch.equal(torch.export.load("net.pt2").module()(X.double()), expected)


def test_a_program_of_onnx_gives_the_tasks_numbers():
    pytest.importorskip("onnxscript")  # 45 MB with onnx, which no other test needs
    reference = pytest.importorskip("onnx.reference")
    fit()
    assert export("--format", "onnx", "--output", "line.onnx")
    evaluator = reference.ReferenceEvaluator("line.onnx")
    (name,) = evaluator.input_names
    torch.testing.assert_close(
        torch.from_numpy(evaluator.run(None, {name: X.numpy()})[0]), train_model(Line)(X).detach()
    )


def test_packages_that_are_missing_are_named(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "--format onnx needs onnx and onnxscript. Run: pip install onnx onnxscript" in catch_error(
        capsys, "--format", "onnx", "--output", "line.onnx"
    )


def test_what_cannot_be_exported_so_says_why(capsys):
    fit()
    program = ["--format", "torch-export", "--output"]
    assert "writes a .pt2 file" in catch_error(capsys, *program, "line.onnx")
    assert "writes a directory" in catch_error(capsys, "--format", "huggingface", "--output", "line.safetensors")
    assert "there is no directory nowhere" in catch_error(capsys, *program, "nowhere/line.pt2")
    assert "only for --format safetensors" in catch_error(capsys, *program, "line.pt2", "--max_shard_size", "1GB")
    assert "found none" in catch_error(capsys, "--format", "huggingface", "--output", "line")
    assert "found none. Export the weights: leave --format out" in catch_error(capsys, "--format=peft", "--output=a")
    assert "Leave --merge out" in catch_error(capsys, "--format=peft", "--merge", "--output=a")
    sizes = ["--merge", "--max_shard_size=1GB"]
    assert "only for --format safetensors without --merge" in catch_error(capsys, "--output=a", *sizes)
    Path("line.pt2").write_text("mine")
    assert "Lumen overwrites nothing" in catch_error(capsys, *program, "line.pt2")
    assert Path("line.pt2").read_text() == "mine"
    config = yaml.safe_load(Path("runs/line/config.yaml").read_text())
    Path("runs/line/config.yaml").rename("kept.yaml")
    assert "runs/line has no config.yaml" in catch_error(capsys, *program, "new.pt2")
    config["model"]["init_args"]["width"] = 4
    Path("runs/line/config.yaml").write_text(yaml.safe_dump(config))
    capsys.readouterr()
    assert export(*program, "new.pt2", code=1)
    assert "the model of runs/line/config.yaml does not match the weights in runs/line" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "instead"), [("to_onnx", "--format onnx"), ("to_torchscript", "torch.export.load")])
def test_methods_of_lightnings_say_what_to_write(method, instead):
    with pytest.raises(lumen.LumenError, match=instead):
        getattr(Line(3), method)("file")
