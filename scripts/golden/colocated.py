"""`python -m onetrunk` with the tests' fake vLLM engine in the place of the package: python colocated.py VERB ..."""

import runpy

import pytest
from tests.rollouts.stub_engine import install

if __name__ == "__main__":
    install(pytest.MonkeyPatch())
    runpy.run_module("onetrunk", run_name="__main__", alter_sys=True)
