"""A self-contained HTML file: pictures are embedded, nothing is fetched."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
body { color: #1a1a1a; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem }
table { border-collapse: collapse; margin: 1rem 0 }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left } img { max-width: 100%; height: auto }
pre { background: #f5f5f5; padding: .75rem; overflow-x: auto }
.claim { font-size: 1.2rem; font-weight: 600 } .dim { color: #555 }
"""


class HtmlReport:
    """Built from top to bottom; `str` is the whole file."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts = [f"<h1>{html.escape(title)}</h1>"]

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str, kind: str = "") -> None:
        self.parts.append(f'<p class="{kind}">{html.escape(text)}</p>')

    def code(self, text: str) -> None:
        self.parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(line(row, "td") for row in rows)
        self.parts.append(f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>")

    def figure(self, figure: Any, alt: str) -> None:
        """Add a matplotlib figure, and close it."""
        from matplotlib import pyplot as plt

        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=120)
        plt.close(figure)
        self.image(data.getvalue(), alt)

    def image(self, png: bytes, alt: str) -> None:
        picture = base64.b64encode(png).decode()
        self.parts.append(f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{picture}">')

    def __str__(self) -> str:
        head = f'<meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{STYLE}</style>'
        return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(self.parts)}</body></html>\n'
