"""Files of a public project: workflows, hooks, templates, policies. Their commands, paths and versions exist."""

import re
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

from lumen.version import __version__
from tests.helpers import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = {*re.findall(r"^([\w-]+):", MAKEFILE, re.M)}
IGNORED = (ROOT / ".gitignore").read_text().split()


def read_yaml(path):
    """Return a YAML file in which `on` is a string, as GitHub reads it."""
    text = re.sub(r"^on:", '"on":', (ROOT / path).read_text(), flags=re.M)
    return yaml.safe_load(text)


WORKFLOWS = {path.stem: read_yaml(path) for path in sorted(ROOT.glob(".github/workflows/*"))}
JOBS = [
    pytest.param(job, id=f"{name}-{key}")
    for name, workflow in WORKFLOWS.items()
    for key, job in workflow["jobs"].items()
]
FORMS = {path.stem: read_yaml(path) for path in sorted(ROOT.glob(".github/ISSUE_TEMPLATE/*")) if path.stem != "config"}
#: Pages that name files and commands in code spans.
TEXTS = [
    ".github/pull_request_template.md",
    ".github/ISSUE_TEMPLATE/bug.yml",
    "CODE_OF_CONDUCT.md",
    "SECURITY.md",
    "docs/contributing/release.md",
]
ADDRESSES = re.compile(r"https?://([^/\s)\"']+)")


def list_runs(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def is_known_path(path):
    """Return True if a path is in the repository, or is a folder that a build writes and Git ignores."""
    return (ROOT / path).exists() or f"/{path.strip('/')}/" in IGNORED


# ---------------------------------------------------------------------- workflows


def test_workflows_start_at_the_right_events():
    events = {name: workflow["on"] for name, workflow in WORKFLOWS.items()}
    assert events.keys() == {"check", "docs", "nightly", "release"}
    assert events["check"] == {"push": {"branches": ["**"]}, "pull_request": None}  # tags start `release` alone
    assert events["docs"] == {"push": {"branches": ["main"]}, "pull_request": None}
    assert events["nightly"].keys() == {"schedule", "workflow_dispatch"}
    assert events["release"] == {"push": {"tags": ["v*"]}}


def test_workflows_run_the_commands_of_make():
    commands = {
        name: [run for job in each["jobs"].values() for run in list_runs(job)] for name, each in WORKFLOWS.items()
    }
    assert commands["check"] == ["make check"]
    assert commands["nightly"] == ["make demo", "make test-all", "make compat"]
    assert commands["docs"] == ["make docs"]
    assert commands["release"][-1] == "make dist"
    named = re.findall(r"make ([\w-]+)", str(commands))
    assert {*named} <= TARGETS


@pytest.mark.parametrize("job", JOBS)
def test_actions_are_pinned(job):
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used
    for each in used:
        assert re.fullmatch(r"actions/[\w-]+@v\d+|[\w.-]+/[\w./-]+@[0-9a-f]{40}", each), each


@pytest.mark.parametrize("job", JOBS)
def test_jobs_have_a_time_limit_and_known_paths(job):
    assert 0 < job["timeout-minutes"] <= 360
    for step in job["steps"]:
        given = step.get("with", {})
        paths = [*given.get("cache-dependency-path", "").split(), *given.get("path", "").split()]
        assert [path for path in paths if not is_known_path(path)] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_permissions_are_least(name):
    """A workflow reads the repository alone, and leaves no credentials in the checkout."""
    workflow = WORKFLOWS[name]
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job
        (checkout,) = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert checkout["with"]["persist-credentials"] is False
    assert "secrets." not in str(workflow)


@pytest.mark.parametrize("job", JOBS)
def test_scripts_insert_no_expressions(job):
    """A branch name in an expression would run as code."""
    assert not [run for run in list_runs(job) if "${{" in run]


def test_workflows_use_the_lowest_python():
    lowest = PROJECT["requires-python"].removeprefix(">=")
    check = WORKFLOWS["check"]["jobs"]["check"]
    assert lowest in check["strategy"]["matrix"]["python"]
    steps = [step for workflow in WORKFLOWS.values() for job in workflow["jobs"].values() for step in job["steps"]]
    given = [step["with"]["python-version"] for step in steps if "python-version" in step.get("with", {})]
    for version in [*check["strategy"]["matrix"]["python"], *(each for each in given if "matrix" not in each)]:
        assert isinstance(version, str)  # YAML reads 3.10 as 3.1
        assert Version(version) >= Version(lowest)


# ---------------------------------------------------------------------- pre-commit and dependabot


def test_hooks_use_the_pinned_ruff():
    hooks = {
        hook["id"]: (repo, hook) for repo in read_yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]
    }
    assert hooks.keys() == {"ruff-check", "ruff-format", "mypy"}
    assert hooks["ruff-check"][0]["rev"] == hooks["ruff-format"][0]["rev"] == f"v{CONSTRAINTS['ruff']}"
    assert hooks["mypy"][1]["stages"] == ["manual"]
    assert hooks["mypy"][1]["entry"] == ".venv/bin/mypy"


