"""Imports and child processes of a program on its way to the first step."""

import json
import re
import shutil
import sys
from functools import reduce

import pytest

import lumen
from lumen.internals.entry_points import COMMANDS
from tests.helpers import ROOT
from tests.helpers.programs import run_python

#: Modules that take longer to import than all of Lumen, and that not every run needs.
HEAVY = {
    "fsspec", "jsonargparse", "rich", "tensorboard", "threadpoolctl", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.utils.flop_counter", "torchmetrics", "yaml",
}  # fmt: skip
TRAIN = """
import lumen
from tests.helpers.tasks import Regression, loader
lumen.Trainer(max_steps=2, seed=1, num_sanity_val_steps=1, **{options}).fit(
    Regression(), loader(), val_dataloaders=loader())
"""
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
#: Code that prints the processes started after it, by any means of Python.
WATCH = """
import os, sys
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn", "os.system")
sys.addaudithook(lambda event, args: print("started:", event, args, flush=True) if event in STARTS else None)
"""


def run_interpreter(code, folder, *arguments):
    """Return the output of a fresh interpreter."""
    return run_python("-c", code, *arguments, cwd=folder)[0]


def list_imported_modules(code, folder):
    """Return the imported modules after some code."""
    return set(
        json.loads(
            run_interpreter(f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))", folder).split("\n")[-2]
        )
    )


def filter_packages(modules):
    """Return the imported packages that do not come with Python."""
    return {name.split(".")[0] for name in modules} - sys.stdlib_module_names


def test_lumen_itself_waits_for_nothing(tmp_path):
    assert filter_packages(list_imported_modules("import lumen", tmp_path) - list_imported_modules("", tmp_path)) == {
        "lumen"
    }


def test_mixed_installation_is_an_error(tmp_path):
    """Files of the distribution `lumen` in the folder of the package end the import with the commands to run."""
    folder = shutil.copytree(ROOT / "lumen", tmp_path / "lumen", ignore=shutil.ignore_patterns("__pycache__"))
    program = "import lumen, sys; sys.exit(lumen.__file__ != sys.argv[1])"
    run_python("-c", program, folder / "__init__.py", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    (folder / "dashboard.py").touch()
    (folder / "sources").mkdir()
    for words in (("-c", "import lumen"), ("-m", "lumen", "--help"), ("-c", "from lumen.cli import main")):
        _, said = run_python(*words, cwd=tmp_path, code=1, PYTHONPATH=str(tmp_path))
        assert said.splitlines()[-1] == (
            f"ImportError: the folder {folder} mixes two packages: it holds Lumen {lumen.__version__}, the training "
            "library, and dashboard.py, sources of the distribution lumen, a dashboard builder. An environment can "
            "hold only one of them. To keep the training library, run: pip uninstall --yes lumen lumen-train && "
            "pip install lumen-train"
        )


def test_main_names_import_little_beyond_torch(tmp_path):
    before = list_imported_modules("import torch", tmp_path)
    added = list_imported_modules("import torch\nfrom lumen import TaskModule, DataModule, Trainer", tmp_path) - before
    found = {
        name for name in filter_packages(added) if not name.startswith(("_cython", "cython"))
    }  # numpy's internal modules
    assert found <= {"lumen", "numpy", "torch"}  # numpy's generators, which Lumen seeds; small modules of torch
    assert not HEAVY & (added | filter_packages(added))


def test_public_names_import_no_heavy_packages(tmp_path):
    before = list_imported_modules("import torch", tmp_path)
    sharded = {"DDP", "FSDP", "Mesh", "CLI", "SaveConfigCallback", "runs"}  # the last three read YAML
    added = list_imported_modules(
        f"import lumen\nfor name in set(lumen.__all__) - {sharded}: getattr(lumen, name)", tmp_path
    )
    assert not HEAVY & (added - before)


FILES = {"lumen.fish", "lumen.patch"}


def list_documented_names():
    """Return every `lumen.NAME` in the pages and configs, without modules that a page imports or runs."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb"), *ROOT.glob("models/*")]
    text = "\n".join(page.read_text() for page in pages if page.is_file())
    named = re.findall(r"(?<![\w./-])(?<!from )(?<!import )(?<!-m )lumen(?:\.[A-Za-z]\w*)+", text)
    return sorted({*named} - FILES)


def test_documented_names_need_no_other_import(tmp_path):
    names = list_documented_names()
    assert {"lumen.optim", "lumen.Trainer", "lumen.precision.Float16"} <= {*names}
    for name in {*names} - {COMMANDS}:  # a group of entry points is not a module
        first, *others = name.split(".")[1:]
        reduce(getattr, others, lumen.__getattr__(first))  # independent of earlier imports in this process
    run_interpreter("import lumen\nlumen.optim.cosine", tmp_path)


def test_missing_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="'optimizers'"):
        _ = lumen.optimizers


#: Code that prints the files opened by a run, after some and after many others, without source read by torch's seeding.
OPENED = """
import os, sys, tempfile
import lumen
from tests.helpers.tasks import Regression, loader

def fit():
    trainer = lumen.Trainer(max_steps=2, seed=1, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Regression(), loader())

fit()
kinds, opened = ("open", "os.listdir", "os.scandir"), []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in kinds else None)
for directories in (10, 100):
    for number in range(2, directories):
        os.makedirs(f"runs/regression-{number}", exist_ok=True)
    opened.clear()
    fit()
    name = f"regression-{directories}"
    files = [each for each in opened if not each.isdigit() and not each.startswith("/proc/")]  # what the kernel says
    paths = {os.path.relpath(each).replace(name, "NAME") for each in files}
    print(*sorted(path for path in paths - {os.path.relpath(tempfile.gettempdir())} if not path.endswith(".py")))
