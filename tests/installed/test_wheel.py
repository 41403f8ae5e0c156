"""Files of a release: complete, and enough in a new environment outside the clone, without any extra."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

from lumen.version import DISTRIBUTION, __version__
from tests.helpers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.time_limit(900)]

CONSTRAINTS = ROOT / "constraints.txt"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
IMPORT_ALL = """
import importlib, lumen, pkgutil
print(lumen.__file__)
for name in lumen.__all__:
    getattr(lumen, name)
for module in pkgutil.walk_packages(lumen.__path__, "lumen."):
    if not module.name.endswith("__main__") and ".templates" not in module.name:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, error.name)
"""
#: The only modules that import the package of an extra. Lumen checks that the package exists before it imports them.
OF_EXTRAS = {
    "lumen.integrations.tensorboard_events": "tensorboard",
    "lumen.integrations.wandb_files": "wandb",
    "lumen.tools.report.curves": "bokeh",
    "lumen.tools.report.page": "bokeh",
}
FEATURES = """
import lumen, torch
from lumen.errors import ConfigError
from torch.utils.data import DataLoader, TensorDataset

class Task(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch):
        return self.net(batch[0]).sum()
    def predict_step(self, batch):
        return {"a": self.net(batch[0])}
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
def make_trainer(*callbacks):
    return lumen.Trainer(max_steps=2, callbacks=[*callbacks], log_level="ERROR", enable_progress_bar=False)

for extra, use in {
    "tensorboard": lumen.TensorBoardLogger,
    "wandb": lumen.WandbLogger,
    "mlflow": lumen.MLFlowLogger,
    "aim": lumen.AimLogger,
    "report": lumen.Report,
    "stats": lambda: make_trainer(lumen.DeviceStatsMonitor()).fit(Task(), data),
    "ray": lambda: make_trainer(lumen.RayTrainReportCallback()).fit(Task(), data),
    "parquet": lambda: make_trainer(lumen.PredictionWriter("out", format="parquet")).predict(Task(), data),
    "remote": lambda: make_trainer(lumen.ModelCheckpoint(dirpath="s3://bucket/run")).fit(Task(), data),
}.items():
    try:
        use()
        print(extra, "raised nothing")
    except ConfigError as error:
        print(extra, error)
"""


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Build the files of a release. Return the wheel and the source distribution."""
    with open(tmp_path_factory.mktemp("build") / "log", "w+") as log:
        words = ["make", "dist", f"PYTHON={sys.executable}"]
        done = subprocess.run(words, cwd=ROOT, stdout=log, stderr=log)
        assert done.returncode == 0, log.seek(0) or log.read()[-3000:]
    (wheel,), (source,) = ROOT.glob("dist/*.whl"), ROOT.glob("dist/*.tar.gz")
    return wheel, source


class Environment:
    """A new virtual environment outside the clone, with the wheel and its dependencies.

    Args:
        folder: The folder of the environment, and of the user's files.
        wheel: The wheel to install.
    """

    def __init__(self, folder, wheel):
        self.folder, self.wheel = folder, wheel
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        self.install(str(wheel))

    def install(self, *words):
        return self.run("pip", "install", "--quiet", "--constraint", str(CONSTRAINTS), *words)

    def run(self, program, *words, cwd="", code=0):
        """Run a program of the environment as a user would. Return its output and its errors."""
        path = f"{self.folder / 'env' / 'bin'}:{os.environ['PATH']}"
        environment = {name: each for name, each in os.environ.items() if not name.startswith(("LUMEN_", "PYTEST_"))}
        environment |= {"PATH": path, "PYTHONPATH": "", "PYTHONSAFEPATH": "", "OMP_NUM_THREADS": "1"}
        words = [self.folder / "env" / "bin" / program, *words]
        done = subprocess.run(words, cwd=self.folder / cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stdout[-1000:] + done.stderr[-3000:]
        return done.stdout, done.stderr


@pytest.fixture(scope="module")
def environment(release, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("user"), release[0])


def test_files_of_a_release_hold_every_source(release):
    listed = subprocess.run(["git", "ls-files", "lumen"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wheel = {name for name in zipfile.ZipFile(release[0]).namelist() if name.startswith("lumen/")}
    with tarfile.open(release[1]) as archive:
        source = {name.partition("/")[2] for name in archive.getnames() if archive.getmember(name).isfile()}
    assert wheel == {*listed.split()} == {name for name in source if name.startswith("lumen/")}
    assert release[0].name == f"lumen_train-{__version__}-py3-none-any.whl"


def test_import_needs_no_extra(environment):
    where, *missing = environment.run("python", "-W", "error", "-c", IMPORT_ALL)[0].splitlines()
    assert where.startswith(str(environment.folder))
    assert dict(line.split() for line in missing) == OF_EXTRAS
    environment.run("pip", "check")


def test_features_name_the_extra_they_need(environment):
    lines = environment.run("python", "-c", FEATURES)[0].splitlines()
    assert len(lines) == 9
    for line in lines:
        assert f"pip install '{DISTRIBUTION}[{line.split()[0]}]'" in line


def test_commands_name_the_extra_they_need(environment):
    for extra, words in {"completion": ["completion", "bash"], "report": ["report", "runs/first"]}.items():
        assert f"pip install '{DISTRIBUTION}[{extra}]'" in environment.run("lumen", *words, code=2)[1]


def test_commands_of_the_readme_give_a_model(environment):
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"```\n(pip install [^\n]*\nlumen init .*?)```", readme, re.S)
    install, *lines = (line.partition(" #")[0].split() for line in block.splitlines())
    assert install[:2] == ["pip", "install"]
    environment.install(install[-1].strip("'").replace(".", str(environment.wheel)))
    cwd = ""
    for words in lines:
        if words[0] == "cd":
            cwd = words[1]
        else:
            environment.run(*words, cwd=cwd)
    assert [line[1] for line in lines if line[0] == "lumen"] == ["init", "fit", "report", "export"]
    project = environment.folder / cwd
    assert (project / "report.html").stat().st_size > 100_000
    assert "val_loss" in (project / "runs/first/metrics.csv").read_text()
    program = "import sys, safetensors.torch as s; print(len(s.load_file(sys.argv[1])))"
    assert int(environment.run("python", "-c", program, "model.safetensors", cwd=cwd)[0]) > 10
    environment.run("lumen", "check", "--config", "first.yaml", cwd=cwd)
    environment.install("pytest")
    environment.run("python", "-m", "pytest", "-q", cwd=cwd)


def test_script_of_the_readme_trains(environment):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    (environment.folder / "train.py").write_text(script)
    assert "finished: " in environment.run("python", "-W", "error", "train.py")[1]


def test_extras_resolve_together(environment):
    """Find versions of every package that an extra names, with the pins of constraints.txt, and install nothing."""
    report = environment.folder / "resolved.json"
    extras = ",".join(extra for extra in EXTRAS if sys.version_info < (3, 13) or extra != "aim")
    environment.install("--dry-run", "--report", str(report), f"{environment.wheel}[{extras}]")
    resolved = {each["metadata"]["name"].lower() for each in json.loads(report.read_text())["install"]}
    assert {"ray", "wandb", "torchao", "s3fs", "timm", "mkdocs-material"} <= resolved
