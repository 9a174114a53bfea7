"""Secrets: masked wherever they stand, named where they are found, and nothing else touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traceana.sources.secret_scan import find_secrets
from traceana.sources.secrets import MASK, allowed_env, find_in_text, is_secret_name, mask_text, mask_value

SECRET = "s3cr3t-V4lue"


@pytest.mark.parametrize(
    "name",
    [
        "api_key", "API-KEY", "admin_api_key", "HF_TOKEN", "token", "hubToken", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD",
        "ssl_keyfile_password", "MODAL_TASK_SECRET", "GITHUB_PAT", "Authorization", "private_key", "WANDB_KEY",
    ],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer_path", "max_total_num_tokens", "new_token", "bos_token", "ssl_keyfile", "PWD", "OLDPWD", "monkey",
        "skip_tokenizer_init", "kv_cache_dtype", "token_usage", "PATH", "key",
    ],
)  # fmt: skip
def test_names_that_are_none(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        f"serve --api-key {SECRET} --port 1",
        f"serve --admin-api-key={SECRET}",
        f"HF_TOKEN={SECRET} serve",
        f"x; export OPENAI_API_KEY='{SECRET}'",
        f'{{"api_key": "{SECRET}", "port": 1}}',
        f'{{"command": "{{\\"api_key\\": \\"{SECRET}\\"}}"}}',
        f"ServerArgs(api_key='{SECRET}', port=1)",
        f"A=1;WANDB_API_KEY={SECRET};B=2",
        f"https://user:{SECRET}@host/path",
        f"Authorization: Bearer {SECRET}",
        f"password: {SECRET}",
    ],
)
def test_masked_where_it_stands(text: str) -> None:
    masked = mask_text(text)
    assert SECRET not in masked
    assert MASK in masked
    assert mask_text(masked) == masked
    assert find_in_text(masked) == []


@pytest.mark.parametrize(
    "shape",
    [
        "hf_abcdefghijklmnopqrstuvwx", "sk-abcdefghijklmnopqrstuvwx", "ghp_abcdefghijklmnopqrstuvwxyzabcdefghij",
        "AKIAABCDEFGHIJKLMNOP", "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2",
    ],
)  # fmt: skip
def test_masked_by_shape(shape: str) -> None:
    assert mask_text(f"run --with {shape} now") == f"run --with {MASK} now"
    assert [s.name for s in find_in_text(shape)] == ["(unnamed)"]


@pytest.mark.parametrize(
    "text",
    [
        "Decode batch, #running-req: 8, #token: 4368, token usage: 0.01, gen throughput (token/s): 101.28",
        "api_key=None, admin_api_key: null, HF_TOKEN=''",
        "--api-key --port 30111",
        "--tokenizer-path /models/key --max-total-tokens 5",
        "Checkout 'https://huggingface.co//srv/model64/tree/main' for available files",
    ],
)
def test_left_alone(text: str) -> None:
    assert mask_text(text) == text


@given(st.text(alphabet="abc-_= :;\"'\\{}[],\n\tKEYtoken", max_size=80))
def test_masking_ends_and_is_stable(text: str) -> None:
    once = mask_text(text)
    assert mask_text(once) == once


@given(st.text(alphabet="ab -=,;\n", max_size=30), st.text(alphabet="ab ,;\n", max_size=30))
def test_planted_option_is_masked(before: str, after: str) -> None:
    assert SECRET not in mask_text(f"{before} --api-key {SECRET} {after}")
    assert SECRET not in mask_text(f'{before},"api_key": "{SECRET}",{after}')


def test_masked_inside_values() -> None:
    value = {"api_key": SECRET, "nested": [{"hf_token": SECRET}, f"--api-key {SECRET}"], "port": 5, "none": None}
    masked = mask_value("server", value)
    assert SECRET not in json.dumps(masked)
    assert masked == {"api_key": MASK, "nested": [{"hf_token": MASK}, f"--api-key {MASK}"], "port": 5, "none": None}


def test_environment_by_allow_list() -> None:
    env = {"SGLANG_X": "1", "NCCL_P2P_LEVEL": "NVL", "HOME": "/root", "MY_FLAG": "1", "SGLANG_API_KEY": SECRET}
    assert allowed_env(env) == {"NCCL_P2P_LEVEL": "NVL", "SGLANG_API_KEY": MASK, "SGLANG_X": "1"}


def test_folder_with_secrets(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "server.log").write_text(f"[2026-01-01 00:00:00] server_args=ServerArgs(api_key='{SECRET}')")
    (tmp_path / "env.json").write_text(json.dumps({"HF_TOKEN": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "A": "1"}))
    (tmp_path / "clean.json").write_text('{"api_key": null}')
    (tmp_path / "packed.gz").write_bytes(b"\x1f\x8b HF_TOKEN=" + SECRET.encode())
    (tmp_path / "report.nsys-rep").write_bytes(b"\0\1")
    (tmp_path / "link").symlink_to("/etc/passwd")
    rows = find_secrets(tmp_path)
    assert rows.select("name", "severity", "count", "detail").rows() == [
        ("secret_in_capture", "warning", 2, "env.json: AWS_SECRET_ACCESS_KEY, HF_TOKEN"),
        ("secret_unreadable", "info", 1, "report.nsys-rep may hold the environment of what was profiled"),
        ("secret_in_capture", "warning", 1, "server/server.log: api_key"),
    ]
    assert SECRET not in rows.write_csv()


def test_secret_across_two_pieces(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    path.write_text("x" * ((4 << 20) - 8) + f" HF_TOKEN={SECRET}\n")
    assert find_secrets(path).get_column("detail").to_list() == ["long.log: HF_TOKEN"]
