"""`tokenmerge web`."""

from __future__ import annotations

from typing import Annotated

import typer

from . import options


@options.command
def web(
    model: options.Model = "embedded",
    images: options.ImagesOption = "embedded",
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    fit: Annotated[
        bool, typer.Option("--calibrate", help="Calibrate configs for the budget control first; takes minutes.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Bind address. Non-loopback exposes the demo without authentication.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free port.")] = 7860,
) -> None:
    """A web demo: pick or upload an image, change the controls, look."""
    with options.errors():
        from ..web.app import serve

        network, data = options.load(model, images, weights, num_classes)
        if host not in ("127.0.0.1", "localhost", "::1"):
            warning = f"warning: everybody who reaches {host} can use this demo; there is no authentication"
            options.stderr.print(warning, style="yellow")
        with options.progress_bars() as progress:
            page = serve(network, data, model, host=host, port=port, fit=fit, progress=progress)
        print(f"http://{page.host}:{page.port}", flush=True)
        page.wait()
