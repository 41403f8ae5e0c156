"""Report in a real browser: no errors, no requests, and working controls."""

import io
import shutil

import numpy as np
import pytest
from PIL import Image

from tests.helpers.report import write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="not proven here: it needs Chromium")

LOG = "document.getElementById('{}').click()"
MODEL = "(name => Bokeh.documents[0].get_model_by_name(name))"
LOSS = "figure[data-chart='m0']"


@pytest.fixture(scope="module")
def chromium():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, report, tmp_path):
    """Open a report of runs; at the end, check that no error occurred and no network request was made."""
    wrong, contexts = [], []

    def open_report(*runs, **settings):
        report(*runs)
        context = chromium.new_context(viewport={"width": 1280, "height": 900}, offline=True, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(f"a dialog: {dialog.message}"))
        page.on("request", lambda asked: None if asked.url.startswith(("file:", "data:")) else wrong.append(asked.url))
        page.goto(f"file://{tmp_path}/written/report.html")
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    open_report.wrong = wrong
    yield open_report
    for context in contexts:
        context.close()
    assert wrong == []


def make_curves(steps=400, **others):
    """Write metrics with a decay, and a peak at step 200."""
    rows = [f"{step},{step // 100},{2.0 / step if step != 200 else 9.0},{0.5 if step % 100 == 0 else ''}"
            for step in range(1, steps + 1)]  # fmt: skip
    return {"metrics_csv": "\n".join(["step,epoch,loss,val_loss", *rows, ""]), **others}


def wait_until(page, holds):
    """Wait until a condition holds; the page's policy forbids evaluated code, which playwright's waits use too."""
    for _ in range(1000):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(20)
    pytest.fail(f"never true: {holds}")


def read_full_range(page):
    """Return the range of all steps, which the page shows first."""
    return page.evaluate(f"[{MODEL}('steps').start, {MODEL}('steps').end]")


def get_point(page, part):
    """Return a point in the first chart, at a fraction of its width."""
    box = page.locator(f"{LOSS} > div > *").first.bounding_box()
    return box["x"] + 50 + part * (box["width"] - 80), box["y"] + box["height"] / 2


