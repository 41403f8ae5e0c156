"""`lumen export --format`: programs of torch.export and ONNX, and directories for `from_pretrained`."""

import sys
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

import lumen
from lumen.cli import main
from tests.helpers.cli_tasks import Line

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

    def __init__(self, layers: int = 1):
        super().__init__(layers)
        lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        self.gpt = get_peft_model(self.gpt, lora)


class Prompted(Writer):
    """Task with a model of transformers and a trained prompt of peft."""

    def __init__(self, layers: int = 1):
        super().__init__(layers)
        self.gpt = get_peft_model(self.gpt, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))


def fit(model=None):
    words = [] if model is None else ["--model", f"tests.fit.tools.test_export_formats.{model}"]
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
    assert "the peft adapter cannot be merged into the model. Write only the adapter" in capsys.readouterr().err


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
