"""The web demo. It serves loopback only unless told otherwise, requests nothing from other servers, and keeps no upload."""

from __future__ import annotations

import html
import os
import signal
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..data.images import Images
from ..methods.no_merge import BASELINE
from ..utils.optional import require_package
from ..utils.progress import Progress, no_progress
from .session import MAX_BYTES, BadUpload, Controls, DemoSession, MethodView, open_session

HEADERS = {
    "content-security-policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; frame-ancestors 'self'",
    "referrer-policy": "no-referrer",
}


# The results are plain HTML: no script, nothing from elsewhere.


def tokens_html(views: dict[str, MethodView]) -> str:
    """One bar per layer, one row per method."""
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


def predictions_html(views: dict[str, MethodView]) -> str:
    columns = []
    for name, view in views.items():
        lines = "".join(f"<li>{html.escape(what)} {probability:.1%}</li>" for what, probability in view.top)
        columns.append(f"<td style='padding-right:2em;vertical-align:top'><b>{html.escape(name)}</b><ol>{lines}</ol></td>")
    return f'<table class="predictions"><tr>{"".join(columns)}</tr></table>'


def figures_html(views: dict[str, MethodView]) -> str:
    head = "<tr><th></th><th>GMACs</th><th>of baseline</th><th>distance</th><th>ms</th></tr>"
    rows = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th><td>{view.gmacs:.3f}</td><td>{view.ratio:.1%}</td>"
        f"<td>{view.distance:.5f}</td><td>{view.milliseconds:.0f}</td></tr>"
        for name, view in views.items()
    )
    configs = "".join(f"<div><code>{html.escape(repr(view.method))}</code></div>" for view in list(views.values())[1:])
    return f'<table class="figures" style="border-spacing:1em 0">{head}{rows}</table>{configs}'