def test_updates_cover_actions_and_packages():
    updates = {each["package-ecosystem"]: each for each in read_yaml(".github/dependabot.yml")["updates"]}
    assert updates.keys() == {"github-actions", "pip"}
    for each in updates.values():
        assert (each["directory"], each["schedule"]) == ("/", {"interval": "weekly"})
    assert {each["dependency-name"] for each in updates["pip"]["ignore"]} <= CONSTRAINTS.keys()


def test_tools_of_a_release_are_pinned():
    (line,) = re.findall(r"-dist/bin/pip install .*constraints.txt (.*)", MAKEFILE)
    assert {*line.split()} == {"build", "twine"} <= CONSTRAINTS.keys()


# ---------------------------------------------------------------------- templates and policies


def test_forms_have_fields_with_unique_names():
    assert FORMS.keys() == {"bug", "feature"}
    for form in FORMS.values():
        fields = [each for each in form["body"] if each["type"] != "markdown"]
        assert len({each["id"] for each in fields}) == len(fields)
        assert any(each["validations"]["required"] for each in fields)


def test_bug_form_asks_for_versions():
    fields = {each.get("id"): each for each in FORMS["bug"]["body"]}
    asked = fields["versions"]
    assert asked["validations"]["required"]
    (program,) = re.findall(r'python -c "(.*)"`', asked["attributes"]["description"])
    compile(program, "bug.yml", "exec")
    assert {"lumen", "torch", "Python"} == {line.split()[0] for line in asked["attributes"]["placeholder"].splitlines()}


@pytest.mark.parametrize("page", TEXTS)
def test_files_and_targets_in_texts_exist(page):
    text = (ROOT / page).read_text()
    assert {*re.findall(r"\bmake ([\w-]+)", text)} <= TARGETS
    paths = re.findall(r"`((?:[.\w-]+/)*[\w-]+\.(?:md|py|cff|yml|toml|txt))`", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing + [link for link in links if not (ROOT / page).parent.joinpath(link).exists()] == []


def test_versions_of_all_files_are_equal():
    citation = read_yaml("CITATION.cff")
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["abstract"] == PROJECT["description"]
    assert f"Lumen is at version {__version__}" in (ROOT / "docs/versions.md").read_text()
    assert re.search(rf"^## \[(Unreleased\]: )?{re.escape(__version__)}", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_code_of_conduct_names_its_covenant():
    text = (ROOT / "CODE_OF_CONDUCT.md").read_text()
    assert "https://www.contributor-covenant.org/version/2/1/code_of_conduct/" in text


def test_files_name_public_hosts_alone():
    files = [
        *ROOT.glob(".github/**/*.*"),
        *(ROOT / name for name in (".pre-commit-config.yaml", *TEXTS, "CITATION.cff")),
    ]
    hosts = {host for path in files if path.is_file() for host in ADDRESSES.findall(path.read_text())}
    assert hosts <= {"github.com", "www.contributor-covenant.org"}


def test_constraints_meet_the_requirements():
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
    ]
    for each in map(Requirement, wanted):
        assert each.name not in CONSTRAINTS or CONSTRAINTS[each.name] in each.specifier, each
