"""The web demo in a real Chromium: every control is used, and the results are read from the page. Screenshots go to the
folder that TOKENMERGE_SCREENSHOTS names, or to a temporary one."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from tests.helpers import web_page

pytest.importorskip("playwright", reason="the page is tested with playwright")
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: make test installs Debian's where it may")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with web_page(tmp_path_factory.mktemp("served")) as (found, _):
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    folder = Path(os.environ.get("TOKENMERGE_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tokens(page: Page) -> dict[str, list[int]]:
    """By method, after each layer, as the page shows them."""
    rows = page.locator("#tokens tr")
    return {
        rows.nth(i).locator("th").inner_text(): [int(n) for n in rows.nth(i).locator("small").all_inner_texts()]
        for i in range(rows.count())
    }


def ratio(page: Page, which: str) -> float:
    """Of the GMACs, in per cent, of method A or B."""
    row = page.locator("#figures tr").filter(has_text=re.compile(f"^{which}:"))
    return float(row.locator("td").nth(1).inner_text().removesuffix("%"))


def until(true: Callable[[], bool]) -> None:
    """Wait for what the page shows to become true."""
    for _ in range(300):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("the page did not come to show it within 30 seconds")


def set_slider(page: Page, control: str, value: float) -> None:
    """Type a number next to a slider."""
    number = page.locator(f"#{control} input[type=number]")
    number.fill(str(value))
    number.press("Enter")
    number.blur()


def choose(page: Page, control: str, option: str) -> None:
    page.locator(f"#{control} input").click()
    page.get_by_role("option", name=option, exact=True).click()


def test_every_control(browser: Browser, address: str, shots: Path) -> None:
    asked: list[str] = []
    page = browser.new_page(viewport={"width": 1400, "height": 1300})
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    expect(page.locator("#tokens small").first).to_be_visible(timeout=60_000)
    assert set(tokens(page)) == {"baseline", "A: ATM, calibrated", "B: ToMe"}
    assert tokens(page)["baseline"] == [197] * 12
    assert len(page.locator("#predictions li").all()) == 15
    assert abs(ratio(page, "B") - 50) < 3
    page.screenshot(path=shots / "start.png")

    shown = tokens(page)
    page.locator("#gallery .grid-container button").nth(7).click()
    until(lambda: tokens(page) != shown)
    expect(page.locator(".progress-text:visible")).to_have_count(0)
    page.screenshot(path=shots / "picked.png")
    set_slider(page, "budget", 0.8)
    until(lambda: abs(ratio(page, "B") - 80) < 3)

    choose(page, "method-b", "EViT")
    expect(page.locator("#tokens")).to_contain_text("B: EViT", timeout=30_000)
    assert len(set(tokens(page)["B: EViT"])) <= 5  # it acts in three layers
    choose(page, "method-a", "ATM")
    until(lambda: "A: ATM" in tokens(page))
    page.locator("#mode").get_by_label("parameters").check()
    said = page.locator("#figures")
    expect(said).to_contain_text("ATM(alpha=0.98, beta=0.04, theta_min=0.84, split_layer=9", timeout=30_000)
    for control, value, shown in (
        ("alpha", 0.9, "alpha=0.9,"),
        ("beta", 0.08, "beta=0.08"),
        ("theta", 0.5, "theta_min=0.5"),
        ("split", 4, "split_layer=4"),
    ):
        set_slider(page, control, value)
        expect(said).to_contain_text(shown, timeout=30_000)
    alone = tokens(page)["A: ATM"]
    expect(said).to_contain_text("batch='each'")
    page.locator("#rule").get_by_label("mean", exact=True).check()
    until(lambda: "batch='each'" not in said.inner_text())
    assert tokens(page)["A: ATM"] != alone
    page.screenshot(path=shots / "parameters.png")

    for layer in (1, 6, 12):
        before = page.locator("#map-b img").get_attribute("src")
        set_slider(page, "layer", layer)
        until(lambda before=before: page.locator("#map-b img").get_attribute("src") != before)
    page.screenshot(path=shots / "layers.png")
    servers = {re.match(r"(?:\w+:)//([^/:]+)", url)[1] for url in asked if url.startswith(("http", "ws"))}  # type: ignore[index]
    assert servers == {"127.0.0.1"}
    page.close()


def test_uploads(browser: Browser, address: str, shots: Path, tmp_path: Path) -> None:
    Image.effect_noise((300, 200), 80).save(tmp_path / "good.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "good.png").read_bytes()[:200])
    (tmp_path / "text.jpg").write_text("no image at all")
    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    page = browser.new_page(viewport={"width": 1400, "height": 1300})
    page.goto(address)
    expect(page.locator("#tokens small").first).to_be_visible(timeout=60_000)

    def put(name: str) -> None:
        clear = page.locator("#upload").get_by_label(re.compile("clear|remove", re.IGNORECASE))
        if clear.count():
            clear.first.click()
        page.locator("#upload input[type=file]").set_input_files(tmp_path / name)

    def predictions() -> list[str]:
        return page.locator("#predictions li").all_inner_texts()

    before = predictions()
    put("good.png")
    until(lambda: predictions() != before)
    good = predictions()
    page.screenshot(path=shots / "uploaded.png")
    for name, said in (
        ("broken.png", "not a readable image"),
        ("text.jpg", "not a readable image"),
        ("huge.png", "million"),
    ):
        put(name)
        expect(page.locator("#message")).to_contain_text(said, timeout=30_000)
        page.screenshot(path=shots / f"{Path(name).stem}.png")
    until(lambda: predictions() == good)  # the image before it is still there
    page.close()
