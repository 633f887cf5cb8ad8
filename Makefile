# `make run` and `make test` need Python 3.11 or newer and nothing else. Both are quick the second time. The web page is
# tested in Chromium: `make test` installs Debian's package where it can, and leaves those tests out where it cannot.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
BROWSER = $(BIN)/python -m tests.http.browser || .ci/chromium

.PHONY: run test lint browser models contract man clean

run: $(VENV)/.installed
	$(BIN)/mlxcel-server --demo --host 127.0.0.1 --port 8080 --metrics $(ARGS)

test: $(VENV)/.installed-test lint
	@$(BROWSER) || export WITHOUT_BROWSER=1; $(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

browser: $(VENV)/.installed-test
	@$(BROWSER)

# Two minutes: runs every family that is in the table.
models: $(VENV)/.installed-test
	$(BIN)/python -m tests.models.table

contract: $(VENV)/.installed-test
	$(BIN)/python -m tests.contract.page

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
