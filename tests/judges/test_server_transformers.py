"""A real server: `transformers serve`, which takes a request for log probabilities and leaves them out of the answer.

Its model knows two words: after any token A comes with probability .6 and B with .4, and after either of them the end.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from onetrunk import cli
from onetrunk.feedback.costs import read_costs
from onetrunk.judges.judge import Pair, Principle
from onetrunk.judges.server import ServerJudge
from onetrunk.servers.fleet import RetryPolicy
from tests.feedback.runs import answers_in

pytestmark = pytest.mark.slow

WORDS = ("<pad>", "<eos>", "<bos>", "<unk>", "A", "B")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}<bos>"
PROBABILITY = 0.6
PATIENT = RetryPolicy(call_timeout_s=60.0)


def two_word_model(folder: Path) -> Path:
    """Save a Llama whose layers add nothing: the next token depends on the last one alone, by its head."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), WORDS, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    a, b, end = WORDS.index("A"), WORDS.index("B"), 1
    shares = torch.full((len(WORDS), len(WORDS)), 1e-9)
    shares[:, a], shares[:, b] = PROBABILITY, 1 - PROBABILITY
    shares[[a, b]] = 1e-9
    shares[[a, b], end] = 1.0
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(WORDS), 8))
        # A unit vector comes out of the norm as long as the square root of its 8 entries.
        model.lm_head.weight.copy_(torch.nn.functional.pad(shares.log().T, (0, 2)) / 8**0.5)
    model.generation_config.do_sample = True
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    model.save_pretrained(folder)
    return folder


class Servers:
    """Servers that this test has started, by address; calling it starts one more."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.logs: dict[str, Path] = {}

    def __call__(self, model: Path) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [Path(sys.executable).with_name("transformers"), "serve", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(self.folder / "hub")}
        url = f"http://127.0.0.1:{port}/v1"
        self.logs[url] = self.folder / f"serve-{port}.log"
        with self.logs[url].open("w") as log:
            self.processes[url] = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        for _ in range(480):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                return url
            except OSError:
                assert self.processes[url].poll() is None, self.logs[url].read_text()[-3000:]
                time.sleep(0.25)
        raise AssertionError(self.logs[url].read_text()[-3000:])

    def num_answered(self, url: str) -> int:
        """Return how many calls a server has answered, by its own log."""
        return self.logs[url].read_text().count('"POST /v1/chat/completions HTTP/1.1" 200')

    def kill(self, url: str) -> None:
        """End a server at once."""
        self.processes[url].kill()
        self.processes[url].wait()


@pytest.fixture
def serve(tmp_path):
    servers = Servers(tmp_path)
    yield servers
    for process in servers.processes.values():
        process.terminate()
        process.wait(20)


def test_what_it_leaves_out_is_noticed_and_votes_estimate_the_probability(serve, tmp_path):
    model = two_word_model(tmp_path / "judge")
    url = serve(model)
    # It says 200 and nothing of what it did not do.
    asked = {"model": str(model), "messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 5}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(asked).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
        assert not json.load(response)["choices"][0].get("logprobs")

    judge = ServerJudge(url, str(model), samples=50, max_concurrency=4, policy=PATIENT)
    judge.check()
    assert judge.top_logprobs == 0
    pairs = [Pair(f"Say hello {i}.", "Hello.", "No.") for i in range(4)]
    verdicts = judge.compare(pairs, Principle("Which completion is kinder?"))
    assert all(v.error is None and v.details["method"] == "votes" for v in verdicts)
    assert all(v.details["votes"]["unread"] == 0 for v in verdicts)
    # Four standard deviations of 200 votes.
    assert sum(v.probability for v in verdicts) / 4 == pytest.approx(PROBABILITY, abs=0.14)
    with pytest.raises(RuntimeError, match="Server is pinned to"):
        ServerJudge(url, "another-model", policy=PATIENT).check()


CONSTITUTION = "name: kind\nprinciples:\n  - text: Which completion is kinder?\n"
NUM_ROWS, SAMPLES, CONCURRENCY = 40, 3, 4


def test_two_servers_share_the_labels_and_the_death_of_one_loses_none_and_buys_none_twice(
    serve, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    model = two_word_model(tmp_path / "judge")
    urls = [serve(model), serve(model)]
    rows = [{"prompt": f"Say hello {i}.", "chosen": "Hello.", "rejected": "No."} for i in range(NUM_ROWS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("constitution.yaml").write_text(CONSTITUTION)
    words = ["prefs", "--completions", "given", "--dataset_name", "rows.jsonl", "--constitution", "constitution.yaml"]
    words += ["--judge_model", str(model), "--judge_samples", str(SAMPLES), "--keep_ties", "true"]
    words += ["--judge_max_concurrency", str(CONCURRENCY), "--output_dir", "out"]
    labels = tmp_path / "out/data/preferences.jsonl"
    shares: list[int] = []
    is_over = threading.Event()

    def kill_in_the_middle() -> None:
        while not is_over.wait(0.02):
            if sum(map(serve.num_answered, urls)) >= SAMPLES * NUM_ROWS:
                shares.extend(map(serve.num_answered, urls))
                serve.kill(urls[0])
                return

    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    code = cli.main([*words, "--judge", *urls])
    is_over.set()
    killer.join()
    assert code == 0 and shares and serve.processes[urls[0]].poll() is not None
    answered, used = sum(map(serve.num_answered, urls)), read_costs(tmp_path / "out")["judge"]
    first = labels.read_bytes()

    # Once more, with the server that is left: everything is kept, and only the check at the start is paid for.
    assert cli.main([*words, "--judge", urls[1]]) == 0
    assert labels.read_bytes() == first and first.count(b"\n") == NUM_ROWS
    num_checks = sum(map(serve.num_answered, urls)) - answered
    questions = 2 * NUM_ROWS
    statistics = json.loads((tmp_path / "out/statistics.json").read_text())
    assert statistics["judge"]["errors"] == 0 and statistics["judge"]["answers"] == questions
    # One answer per question: none was answered twice.
    assert len(answers_in(tmp_path / "out/ledger/ledger.db")) == questions == used["questions"]
    assert used["calls"] - used["failed_calls"] == SAMPLES * questions + num_checks
    # What the dead server had answered and could not send any more is all that was paid for in vain.
    assert 0 <= answered - (SAMPLES * questions + num_checks) <= CONCURRENCY
    # Until it died, both had a good part of the work; then the other one did the rest.
    assert min(shares) >= sum(shares) / 4 and serve.num_answered(urls[1]) > shares[1] + CONCURRENCY
