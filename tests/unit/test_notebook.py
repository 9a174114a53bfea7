"""`traceana.load`, and the page that documents it."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest
from captures import real

import traceana
from traceana.errors import TraceanaError
from traceana.notebook import LoadedCapture

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "notebook.md"


def loaded() -> LoadedCapture:
    capture = traceana.load(real("demo"), cache=False)
    assert isinstance(capture, LoadedCapture)
    return capture


def test_frames_say_what_the_document_says() -> None:
    capture = loaded()
    stages = capture.stages
    assert stages.height == len(capture.document["stages"]) == 2
    whole = stages.select(pl.col("busy_ns") + pl.col("transfer_ns") + pl.col("bubble_ns")).to_series()
    assert whole.to_list() == stages["window_ns"].to_list()
    causes = stages.select("causes_ns").unnest("causes_ns").sum_horizontal()
    assert causes.to_list() == stages["bubble_ns"].to_list()
    assert capture.findings["id"].to_list() == [f["id"] for f in capture.document["findings"]]
    assert set(capture.ranks) == {0, 1} and capture.ranks[0].device.height > 0
    assert "attribution" in capture.tables and capture.losses.columns[0] == "name"


def test_import_stays_cheap_and_other_names_are_errors() -> None:
    code = "import sys, traceana; sys.exit('polars' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="nothing"):
        _ = traceana.nothing


def test_bad_input_is_a_traceana_error(tmp_path: Path) -> None:
    with pytest.raises(TraceanaError):
        traceana.load(tmp_path)
    with pytest.raises(TraceanaError, match="not a window"):
        traceana.load(real("demo"), window="12")


def test_hta_gets_each_file_under_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = loaded()
    asked: dict[str, object] = {}
    module = ModuleType("hta.trace_analysis")
    module.TraceAnalysis = lambda **kw: asked.update(kw)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hta", ModuleType("hta"))
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", module)
    capture.to_hta()
    files = asked["trace_files"]
    assert isinstance(files, dict)
    assert {rank: Path(f) for rank, f in files.items()} == {r: t.info.file for r, t in capture.ranks.items()}


def test_hta_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = loaded()
    monkeypatch.setitem(sys.modules, "hta", None)
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    with pytest.raises(TraceanaError) as caught:
        capture.to_hta()
    assert caught.value.hint is not None and "traceana[hta]" in caught.value.hint


def test_page_shows_what_its_code_prints() -> None:
    """Every python block runs in order; the text block after it is what it prints."""
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    shown = 0
    for (kind, code), after in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind != "python":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out), pl.Config(tbl_formatting="ASCII_MARKDOWN", tbl_hide_dataframe_shape=True):
            exec(code, names)
        if after[0] == "text":
            assert out.getvalue() == after[1]
            shown += 1
    assert shown >= 3
