# Everything a clean clone needs: Python 3.11+, make, gcc (optional: without it the reference operators run) and pip.
#   make demo       set up, continue a book and read a 16K-token document with the shipped model
#   make test       every test layer at reduced counts; no GPU, no network
#   make test-long  the counts that the issues name
#   make check      lint, format, types, import boundaries, size table
# PYTHON picks the interpreter that creates .venv.  VENV=PATH uses an environment that exists already.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.kvist-installed
EXTRAS := dev,hub,plot
# Two processes for two cores; PYTEST_ARGS=-n0 runs in one.
PYTEST_ARGS ?= -n 2 --dist worksteal

.PHONY: help setup demo test test-long check clean

help:
	@sed -n 's/^#   //p' Makefile

setup: $(STAMP)

# The stamp's content is the digest of the two files, so that a fresh checkout's newer mtimes do not reinstall.
$(STAMP): pyproject.toml constraints.txt
	@want="$$(cat pyproject.toml constraints.txt | cksum) $(CURDIR)"
	if [[ -f $@ && "$$(cat $@)" == "$$want" ]]; then touch $@; exit 0; fi
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "kvist needs Python 3.11 or newer, %s is %s.%s; try: make PYTHON=python3.11 ..." % (sys.executable, v[0], v[1]))'
	[[ -x $(PY) ]] || $(PYTHON) -m venv $(VENV)
	echo "installing into $(VENV) (about 200 MB to download, one to two minutes)"
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	echo "$$want" > $@

demo: setup
	$(PY) -m kvist demo

test: setup
	$(PY) -m pytest $(PYTEST_ARGS)

test-long: setup
	$(PY) -m pytest -m 'long or not long' $(PYTEST_ARGS)

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -q tests/unit/test_imports.py
	$(PY) tools/size_table.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
