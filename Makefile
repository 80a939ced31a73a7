# Everything here works on a fresh machine: what a target needs, it installs into .venv first.
#
#   make test                   lint, types, tests (kernels under Triton's interpreter)
#   make test-gpu PY=python3    with an interpreter that has PyTorch already, and no .venv
#
# PYTHON makes the environment, ARGS go to the command: make demo ARGS="--steps 50".

PYTHON ?= python3
ARGS ?=

ifndef PY
PY := .venv/bin/python
READY := .venv/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help test test-gpu fuzz bench demo lint types format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: lint types  ## lint, types and all tests, at small sizes where there is no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 $(ARGS)

test-gpu: $(READY)  ## the tests at real sizes, on a GPU
	$(PY) -m pytest tests/gpu $(ARGS)

fuzz: $(READY)  ## random cases of every function, for ARGS="--minutes 10"
	OMP_NUM_THREADS=1 PYTHONPATH=tests:. $(PY) -m differential $(ARGS)

bench: $(READY)  ## correctness, time and memory against the rivals
	$(PY) -m logitless bench $(ARGS)

demo: $(READY)  ## train one small model with two losses: same curve
	$(PY) -m logitless demo $(ARGS)

lint: $(READY)  ## ruff, check and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)  ## pyright
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

format: $(READY)  ## rewrite the sources as ruff wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove the environment and everything built
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis logitless-demo.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -r requirements/dev.txt
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
