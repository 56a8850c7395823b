# Every target sets itself up: a clean clone needs only Python 3.12, git and make.
#   make demo        a tiny Qwen3 learns arithmetic on the CPU
#   make test        the tests that need no accelerator
#   make test-slow   the long ones among them
#   make test-gpu    the tests that need a Hopper GPU
#   make lint        ruff, as CI runs it;  make format  applies it
#   make clean       removes the environment and what tools left

# The first of these that is new enough; or give one, `make PYTHON=/path/to/python3.12`.
is_new_enough := -c 'import sys; sys.exit(sys.version_info < (3, 12))'
PYTHON ?= $(shell for p in python3.12 python3; do \
	$$p $(is_new_enough) 2>/dev/null && echo $$p && break; done)

# Add others for accelerators: `make setup EXTRAS=dev,cuda12`.
EXTRAS ?= dev
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed-$(EXTRAS)
ON_CPU := JAX_PLATFORMS=cpu
# Processes that share the tests, by files; each takes about 3 GB.
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-gpu lint format clean

help:
	@sed -n 's/^#   \(make .*\)/  \1/p' Makefile

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(if $(strip $(PYTHON)),$(PYTHON),false) $(is_new_enough) || { \
	  echo "error: Python 3.12 or newer is needed, and '$(PYTHON)' is not it:" \
	    "install it, or name it with make PYTHON=/path/to/python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

demo: setup
	rm -rf runs/demo
	$(ON_CPU) $(BIN)/python -m fp8rl_jax.train --config=configs/qwen3_tiny.py \
	  --config.run_dir=runs/demo

test: setup
	$(ON_CPU) $(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile

test-slow: setup
	$(ON_CPU) $(BIN)/python -m pytest -m slow

# On a machine with a Hopper GPU, after `make setup EXTRAS=dev,cuda12`.
test-gpu: setup
	JAX_PLATFORMS=cuda,cpu $(BIN)/python -m pytest tests/gpu

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist *.egg-info runs/demo .pytest_cache .ruff_cache \
	  .hypothesis
