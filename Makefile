# Two commands do everything on a machine that has Python 3.11+ and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test test-all lint types format clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/\t/' | expand -t 12

setup: $(STAMP) ## create .venv and install the package with the tested versions

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: setup ## the embedded model: a grid of pictures and its benchmark
	$(BIN)/cgru evaluate emoji-canvas --benchmark canvas --images 1 --out runs/demo
	@echo
	@echo "Look at runs/demo/grid.png (every class in every style) and runs/demo/scores.json (the figures)."
	@echo "Next: $(BIN)/cgru generate 'a poodle on a blue background' --out poodle.png"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test: lint types ## lint, types and fast tests (under 8 minutes on two cores)
	$(BIN)/pytest

test-all: test ## the slow tiers too
	$(BIN)/pytest -m slow

clean: ## remove what was installed and built
	rm -rf $(VENV) build dist runs
