"""Pictures of the documentation: their script draws them, and they match the code."""

import re
import runpy
from xml.etree import ElementTree

import pytest

import lumen
from tests.helpers import ROOT

SCRIPT = runpy.run_path(str(ROOT / "docs/site/pictures.py"), run_name="pictures")
DRAWN = SCRIPT["PICTURES"]
NAMED = "{http://www.w3.org/2000/svg}text"


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_are_what_the_script_draws(name):
    picture = (ROOT / f"docs/pictures/{name}.svg").read_text()
    assert picture == DRAWN[name]().svg(), "run: python docs/site/pictures.py"
    assert ElementTree.fromstring(picture).get("viewBox").startswith("0 0 480 ")


def test_every_picture_is_shown_on_a_page():
    pages = [path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+)\.svg\)", page)}
    assert shown == {*DRAWN, "terminal"} == {path.stem for path in (ROOT / "docs/pictures").iterdir()}


def test_hooks_are_drawn_in_the_order_of_calls():
    texts = [each.text for each in ElementTree.fromstring(DRAWN["hooks"]().svg()).iter(NAMED)]
    drawn = [text.split()[0] for text in texts if "_" in text or text == "teardown"]
    order = lumen.Callback.__doc__.split("fit:", 1)[1].split("boundary:\n", 1)
    boundary = order[1].split("checkpoint:\n", 1)[0]
    calls = order[0].replace("boundary", boundary, 1).replace("if validating:", "on_validation_start", 1)
    places = [re.search(rf"\b{name}\b", calls).start() for name in drawn]
    assert len(places) > 20
    assert places == sorted(places)
