"""A capture's own manifest: which ranks it lists, and what of it is doubtful."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import cast

from traceana.sources.folder import Listing
from traceana.sources.losses import Loss, loss
from traceana.tables.identity import listed_ranks

__all__ = ["read_listed"]

MANIFEST = "manifest.json"
VERSION = 1
_LISTED = 8


def read_listed(listing: Listing) -> tuple[Mapping[str, object] | None, list[Loss]]:
    """The manifest of the folder, None where it has none or a broken one, and the losses: broken, of another version,
    or listing traces that the folder lacks. Its paths are never followed: only their last part counts."""
    path = next((p for p in listing.beside if p.name == MANIFEST and p.parent == listing.root), None)
    if path is None:
        return None, []
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return None, [loss("manifest_broken", "warning", 1, f"{path.name} is not valid JSON ({why!s:.80})")]
    if not isinstance(found, dict):
        return None, [loss("manifest_broken", "warning", 1, f"{path.name} is no JSON object")]
    manifest = cast("Mapping[str, object]", found)
    losses: list[Loss] = []
    if (version := manifest.get("schema_version")) != VERSION:
        detail = f"{path.name} has schema_version {version!r:.40}; {VERSION} is known"
        losses.append(loss("manifest_version_unknown", "warning", 1, detail))
    there = {p.name for p in (*listing.traces, *listing.beside)}
    absent = [name for name in listed_ranks(manifest) if name not in there]
    if absent:
        detail = f"the manifest lists traces that are not here: {', '.join(n[:80] for n in absent[:_LISTED])}"
        losses.append(loss("listed_trace_missing", "warning", len(absent), detail))
    return manifest, losses
