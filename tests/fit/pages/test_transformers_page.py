"""Programs of the page on transformers: each one runs."""

import pytest

from lumen.checkpoint import find_checkpoints
from tests.helpers.pages import run_programs

PEFT = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"  # a deprecated call of peft to transformers


@pytest.mark.filterwarnings(PEFT)
def test_programs_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = [("(max_epochs=2,", "(max_steps=5, limit_val_batches=2,")]
    few.append(('(max_epochs=1, name="names"', '(max_steps=5, limit_val_batches=2, name="names"'))
    assert len(list(run_programs("docs/guides/transformers.md", *few))) == 5
    for name in ("origins", "names", "base", "lora"):
        assert find_checkpoints(tmp_path / "runs" / name / "checkpoints")
