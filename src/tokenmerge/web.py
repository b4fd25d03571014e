"""A page to try merging on. It serves loopback alone unless told otherwise, asks no other host for anything, and keeps no
upload."""

from __future__ import annotations

import html
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .extras import need
from .loading import Images
from .studio import MAX_BYTES, BadUpload, Setting, Studio, View, open_studio

HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
}


# What the page shows, as HTML of its own: no script, nothing from elsewhere.


def tokens_html(views: dict[str, View]) -> str:
    """Bars a layer, a row a method."""
    most = max(max(view.tokens) for view in views.values())
    rows = []
    for name, view in views.items():
        bars = "".join(
            f'<td style="vertical-align:bottom;text-align:center;padding:0 2px"><div style="background:#888;width:1.4em;'
            f'height:{max(1, round(64 * n / most))}px;margin:auto"></div><small>{n}</small></td>'
            for n in view.tokens
        )
        rows.append(f"<tr><th style='text-align:left;padding-right:1em'>{html.escape(name)}</th>{bars}</tr>")
    return f'<table class="tokens">{"".join(rows)}</table>'


def answers_html(views: dict[str, View]) -> str:
    columns = []
    for name, view in views.items():
        lines = "".join(f"<li>{html.escape(what)} {share:.1%}</li>" for what, share in view.top)
        columns.append(f"<td style='padding-right:2em;vertical-align:top'><b>{html.escape(name)}</b><ol>{lines}</ol></td>")
    return f'<table class="answers"><tr>{"".join(columns)}</tr></table>'


def figures_html(views: dict[str, View]) -> str:
    head = "<tr><th></th><th>GMACs</th><th>of unmerged</th><th>distance</th><th>ms</th></tr>"
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{view.gmacs:.3f}</td><td>{view.ratio:.1%}</td>"
        f"<td>{view.distance:.5f}</td><td>{view.milliseconds:.0f}</td></tr>"
        for name, view in views.items()
    )
    settings = "".join(f"<div><code>{html.escape(repr(view.method))}</code></div>" for view in list(views.values())[1:])
    return f'<table class="figures" style="border-spacing:1em 0">{head}{rows}</table>{settings}'


def _show(studio: Studio, x: Any, a: str, b: str, by: str, *rest: Any) -> tuple[Any, ...]:
    """Everything that the knobs change."""
    share, own_alpha, own_beta, least, after, each, at = rest
    common = Setting("", by == "budget", share, own_alpha, own_beta, least, int(after), each == "each")
    settings = [replace(common, method=name) for name in (a, b)]
    unmerged, left, right = studio.look(torch.from_numpy(x), settings, int(at))
    views = {"unmerged": unmerged, f"A: {a}": left, f"B: {b}": right}
    pictures = (unmerged.picture, left.picture), right.picture
    return (*pictures, figures_html(views), answers_html(views), tokens_html(views))


