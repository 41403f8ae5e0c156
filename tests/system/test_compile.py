"""Compilation in a separate program."""

import pytest

from tests.helpers.programs import run_python

pytestmark = pytest.mark.filterwarnings(  # torch's own code warns when it compiles and when it is imported for this
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.torch.jit:DeprecationWarning"
)


@pytest.mark.slow
def test_a_missing_compiler_is_one_clear_error(tmp_path):
    script = (
        "from pathlib import Path\n"
        "from tests.helpers.tasks import Regression, loader, quiet_trainer\n"
        "quiet_trainer(Path('.'), max_steps=1, compile=True).fit(Regression(), loader())\n"
    )
    (tmp_path / "train.py").write_text(script)
    environment = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    _, said = run_python("train.py", cwd=tmp_path, code=1, **environment)
    assert "ConfigError: compile: compiling for the CPU needs a C++ compiler" in said.strip().splitlines()[-1]
    assert "Install g++ or clang++" in said
