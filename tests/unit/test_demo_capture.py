"""The bundled capture: what `traceana capture` left, unedited, and what its report must say."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, cast

from captures import report_of

from traceana.demo_capture import demo_folder
from traceana.outputs.terminal import render_terminal

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_it_is_the_fixture_as_it_was_written() -> None:
    folder = FIXTURES / "traces" / "pp2-cap8"
    assert folder.resolve() == demo_folder()
    told = re.findall(r"^\| `(\S+)` \| ([0-9a-f]{64}) \|$", (FIXTURES / "README.md").read_text(), flags=re.MULTILINE)
    assert len(told) == 5
    for name, digest in told:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["kind"], manifest["status"]) == ("traceana-capture", "complete")
    for row in manifest["ranks"]:
        assert (folder / row["file"]).stat().st_size == row["bytes"]
    assert sum(p.stat().st_size for p in folder.rglob("*")) < 3_000_000


def test_its_report_names_the_cap_and_loses_nothing() -> None:
    document = cast("dict[str, Any]", report_of(demo_folder()).document)
    assert {loss["severity"] for loss in document["losses"]} == {"info"}
    assert not {"file_not_recognised", "secret_in_capture"} & {loss["name"] for loss in document["losses"]}
    assert (document["server"]["micro_batch_cap"], document["server"]["queue"]["p50"]) == (8, 16)
    first = document["findings"][0]
    assert first["id"] == "micro_batch_cap"
    assert first["action"] == "--max-running-requests 32 --pp-max-micro-batch-size 16"
    said = " ".join(render_terminal(document, width=80, color=False).split())
    assert "16 more requests wait because each slot is at its cap of 8 (auto: max_running_requests // pp_size)" in said
    assert "The micro-batch cap holds back 16 waiting requests: 8 and 8 run in 2 slots" in said
    # Pure decode by the server's own log, within 6 % of the same configuration's other capture (984).
    assert abs(document["server"]["throughput"]["decode"] - 984) < 0.06 * 984
