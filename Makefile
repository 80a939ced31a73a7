# Everything here works on a fresh machine: what a target needs, it installs into .venv first.
#
#   make test                   lint, types, tests (kernels under Triton's interpreter)
#   make test-newest            the tests with what pip installs today, in .venv-newest
#   make test-oldest            the tests with the oldest versions we allow, in .venv-oldest
#   make test-gpu PY=python3    with an interpreter that has PyTorch already, and no .venv
#
# PYTHON makes the environment, ARGS go to the command: make demo ARGS="--steps 50".

PYTHON ?= python3
PYTHON_OLDEST ?= python3.10
ARGS ?=
# Halves of the tests in their order, so that what a file shares is mostly made once; who ends first helps.
TWO_WORKERS := -n 2 --dist worksteal

ifndef PY
PY := .venv/bin/python
READY := .venv/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help test test-newest test-oldest test-gpu test-families sanitize fuzz planted bench tables demo lint types format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: lint types  ## lint, types and all tests, at small sizes where there is no GPU
	OMP_NUM_THREADS=1 $(PY) -m pytest $(TWO_WORKERS) $(ARGS)

test-newest: .venv-newest/.ready  ## all tests, with the PyTorch and Triton that pip installs today
	.venv-newest/bin/python -m pip install --quiet --upgrade -r requirements/newest.txt
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(TWO_WORKERS) $(ARGS)

test-oldest: .venv-oldest/.ready  ## all tests, with the oldest Python, PyTorch and Triton we allow
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(TWO_WORKERS) $(ARGS)

test-gpu: $(READY)  ## the tests at real sizes, on a GPU
	$(PY) -m pytest tests/gpu $(ARGS)

test-families: $(READY)  ## fuse, on every causal LM of Transformers; the table in docs/fuse.md
	$(PY) -W ignore -m tests.support.families $(ARGS)

sanitize: $(READY)  ## every kernel under compute-sanitizer, on a GPU: memcheck and racecheck
	$(PY) -m tests.support.sanitizer

fuzz: $(READY)  ## random cases of every function, for ARGS="--minutes 10"
	OMP_NUM_THREADS=1 $(PY) -m tests.differential $(ARGS)

planted: $(READY)  ## plant bugs in a copy of the library, and run the tests that find each
	OMP_NUM_THREADS=1 $(PY) -m tests.support.planted $(ARGS)

bench: $(READY)  ## correctness, time and memory against the rivals
	$(PY) -m logitless bench $(ARGS)

tables: $(READY)  ## the tables of README and docs, and the plots, from the newest stored results
	$(PY) -m benchmarks.tables

demo: $(READY)  ## train a teacher, capture it into a store, distil a student from it; a report in HTML
	$(PY) -m logitless demo $(ARGS)

lint: $(READY)  ## ruff, check and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)  ## pyright
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

format: $(READY)  ## rewrite the sources as ruff wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove the environments and everything built
	rm -rf .venv .venv-newest .venv-oldest build dist .pytest_cache .ruff_cache .hypothesis logitless-demo.png logitless-demo.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,PYTHON): an environment of that interpreter, with the first prerequisite's packages.
define install
$(1) -m venv $(@D)
$(@D)/bin/python -m pip install --quiet -r $<
$(@D)/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
touch $@
endef

.venv/.ready: requirements/dev.txt requirements/tests.txt pyproject.toml
	$(call install,$(PYTHON))

.venv-newest/.ready: requirements/newest.txt requirements/tests.txt pyproject.toml
	$(call install,$(PYTHON))

.venv-oldest/.ready: requirements/oldest.txt requirements/tests.txt pyproject.toml
	@$(PYTHON_OLDEST) -c "import sys; sys.exit(sys.version_info[:2] != (3, 10))" 2>/dev/null || \
		{ echo "PYTHON_OLDEST must name a Python 3.10, got $(PYTHON_OLDEST)." >&2; exit 1; }
	$(call install,$(PYTHON_OLDEST))
