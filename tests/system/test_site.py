"""The documentation as a site: it is built without a warning, and read without a network."""

import os
import re
import shutil
import subprocess
import sys

import pytest

import lumen
from lumen.cli.commands import list_commands
from tests.helpers import ROOT

pytest.importorskip("mkdocs", reason="not proven here: it needs mkdocs-material and mkdocstrings, the extra `docs`")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.slow, pytest.mark.time_limit(400)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(built)]
    without_network = {
        "NO_MKDOCS_2_WARNING": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **without_network}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "WARNING" not in done.stderr
    return built


def test_navigation_has_every_page(site):
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md") if path.parts[-2] != "site"}
    names = pages | {"tutorials/notebook", "contributing/index", "changelog"}
    linked = {*re.findall(r'<a href="([\w/-]+)\.html" class="md-nav__link', (site / "index.html").read_text())}
    assert names - linked == set()


def test_reference_has_every_export_and_command(site):
    pages = [path.read_text() for path in (site / "reference").glob("*.html")]
    found = [name for page in pages for name in re.findall(r'<h2 id="lumen\.(\w+)" class="doc doc-heading', page)]
    assert sorted(found) == sorted(lumen.__all__)
    commands = (site / "reference/commands.html").read_text()
    for command in list_commands():
        assert f"usage: lumen {command} " in commands


def test_links_out_of_docs_lead_to_source(site):
    page = (site / "guides/transformers.html").read_text()
    assert 'href="../source/models/bert.py.html"' in page
    assert "NameWriter" in (site / "source/models/gpt2.py.html").read_text()


@pytest.mark.skipif(BROWSER is None, reason="not proven here: it needs Chromium")
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1360, "light")])
def test_pages_fit_their_window_and_work_offline(site, width, scheme):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
        page, wrong = context.new_page(), []
        page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        for name in (
            "index",
            "tutorials/quick-start",
            "guides/data-loaders",
            "reference/trainer",
            "source/models/gpt.py",
        ):
            page.goto(f"file://{site}/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            assert page.evaluate("document.body.dataset.mdColorScheme") == {"dark": "slate", "light": "default"}[scheme]
        page.locator("label[for=__search]").first.click() if width < 960 else page.locator(".md-search__input").click()
        page.keyboard.type("shuffle")
        page.wait_for_selector(".md-search-result__item")
        browser.close()
    assert wrong == []
