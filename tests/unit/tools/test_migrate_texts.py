"""`lumen migrate`: notebooks, requirements, shell scripts and other texts."""

import pytest

from tests.helpers.migrate import make_notebook, migrate_text, run_migrate, run_migrate_write

REQUIREMENTS = [
    ("requirements.txt", "torch\npytorch-lightning>=2,<3  # loops\nlightning-bolts\n# lightning\n",
     "torch\nlumen-train  # loops\nlightning-bolts\n# lightning\n"),
    ("requirements.txt", "lightning[extra] == 2.0.*; python_version>'3'", "lumen-train; python_version>'3'"),
    ("pyproject.toml", 'dependencies = ["lightning[extra]>=2", "x"]\n', 'dependencies = ["lumen-train", "x"]\n'),
    ("pyproject.toml", '"lightning (~=2.5.0)"\n', '"lumen-train"\n'),
    ("pyproject.toml", 'description = "pytorch lightning"\n', 'description = "pytorch lightning"\n'),
    ("config.yaml", "lightning:\n  trainer: {}\n", "lightning:\n  trainer: {}\n"),
    ("pyproject.toml", '[tool.poetry.dependencies]\npytorch-lightning = "^1.5"\n',
     '[tool.poetry.dependencies]\nlumen-train = "*"\n'),
    ("Pipfile", 'pytorch-lightning = "*"\n', 'lumen-train = "*"\n'),
    ("environment.yml", "dependencies:\n  - pip:\n    - torch\n    - pytorch-lightning==1.8.0\n",
     "dependencies:\n  - pip:\n    - torch\n    - lumen-train\n"),
    ("Dockerfile", 'RUN pip install "lightning>=2" wandb\n', 'RUN pip install "lumen-train" wandb\n'),
    ("install.sh", "pip install pytorch-lightning==1.5 \\\n  x\n", "pip install lumen-train \\\n  x\n"),
    ("Dockerfile", "RUN pip install \\\n    torch \\\n    lightning \\\n    && python -m lightning \\\n    x\n",
     "RUN pip install \\\n    torch \\\n    lumen-train \\\n    && python -m lightning \\\n    x\n"),
    ("install.sh", "pip install \\\r\n  pytorch-lightning==1.5\r\n", "pip install \\\r\n  lumen-train\r\n"),
    ("install.sh", "pip install x\necho \\\n  lightning\n", "pip install x\necho \\\n  lightning\n"),
    ("README.md", "```\npip install \\\n  lightning \\\n  x\n```\n",
     "```\npip install \\\n  lumen-train \\\n  x\n```\n"),
    ("setup.py", "setup(name='lightning', install_requires=['torch', 'lightning[extra]>=2; x', 'lightning-bolts'])\n",
     "setup(name='lightning', install_requires=['torch', 'lumen-train; x', 'lightning-bolts'])\n"),
    ("setup.py",
     "needed = [\n    'pytorch-lightning',\n]\nneeded = needed + x\nsetup(extras_require={'lightning': needed})\n",
     "needed = [\n    'lumen-train',\n]\nneeded = needed + x\nsetup(extras_require={'lightning': needed})\n"),
    ("README.md", "Uses lightning 2.\n```\npip install lightning\n```\n",
     "Uses lightning 2.\n```\npip install lumen-train\n```\n"),
]  # fmt: skip

NOTED = [
    ("pyproject.toml", '[tool.isort]\nknown_third_party = ["lightning"]\n', "replace Lightning by lumen-train."),
    ("poetry.lock", 'name = "pytorch-lightning"\n', "replace Lightning by lumen-train."),
    ("environment.yml", "dependencies:\n  - lightning=2\n", "list lumen-train under pip"),
    ("README.md", "```python\nimport lightning as L\n```\n", "Edit the code by hand"),
]

