"""`lightning-swarm http` refuses wrong options before it connects to anything."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_swarm import cli
from lightning_swarm.serving import http_server

HERE = "203.0.113.7:31337/12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"
KEY = "k" * 32


def http(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-swarm", "http", *arguments])
    return cli.main()


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("poems", "laws"):
        Path(name).mkdir()
        Path(name, "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    Path("empty").mkdir()
    Path("short").write_text("k" * 15)
    Path("twice").write_text(f"{KEY}\n\n{KEY}\n")
    Path("none").write_text("\n")
    Path("keys").write_text(f"{KEY}\n{'l' * 32}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([HERE, "--adapter", "poems"], "`--adapter` must have the form NAME=FOLDER, got 'poems'"),
        ([HERE, "--adapter", "a=empty"], "got 'empty' without adapter_config.json"),
        ([HERE, "--adapter", "a=poems", "--adapter", "a=laws"], "a name of its own, got 'a' twice"),
        ([f"a={HERE}", "--adapter", "a=poems"], "a name of its own, got 'a' twice"),
        ([f"a={HERE}", f"a={HERE}"], "a name of its own, got 'a' twice"),
        ([HERE, "--adapter", "<b>=poems"], "must have up to 128 letters"),
        ([HERE, "--adapter", f"{'a' * 5000}=poems"], "must have up to 128 letters"),
        ([f"a\nb={HERE}"], "must have up to 128 letters"),
        ([HERE, HERE, "--adapter", "a=poems"], "`--adapter` is for one model, got 2 models"),
        ([HERE, "--max-texts", "0"], "`--max-texts` must be 1 to 10000, got 0"),
        ([HERE, "--max-waiting", "-1"], "`--max-waiting` must be 0 to 10000, got -1"),
        ([HERE, "--max-wait", "nan"], "`--max-wait` must be 0.1 to 10000, got nan"),
        ([HERE, "--host", "0.0.0.0"], "must have an API key"),
        ([HERE, "--api-key", "short"], "unlike key 1 in 'short'"),
        ([HERE, "--api-key", "twice"], "different keys, one a line, got 2 keys in 'twice', of which 1 differ"),
        ([HERE, "--api-key", "none"], "got 0 keys in 'none'"),
    ],
)
def test_wrong_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert http(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Importing" not in error
    assert KEY not in error
    assert len(error) < 1000


def test_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    swarm = SimpleNamespace(
        tokenizer=lambda: "tokenizer", with_lora=lambda folder: adapted, close=lambda: closed.append("closed")
    )
    base = SimpleNamespace(swarm=swarm, config=SimpleNamespace(model_type="llama"))
    adapted = SimpleNamespace(swarm=swarm)
    monkeypatch.setattr("lightning_swarm.serving.remote_model.remote_model", lambda *_, **__: base)
    ran: list[Any] = []
    monkeypatch.setattr(http_server, "run", lambda served, **options: ran.append((served, options)))
    given = ["--adapter", "poems=poems", "--api-key", "keys", "--max-texts", "3", "--max-wait", "2.5"]
    assert http(monkeypatch, HERE, *given) == 0
    ((served, options),) = ran
    assert [(one.name, one.parent, one.tokenizer) for one in served] == [
        ("llama", None, "tokenizer"),
        ("poems", "llama", "tokenizer"),
    ]
    assert [one.model for one in served] == [base, adapted]
    limits = options["limits"]
    assert (limits.texts, limits.waiting, limits.wait_s) == (3, 256, 2.5)
    assert options["keys"] == [KEY, "l" * 32]
    assert closed
    assert http(monkeypatch, HERE, "--adapter", "llama=poems") == 2  # the model's default name
    assert len(ran) == 1
