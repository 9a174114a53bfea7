"""NVML samples as CSV: the header says which column is what, and in which unit."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import polars as pl

from traceana import schema
from traceana.sources.losses import Loss, loss
from traceana.sources.sidecar import SECOND, Sidecar

__all__ = ["read_gpu_samples"]

# Column of GPU_SAMPLES -> (pattern over a header's name, factor to the schema's unit). Names as nvidia-smi, NVML
# scripts and `traceana capture` write them, lower case, blanks removed. First match wins.
_COLUMNS: dict[str, tuple[tuple[str, float], ...]] = {
    "gpu": ((r"gpu|index|gpu_?index|gpu_id|device", 1),),
    "power_w": (
        (r"power(_draw|_usage)?_mw", 1e-3),
        (r"power(_draw|_usage)?_w|power\.draw(\.instant|\.average)?(\[w\])?", 1),
    ),
    "power_limit_w": (
        (r"(enforced_)?power_(limit|cap)_mw", 1e-3),
        (r"(enforced_)?power_(limit|cap)_w|(enforced\.)?power\.limit(\[w\])?", 1),
    ),
    "utilisation": (
        (r"utili[sz]ation(_ratio)?", 1),
        (r"util(_gpu|_pct|_percent)?|gpu_util(_pct|_percent)?|utili[sz]ation(_gpu|_pct|_percent|\.gpu)(\[%\])?", 1e-2),
    ),
    "sm_clock_mhz": ((r"sm(_clock)?_mhz|clock_sm_mhz|clocks(\.current)?\.sm(\[mhz\])?", 1),),
    "memory_bytes": (
        (r"mem(ory)?_used_b(ytes)?|mem(ory)?_bytes|memory_used", 1),
        (r"mem(ory)?_used_mi?b|memory\.used(\[mib\])?", 1 << 20),
    ),
    "temperature_c": ((r"temp(erature)?(_c|\.gpu)?", 1),),
}
# What a GPU can show, in the schema's units: beyond it a value is a broken one.
_POSSIBLE = {
    "power_w": (0, 1e5), "power_limit_w": (0, 1e5), "utilisation": (0, 1), "sm_clock_mhz": (0, 1e5),
    "memory_bytes": (0, 1 << 50), "temperature_c": (-273, 1e4),
}  # fmt: skip
_YEAR = r"^2[01]\d\d"  # the years that nanoseconds in 64 bits can hold
_TIMES = (
    (r"(epoch|ts|time|timestamp)_ns", 1),
    (r"(epoch|ts|time|timestamp)_us", 10**3),
    (r"(epoch|ts|time|timestamp)_ms", 10**6),
    (r"(epoch|ts|time|timestamp)_s", SECOND),
    (r"(epoch|ts|time|timestamp)", 0),  # the size of the numbers tells
)


def read_gpu_samples(sidecar: Sidecar) -> tuple[pl.DataFrame, list[Loss]]:
    """A GPU_SAMPLES frame (rank null) sorted by time then GPU, and the rows that were left out."""
    name = sidecar.path.name
    try:
        raw = pl.read_csv(
            io.BytesIO(sidecar.text.strip().encode()), infer_schema=False, truncate_ragged_lines=True, quote_char=None
        )
    except pl.exceptions.PolarsError as error:
        return schema.GPU_SAMPLES.empty(), [loss("file_damaged", "warning", 1, f"{name}: {error}"[:300])]
    headers = {re.sub(r"\s+", "", c).lower(): c for c in raw.columns}
    time = _time(headers, raw)
    picked = {column: _pick(headers, patterns) for column, patterns in _COLUMNS.items()}
    if time is None or picked["gpu"] is None:
        return schema.GPU_SAMPLES.empty(), [
            loss("gpu_samples_unusable", "warning", raw.height, f"{name}: the header names no time or no GPU")
        ]
    columns = (_possible(column, _number(raw, hit)).alias(column) for column, hit in picked.items() if hit)
    frame = pl.DataFrame([time, *columns])
    good = frame.drop_nulls(["ts_ns", "gpu"]).with_columns(pl.col("gpu").cast(pl.Int32(), strict=False))
    good = good.drop_nulls("gpu").unique(["ts_ns", "gpu"], keep="first", maintain_order=True)
    if "memory_bytes" in good.columns:
        good = good.with_columns(pl.col("memory_bytes").round().cast(pl.Int64(), strict=False))
    losses: list[Loss] = []
    if raw.height > good.height:
        lost = raw.height - good.height
        losses.append(loss("gpu_sample_malformed", "warning", lost, f"{name}: rows without a time or a GPU, or twice"))
    malformed = sum(
        int(raw.get_column(hit[0]).str.contains(r"\d").sum() or 0) - raw.height + frame.get_column(column).null_count()
        for column, hit in picked.items()
        if hit and column != "gpu"
    )
    if malformed > 0:
        losses.append(
            loss("gpu_value_malformed", "warning", malformed, f"{name}: values that are no numbers, or impossible")
        )
    if good.height and (
        picked["power_limit_w"] is None or good.get_column("power_limit_w").null_count() == good.height
    ):
        losses.append(loss("gpu_power_limit_not_recorded", "info", 1, f"{name} has no power limit"))
    return schema.GPU_SAMPLES.frame(good).sort("ts_ns", "gpu", maintain_order=True), losses


def _pick(headers: Mapping[str, str], patterns: tuple[tuple[str, float], ...]) -> tuple[str, float] | None:
    for pattern, factor in patterns:
        for bare, header in headers.items():
            if re.fullmatch(pattern, bare):
                return header, factor
    return None


def _number(raw: pl.DataFrame, hit: tuple[str, float]) -> pl.Series:
    """The column as a number in the schema's unit; `79.15 W` and `0 %` lose their unit, `[N/A]` becomes null."""
    header, factor = hit
    text = raw.get_column(header)
    number = text.cast(pl.Float64(), strict=False)
    if number.null_count() > text.null_count():  # a plain cast is much faster, and enough for most files
        text = text.str.strip_chars().str.extract(r"^([-+]?[\d.]+(?:[eE][-+]?\d+)?)(?:\s*(?:W|%|MHz|MiB))?$")
        number = text.cast(pl.Float64(), strict=False)
    number = number.set(number.is_infinite() | number.is_nan(), None)
    return number * factor if factor >= 1 else number / (1 / factor)


