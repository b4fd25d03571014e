"""The web demo without a browser: what it computes, what it refuses, many visitors at once."""

from __future__ import annotations

import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from gradio_client import Client
from PIL import Image

import tokenmerge as tm
from tests.helpers import web_page
from tokenmerge.data.embedded import CLASSES
from tokenmerge.web.session import CALIBRATED, MAX_BYTES, BadUpload, Controls, DemoSession, embedded_curve

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # gradio_client's


@pytest.fixture(scope="module")
def session() -> DemoSession:
    model = tm.load_model("embedded")
    return DemoSession(model, tm.load_images("embedded", model), "embedded", embedded_curve())


def test_what_is_shown_is_what_the_model_does(session: DemoSession) -> None:
    x = session.samples.images[5]
    base, view = session.look(x, [Controls("ATM", False, alpha=0.95, beta=0.05, theta_min=0.8)], 12)
    model = tm.apply(tm.load_model("embedded"), view.method)
    with torch.inference_mode(), tm.trace(model) as t:
        prediction = int(model(x[None]).argmax())
    assert view.tokens == [int(n[0]) for n in t.tokens]
    assert view.top[0][0] == CLASSES[prediction]
    assert view.gmacs == pytest.approx(t.cost("paper").gmacs)
    assert base.ratio == 1
    assert base.distance == 0
    assert 0 < view.ratio < 1


def test_the_budget_is_met(session: DemoSession) -> None:
    for name in ("ToMe", "EViT"):
        for budget in (0.5, 0.8):
            _, view = session.look(session.samples.images[0], [Controls(name, budget=budget)], 12)
            assert view.ratio == pytest.approx(budget, abs=0.03)
    few = [session.look(x, [Controls(CALIBRATED, budget=0.5)], 12)[1].ratio for x in session.samples.images[:12]]
    assert sum(few) / len(few) == pytest.approx(0.5, abs=0.05)


def test_visitors_in_threads_get_what_one_alone_gets(session: DemoSession) -> None:
    asked = [Controls(name, budget=budget) for name in ("ToMe", "EViT", "PiToMe") for budget in (0.55, 0.75)]
    alone = DemoSession(session.model, session.images, session.name)
    expected = [alone.method(controls) for controls in asked]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(DemoSession(session.model, session.images, session.name).method, asked)) == expected


def test_the_curve_is_of_this_model() -> None:
    model = tm.load_model("embedded")
    images = tm.load_images("embedded", model).take(range(200, 264))
    for ratio, method in embedded_curve()[::3]:
        _, found = tm.evaluate(model, images, [method])
        assert found.ratio == pytest.approx(ratio, abs=0.03)
        assert found.distance < 0.05


def test_the_batch_rule_matters(session: DemoSession) -> None:
    x = session.samples.images[5]
    each = session.look(x, [Controls("ATM", False, alpha=0.95, beta=0.05, theta_min=0.8, per_image=True)], 12)[1]
    mean = session.look(x, [Controls("ATM", False, alpha=0.95, beta=0.05, theta_min=0.8, per_image=False)], 12)[1]
    assert each.tokens != mean.tokens


def test_uploads_are_read_safely_and_removed(session: DemoSession, tmp_path: Path) -> None:
    def put(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    for mode in ("RGB", "CMYK", "L", "P", "RGBA", "I;16"):
        path = tmp_path / f"{mode[0]}.{'jpg' if mode == 'CMYK' else 'png'}"
        Image.new(mode, (50, 40)).save(path)
        assert session.read(path).shape == (1, 28, 28)
        assert not path.exists()
    Image.new("1", (9000, 9000)).save(tmp_path / "huge.png")
    bad = [
        (put("text.png", b"hello"), "not a readable image"),
        (put("empty.png", b""), "not a readable image"),
        (put("large.png", b"x" * (MAX_BYTES + 1)), "MiB"),
        (tmp_path / "huge.png", "million"),
        (put("gif.gif", b"GIF89a" + b"\0" * 100), "not a readable image"),
    ]
    for path, said in bad:
        with pytest.raises(BadUpload, match=said):
            session.read(path)
        assert not path.exists()


def test_the_server_answers_loopback_with_its_guard(tmp_path: Path) -> None:
    with web_page(tmp_path, threads=1) as (address, _):
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address) as response:
            body = response.read().decode()
            assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "fonts.googleapis" not in body
        assert list(tmp_path.glob("tokenmerge-*"))  # pictures that it shows
    assert not list(tmp_path.glob("tokenmerge-*"))


@pytest.mark.slow
def test_twenty_visitors_at_once(tmp_path: Path) -> None:
    """Two minutes; each has an image of its own and must get the result for it."""
    model = tm.load_model("embedded")
    images = tm.load_images("embedded", model)
    expected = [_tokens(images, i) for i in range(20)]
    wrong: list[tuple[int, list[int]]] = []
    done: list[int] = []
    stop = threading.Event()
    with web_page(tmp_path) as (address, run):
        process = psutil.Process(run.pid)

        def visit(number: int) -> None:
            client = Client(address, verbose=False)
            client.predict(number, api_name="/pick")
            while not stop.is_set():
                *_, shown = client.predict(
                    "ATM", "ToMe", "parameters", 0.5, 0.95, 0.05, 0.8, 9, "each", 12, api_name="/show"
                )
                row = str(shown).split("<tr>")[2]
                found = [int(part.split("<")[0]) for part in row.split("<small>")[1:]]
                done.append(number)
                if found != expected[number]:
                    wrong.append((number, found))

        threads = [threading.Thread(target=visit, args=(i,)) for i in range(20)]
        for thread in threads:
            thread.start()
        stop.wait(60)
        early = process.memory_info().rss
        stop.wait(60)
        late = process.memory_info().rss
        stop.set()
        for thread in threads:
            thread.join(120)
    print(f"{len(done)} results, {early / 2**20:.0f} MiB after one minute, {late / 2**20:.0f} after two")
    assert not wrong
    assert set(done) == set(range(20))
    assert late < 1.1 * early


def _tokens(images: tm.Images, number: int) -> list[int]:
    batch = next(images.take([number]).batches(1))
    merged = tm.apply(tm.load_model("embedded"), tm.ATM(0.95, 0.05, 0.8, 9, batch="each"))
    with torch.inference_mode(), tm.trace(merged) as t:
        merged(batch.images)
    return [int(n[0]) for n in t.tokens]
