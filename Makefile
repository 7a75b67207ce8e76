# Every target sets up what it needs: .venv, from pyproject.toml and constraints.txt.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
LOGS := out/test

# One thread a process: the tests start processes of their own, and time them.
export OMP_NUM_THREADS ?= 1
# Nor does each of those processes compile all of rlplace anew.
unexport PYTHONDONTWRITEBYTECODE

# Of the property test in `make nightly`; another seed draws other plans.
PLANS ?= 200
SEED ?= 1

.PHONY: help demo test lint type unit test-dist wheel bench property nightly clean

help: ## Show the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || python3 -m venv $(VENV)
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[models,dev]'
	$(BIN)/python -m pip check
	touch $@

demo: $(READY) ## Discover this machine, plan a model with the shipped policy, run and measure it
	$(BIN)/python -m rlplace.demo

test: lint type unit test-dist wheel ## All that CI runs

lint: $(READY) ## Style, format and import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

type: $(READY) ## mypy --strict
	$(BIN)/mypy rlplace tests

unit: $(READY) ## Tests of one process, one worker a core
	mkdir -p $(LOGS)
	$(BIN)/pytest -n auto --maxprocesses 8 -m "not dist" 2>&1 | tee $(LOGS)/unit.log

test-dist: $(READY) ## Tests that start gloo ranks, two files at a time: much of it is waiting
	mkdir -p $(LOGS)
	$(BIN)/pytest -n 2 --dist loadfile -m dist 2>&1 | tee $(LOGS)/test-dist.log

wheel: $(READY) ## Build sdist and wheel, and use the wheel in an empty environment
	.ci/check-wheel

bench: $(READY) ## The scripts that the figures in README and docs come from
	for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python "$$script"; done

property: $(READY) ## Random plans against one process; PLANS=200 SEED=1
	mkdir -p $(LOGS)
	RLPLACE_PLANS=$(PLANS) RLPLACE_SEED=$(SEED) $(BIN)/pytest -s --show-capture=no \
		tests/runtime/test_property.py 2>&1 | tee $(LOGS)/property.log

nightly: test property bench ## Tests, many random plans, then the long benchmarks

clean: ## Remove what the other targets made, .venv excepted
	rm -rf build dist out *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache
	rm -rf .hypothesis .import_linter_cache
	find rlplace envs policies tests benchmarks -name __pycache__ -prune -exec rm -rf {} +
