"""The page itself: one HTML file, the same for a report and for a live view."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import asdict
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from qurl.run.report.charts import CHARTS, PARTS
from qurl.run.report.verdict import LEVELS

SCRIPTS = ("uPlot.iife.min.js", "dom.js", "charts.js", "samples.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")


def render_page(title: str, data: dict[str, Any]) -> tuple[str, str]:
    """The HTML of the page, and the Content-Security-Policy that it states.

    Only our own scripts and styles run, named by their hashes. All text from runs is in one block
    of JSON, which the scripts show as text.
    """
    data = data | {"charts": [*map(asdict, CHARTS)], "parts": PARTS, "levels": LEVELS}
    scripts, styles = ([_read(name) for name in names] for names in (SCRIPTS, STYLES))
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, scripts))}",
            f"style-src {' '.join(map(_hash, styles))}",
            "connect-src 'self'" if data["live"] else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    environment = Environment(
        loader=PackageLoader("qurl.run.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("page.html")
    page = template.render(
        title=title, policy=policy, scripts=scripts, styles=styles, data=to_script(data)
    )
    return page, policy


def to_script(data: Any) -> str:
    """JSON in ASCII that cannot end the <script> element around it."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return resources.files("qurl.run.report").joinpath("assets", name).read_text("utf-8").strip()


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