def _possible(column: str, values: pl.Series) -> pl.Series:
    low, high = _POSSIBLE.get(column, (-1, 2**31))
    return values.set(~values.is_between(low, high), None)


def _time(headers: Mapping[str, str], raw: pl.DataFrame) -> pl.Series | None:
    """The first column that is a time, as epoch nanoseconds, exact to the last digit."""
    for pattern, unit in _TIMES:
        for bare, header in headers.items():
            if re.fullmatch(pattern, bare):
                return _nanoseconds(raw.get_column(header), unit).alias("ts_ns")
    return None


def _nanoseconds(text: pl.Series, unit: int) -> pl.Series:
    text = text.str.strip_chars()
    whole = text.str.extract(r"^(\d+)(?:\.\d*)?$").cast(pl.Int64(), strict=False)
    if unit == 0:  # now is about 1.8e9 s after the epoch: each step of a thousand is another unit
        largest = whole.max()
        size = len(str(largest)) if isinstance(largest, int) else 0
        unit = SECOND if size < 12 else 10**6 if size < 15 else 10**3 if size < 18 else 1
    whole = whole.set(whole > (2**63 - 1) // unit - 1, None)
    digits = len(str(unit)) - 1  # of the fraction that nanoseconds can hold
    part = text.str.extract(r"^\d+\.(\d*)$").fill_null("").str.pad_end(digits, "0").str.head(digits)
    number = whole * unit + part.cast(pl.Int64(), strict=False).fill_null(0)
    # nvidia-smi prints local time without a zone; it is read as UTC, like the server's log.
    for form in ("%Y/%m/%d %H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M:%S%.f"):
        if number.null_count() > text.null_count():
            printed = (
                text.set(~text.str.contains(_YEAR), None)
                .str.to_datetime(form, strict=False, time_unit="ns")
                .dt.epoch("ns")
            )
            number = number.fill_null(printed)
    return number
