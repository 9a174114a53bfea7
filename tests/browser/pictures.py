"""Takes the pictures of the documentation: `python tests/browser/pictures.py CAPTURE`, from the project's root.

Writes docs/images/report-{light,dark}.png: the timeline of the capture's report with its worst gap chosen.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from browser.chromium import Browser

from traceana.outputs.html import write_html
from traceana.pipeline import analyse

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"


def main(capture: Path) -> None:
    """Both pictures from the capture at `capture`."""
    report = analyse(capture)
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        page_file = Path(folder) / "report.html"
        write_html(page_file, report.document, report.tables)
        for name, dark in (("light", False), ("dark", True)):
            page = browser.open(page_file, width=1280, height=1000, dark=dark)
            # The bar at the top would lie over what is photographed.
            page.run("document.querySelector('.bar-top').style.position = 'static'")
            page.run("document.querySelector('#gaps button').click(); document.activeElement.blur()")
            page.frame()
            page.picture(IMAGES / f"report-{name}.png", "#timeline-section")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
