"""Stored runs, and their reports, read like a browser."""

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

CONFIG = "model: {class_path: Net, init_args: {lr: 0.1, width: 8}}\ntrainer: {name: NAME, precision: fp32}\n"
FILES = {
    "metrics.csv": "step,epoch,loss,val_loss\n1,0,0.5,\n2,1,0.25,0.75\n3,2,0.125,0.5\n",
    "system.csv": "step,steps_per_s\n1,10.0\n3,12.5\n",
    "config.yaml": CONFIG,
    "run.log": "2026-01-01 00:00:00,000 INFO the run is in runs/a\n2026-01-01 00:00:09,000 INFO finished: max_steps\n",
    "environment.json": json.dumps({"host": "elderberry", "python": "3.12.1", "command": ["lumen", "fit"]}),
    "goodput.jsonl": "".join(
        json.dumps(line) + "\n"
        for line in (
            {"life": 1, "from_s": 100.0, "to_s": 110.0, "step": 0, "spent": {"startup": 10.0}},
            {"life": 1, "from_s": 110.0, "to_s": 150.0, "step": 2, "spent": {"step": 30.0, "evaluation": 10.0}},
            {"life": 2, "from_s": 150.0, "to_s": 170.0, "step": 2, "spent": {"startup": 20.0}},
            {"life": 2, "from_s": 170.0, "to_s": 200.0, "step": 3, "spent": {"step": 30.0}},
        )
    ),
}


def write_run(path, **others):
    """Write the directory of a run: FILES, except for files with other contents; None leaves a file out."""
    path = Path(path)
    path.mkdir(parents=True)
    for name, text in (FILES | {name.replace("_", ".", 1): text for name, text in others.items()}).items():
        if text is not None:
            (path / name).write_text(text.replace("NAME", path.name))
    return path


class Page(HTMLParser):
    """Report.

    Attributes:
        tags: Name and attributes of each element.
        text: Visible text, with single blanks.
        scripts: Contents of each script.
    """

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self._texts, self._within = [], [], [], None
        self.source = text
        self.feed(text)
        self.close()
        self.text = " ".join(" ".join(self._texts).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._within = tag
            self.scripts += [""] * (tag == "script")

    def handle_endtag(self, tag):
        if tag == self._within:
            self._within = None

    def handle_data(self, data):
        if self._within == "script":
            self.scripts[-1] += data
        elif self._within is None:
            self._texts.append(data)

    @property
    def allowed(self):
        """Return the digests of the scripts that the page's policy allows."""
        return set(re.findall(r"'sha256-([^']+)'", self.policy))

    @property
    def policy(self):
        return next(each["content"] for tag, each in self.tags if each.get("http-equiv") == "Content-Security-Policy")

    def drawn(self):
        """Return the arrays in bokeh's charts, by the names of their columns: a list for each."""
        arrays = {"x": [], "y": []}
        pattern = r'\["([xy])",\{"type":"ndarray","array":\{"type":"bytes","data":"([^"]*)"\}[^}]*"dtype":"(\w+)"'
        for column, data, dtype in re.findall(pattern, self.scripts[2]):
            arrays[column].append(np.frombuffer(gzip.decompress(base64.b64decode(data)), dtype))
        return arrays


def compute_digest(script):
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@pytest.fixture
def report(tmp_path, capsys):
    """Write a report of runs with `lumen report`, and read it."""

    def make(*runs):
        from lumen.cli import main  # imported here: the core's tests use this file without it

        output = tmp_path / "written" / "report.html"
        output.parent.mkdir(exist_ok=True)
        assert main(["report", *map(str, runs), "--output", str(output)]) == 0
        assert [*output.parent.iterdir()] == [output]
        assert output.stat().st_size < 3_000_000
        return Page(output.read_text(encoding="utf-8"))

    return make