COMMANDS = [
    ("--trainer.gpus 2 --model.lr 3", "--trainer.accelerator=gpu --trainer.devices=2 --model.lr 3", ""),
    ("--trainer.devices=[0, 1]", "--trainer.devices=[0, 1]", ""),
    ("--trainer.strategy=ddp_spawn", "--trainer.strategy=ddp", ""),
    ("--trainer.max_epochs 3 --trainer.barebones false", "--trainer.max_epochs 3 ", ""),
    ("--trainer.replace_sampler_ddp=false --a", "--a", "divides the samples"),
    ("--trainer.resume_from_checkpoint $CKPT", "--trainer.resume=$CKPT", "lumen convert"),
    ("--trainer.callbacks+=lightning.pytorch.callbacks.RichProgressBar", "--trainer.callbacks+=lumen.ProgressBar", ""),
    ("--trainer.gpus", "--trainer.gpus", "--trainer.gpus: write --trainer.accelerator and --trainer.devices."),
    ("--ckpt_path out/last.ckpt", "--ckpt_path out/last.ckpt", "lumen convert"),
    ("lightning_logs/version_0", "lightning_logs/version_0", "runs/NAME"),
    ("PL_TRAINER_MAX_EPOCHS=3", "PL_TRAINER_MAX_EPOCHS=3", "PL_TRAINER_MAX_EPOCHS: write LUMEN_TRAINER__MAX_EPOCHS."),
]


@pytest.mark.parametrize(("name", "before", "after"), REQUIREMENTS)
def test_requirements_become_lumens(tmp_path, name, before, after):
    assert migrate_text(tmp_path, before, name) == (after, [])
    assert migrate_text(tmp_path, after, name) == (after, [])


@pytest.mark.parametrize(("name", "text", "said"), NOTED)
def test_other_mentions_are_noted(tmp_path, name, text, said):
    after, (note,) = migrate_text(tmp_path, text, name)
    assert after == text
    assert said in note


def test_torchmetrics_is_missed_after_the_edit(tmp_path):
    (tmp_path / "a.py").write_text("import lightning, torchmetrics\n")
    (tmp_path / "requirements.txt").write_text("lightning\n")
    assert "requirements.txt:1: Lightning installs torchmetrics" in run_migrate(tmp_path)[2]


@pytest.mark.parametrize("name", ["run.sh", "job.sbatch", "Makefile"])
@pytest.mark.parametrize(("before", "after", "said"), COMMANDS)
def test_commands_of_scripts_are_edited(tmp_path, name, before, after, said):
    (tmp_path / "a.py").write_text("import lightning\n")
    (tmp_path / name).write_text(f"python main.py fit {before}\n")
    notes = run_migrate_write(tmp_path, "--force")[1]
    assert (tmp_path / name).read_text() == f"python main.py fit {after}\n"
    assert said in notes


def test_scripts_of_other_projects_stay(tmp_path):
    assert migrate_text(tmp_path, "python a.py --trainer.gpus 2 --resume a.ckpt\n", "run.sh")[1] == []


def test_classes_in_json_are_renamed(tmp_path):
    text = '{"class_path": "pytorch_lightning.callbacks.RichProgressBar", "a": "lightning.pytorch.loggers.CometLogger"}'
    after, (note,) = migrate_text(tmp_path, text, "a.json")
    assert after == text.replace("pytorch_lightning.callbacks.RichProgressBar", "lumen.ProgressBar")
    assert "Subclass lumen.Logger" in note


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"indent": None}, {"ensure_ascii": True}])
def test_notebooks_are_edited_as_one_program(tmp_path, layout):
    before = make_notebook(
        "!pip install pytorch-lightning==1.5\nimport pytorch_lightning as pl", "%%bash\nls", "not python",
        "for x in 'é':\n    %time f(x)\nt = pl.Trainer(gpus=2, prefix=3, max_epochs=1)", **layout,
    )  # fmt: skip
    after = make_notebook(
        "!pip install lumen-train\nimport lumen", "%%bash\nls", "not python",
        "for x in 'é':\n    %time f(x)\nt = lumen.Trainer(accelerator=\"gpu\", devices=2, prefix=3, max_epochs=1)",
        **layout,
    )  # fmt: skip
    (tmp_path / "a.ipynb").write_text(before)
    assert "a.ipynb:cell 4: prefix of Trainer." in run_migrate_write(tmp_path, "--force")[1]
    assert (tmp_path / "a.ipynb").read_text() == after


@pytest.mark.parametrize("text", ['{"cells": 3, "a": "lightning"}', "{lightning", '{"cells":   [], "a": "lightning"}',
                                  '{"cells": [3], "a": "lightning"}', '{"cells": [{}], "a": "lightning"}'])  # fmt: skip
def test_a_notebook_that_cannot_be_kept_is_refused(tmp_path, text):
    (tmp_path / "a.ipynb").write_text(text)
    code, diff, said = run_migrate(tmp_path)
    assert (code, diff) == (1, "")
    assert "a.ipynb: not edited:" in said
