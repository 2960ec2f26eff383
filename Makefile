# Everything a newcomer runs; `make` alone lists it. Only POSIX tools and Python 3.11 or newer are needed.

PYTHON ?= python3
VENV ?= .venv
# Installed first; empty (make setup TORCH_VERSION=): the newest. On Linux it is a build for CUDA 13, a download of
# gigabytes. For a machine without a GPU set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels.
TORCH_VERSION ?= 2.13.0
# Test processes side by side, and further arguments to pytest: make test PYTEST_ARGS='-k files'
TEST_WORKERS ?= 3
PYTEST_ARGS ?=
# What scripts/bench.py is given (python scripts/bench.py --help).
BENCH_ARGS ?= --make_baseline
# What scripts/check_gpu.py is given (python scripts/check_gpu.py --help).
CHECK_GPU_ARGS ?=

BIN := $(VENV)/bin
# An environment keeps the torch it was made with, unless TORCH_VERSION is given again.
MADE_WITH := $(firstword $(wildcard $(VENV)/.installed-torch-*))
ifeq ($(origin TORCH_VERSION)$(if $(MADE_WITH),+made),file+made)
  TORCH_VERSION := $(subst newest,,$(MADE_WITH:$(VENV)/.installed-torch-%=%))
endif
STAMP := $(VENV)/.installed-torch-$(or $(TORCH_VERSION),newest)
QUIET_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
PYTEST := $(QUIET_ENV) $(BIN)/python -m pytest -q -n $(TEST_WORKERS) $(PYTEST_ARGS)
# Slow tests of one file share launches: they stay with one process.
KEEP_FILES := --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-soak test-next check check-gpu bench format docs

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment and install onetrunk with its tools (about 2 minutes with CPU wheels)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "onetrunk needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) -V 2>&1`. Say which: make setup PYTHON=python3.12"; \
	  exit 1; }
	@test -x $(BIN)/python || { echo "setup 1/3: virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "setup 2/3: torch $(or $(TORCH_VERSION),(newest))"
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'torch$(if $(TORCH_VERSION),==$(TORCH_VERSION),>=2.10)'
	@echo "setup 3/3: onetrunk and its tools"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.installed-torch-*
	@touch $@
	@echo "setup: done; next: source $(BIN)/activate"

demo: setup ## train a tiny model by PPO on this machine's CPU and show what it learned
	$(QUIET_ENV) $(BIN)/python recipes/tiny/demo.py

test: setup ## run the tests (about 5 minutes on 2 cores)
	$(PYTEST) $(KEEP_FILES)

test-slow: setup ## run the slow tests: real servers, kills, fresh environments (about 50 minutes on 2 cores)
	$(PYTEST) $(KEEP_FILES) -m "slow and not soak" --timeout 1800 $(NONE_IS_FINE)

test-soak: setup ## run the soak tests: hours of kills and fuzzing
	$(PYTEST) $(KEEP_FILES) -m soak --timeout 0 $(NONE_IS_FINE)

# Their internals we use. torch stays, because it comes in builds for different hardware.
NEXT_PACKAGES := transformers trl peft accelerate datasets huggingface_hub bitsandbytes
NEXT := .venv-next

test-next: ## in .venv-next, run the tests for every version with the newest pre-releases; a failure is only reported
	$(MAKE) setup VENV=$(NEXT) TORCH_VERSION=$(TORCH_VERSION)
	{ $(NEXT)/bin/python -m pip freeze | grep '^torch==' >$(NEXT)/torch.txt && \
	  $(NEXT)/bin/python -m pip install -q --disable-pip-version-check --pre --upgrade -c $(NEXT)/torch.txt $(NEXT_PACKAGES) && \
	  $(QUIET_ENV) $(NEXT)/bin/python -m pytest -q -n $(TEST_WORKERS) $(PYTEST_ARGS) @tests/for_every_version.txt; } || \
	  echo "$@: failed with exit code $$?"

# pytest exits 5 when it collects nothing.
NONE_IS_FINE = || { code=$$?; [ $$code -eq 5 ] && echo "$@: there are no such tests yet" || exit $$code; }

check: setup ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check-gpu: setup ## on a machine with a GPU: test and measure what only it can show (at most 9 minutes)
	$(QUIET_ENV) $(BIN)/python scripts/check_gpu.py $(CHECK_GPU_ARGS)

bench: setup ## time the parts against their naive twins, and iterations against TRL 1.12 (two hours, 17 GB; see BENCH_ARGS)
	$(BIN)/python scripts/bench_ops.py
	$(BIN)/python scripts/bench.py $(BENCH_ARGS)

format: setup ## put imports and formatting in order
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .

docs: setup ## build the documentation as a site, in site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f .mkdocs.yml
	@echo "docs: open site/index.html"
