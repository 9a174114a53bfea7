"""What a server says of itself, and what is known of its version."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from fake_server import FakeServer, Traps

from traceana_capture.errors import CaptureError, Unreachable
from traceana_capture.facts import LocalServer, save_answers, save_model_config
from traceana_capture.http import HttpServer
from traceana_capture.lock import CaptureLock
from traceana_capture.processes import is_local
from traceana_capture.secrets import allowed_environment, mask_command, mask_text, mask_value
from traceana_capture.server import ServerInfo, discover, parse_ranks, vocabulary, wait_ready
from traceana_capture.settings import Settings
from traceana_capture.versions import known, parse


def info_of(**values: object) -> ServerInfo:
    with FakeServer() as fake:
        document = {**fake.server_info(), **values}
    import traceana_capture.server as server

    return server._from_document(document)


def test_layout_and_effective_cap() -> None:
    with FakeServer(pp_size=4, tp_size=2, max_running_requests=64) as fake:
        info = discover(HttpServer(fake.url))
    assert (info.pp_size, info.tp_size, info.slots, info.version) == (4, 2, 4, "0.5.16")
    assert (info.max_running_requests, info.micro_batch_cap, info.cap_source) == (64, 16, "internal_states")
    assert [(k.rank, k.pp, k.tp) for k in info.ranks][:3] == [(0, 0, 0), (1, 0, 1), (2, 1, 0)]


def test_depth_adds_slots_and_the_automatic_cap_ignores_it() -> None:
    info = info_of(pp_async_batch_depth=1, internal_states=[], max_running_requests=65)
    assert (info.slots, info.micro_batch_cap, info.cap_source) == (3, 32, "max_running_requests // pp_size")


def test_replicas_are_ranks_of_their_own_unless_attention_shares_them() -> None:
    replicas = info_of(dp_size=2, tp_size=2)
    assert [(k.rank, k.dp, k.pp, k.tp) for k in replicas.ranks][4:6] == [(4, 1, 0, 0), (5, 1, 0, 1)]
    assert len(info_of(dp_size=2, tp_size=2, enable_dp_attention=True).ranks) == 4


def test_older_and_other_servers() -> None:
    with FakeServer(legacy_info=True, version="0.4.6") as fake:
        assert discover(HttpServer(fake.url)).version == "0.4.6"
    with FakeServer(openai_only=True) as fake:
        info = discover(HttpServer(fake.url))
        assert (info.is_sglang, info.pp_size, len(info.ranks)) == (False, 1, 1)


def test_a_key_is_asked_for_and_sent() -> None:
    with FakeServer(api_key="k") as fake:
        with pytest.raises(CaptureError, match="wants a key") as raised:
            discover(HttpServer(fake.url))
        assert raised.value.hint == "set TRACEANA_API_KEY"
        assert discover(HttpServer(fake.url, api_key="k")).pp_size == 2


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://user:pass@h:1", "http://h:notaport"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(CaptureError) as raised:
        HttpServer(url)
    assert "pass@" not in str(raised.value)


def test_urls_are_normalised() -> None:
    assert HttpServer("127.0.0.1:30000").url == "http://127.0.0.1:30000"
    assert HttpServer("http://[::1]:30000/").url == "http://[::1]:30000"


@pytest.mark.parametrize(
    ("text", "ranks"),
    [(None, [0, 1, 2, 3]), ("all", [0, 1, 2, 3]), ("0-3", [0, 1, 2, 3]), ("3,0", [0, 3]), ("1-2,2", [1, 2])],
)
def test_ranks(text: str | None, ranks: list[int]) -> None:
    assert [k.rank for k in parse_ranks(text, info_of(pp_size=4))] == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-7", "the server has 4 ranks, not 4, 5, 6, 7"),
        ("x", "not a list"),
        ("3-1", "not a list"),
        ("", "not a list"),
        ("0-", "not a list"),
        ("0-99999999999", "not a list"),
    ],
)
def test_bad_ranks(text: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        parse_ranks(text, info_of(pp_size=4))


def test_waiting_for_a_server_ends_with_why() -> None:
    with FakeServer() as fake:
        wait_ready(HttpServer(fake.url), timeout_s=5, died=lambda: None)
        dead = HttpServer("http://127.0.0.1:9")
        with pytest.raises(CaptureError, match="python ended with exit status 1"):
            wait_ready(dead, timeout_s=5, died=lambda: "python ended with exit status 1")
        with pytest.raises(CaptureError, match="not ready after 0 s"):
            wait_ready(dead, timeout_s=0.1, died=lambda: None, pause=lambda s: None)
        with pytest.raises(Unreachable):
            discover(dead)


def test_vocabulary_comes_from_the_model_where_it_is_readable(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32768}))
    assert vocabulary(info_of(model_path=str(tmp_path))) == 32768
    assert vocabulary(info_of(model_path="/nowhere")) == 1000


def test_known_breakage_is_told_by_version() -> None:
    assert [k.name for k in known("torch", "2.11.0+cu130", pipeline=False)] == [
        "profiler_heap_corruption",
        "cupti_stays",
    ]
    assert [k.name for k in known("torch", "2.12.0", pipeline=True)] == ["cupti_stays"]
    assert known("torch", None, pipeline=True) == []
    names = {k.name for k in known("sglang", "0.5.16", pipeline=True)}
    assert {"stop_is_serial", "running_requests_are_per_slot", "device_timer_is_nan"} <= names
    assert known("sglang", "0.5.16", pipeline=False) == []
    assert parse("v0.5.16.post1") == (0, 5, 16) and parse("dev") == ()


def test_a_setting_is_applied_and_put_back(tmp_path: Path) -> None:
    with FakeServer() as fake, CaptureLock(fake.url, folder=tmp_path) as lock:
        server = HttpServer(fake.url)
        settings = Settings(server, discover(server), {"pp_max_micro_batch_size": 4}, lock)
        settings.apply()
        assert fake.cap == 4 and '"restore": {"pp_max_micro_batch_size": 8}' in next(tmp_path.iterdir()).read_text()
        settings.restore()
        assert fake.cap == 8 and settings.restored and "restore" not in next(tmp_path.iterdir()).read_text()
        assert settings.document() == {
            "set": {"pp_max_micro_batch_size": 4},
            "before": {"pp_max_micro_batch_size": 8},
            "restored": True,
        }


@pytest.mark.parametrize(
    ("traps", "wanted", "words"),
    [
        (Traps(), {"tp_size": 2}, "cannot be changed on a running server"),
        (Traps(), {"pp_max_micro_batch_size": 9}, "takes 1 to 8"),
        (Traps(), {"pp_max_micro_batch_size": "x"}, "takes 1 to 8"),
        (Traps(refuse_settings=True), {"pp_max_micro_batch_size": 4}, "the server refused"),
        (Traps(ignore_settings=True), {"pp_max_micro_batch_size": 4}, "the server still uses 8"),
    ],
)
def test_a_setting_that_does_not_take_is_an_error(
    tmp_path: Path, traps: Traps, wanted: dict[str, object], words: str
) -> None:
    with FakeServer(traps=traps) as fake, CaptureLock(fake.url, folder=tmp_path) as lock:
        server = HttpServer(fake.url)
        with pytest.raises(CaptureError, match=words):
            Settings(server, discover(server), wanted, lock).apply()


def test_secrets_are_masked_wherever_they_stand() -> None:
    secret = "sk-very-secret-0123456789abcdef"
    with FakeServer() as fake:
        masked = json.dumps(mask_value("", fake.server_info()))
    assert secret not in masked and '"max_running_requests": 16' in masked and '"api_key": "***"' in masked
    assert mask_command(["python", "--api-key", "abc", "--port", "3", "--hf-token=hf_x1"]) == [
        "python", "--api-key", "***", "--port", "3", "--hf-token=***",
    ]  # fmt: skip
    assert mask_text("server_args=ServerArgs(api_key='abc', tokenizer_path='/m', max_total_tokens=None)") == (
        "server_args=ServerArgs(api_key='***', tokenizer_path='/m', max_total_tokens=None)"
    )
    assert mask_text("GET http://u:hunter2@h/ Authorization: Bearer abcdefghij") == (
        "GET http://u:***@h/ Authorization: ***"
    ) or "hunter2" not in mask_text("GET http://u:hunter2@h/")
    assert (
        mask_text("#token: 9008, token usage: 0.01, num_new_token: 5")
        == "#token: 9008, token usage: 0.01, num_new_token: 5"
    )


def test_only_the_environment_that_explains_speed_is_kept() -> None:
    kept = allowed_environment(
        {"NCCL_DEBUG": "INFO", "HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "SGLANG_API_KEY": "secret"}
    )
    assert kept == {"NCCL_DEBUG": "INFO", "SGLANG_API_KEY": "***"}


@pytest.mark.parametrize("place", ["/{}/m", "here", "org/name"])
def test_the_models_config_is_kept_where_it_can_be_read(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = place.format(str(tmp_path).strip("/"))
    hub = tmp_path / "home" / ".cache" / "huggingface" / "hub" / "models--org--name" / "snapshots" / "abc"
    folder = {"here": tmp_path / "here", "org/name": hub}.get(place, tmp_path / "m")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"num_hidden_layers": 3, "api_key": "abcdefgh"}')
    local = LocalServer(os.getpid(), environment={"HOME": str(tmp_path / "home")})
    save_model_config(info_of(model_path=model), local, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"num_hidden_layers": 3, "api_key": "***"}


def test_no_config_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "out").mkdir()
    for local in (LocalServer(), LocalServer(os.getpid()), LocalServer(2**30)):
        save_model_config(info_of(model_path=str(tmp_path)), local, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_the_end_keeps_only_what_can_have_changed(tmp_path: Path) -> None:
    with FakeServer() as fake:
        save_answers(HttpServer(fake.url), tmp_path)
        save_answers(HttpServer(fake.url), tmp_path, "_end")
    names = {p.stem for p in tmp_path.iterdir()}
    assert names == {"server_info", "model_info", "loads", "server_info_end", "loads_end"}


def test_a_server_is_local_where_this_host_has_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"head": "127.0.0.1", "other": "192.0.2.1"}

    def lookup(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        if host not in names:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (names[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    assert [is_local(h) for h in ("127.0.0.1", "localhost", "head", "other", "nowhere")] == [True] * 3 + [False] * 2
