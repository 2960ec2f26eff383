"""The tests' fake vLLM server for a base model, until standard input ends: python server.py MODEL; prints its address."""

import sys

from tests.rollouts.stub_vllm import StubVLLM
from transformers import AutoModelForCausalLM

if __name__ == "__main__":
    with StubVLLM(AutoModelForCausalLM.from_pretrained(sys.argv[1])) as server:
        print(server.url, flush=True)
        sys.stdin.read()
