# Two commands from a fresh clone: `make serve` runs the server and its web page, `make test` checks everything.
# Both set up .venv first and reinstall only when pyproject.toml or constraints.txt changed.

PYTHON ?= python3
BIN := .venv/bin
PIP := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: serve test check slow format clean help

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

serve: .venv/installed  ## install what running needs, then serve the default model and its web page
	$(BIN)/k3 serve --weights int8

test: check  ## install what developing needs, then lint, type-check and run the default test suite
	$(BIN)/python -m pytest

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: .venv/installed-dev  ## the tests that take minutes or a large download
	$(BIN)/python -m pytest -m slow

format: .venv/installed-dev  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything the targets above made
	rm -rf .venv

# pip is the last thing that `venv` puts there, so its presence says that the environment is whole.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "OpenK3 needs Python 3.11 or newer: set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv

# PyTorch comes first and by its exact version, so that a machine with the small CPU build at hand takes that one.
.venv/installed: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing OpenK3 into .venv (minutes the first time)"
	@$(PIP) "$$(grep '^torch==' constraints.txt)"
	@$(PIP) --editable .
	@touch $@

.venv/installed-dev: .venv/installed
	@$(PIP) --editable '.[dev]'
	@touch $@
