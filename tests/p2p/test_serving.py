"""A finished model served by real processes: texts, a death during one, OpenAI's client, and a graceful leave."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_swarm import AttachStrategy, remote_model
from lightning_swarm.serving.tuning_client import Chain
from tests.p2p.processes import COMMAND, Run, free_port
from tests.p2p.warm import PATIENCE_S, SERVING, WarmRun
from tests.parity import test_attach as tuning
from tests.parity.test_adapted_texts import plain, save_adapter
from tests.served import calling, make_model

# Cold starts of peers in this file: none; all are forked from a process that has imported everything.
pytestmark = pytest.mark.thorough

PROMPT = "a b c"
WORDS = ["[PAD]", "[BOS]", *"abcdefghijklmnopqrstuvwxyz", "."]
CHAT = "{% for one in messages %}{{ one['content'] }} {% endfor %}"
NUM_NEW = 24
TEXTS = 64 << 20  # bytes


def save(folder: Path) -> Any:
    """Save a small model with a tokenizer whose tokens are letters; return the model."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    model = make_model("llama")
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="."))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", bos_token="[BOS]", unk_token=".")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return model


class Servers:
    """Processes that serve one folder. All but the first have room for about half of the blocks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, Run] = {}
        self.names: dict[str, str] = {}  # peer id -> name
        self.address = ""
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        self.half = ("--memory", size // 2 + TEXTS, "--texts", TEXTS)

    def start(self, name: str, *options: object) -> Run:
        join = ("--join", self.address) if self.address else ("--stages", 4)
        run = self.command(name, "serve", *join, *options)
        line = run.wait_for("Others can join")
        self.address = self.address or line.split()[-1]
        self.names[line.split()[-1].rpartition("/")[2]] = name
        return run

    def command(self, name: str, *arguments: object) -> Run:
        """Run a command."""
        run = self.runs[name] = WarmRun(*arguments, program=COMMAND, modules=SERVING)
        return run

    def end(self) -> None:
        for run in self.runs.values():
            run.end()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


@pytest.fixture
def servers(folder: Path) -> Iterator[Servers]:
    folder.mkdir()
    save(folder)
    made = Servers(folder)
    yield made
    made.end()


def read(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60.0) as answer:
        return json.loads(answer.read())


def until_ill(base: str) -> None:
    """Poll the health endpoint until it returns an error."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        read(f"{base}/health")
        threading.Event().wait(1.0)


def test_a_model_is_served_by_processes_of_which_one_is_killed(servers: Servers) -> None:
    model = make_model("llama")
    servers.start("a", "--weights", servers.folder)
    servers.start("b", "--weights", servers.folder, *servers.half)
    servers.start("c", *servers.half)
    remote = remote_model(servers.address)
    try:
        given = remote.swarm.tokenizer()(PROMPT, return_tensors="pt")
        options = {**given, "max_new_tokens": NUM_NEW, "do_sample": False}
        expected = model.generate(**options)
        assert torch.equal(remote.generate(**options), expected)

        def kill() -> None:
            os.kill(servers.runs["a"].process.pid, signal.SIGKILL)

        moments: list[float] = []

        class Noting:
            def put(self, value: Any) -> None:
                moments.append(time.perf_counter())

            def end(self) -> None:
                pass

        found = remote.generate(**options, stopping_criteria=[calling(kill, at=8)], streamer=Noting())
        assert servers.runs["a"].wait() == -signal.SIGKILL
        assert torch.equal(found, expected)
        stall_s = max(later - earlier for earlier, later in itertools.pairwise(moments))
        print(f"the longest wait for a token: {stall_s:.2f} s")
    finally:
        remote.swarm.close()
    left = servers.runs["b"]
    left.process.send_signal(signal.SIGTERM)
    assert left.wait() == 0, "".join(left.output)


