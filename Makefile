# `make run` and `make test` need Python 3.11 or newer and nothing else. Both are quick the second time.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: run test lint models man clean

run: $(VENV)/.installed
	$(BIN)/mlxcel-server --demo --host 127.0.0.1 --port 8080 --metrics $(ARGS)

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two minutes: runs every family that is in the table.
models: $(VENV)/.installed-test
	$(BIN)/python -m tests.models.table

man: $(VENV)/.installed
	$(BIN)/python man/generate.py

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "mlxcel needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python setup.cfg pyproject.toml
	@echo "installing mlxcel into $(VENV); the first time takes about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
