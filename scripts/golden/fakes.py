"""The tests' fake vLLM: `fakes.py serve MODEL` serves until standard input ends; `fakes.py VERB ...` is a command of
onetrunk with the fake engine in its process.
"""

import runpy
import sys

import pytest

if __name__ == "__main__":
    if sys.argv[1] == "serve":
        from transformers import AutoModelForCausalLM

        from tests.rollouts.stub_vllm import StubVLLM

        with StubVLLM(AutoModelForCausalLM.from_pretrained(sys.argv[2])) as server:
            print(server.url, flush=True)
            sys.stdin.read()
    else:
        from tests.rollouts.stub_engine import install

        install(pytest.MonkeyPatch())
        runpy.run_module("onetrunk", run_name="__main__", alter_sys=True)