def test_printed_lines_work_as_they_stand(servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three users: the model's owner, a server without files that joins by a printed line, and a client."""

    def run_as(user: str, words: list[str]) -> Run:
        home = tmp_path / user
        home.mkdir(exist_ok=True)
        monkeypatch.chdir(home)
        run = servers.runs[f"{user} {words[0]}"] = WarmRun(
            *words, program=COMMAND, modules=SERVING, environment={"XDG_CONFIG_HOME": str(home)}
        )
        return run

    def printed(line: str) -> list[str]:
        return shlex.split(line.partition(": lightning-swarm ")[2])

    size = sum(file.stat().st_size for file in servers.folder.glob("*.safetensors"))
    small = ["--memory", str(size // 2 + TEXTS), "--texts", str(TEXTS), "--trust", "invited", "--stay"]
    owner = run_as("owner", ["serve", "--weights", str(servers.folder), *small])
    assert "are missing" in owner.wait_for("The model needs")
    joining, writing = printed(owner.wait_for("Others can join")), printed(owner.wait_for("To write a text"))
    address, secret = joining[-1], writing[writing.index("--invite") + 1]
    joined = run_as("server", joining)
    assert "of memory, of which" in joined.wait_for("Taking ")
    assert "each stage has a server" in joined.wait_for("The model needs")
    other = joined.wait_for("Others can join here, too, by invitations").split()[-1]
    assert "each stage has a server" in owner.wait_for("came with stages")
    client = run_as("client", [*writing[:-1], PROMPT])
    assert client.wait() == 0, "".join(client.output)
    assert "tokens, " in "".join(client.output)
    for user, words in (("owner", ["status", address]), ("client", ["status", other, "--invite", secret])):
        shown = run_as(user, words)
        assert shown.wait() == 0, "".join(shown.output)
        table = "".join(shown.output)
        assert f"{other[-6:]}  127.0.0.1:" in table
        assert f"{address[-6:]}  127.0.0.1:" in table
        assert "has the files" in table
    stranger = run_as("stranger", ["status", address])
    assert stranger.wait() == 1
    assert "answers only peers with a certificate" in "".join(stranger.output)


def test_texts_of_many_at_once_and_texts_that_nobody_closes(servers: Servers) -> None:
    """Eight texts are written at once. Then eighty stay open, whose memory stays within the server's limit."""
    model = make_model("llama")
    server = servers.start("a", "--weights", servers.folder, "--memory", 2 * TEXTS, "--texts", TEXTS)
    remote = remote_model(servers.address)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    try:
        prompts = [torch.randint(1, 29, (1, 3 + number)) for number in range(8)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: remote.generate(prompt, **options), prompts))
        for prompt, text in zip(prompts, found, strict=True):
            assert torch.equal(text, model.generate(prompt, **options))

        left, rows = [], torch.randint(1, 29, (128, 30))
        taken = []
        for _ in range(80):
            text = remote.generate(rows, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
            left.append(text)
            taken.append(memory_bytes(server.process.pid))
        kept = sum(one.nbytes for layer in cache_of(model, rows).layers for one in (layer.keys, layer.values))
        assert 80 * kept > 2 * TEXTS  # most of them have been dropped
        shares = [(one - taken[0]) / TEXTS for one in taken]  # the first measurement includes the memory of a step
        print(f"of the memory for texts: {statistics.median(shares[40:]):.2f}, at most {max(shares):.2f}")
        assert 0.5 < statistics.median(shares[40:]) < 1.1
        for text in (left[0], left[-1]):  # one that the server has dropped, and one that it still has
            found = remote.generate(text.sequences, past_key_values=text.past_key_values, **options)
            assert torch.equal(found, model.generate(text.sequences, **options))
    finally:
        remote.swarm.close()


def cache_of(model: Any, rows: torch.Tensor) -> Any:
    return model(rows, use_cache=True).past_key_values


def memory_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # caused by peft
def test_the_stock_client_of_openai_writes_and_chats(servers: Servers, tmp_path: Path) -> None:
    import openai

    model, adapter = make_model("llama"), save_adapter("llama", tmp_path / "adapter")
    servers.start("a", "--weights", servers.folder, "--share-prefixes")
    written = WarmRun(
        "generate", servers.address, "--prompt", PROMPT, "--max-new-tokens", NUM_NEW, program=COMMAND, modules=SERVING
    )
    servers.runs["written"] = written
    port = free_port()
    served = ("http", f"small={servers.address}", "--adapter", f"poems={adapter}", "--port", port)
    endpoint = servers.runs["http"] = WarmRun(*served, program=COMMAND, modules=SERVING)
    endpoint.wait_for("Answering at")
    base = f"http://127.0.0.1:{port}"
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert read(f"{base}/health") == {"status": "ok"}
            break
        except OSError:
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.1)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(servers.folder)
    given = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**given, max_new_tokens=NUM_NEW, do_sample=False)[0, given["input_ids"].shape[1] :]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert written.wait() == 0
    assert expected in "".join(written.output)
    expected = f" {expected}"  # the separator from the prompt comes first
    client = openai.OpenAI(base_url=f"{base}/v1", api_key="-")
    assert [one.id for one in client.models.list()] == ["small", "poems"]
    options: dict[str, Any] = {"model": "small", "temperature": 0.0, "max_tokens": NUM_NEW}
    whole = client.completions.create(prompt=PROMPT, **options)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(given["input_ids"][0]), NUM_NEW)
    tokens = plain("llama", adapter).generate(**given, max_new_tokens=NUM_NEW, do_sample=False)[0]
    poem = tokenizer.decode(tokens[given["input_ids"].shape[1] :], skip_special_tokens=True)
    found = client.completions.create(prompt=PROMPT, **{**options, "model": "poems"}).choices[0].text
    assert found == f" {poem}" != expected
    pieces = [part.choices[0].text for part in client.completions.create(prompt=PROMPT, stream=True, **options)]
    assert "".join(pieces) == expected
    assert len(pieces) > 3
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(messages=messages, **options)
    assert chat.choices[0].message.content == expected
    parts = client.chat.completions.create(messages=messages, stream=True, **options)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected
    messages = [{"role": "user", "content": " ".join("abcdefgh" * 10)}]
    cached = []
    for _ in range(2):
        chat = client.chat.completions.create(messages=messages, **options)
        messages += [{"role": "assistant", "content": chat.choices[0].message.content}, messages[0]]
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        cached.append(chat.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 80, "the second turn begins with the first"
    examples = Path(__file__).parents[2] / "examples" / "serving"
    for name, arguments in (("write", (servers.address, PROMPT)), ("chat", (f"{base}/v1", "small"))):
        command = [sys.executable, str(examples / f"{name}.py"), *arguments]
        shown = subprocess.run(command, input=f"{PROMPT}\n", capture_output=True, text=True, timeout=120.0, check=True)
        assert expected.strip() in shown.stdout
    stop = expected.split()[5]
    cut = client.completions.create(prompt=PROMPT, stop=f"{stop}", **options)
    assert cut.choices[0].text == expected.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    drawn = [client.completions.create(prompt=PROMPT, **{**options, "temperature": 1.0}, seed=3) for _ in range(2)]
    assert drawn[0].choices[0].text == drawn[1].choices[0].text != expected
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.completions.create(prompt=PROMPT, **{**options, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="cannot be read"):
        client.completions.create(prompt=PROMPT, **{**options, "max_tokens": -1})
    servers.runs["a"].end()
    with pytest.raises(urllib.error.HTTPError, match="503"):
        until_ill(base)


def test_users_tune_adapters_over_the_same_processes_of_which_one_is_killed(servers: Servers, tmp_path: Path) -> None:
    """Two scripts with different texts at once; each adapter generates its text. A server dies during the tuning."""
    servers.start("a", "--weights", servers.folder)
    servers.start("b", *servers.half, "--stay")
    servers.start("c", *servers.half, "--stay")
    script = Path(__file__).parents[2] / "examples" / "tuning" / "tune.py"
    runs = []
    for name, text in (("up", "a b c d e f g h "), ("down", "h g f e d c b a ")):
        (tmp_path / name).write_text(text * 40)
        command = [servers.address, tmp_path / name, tmp_path / f"adapter-{name}"]
        runs.append(WarmRun(*command, program=(sys.executable, str(script)), modules=SERVING))
        servers.runs[name] = runs[-1]
    for run in runs:
        run.wait_for("Epoch 1")
    os.kill(servers.runs["b"].process.pid, signal.SIGKILL)
    for run, written in zip(runs, ("a b c d e f g h a b c d", "h g f e d c b a h g f e"), strict=True):
        assert run.wait() == 0, "".join(run.output)
        assert f"It writes: {written}" in "".join(run.output)
    assert servers.runs["b"].wait() == -signal.SIGKILL
    options = ("--prompt", "h g", "--max-new-tokens", "7", "--adapter", tmp_path / "adapter-down")
    generating = servers.runs["generate"] = WarmRun(
        "generate", servers.address, *options, program=COMMAND, modules=SERVING
    )
    assert generating.wait() == 0, "".join(generating.output)
    assert "h g f e d c b a h" in "".join(generating.output)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # caused by peft
@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
# The loop ends before the daemon's end is reported to it.
@pytest.mark.filterwarnings("ignore:unclosed resource <UVProcess")
def test_a_kill_in_mid_backward_changes_no_gradient(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 steps of LoRA in float64 equal peft with the plain Trainer on one machine."""
    for name in "abc":
        servers.start(name, "--weights", servers.folder, "--stay", *(servers.half if name != "a" else ()))
    killed: list[str] = []
    backward, num = Chain._backward, 0

    async def kills(self: Chain, peer: Any, **rest: Any) -> Any:
        nonlocal num
        num += servers.names[peer] != "a"
        if num == 40 and not killed:
            killed.append(servers.names[peer])
            os.kill(servers.runs[killed[0]].process.pid, signal.SIGKILL)
        return await backward(self, peer, **rest)

    monkeypatch.setattr(Chain, "_backward", kills)
    strategy = AttachStrategy(servers.address, weights=servers.folder)
    runs = []
    try:
        for base, chosen in ((make_model("llama"), "auto"), (strategy.base_model(), strategy)):
            torch.manual_seed(1)
            runs.append(tuning.tune(tuning.lora(base), chosen))
    finally:
        strategy.base_model().swarm.close()
    assert killed, "the fault is due"
    assert servers.runs[killed[0]].wait() == -signal.SIGKILL
    tuning.assert_equal(runs[1], runs[0])
