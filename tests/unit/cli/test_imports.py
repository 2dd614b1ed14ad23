"""The command line answers immediately: only commands that compute import torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import lightning_swarm

ID = "12D3KooWBTrNL8qKG3SxDRQNAcaUb5nNNixuFBXcKeMfexuaGUUR"
SLOW = {"hivemind", "lightning", "numpy", "pytorch_lightning", "scipy", "torch", "torchmetrics", "transformers"}
VERBS = (
    "doctor",
    "status",
    "dashboard",
    "invite",
    "members",
    "ban",
    "unban",
    "plan",
    "export",
    "generate",
    "http",
    "simulate",
    "completion",
)
PLACE = f"203.0.113.7:31337/{ID}"
CALLS = [
    ([], 0),
    (["--help"], 0),
    (["--version"], 0),
    *(([verb, "--help"], 0) for verb in (*VERBS, "join", "serve")),
    (["serve", "--weights=.", "--help"], 0),
    (["completion", "bash"], 0),
    (["completion", "zsh"], 0),
    (["completion", "tcsh"], 2),
    (["nonsense"], 2),
    (["stat"], 2),  # abbreviations are refused
    (["status"], 2),
    (["ban", PLACE], 2),
    (["join", "here", "train.py"], 2),
    (["invite", "--uses", "0"], 2),
    (["invite", "--out", "one.invite"], 0),
    (["join", PLACE, "leaves.py"], 3),
]
PROGRAM = """
import json, sys
from lightning_swarm import cli

found = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        status = cli.main()
    except SystemExit as error:
        status = error.code or 0
    found.append([status, [name for name in sys.modules if "." not in name]])
print()
print(json.dumps(found))
"""


def test_help_invitations_and_mistakes_import_nothing_slow(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)")  # exits before it imports a package
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([words for words, _ in CALLS])],
        capture_output=True,
        text=True,
        timeout=200.0,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(lightning_swarm.__file__).parents[1]), "XDG_CONFIG_HOME": str(tmp_path)},
    )
    for (words, expected), (status, modules) in zip(CALLS, json.loads(run.stdout.splitlines()[-1]), strict=True):
        assert status == expected, words
        assert "msgspec" in modules  # shows that this is a list of modules
        assert not SLOW & set(modules), words
    assert run.stderr.splitlines()[-1] == "Importing torch, Lightning and leaves.py."
    assert (tmp_path / "one.invite").read_text().startswith("swarm-invite")
