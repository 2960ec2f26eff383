"""A real server: `transformers serve`, which takes a request for log probabilities and leaves them out of the answer.

Its model knows two words: after any token A comes with probability .6 and B with .4, and after either of them the end.
"""

import json
import sys
import urllib.request
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from onetrunk.judges.judge import Pair, Principle
from onetrunk.judges.server import ServerJudge
from tests.processes import environment, served

pytestmark = pytest.mark.slow

WORDS = ("<pad>", "<eos>", "<bos>", "<unk>", "A", "B")
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}<bos>"
PROBABILITY = 0.6


@pytest.fixture
def model(tmp_path):
    """Save a Llama whose layers add nothing: the next token depends on the last one alone, by its head."""
    folder = tmp_path / "judge"
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), WORDS, strict=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **names)
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(WORDS), "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 4096}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 1, "tie_word_embeddings": False}
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers, **special))
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


@pytest.fixture
def url(model, tmp_path):
    """Return the address of `transformers serve` for the model."""
    words = [Path(sys.executable).with_name("transformers"), "serve", model, "--host", "127.0.0.1"]
    words += ["--device", "cpu", "--dtype", "float32"]
    env = environment(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    with served(words, tmp_path / "serve.log", env=env) as address:
        yield f"{address}/v1"


def test_what_it_leaves_out_is_noticed_and_votes_estimate_the_probability(model, url):
    # It says 200 and nothing of what it did not do.
    asked = {"model": str(model), "messages": [{"role": "user", "content": "A"}], "logprobs": True, "top_logprobs": 5}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(asked).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
        assert not json.load(response)["choices"][0].get("logprobs")

    judge = ServerJudge(url, str(model), samples=50, max_concurrency=4)
    judge.check()
    assert judge.top_logprobs == 0
    pairs = [Pair(f"Say hello {i}.", "Hello.", "No.") for i in range(4)]
    verdicts = judge.compare(pairs, Principle("Which completion is kinder?"))
    assert all(v.error is None and v.details["method"] == "votes" for v in verdicts)
    assert all(v.details["votes"]["unread"] == 0 for v in verdicts)
    # Four standard deviations of 200 votes.
    assert sum(v.probability for v in verdicts) / 4 == pytest.approx(PROBABILITY, abs=0.14)
    with pytest.raises(RuntimeError, match="Server is pinned to"):
        ServerJudge(url, "another-model").check()
