"""A report in a headless Chromium: nothing on the console, nothing fetched, keyboard, light, dark, narrow, print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import HOSTILE, Words, make, report

from libxd.report import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on the path")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("page")
    html = page.html(report(make(place), Words(HOSTILE.replace("\udc80", "")[:30])).value)
    (place / "report.html").write_text(html)
    return place / "report.html"


class Opened:
    """A tab with the page, and what it said and asked for meanwhile."""

    def __init__(self, browser: Any, file: Path, script: bool = True, **options: Any) -> None:
        self.tab = browser.new_context(java_script_enabled=script, **options).new_page()
        self.trouble: list[str] = []
        self.tab.on("console", lambda message: self.trouble.append(f"{message.type}: {message.text}"))
        self.tab.on("pageerror", lambda error: self.trouble.append(str(error)))
        self.tab.on("dialog", lambda dialog: self.trouble.append(dialog.message))
        self.tab.on("request", lambda request: self._asked(request.url))
        self.tab.goto(file.as_uri())

    def _asked(self, url: str) -> None:
        if not url.startswith(("file:", "data:")):
            self.trouble.append(url)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_it_opens_quietly_and_fits_the_window(browser, file, scheme, width):
    opened = Opened(browser, file, color_scheme=scheme, viewport={"width": width, "height": 800})
    for button in opened.tab.query_selector_all("button[data-open=true]"):
        button.click()
    assert opened.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ground = opened.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) > 380) == (scheme == "light")
    assert opened.trouble == []


def test_text_stands_out_from_its_ground_in_both_schemes(browser, file):
    """WCAG's contrast of at least 4.5, of every text in sight."""
    for scheme in ("light", "dark"):
        opened = Opened(browser, file, color_scheme=scheme, viewport={"width": 1280, "height": 800})
        assert opened.tab.evaluate(_CONTRAST) == []
        opened.tab.evaluate("document.querySelector('.what').style.color = 'gray'")
        assert opened.tab.evaluate(_CONTRAST) != [], "the control"


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """A page of three knobs at once, and of an identity that nobody showed."""
    place = tmp_path_factory.mktemp("long")
    value = report(make(place), Words("word")).value
    case = next(each for each in value["cases"] if each["intervention"] and each["effects"])
    case["intervention"] = [{"path": path, "value": "bfloat16", "allow_fallback": False} for path in (
        "rollout.enable_prefix_caching", "training.attention_backend", "training.compute_dtype")]  # fmt: skip
    case["violations"] = [{"side": "training", "code": "unobservable", "observed": None, "expected": None,
                           "path": "readback_training.json#/observed/weights_before"}]  # fmt: skip
    (place / "long.html").write_text(page.html(value))
    return place / "long.html"


@pytest.mark.parametrize(("width", "media"), [(1280, "screen"), (360, "screen"), (688, "print")])
def test_long_names_break_and_no_table_is_cut(browser, long, width, media):
    """688: A4 between its margins."""
    opened = Opened(browser, long, viewport={"width": width, "height": 800})
    opened.tab.emulate_media(media=media)
    for button in opened.tab.query_selector_all("button[data-open=true]"):
        if media == "screen":
            button.click()
    assert "readback_training.json" in opened.tab.content()
    assert opened.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if width > 360:  # there a table may be moved by itself
        cut = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert opened.tab.evaluate(cut) == 0
        opened.tab.evaluate("document.querySelectorAll('.scroll td, .scroll th').forEach("
                            "e => { e.style.whiteSpace = 'nowrap'; e.style.minWidth = '30rem'; })")  # fmt: skip
        assert opened.tab.evaluate(cut) > 0, "the control"


_CONTRAST = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = parts(colour).map(linear);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (; element; element = element.parentElement) {
      const found = getComputedStyle(element).backgroundColor;
      if (parts(found)[3] !== 0) return found;
    }
    return "rgb(255, 255, 255)";
  };
  const bad = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.closest("svg, script, .skip")) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push(`${element.tagName} ${element.textContent.slice(0, 30)}`);
  }
  return bad;
}"""


def test_tokens_are_walked_by_the_keyboard_and_read_out(browser, file):
    opened = Opened(browser, file)
    strip = opened.tab.locator("details[open] .tokens").first
    token = strip.locator("b[tabindex='0']")
    assert token.count() == 1, "one stop of the tab key a strip"
    token.focus()
    output = opened.tab.locator("details[open] .strip output").first
    first = output.text_content()
    assert "difference" in first and "rollout" in first
    opened.tab.keyboard.press("Home")
    assert "position 0" in output.text_content() and "not active" in output.text_content()
    opened.tab.keyboard.press("ArrowRight")
    assert "position 1" in output.text_content()
    focused = "({role: document.activeElement.getAttribute('role'), said: document.activeElement.ariaLabel})"
    state = opened.tab.evaluate(focused)
    assert state["role"] == "option" and "position 1" in state["said"]
    assert strip.get_attribute("role") == "listbox" and strip.locator("b[tabindex='0']").count() == 1
    opened.tab.keyboard.press("End")
    opened.tab.keyboard.press("ArrowRight")
    strip.locator("b").first.hover()
    assert "position 0" in output.text_content()
    assert opened.trouble == []


def test_a_link_opens_its_case(browser, file):
    opened = Opened(browser, file)
    link = opened.tab.locator("#verdicts th a").last
    target = link.get_attribute("href")
    case = opened.tab.locator(f"details:has({target})")
    assert case.get_attribute("open") is None
    link.click()
    assert case.get_attribute("open") is not None
    assert opened.tab.locator(target).is_visible()


def test_without_its_script_all_is_there(browser, file):
    opened = Opened(browser, file, script=False)
    opened.tab.locator("details.case summary").nth(1).click()
    assert opened.tab.locator("details.case").nth(1).locator("svg.plot").first.is_visible()
    assert "position" in opened.tab.locator(".tokens b").first.get_attribute("title")
    assert not opened.tab.locator("button").first.is_visible()


def test_it_prints(browser, file):
    opened = Opened(browser, file)
    opened.tab.emulate_media(media="print", color_scheme="dark")
    assert opened.tab.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert not opened.tab.locator("nav").is_visible()
    assert opened.tab.locator("#verdicts table").is_visible()
    assert opened.tab.pdf(format="A4").startswith(b"%PDF")