def build(studio: Studio) -> Any:
    """The page, as Gradio's blocks."""
    import gradio as gr

    depth, names = studio.reference.depth, studio.names
    samples = [studio.picture(x) for x in studio.samples.images]
    with gr.Blocks(title="tokenmerge", analytics_enabled=False, delete_cache=(300, 300)) as page:
        gr.Markdown(f"# tokenmerge\nMerge the tokens of **{studio.name}**: pick an image or upload one, and turn the knobs.")
        chosen = gr.State(studio.samples.images[0].numpy())
        number = gr.Number(visible=False)  # of the sample that was picked
        message = gr.Markdown(elem_id="message")
        with gr.Row():
            with gr.Column(scale=1):
                gallery = gr.Gallery(
                    samples, label="images", columns=4, height=240, allow_preview=False, buttons=[], elem_id="gallery"
                )
                upload = gr.File(label="or upload one (JPEG, PNG, WebP, BMP; 8 MiB)", elem_id="upload")
                first = gr.Dropdown(names, value=names[0], label="method A", elem_id="method-a")
                second = gr.Dropdown(names, value="ToMe", label="method B", elem_id="method-b")
                mode = gr.Radio(["budget", "parameters"], value="budget", label="ATM is set by", elem_id="mode")
                budget = gr.Slider(0.4, 1, 0.5, step=0.05, label="budget: GMACs of unmerged", elem_id="budget")
                alpha = gr.Slider(0.8, 1, 0.98, step=0.005, label="α", elem_id="alpha")
                beta = gr.Slider(0, 0.1, 0.04, step=0.005, label="β", elem_id="beta")
                theta = gr.Slider(0.3, 1, 0.84, step=0.005, label="θ_min", elem_id="theta")
                split = gr.Slider(0, depth, 3 * depth // 4, step=1, label="l_s, splitting layer", elem_id="split")
                rule = gr.Radio(
                    ["each", "mean"], value="each", elem_id="rule",
                    label="batch rule: each image by itself, or the mean of it and seven samples",
                )  # fmt: skip
            with gr.Column(scale=2):
                layer = gr.Slider(1, depth, depth, step=1, label="after layer", elem_id="layer")
                with gr.Row():
                    before = gr.ImageSlider(
                        label="image | method A",
                        type="pil",
                        format="png",
                        buttons=["fullscreen"],
                        height=340,
                        elem_id="before-after",
                    )
                    shown = gr.Image(
                        label="method B",
                        type="pil",
                        format="png",
                        interactive=False,
                        buttons=["fullscreen"],
                        height=340,
                        elem_id="map-b",
                    )
                figures = gr.HTML(elem_id="figures")
                answers = gr.HTML(elem_id="answers")
                tokens = gr.HTML(elem_id="tokens")
        knobs = [first, second, mode, budget, alpha, beta, theta, split, rule, layer]

        show = partial(_show, studio)
        outputs = [before, shown, figures, answers, tokens]

        def point(event: Any) -> int:
            return int(event.index)

        point.__annotations__["event"] = gr.SelectData  # Gradio goes by it, and finds no names of inside a function

        def pick(number: float) -> tuple[Any, str]:
            return studio.samples.images[int(number) % len(studio.samples.images)].numpy(), ""

        def take(path: str | None, x: Any) -> tuple[Any, str]:
            if path is None:
                return x, ""
            try:
                return studio.read(path).numpy(), ""
            except BadUpload as error:
                return x, f"**{error}**"

        own: dict[str, Any] = {"api_visibility": "private"}  # those below with a name are for scripts
        gallery.select(point, None, number, **own)
        number.change(pick, number, [chosen, message], api_name="pick").then(show, [chosen, *knobs], outputs, **own)
        upload.upload(take, [upload, chosen], [chosen, message], **own).then(show, [chosen, *knobs], outputs, **own)
        for knob in knobs:
            event: Any = knob.release if isinstance(knob, gr.Slider) else getattr(knob, "change")  # noqa: B009
            event(show, [chosen, *knobs], outputs, trigger_mode="always_last", show_progress="hidden", **own)
        page.load(show, [chosen, *knobs], outputs, api_name="show")
    page.queue(default_concurrency_limit=2, max_size=64)
    return page


@dataclass
class Served:
    """A running page."""

    host: str
    port: int
    _server: Any
    _thread: threading.Thread
    _folder: tempfile.TemporaryDirectory[str]

    def wait(self) -> None:
        """Until Ctrl-C, or a polite kill; then nothing is left behind."""
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        while self._thread.is_alive() and not stop.wait(0.5):
            pass
        self.close()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._folder.cleanup()


def serve(
    model: nn.Module,
    images: Images,
    name: str,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    fit: bool = False,
    say: Callable[[str], object] = lambda what: None,
) -> Served:
    """Start the page, and return as soon as it answers. Port 0 takes a free one."""
    need("gradio", "web pages")
    folder = tempfile.TemporaryDirectory(prefix="tokenmerge-")
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder.name}  # read when gradio is imported
    import gradio as gr
    import uvicorn
    from fastapi import FastAPI

    page = build(open_studio(model, images, name, fit=fit, say=say))
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    app = gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None), page, "/", theme=theme, footer_links=[], ssr_mode=False,
        max_file_size=MAX_BYTES, run_history=False, show_error=False,
    )  # fmt: skip
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    config = uvicorn.Config(_Guarded(app), log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.05)
    return Served(host, listener.getsockname()[1], server, thread, folder)


class _Guarded:
    """Says to the browser, with every answer, that this page has no business with other hosts."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def guarded(event: Any) -> None:
            if event["type"] == "http.response.start":
                event["headers"] = [*event.get("headers", []), *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(event)

        await self.app(scope, receive, guarded)