"""


def test_later_runs_open_no_files_of_earlier_runs(tmp_path):
    few, many = run_interpreter(OPENED, tmp_path).splitlines()[-2:]
    assert few == many
    assert {path for path in few.split() if not path.startswith("runs/NAME")} == {"runs"}


def test_run_imports_no_unused_heavy_packages(tmp_path):
    before = list_imported_modules(
        "from tests.helpers.tasks import Regression, loader\nRegression().configure_optimizers()", tmp_path
    )
    assert "torch._dynamo" in before  # of any optimizer
    added = list_imported_modules(TRAIN.format(options=QUIET), tmp_path) - before
    assert not HEAVY & added


def test_torchmetrics_is_not_imported_before_first_metric(tmp_path):
    assert "torchmetrics" not in list_imported_modules(TRAIN.format(options={}), tmp_path)


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"]])
def test_usage_help_and_version_do_not_import_torch(tmp_path, words):
    modules = list_imported_modules(f"from lumen.cli import main\nmain({words})", tmp_path)
    assert not {"torch", "numpy", "rich", "yaml", "jsonargparse"} & modules


def test_command_help_imports_no_compiler_or_torchmetrics(tmp_path):
    modules = list_imported_modules(
        "from lumen.cli import main\ntry: main(['fit', '--help'])\nexcept SystemExit: print()", tmp_path
    )
    assert not {"torch._dynamo", "torchmetrics", "fsspec", "tensorboard", "torch.distributed.fsdp"} & modules


def list_started(printed):
    """Return the processes that were started while a program printed."""
    return {line for line in printed.split("\n") if line.startswith("started:")}


def list_started_by_torch(folder):
    """Return the processes that the imports of an optimizer start: torch's CUDA builds look for libraries."""
    return list_started(
        run_interpreter(
            f"{WATCH}from tests.helpers.tasks import Regression\nRegression().configure_optimizers()", folder
        )
    )


def test_single_device_script_starts_no_other_process(tmp_path):
    assert list_started(run_interpreter(WATCH + TRAIN.format(options={}), tmp_path)) == list_started_by_torch(tmp_path)


def test_command_trains_in_the_started_process(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\nfrom tests.helpers.tasks import Seeing, make_numbers\nimport lumen\n"
        "from torch.utils.data import DataLoader\n"
        "class Task(Seeing):\n"
        "    def training_step(self, batch):\n"
        "        print('trains in', os.getpid(), flush=True)\n"
        "        return super().training_step(batch)\n"
        "class Data(lumen.DataModule):\n"
        "    def train_dataloader(self):\n"
        "        return DataLoader(make_numbers(), 8)\n"
    )
    code = f"{WATCH}\nprint('command', os.getpid())\nfrom lumen.cli import main\nsys.exit(main())"
    printed = run_interpreter(
        code, tmp_path, "fit", "--model", "mine.Task", "--data", "mine.Data", "--trainer.max_steps", "2"
    )
    assert list_started(printed) == list_started_by_torch(tmp_path)
    printed = printed.split("\n")
    (command,) = [line.split()[-1] for line in printed if line.startswith("command")]
    assert [line.split()[-1] for line in printed if line.startswith("trains in")] == [command] * 2


@pytest.mark.slow
def test_examples_of_transformers_import_silently():
    program = "import models.bert, models.gpt2, models.packed_gpt2, models.lora_gpt2"
    assert run_python("-c", program) == ("", "")
