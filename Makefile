# Sets up what each target needs, from nothing, in .venv; a second run is quick.
#
#   make serve                                        the default model on http://127.0.0.1:8000, until Ctrl-C
#   make serve CONFIG=serve_configs/local-2p1d.yaml   another configuration
#   make test                                         lint, types, import contracts, tests
#   make check                                        the same without the tests
#   make proto                                        what is generated from app/grpc_api/inference.proto
#   make clean                                        removes .venv and caches of tools (models stay in their cache)

SHELL := /bin/bash
VENV ?= .venv
CONFIG ?= serve_configs/local.yaml
PYTEST_ARGS ?=
BIN := $(VENV)/bin
PACKAGES := $(VENV)/.packages

# The first interpreter that is recent enough; `make PYTHON=/path/to/python3 ...` chooses another.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
  $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(name))))

export RAY_USAGE_STATS_ENABLED ?= 0
# What Serve does all the time, though nothing has changed: less often (docs/cluster.md, "Small machines").
export RAY_SERVE_CONTROL_LOOP_INTERVAL_S ?= 0.5
export RAY_SERVE_METRICS_EXPORT_INTERVAL_MS ?= 2000
export PYTHONUNBUFFERED ?= 1

.PHONY: help serve test check lint setup model proto clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -8

setup: $(PACKAGES)

$(PACKAGES): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer found; install one, or run make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

model: $(PACKAGES)
	$(BIN)/python -m actors.model_source

serve: $(PACKAGES)
	$(BIN)/python -m app.check $(CONFIG) --fetch-model
	exec $(BIN)/serve run $(CONFIG)

lint check: $(PACKAGES)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/mypy

test: check model
	$(BIN)/python -m pytest -n 2 -m "not cluster" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS)

proto: $(PACKAGES)
	$(BIN)/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. app/grpc_api/inference.proto

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
