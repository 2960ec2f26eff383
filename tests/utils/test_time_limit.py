"""An expression or a chat template without an end is one message; a limit leaves alarms of others as they were."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from peft import LoraConfig

from onetrunk.models.base_model import load_tokenizer
from onetrunk.models.build import build_trunk
from onetrunk.utils import startup as limits
from onetrunk.utils.startup import time_limit
from tests.ppo.support import base_model, lora
from tests.tiny import tiny_tokenizer

ENDLESS = r"([a-z._0-9]+)+!"  # Of the names of modules: 2 to the power of their lengths.


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(limits, "LONGEST_S", 0.2)


@pytest.mark.parametrize("option", ["target_modules", "exclude_modules", "rank_pattern"])
def test_an_endless_expression_for_lora_is_one_message(short, option):
    given = {option: {ENDLESS: 4} if option == "rank_pattern" else ENDLESS}
    config = LoraConfig(**{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **given})
    with pytest.raises(ValueError, match="LoRA config's expressions .* take"):
        build_trunk(base_model(), config)


def test_so_is_that_of_an_adapter_of_others(short, tmp_path):
    base_model().save_pretrained(tmp_path / "base")
    build_trunk(str(tmp_path / "base"), lora()).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"exclude_modules": ENDLESS}))
    with pytest.raises(RuntimeError, match="adapter.* cannot be loaded: .*a loop without an end"):
        build_trunk(str(tmp_path / "adapter"))


def test_a_chat_template_of_ten_billion_rounds_is_one_message(short, tmp_path):
    rounds = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    tiny_tokenizer(chat_template=rounds).save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="the chat template, for one short message, takes more than 0.2 seconds"):
        load_tokenizer(tmp_path)


def test_a_limit_that_a_block_swallows_is_still_an_error(short):
    with pytest.raises(ValueError, match="the block takes"), time_limit("the block"):
        try:
            re.fullmatch(r"(a+)+$", "a" * 60 + "b")
        except ValueError:
            pass


def test_the_timer_and_handler_of_others_go_on(monkeypatch):
    monkeypatch.setattr(limits, "LONGEST_S", 50.0)
    heard = []
    handler, timer = signal.signal(signal.SIGALRM, lambda *_: heard.append(1)), signal.getitimer(signal.ITIMER_REAL)
    try:
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        with time_limit("the block"):
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 50
            time.sleep(0.01)
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] < 60
        signal.setitimer(signal.ITIMER_REAL, 0.02)  # Sooner than the limit: it is heard within the block.
        with time_limit("the block"):
            time.sleep(0.1)
        assert heard == [1]
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def test_there_is_no_limit_in_another_thread(short):
    def work():
        with time_limit("the block"):
            time.sleep(0.3)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()
