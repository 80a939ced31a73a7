# Every target works on a fresh machine, because the target first installs what it needs into .venv.
#
#   make test                   lint, types, and few cases of every test (kernels under Triton's interpreter)
#   make test-all               all cases of every test
#   make test-newest            tests with the newest versions, in .venv-newest
#   make test-oldest            tests with the oldest versions that we support, in .venv-oldest
#   make test-clients           tests of other libraries over fused models, in .venv-clients
#   make test-trainers          the newest release of each trainer, with us and without, in .venv-trainers
#   make test-gpu PY=python3    GPU tests with an interpreter that has PyTorch, without .venv
#   make docs                   the site of docs/ in build/site, in .venv-docs
#   make release                wheel and source archive in dist/; tries the wheel outside of the clone
#
# The interpreter PYTHON creates the environments. ARGS are passed to the command, for example:
# make demo ARGS="--steps 50".

# Each of the processes that tests start would compile our sources anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
PYTHON_OLDEST ?= python3.10
ARGS ?=
# Each of two pytest workers starts with one half of the tests, in their order. So the fixtures of a
# file are mostly set up once. A worker that has finished takes tests from the other worker.
TWO_WORKERS := -n 2 --dist worksteal
# The variable turns off an advertisement for the successor of the theme.
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs

ifndef PY
PY := .venv/bin/python
READY := .venv/.ready
SITE_READY := .venv-docs/.ready
endif

.DEFAULT_GOAL := help
.PHONY: help test test-all test-newest test-oldest test-gpu test-families test-clients test-trainers sanitize compile fuzz mutants bench tables demo docs docs-serve release lint types format clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: lint types $(SITE_READY)  ## lint, types, and few cases of every test
	OMP_NUM_THREADS=1 $(PY) -m pytest $(TWO_WORKERS) --few $(ARGS)

test-all: lint types $(SITE_READY)  ## lint, types and every combination of parameters
	OMP_NUM_THREADS=1 $(PY) -m pytest $(TWO_WORKERS) $(ARGS)

test-newest: .venv-newest/.ready  ## all tests, with the newest PyTorch and Triton
	.venv-newest/bin/python -m pip install --quiet --upgrade -r requirements/newest.txt
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(TWO_WORKERS) $(ARGS)

test-oldest: .venv-oldest/.ready  ## all tests, with the oldest Python, PyTorch and Triton that we support
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(TWO_WORKERS) $(ARGS)

test-gpu: $(READY)  ## tests at real sizes, on a GPU
	$(PY) -m pytest tests/gpu $(ARGS)

test-families: $(READY)  ## fuse every causal LM of Transformers; prints the table of docs/fuse.md
	$(PY) -W ignore -m tests.support.families $(ARGS)

test-clients: .venv-clients/sources/tests  ## other libraries' tests over fused models: Transformers, PyTorch, PEFT, torchao
	LOGITLESS_CLIENTS=$< HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-clients/bin/python -m pytest $(TWO_WORKERS) \
		tests/clients tests/lazy/test_peft_accelerate.py $(ARGS)

test-trainers: .venv-trainers/.ready  ## newest release of each trainer, with us and without; writes the table of docs/trainers.md
	.venv-trainers/bin/python -m tests.trainers $(ARGS)

sanitize: $(READY)  ## run every kernel under compute-sanitizer (memcheck, racecheck), on a GPU
	$(PY) -m tests.support.sanitizer

compile: $(READY)  ## compile every kernel variant for Hopper, and print registers and spills, without a GPU
	$(PY) -m tests.support.aot cuda:90 --all

fuzz: $(READY)  ## test random cases of every function, for example with ARGS="--minutes 10"
	OMP_NUM_THREADS=1 $(PY) -m tests.differential $(ARGS)

mutants: $(READY)  ## put bugs into the library, one at a time, and run the tests that must find them
	OMP_NUM_THREADS=1 $(PY) -m tests.differential.mutations $(ARGS)

bench: $(READY)  ## check and time logitless beside PyTorch and other libraries
	$(PY) -m benchmarks.bench $(ARGS)

tables: $(READY)  ## rewrite the tables of README and docs, and the plots, from stored results
	$(PY) -m benchmarks.tables

demo: $(READY)  ## train a teacher, capture it, distil students; writes a report in HTML
	$(PY) -m examples.demo $(ARGS)

docs: .venv-docs/.ready  ## build the site into build/site; open build/site/index.html
	$(MKDOCS) build $(ARGS)

docs-serve: .venv-docs/.ready  ## show the site at http://127.0.0.1:8000, and rebuild it after each change
	$(MKDOCS) serve $(ARGS)

release: .venv-release/.ready  ## build wheel and source archive, check both, try the wheel outside of the clone
	OMP_NUM_THREADS=1 .venv-release/bin/python -m tests.support.release $(ARGS)

lint: $(READY)  ## check style and format with ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)  ## check types with ty
	$(PY) -m ty check --python "$$(command -v $(PY))" --output-format concise

format: $(READY)  ## fix and format the sources with ruff
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## remove the environments and all build products
	rm -rf .venv .venv-newest .venv-oldest .venv-clients .venv-trainers .venv-release .venv-docs build dist .pytest_cache .ruff_cache .hypothesis logitless-demo.png logitless-demo.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# $(call install,PYTHON) creates an environment with the packages of the first prerequisite.
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

.venv-clients/.ready: requirements/clients.txt requirements/tests.txt pyproject.toml
	$(call install,$(PYTHON))

.venv-trainers/.ready: requirements/trainers.txt requirements/tests.txt pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || \
		{ echo "PYTHON must name a Python 3.11 or newer, got $(PYTHON)." >&2; exit 1; }
	$(call install,$(PYTHON))

# The site reads the sources of the package without importing them. So it needs no PyTorch.
.venv-docs/.ready: requirements/docs.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet -r $<
	touch $@

.venv-release/.ready: requirements/release.txt requirements/tests.txt pyproject.toml
	$(call install,$(PYTHON))

# The tests of Transformers are in the source archive of the installed release.
.venv-clients/sources/tests: .venv-clients/.ready
	.venv-clients/bin/python -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
		--dest $(@D) "$$(.venv-clients/bin/python -m pip freeze | grep '^transformers==')"
	tar -xzf $(@D)/transformers-*.tar.gz -C $(@D) --strip-components=1
	touch $@