CUT = "[...document.querySelectorAll('main *, header *')].filter(each => each.scrollWidth > each.clientWidth + 1)"


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (768, "dark"), (1600, "light")])
def test_report_fits_its_window_in_light_and_dark(opened, tmp_path, width, scheme):
    """Six runs with long names fit: no table or legend must be scrolled to be seen."""
    rates = [f"a-regression-with-learning-rate-{rate}-and-a-cosine-schedule" for rate in (1, 3, 10, 30, 100)]
    runs = [write_run(tmp_path / name, config_yaml=f"model: {{lr: {number}}}\n") for number, name in enumerate(rates)]
    page = opened(write_run(tmp_path / "a", **make_curves()), *runs, color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    wait_until(page, f"document.documentElement.scrollWidth <= {width}")
    assert page.evaluate(f"{CUT}.filter(each => each.clientWidth).map(each => each.outerHTML.slice(0, 200))") == []
    wait_until(page, f'document.querySelector("{LOSS} > div > *").clientWidth <= {width}')
    background, text = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    light, dark = (np.mean([int(each) for each in colour[4:-1].split(",")]) for colour in (background, text))
    assert (light > dark) == (scheme == "light")
    page.locator(LOSS).scroll_into_view_if_needed()
    colour = {"light": (0x00, 0x62, 0xA8), "dark": (0x6C, 0xB2, 0xF0)}[scheme]

    def has_curve():
        """Return True if the page shows a curve below the legend."""
        pixels = np.asarray(Image.open(io.BytesIO(page.locator(LOSS).screenshot())).convert("RGB")).astype(int)
        return (np.abs(pixels[120:] - colour).max(axis=2) < 40).sum() > 100

    for _ in range(100):
        page.wait_for_timeout(100)
        if has_curve():
            break
    assert has_curve()


def test_cursor_shows_values_of_all_charts(opened, tmp_path):
    """The test moves the cursor by mouse and by keyboard."""
    page = opened(
        write_run(
            tmp_path / "a", **make_curves(system_csv="step,speed\n" + "".join(f"{s},{s}\n" for s in range(1, 401)))
        )
    )
    output, speed = page.locator(f"{LOSS} output").first, page.locator("figure[data-chart='s0'] output")
    assert (output.text_content(), speed.text_content()) == ("0.005", "400")
    page.locator(LOSS).scroll_into_view_if_needed()
    page.mouse.move(*get_point(page, 0.5))
    wait_until(page, "document.getElementById('position').textContent.startsWith('step ')")
    step = int(page.locator("#position").text_content().removeprefix("step "))
    assert 150 < step < 250
    page.keyboard.press("Tab")
    page.locator(LOSS).focus()
    page.keyboard.press("Escape")
    wait_until(page, "document.getElementById('position').textContent === ''")
    assert output.text_content() == "0.005"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    wait_until(page, "document.getElementById('position').textContent === 'step 399'")
    assert output.text_content() == f"{2.0 / 399:.5g}"


def test_dragging_zooms_all_charts_and_button_resets(opened, tmp_path):
    page = opened(write_run(tmp_path / "a", **make_curves()))
    all_steps = read_full_range(page)
    page.locator(LOSS).scroll_into_view_if_needed()
    for _ in range(20):  # On a busy machine, bokeh may take the slow beginning of a drag for a press.
        page.mouse.move(*get_point(page, 0.2))
        page.mouse.down()
        page.mouse.move(*get_point(page, 0.4), steps=4)
        page.mouse.up()
        page.wait_for_timeout(100)
        if page.locator("#reset").is_enabled():
            break
    wait_until(page, "!document.getElementById('reset').disabled")
    begin, end = read_full_range(page)
    assert all_steps[0] < begin < end < 200 < all_steps[1]
    wait_until(page, f"{MODEL}('chart-m0').y_range.end < 1")  # the peak is not visible
    page.locator("#reset").click()
    assert read_full_range(page) == all_steps
    wait_until(page, f"{MODEL}('chart-m0').y_range.end > 9")


def test_smoothing_draws_a_mean_and_can_be_removed(opened, tmp_path):
    page = opened(write_run(tmp_path / "a", **make_curves()))
    smooth = f"[...{MODEL}('smooth-m0-0-0').data_source.data.y]"
    assert page.evaluate(smooth) == []
    for value, count in ((60, 400), (0, 0)):
        page.locator("#smoothing").fill(str(value))
        assert len(page.evaluate(smooth)) == count
        if count:
            values = page.evaluate(smooth)
            assert 0.005 < values[300] < 0.2
            assert max(values[100:]) < 1
    flat = [1.0] * 400
    page = opened(
        write_run(tmp_path / "flat", metrics_csv="step,loss\n" + "".join(f"{s},{v}\n" for s, v in enumerate(flat)))
    )
    page.locator("#smoothing").fill("80")
    assert page.evaluate(smooth) == pytest.approx(flat)


def test_ticks_have_few_digits(opened, tmp_path):
    page = opened(write_run(tmp_path / "a", **make_curves()))
    ticks = page.evaluate(f"{MODEL}('chart-m0').left[0].formatter.doFormat([0, 0.1 + 0.2, 0.0002, 3e-7, 1200, 2.5e6])")
    assert ticks == ["0", "0.3", "0.0002", "3e-7", "1,200", "2.5e6"]


def test_axes_turn_logarithmic_where_values_are_positive(opened, tmp_path):
    rows = "step,loss,offset\n1,0.001,-1\n10,1,-2\n100,10,-3\n"
    page = opened(write_run(tmp_path / "a", metrics_csv=rows, system_csv=None))
    page.evaluate(LOG.format("log-y"))
    page.evaluate(LOG.format("log-x"))
    assert page.evaluate(f"{MODEL}('chart-m0').y_scale.type") == "LogScale"
    assert page.evaluate(f"{MODEL}('chart-m1').y_scale.type") == "LinearScale"
    assert page.evaluate(f"{MODEL}('chart-m1').x_scale.type") == "LogScale"
    begin, end = page.evaluate(f"[{MODEL}('chart-m0').y_range.start, {MODEL}('chart-m0').y_range.end]")
    assert 0 < begin < 0.001
    assert 10 < end < 100
    page.evaluate(LOG.format("log-y"))
    assert page.evaluate(f"{MODEL}('chart-m0').y_scale.type") == "LinearScale"


def test_runs_and_marks_are_hidden_and_shown(opened, tmp_path):
    page = opened(write_run(tmp_path / "a", **make_curves()), write_run(tmp_path / "b"))

    def visible(name):
        return page.evaluate(f"{MODEL}('chart-m0').renderers.find(each => each.name === '{name}').visible")

    assert (visible("line-m0-0-0"), visible("line-m0-1-0"), visible("mark-epochs-1")) == (True, True, False)
    page.locator("[data-marks='epochs']").check()
    assert visible("mark-epochs-1")
    page.locator("[data-shows='0']").uncheck()
    assert (visible("line-m0-0-0"), visible("line-m0-1-0")) == (False, True)
    assert page.locator(f"{LOSS} tbody tr:visible").count() == 1
    assert page.evaluate(f"{MODEL}('chart-m0').y_range.end") < 1  # scaled to the remaining curves
    page.locator("[data-shows='1']").uncheck()
    assert not visible("mark-epochs-1")


def test_hostile_text_is_shown_and_not_executed(opened, tmp_path):
    attack = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=1><svg onload=window.pwned=1>"
    rows = f'step,"{attack}"\n1,0.5\n2,0.25\n'
    page = opened(
        write_run(tmp_path / "a", metrics_csv=rows, run_log=f"INFO {attack}\n", config_yaml=f"'{attack}': 1\n")
    )
    assert page.evaluate("window.pwned") is None
    assert page.locator("h3").first.text_content() == attack
    assert not opened.wrong
    page.evaluate(  # code that passes the escaping is still not executed
        "const script = document.createElement('script'); script.textContent = 'window.pwned = 2';"
        " document.body.append(script)"
    )
    assert page.evaluate("window.pwned") is None
    for _ in range(1000):
        if not opened.wrong:
            page.wait_for_timeout(20)
    assert "Content Security Policy" in opened.wrong.pop()


def test_a_report_without_javascript_has_its_values(chromium, report, tmp_path):
    report(write_run(tmp_path / "a"))
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"file://{tmp_path}/written/report.html")
    assert page.locator("noscript").is_visible()
    assert page.locator("#values td").first.text_content() == "0.125"
    context.close()


def test_it_prints(opened, tmp_path):
    page = opened(write_run(tmp_path / "a", **make_curves()), color_scheme="dark")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#controls").is_visible()
    assert page.locator(LOSS).is_visible()
    assert page.pdf()[:5] == b"%PDF-"
