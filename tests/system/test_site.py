"""Documentation as a site: built without a warning, and readable without a network."""

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
#: A guide for each question, which the search shows among the first three pages.
GUIDES = {
    "install": "installation",
    "cosine schedule": "guides/learning-rate-schedules",
    "multiple validation dataloaders": "guides/multiple-dataloaders",
    "freeze layers": "guides/freeze-layers",
    "resume": "guides/resume",
    "out of memory": "guides/out-of-memory",
    "ddp hang": "guides/debug-a-hang",
    "export huggingface": "guides/export",
}
#: Arguments, classes, hooks and attributes of Lightning 2 that users search for; the first pages must have the name.
LIGHTNING_NAMES = """
    accelerator devices num_nodes fast_dev_run max_epochs max_steps max_time limit_train_batches
    limit_val_batches overfit_batches val_check_interval check_val_every_n_epoch num_sanity_val_steps
    log_every_n_steps enable_checkpointing enable_model_summary accumulate_grad_batches gradient_clip_val
    deterministic inference_mode use_distributed_sampler profiler detect_anomaly barebones plugins
    sync_batchnorm default_root_dir reload_dataloaders_every_n_epochs enable_autolog_hparams model_registry
    auto_lr_find resume_from_checkpoint LightningModule LightningDataModule EarlyStopping ModelCheckpoint
    LearningRateMonitor StochasticWeightAveraging BackboneFinetuning BatchSizeFinder LearningRateFinder
    DeviceStatsMonitor GradientAccumulationScheduler LambdaCallback RichProgressBar TQDMProgressBar
    BasePredictionWriter OnExceptionCheckpoint EMAWeightAveraging ModelPruning CSVLogger TensorBoardLogger
    WandbLogger MLFlowLogger CometLogger DDPStrategy FSDPStrategy DeepSpeedStrategy LightningCLI PyTorchProfiler
    CombinedLoader seed_everything MixedPrecision SLURMEnvironment on_fit_start on_train_epoch_end
    on_train_batch_end on_validation_epoch_end on_before_optimizer_step on_save_checkpoint on_exception
    configure_optimizers configure_callbacks configure_gradient_clipping optimizer_step lr_scheduler_step
    transfer_batch_to_device training_epoch_end validation_epoch_end prepare_data save_hyperparameters
    load_from_checkpoint manual_backward toggle_optimizer all_gather global_step current_epoch dirpath filename
    monitor save_top_k save_last every_n_train_steps ckpt_path weights_only sync_dist rank_zero_only
    callback_metrics logged_metrics is_global_zero estimated_stepping_batches log_dir num_training_batches
    sanity_checking lightning_module
"""
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


@pytest.fixture(scope="module")
def search(site):
    """A function that types words into the search of the site, and returns the names of the pages found, in order."""
    from playwright.sync_api import sync_playwright

    found = "[...document.querySelectorAll('.md-search-result__item')].map(item => item.querySelector('a').href)"
    meta = "document.querySelector('.md-search-result__meta').textContent"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1360, "height": 900}, offline=True).new_page()
        page.goto(f"file://{site}/index.html")
        page.locator(".md-search__input").click()

        def find(words):
            page.keyboard.press("Control+A")
            page.keyboard.press("Delete")
            page.wait_for_function(f"{meta}.includes('Type to start')")
            page.keyboard.insert_text(words)
            page.keyboard.press("Shift")  # the search begins when a key is released
            page.wait_for_function(f"/matching|No match/.test({meta})")
            return [re.sub(r"\.html.*", "", link.removeprefix(f"file://{site}/")) for link in page.evaluate(found)]

        yield find
        browser.close()


@pytest.mark.skipif(BROWSER is None, reason="not proven here: it needs Chromium")
def test_questions_find_their_guides(search):
    found = {words: search(words)[:3] for words in GUIDES}
    assert {words: pages for words, pages in found.items() if GUIDES[words] not in pages} == {}


@pytest.mark.skipif(BROWSER is None, reason="not proven here: it needs Chromium")
def test_lightning_names_lead_to_their_rows(search):
    found = {name: search(name)[:4] for name in LIGHTNING_NAMES.split()}
    assert {name: pages for name, pages in found.items() if not re.search("migration/|reference/", str(pages))} == {}
    assert search("a_name_that_no_page_has") == []