class Demo:
    """The page as Gradio blocks: controls, outputs, and the events between them."""

    def __init__(self, session: DemoSession) -> None:
        import gradio as gr

        self.session = session
        samples = [session.picture(x) for x in session.samples.images]
        with gr.Blocks(title="tokenmerge", analytics_enabled=False, delete_cache=(300, 300)) as self.blocks:
            gr.Markdown(
                f"# tokenmerge\nMerge the tokens of **{session.name}**: pick or upload an image, and change the controls."
            )
            self.chosen = gr.State(session.samples.images[0].numpy())
            self.number = gr.Number(visible=False)  # of the sample that was picked
            self.message = gr.Markdown(elem_id="message")
            with gr.Row():
                with gr.Column(scale=1):
                    self.gallery = gr.Gallery(
                        samples, label="images", columns=4, height=240, allow_preview=False, buttons=[], elem_id="gallery"
                    )
                    self.upload = gr.File(label="or upload one (JPEG, PNG, WebP, BMP; 8 MiB)", elem_id="upload")
                    self.controls = self._controls(gr)
                with gr.Column(scale=2):
                    self.controls["layer"] = gr.Slider(
                        1, session.reference.depth, session.reference.depth, step=1, label="after layer", elem_id="layer"
                    )
                    self.outputs = self._outputs(gr)
            self._connect(gr)
        self.blocks.queue(default_concurrency_limit=2, max_size=64)

    def _controls(self, gr: Any) -> dict[str, Any]:
        names = self.session.names
        depth = self.session.reference.depth
        rule = "batch rule: per image, or the mean over it and seven samples"
        return {
            "method_a": gr.Dropdown(names, value=names[0], label="method A", elem_id="method-a"),
            "method_b": gr.Dropdown(names, value="ToMe", label="method B", elem_id="method-b"),
            "mode": gr.Radio(["budget", "parameters"], value="budget", label="ATM is set by", elem_id="mode"),
            "budget": gr.Slider(0.4, 1, 0.5, step=0.05, label="budget: GMACs of baseline", elem_id="budget"),
            "alpha": gr.Slider(0.8, 1, 0.98, step=0.005, label="α", elem_id="alpha"),
            "beta": gr.Slider(0, 0.1, 0.04, step=0.005, label="β", elem_id="beta"),
            "theta_min": gr.Slider(0.3, 1, 0.84, step=0.005, label="θ_min", elem_id="theta"),
            "split_layer": gr.Slider(0, depth, 3 * depth // 4, step=1, label="l_s, splitting layer", elem_id="split"),
            "rule": gr.Radio(["each", "mean"], value="each", label=rule, elem_id="rule"),
        }

    def _outputs(self, gr: Any) -> list[Any]:
        look: dict[str, Any] = {"type": "pil", "format": "png", "buttons": ["fullscreen"], "height": 340}
        with gr.Row():
            before = gr.ImageSlider(label="image | method A", elem_id="before-after", **look)
            after = gr.Image(label="method B", interactive=False, elem_id="map-b", **look)
        return [
            before,
            after,
            gr.HTML(elem_id="figures"),
            gr.HTML(elem_id="predictions"),
            gr.HTML(elem_id="tokens"),
        ]

    def _connect(self, gr: Any) -> None:
        inputs = [self.chosen, *self.controls.values()]

        def selected(event: gr.SelectData) -> int:
            return int(event.index)

        selected.__annotations__["event"] = gr.SelectData  # Gradio reads it; names inside a function cannot be resolved
        private: dict[str, Any] = {"api_visibility": "private"}  # the events with an api_name are for scripts
        show = {"fn": self.show, "inputs": inputs, "outputs": self.outputs}
        self.gallery.select(selected, None, self.number, **private)
        self.number.change(self.pick, self.number, [self.chosen, self.message], api_name="pick").then(**show, **private)
        self.upload.upload(self.take, [self.upload, self.chosen], [self.chosen, self.message], **private).then(
            **show, **private
        )
        for control in self.controls.values():
            event: Any = control.release if isinstance(control, gr.Slider) else control.change
            event(**show, trigger_mode="always_last", show_progress="hidden", **private)
        self.blocks.load(**show, api_name="show")

    def show(self, x: Any, *values: Any) -> tuple[Any, ...]:
        """Everything that the controls change."""
        given = dict(zip(self.controls, values, strict=True))
        common = Controls(
            method="",
            by_budget=given["mode"] == "budget",
            budget=given["budget"],
            alpha=given["alpha"],
            beta=given["beta"],
            theta_min=given["theta_min"],
            split_layer=int(given["split_layer"]),
            per_image=given["rule"] == "each",
        )
        names = (given["method_a"], given["method_b"])
        controls = [replace(common, method=name) for name in names]
        baseline, left, right = self.session.look(torch.from_numpy(x), controls, int(given["layer"]))
        views = {BASELINE: baseline, f"A: {names[0]}": left, f"B: {names[1]}": right}
        pictures = ((baseline.picture, left.picture), right.picture)
        return (*pictures, figures_html(views), predictions_html(views), tokens_html(views))

    def pick(self, number: float) -> tuple[Any, str]:
        """One of the samples."""
        images = self.session.samples.images
        return images[int(number) % len(images)].numpy(), ""

    def take(self, path: str | None, x: Any) -> tuple[Any, str]:
        """An uploaded file, or the image that was shown before and a message."""
        if path is None:
            return x, ""
        try:
            return self.session.read(path).numpy(), ""
        except BadUpload as error:
            return x, f"**{error}**"


@dataclass
class Served:
    """A running web demo."""

    host: str
    port: int
    _server: Any
    _thread: threading.Thread
    _folder: tempfile.TemporaryDirectory[str]

    def wait(self) -> None:
        """Until Ctrl-C or SIGTERM; then nothing is left behind."""
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
    progress: Progress = no_progress,
) -> Served:
    """Start the web demo, and return as soon as it answers. Port 0 takes a free one."""
    require_package("gradio", "web demos")
    folder = tempfile.TemporaryDirectory(prefix="tokenmerge-")
    os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder.name}  # read when gradio is imported
    import gradio as gr
    import uvicorn
    from fastapi import FastAPI

    demo = Demo(open_session(model, images, name, fit=fit, progress=progress))
    theme = gr.themes.Base(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    app = gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
        demo.blocks,
        "/",
        theme=theme,
        footer_links=[],
        ssr_mode=False,
        max_file_size=MAX_BYTES,
        run_history=False,
        show_error=False,
    )
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    server = uvicorn.Server(uvicorn.Config(_SecurityHeaders(app), log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.05)
    return Served(host, listener.getsockname()[1], server, thread, folder)


class _SecurityHeaders:
    """Adds headers to every response that keep the browser from contacting other servers."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def with_headers(event: Any) -> None:
            if event["type"] == "http.response.start":
                event["headers"] = [*event.get("headers", []), *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(event)

        await self.app(scope, receive, with_headers)
