"""Scripts for transformers' `Trainer`: after `lumen migrate --write` they compute the same numbers."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.helpers import ROOT
from tests.helpers.migrate import run_migrate, run_migrate_write

PROJECT = ROOT / "tests/projects/hftrainer"


def start_script(path, output):
    """Start a script in float64; its record is `output.json`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OUTPUT": str(output), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.helpers.hftrainer", str(path), f"{output}.json"]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def make_plain(text):
    """Return the script on names with a Llama, whose loss is the mean over the tokens of a step.

    A step has three batches of five names, and the last of an epoch has two.
    """
    text = re.sub(r"class WeightedTrainer.*?\n\n\n", "", text, flags=re.S)
    text = re.sub(r"    dropout = .*?\n    config = .*?\n", f"    config = LlamaConfig({LLAMA})\n", text, flags=re.S)
    for before, after in REPLACED.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


LLAMA = "vocab_size=27, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2"
REPLACED = {
    "= WeightedTrainer(": "= Trainer(", "        end_weight=2.0,\n": "", "target=1.5": "target=0",
    "gradient_accumulation_steps=2": "gradient_accumulation_steps=3", "GPT2LMHeadModel": "LlamaForCausalLM",
    "per_device_train_batch_size=8": "per_device_train_batch_size=5", "GPT2Config": "LlamaConfig",
}  # fmt: skip
SCRIPTS = {
    "classify": (PROJECT / "classify.py").read_text(),
    "write_names": (PROJECT / "write_names.py").read_text(),
    "tokens": make_plain((PROJECT / "write_names.py").read_text()),
}


@pytest.mark.slow
@pytest.mark.time_limit(200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_migrated_script_computes_the_same(name, tmp_path):
    """Losses, rates, metrics and weights are equal in float64, with the same order of data and without dropout.

    The tolerance is for another order of divisions: Lumen divides the loss of a step once, transformers that of each
    micro-batch. Causal models of transformers compute their loss in float32.
    """
    (tmp_path / "before.py").write_text(SCRIPTS[name])
    (tmp_path / "after.py").write_text(SCRIPTS[name])
    assert run_migrate_write(tmp_path / "after.py", "--force")[0] == 0
    assert "lumen.Trainer(" in (tmp_path / "after.py").read_text()
    running = [start_script(tmp_path / f"{when}.py", tmp_path / when) for when in ("before", "after")]
    said = [each.communicate()[1] for each in running]
    assert [each.returncode for each in running] == [0, 0], said
    before, after = (json.loads((tmp_path / f"{when}.json").read_text()) for when in ("before", "after"))
    assert before["updates"] == after["updates"]
    assert len(before["updates"]) == {"classify": 128, "write_names": 20, "tokens": 24}[name]
    # Transformers also logs the evaluation after the training, at the last step: the first value of a step counts.
    tolerance = 1e-5 if name == "tokens" else 1e-12
    values = [{(step, key): value for step, key, value in each["values"][::-1]} for each in (before, after)]
    assert values[0].keys() == values[1].keys()
    assert values[1] == pytest.approx(values[0], rel=tolerance, abs=0)
    for key, weight in before["weights"].items():
        torch.testing.assert_close(
            torch.tensor(after["weights"][key]), torch.tensor(weight), rtol=0, atol=100 * tolerance
        )
    if name == "classify":  # the best weights were loaded and saved
        assert (tmp_path / "after/final/model.safetensors").exists()
        losses = [[value for (_, key), value in each.items() if key == "eval_accuracy"] for each in values]
        assert losses[0] == losses[1]
        assert max(losses[0]) > losses[0][-1]
    else:  # the callback wrote what it was given
        files = [(tmp_path / when / "history.jsonl").read_text().splitlines() for when in ("before", "after")]
        steps, losses = zip(*([[row["step"] for row in rows], [row["loss"] for row in rows]] for rows in (
            [json.loads(line) for line in file] for file in files)), strict=True)  # fmt: skip
        assert steps[0] == steps[1] == [*range(1, len(before["updates"]) + 1)]
        assert losses[1] == pytest.approx(losses[0], rel=tolerance, abs=0)


def test_the_two_scripts_need_two_decisions(tmp_path):
    for name in ("classify", "write_names"):
        (tmp_path / f"{name}.py").write_text(SCRIPTS[name])
    code, diff, said = run_migrate(tmp_path)
    assert code == 0
    assert "2 files" in said
    assert "; 2 places to check by hand" in said
    assert "on_log" not in diff.replace("-    def on_log", "")


def test_the_new_code_is_formatted(tmp_path):
    for name in ("classify", "write_names"):
        (tmp_path / f"{name}.py").write_text(SCRIPTS[name])
    assert run_migrate_write(tmp_path, "--force")[0] == 0
    command = [sys.executable, "-m", "ruff"]
    rules = ["--isolated", "--line-length=100", str(tmp_path)]
    for words in (["format", "--check", "--diff"], ["check", "--select=E,F,W,I,B,UP"]):
        done = subprocess.run([*command, *words, *rules], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
