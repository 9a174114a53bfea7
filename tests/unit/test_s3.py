"""A capture, and the cache, in a bucket of a local S3 server. Wants moto[server] and s3fs, and is skipped without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from traceana.demo_capture import demo_folder
from traceana.errors import SourceError
from traceana.outputs.jsonfile import to_json
from traceana.pipeline import Options, analyse
from traceana.tables.memory import Memory
from traceana.tables.read import read_capture

server: Any = pytest.importorskip("moto.server")
s3fs: Any = pytest.importorskip("s3fs")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    local = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    local.start()
    host, port = local.get_host_and_port()
    for name, value in (("ACCESS_KEY_ID", "a"), ("SECRET_ACCESS_KEY", "b"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("TRACEANA_CACHE_DIR", "s3://bucket/cache")
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    files.put(str(demo_folder()), "bucket/capture", recursive=True)
    yield files
    files.rm("bucket", recursive=True)  # the next server of this process would find it
    local.stop()


def test_a_bucket_holds_the_capture_and_the_cache(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = to_json(analyse(demo_folder(), Options(cache=False)).document)
    assert to_json(analyse("s3://bucket/capture").document) == expected
    assert len([name for name in bucket.find("bucket/cache") if name.endswith("/claim.json")]) == 2
    monkeypatch.setattr("traceana.tables.read.read_kineto", None)  # a parse would fail
    assert to_json(analyse("s3://bucket/capture").document) == expected


def test_a_run_without_cache_leaves_nothing_in_the_bucket(bucket: Any) -> None:
    capture = read_capture("s3://bucket/capture", cache=False, memory=Memory(0))
    assert capture.ranks[0].device.height > 0
    assert bucket.find("bucket/cache", refresh=True)
    del capture
    assert bucket.find("bucket/cache", refresh=True) == []


@pytest.mark.parametrize("url", ["s3://bucket/nothing", "s3://none/capture"])
def test_what_is_not_there_is_said(bucket: Any, url: str) -> None:
    with pytest.raises(SourceError, match="no file here"):
        analyse(url)
