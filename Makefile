# Copy the commands, or use the targets. `make help` lists them.
# PYTHON: the Python to build on. If it has torch already, that torch is used.
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
VENV_PYTHON = .venv/bin/python
RUN = PYTHON="$(CURDIR)/$(VENV_PYTHON)"
PYTEST = $(VENV_PYTHON) -m pytest -q

.PHONY: help setup setup-tests train train-1gpu train-4gpu train-cpu train-multi-node
.PHONY: test test-fast test-recipes test-long test-the-tests test-gpu lint
.PHONY: bench bench-wire figures refresh-recipes clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 20

setup: .venv/.torch ## make .venv, with torch and numpy

.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -m venv .venv
	@if torch=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))' 2>/dev/null); then \
	  echo "using the torch in $$torch"; echo "$$torch" >"$$(echo .venv/lib/python*/site-packages)/with_torch.pth"; \
	else \
	  echo "installing torch into .venv: some minutes, the first time"; $(VENV_PYTHON) -m pip install -q $(TORCH); fi
	@$(VENV_PYTHON) -c 'import numpy' 2>/dev/null || $(VENV_PYTHON) -m pip install -q numpy
	@touch $@

setup-tests: .venv/.tests ## besides, what the tests need

.venv/.tests: .venv/.torch tests/requirements.txt
	$(VENV_PYTHON) -m pip install -q -r tests/requirements.txt
	@touch $@

train: setup ## train with all GPUs of this machine, or on the CPU
	$(RUN) ./run_single.sh $(ARGS)

train-1gpu: setup ## one process, one GPU
	$(RUN) NPROC=1 ./run_single.sh $(ARGS)

train-4gpu: setup ## four processes, a GPU each (on the CPU where there is none)
	$(RUN) NPROC=4 ./run_single.sh $(ARGS)

train-cpu: setup ## NPROC (2) processes on the CPU
	$(RUN) NPROC=$(or $(NPROC),2) ./run_single.sh --device cpu $(ARGS)

train-multi-node: setup ## MASTER_ADDR=10.0.0.1 NNODES=2, the same on every node
	$(RUN) MASTER_ADDR=$(MASTER_ADDR) NNODES=$(or $(NNODES),2) ./run_multi_node.sh $(ARGS)

test: setup-tests ## all tests: some two minutes on two cores
	$(PYTEST) -n 4 --dist worksteal $(ARGS)

test-fast: setup-tests ## the direct tests: seconds
	$(PYTEST) -m "not processes" $(ARGS) test_ddp_train.py

test-recipes: setup-tests ## run each recipe on two ranks
	$(VENV_PYTHON) -m pip install -q -r recipes/requirements.txt
	$(PYTEST) -m recipes $(ARGS) tests

refresh-recipes: setup ## make the diffs anew, after ddp_train.py was changed
	$(VENV_PYTHON) recipes/refresh.py

test-long: setup-tests ## 100 kills, 1,000 damaged checkpoints, 20 clean exits
	$(PYTEST) -s -m long $(ARGS)

test-the-tests: setup-tests ## break the program: does the test that should fail do so?
	$(VENV_PYTHON) tests/breaks.py $(ARGS)

test-gpu: setup-tests ## what a GPU alone can show, with a table at the end
	$(PYTEST) -s -rs $(ARGS) tests/test_gpu.py

lint: setup-tests ## ruff and shellcheck
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ruff check .
	.venv/bin/shellcheck run_single.sh run_multi_node.sh

bench: setup ## speed against the bare loop, on this machine
	$(VENV_PYTHON) benchmarks/bench.py $(ARGS)

bench-wire: setup ## speed over 100 Mbit/s between two hosts (root, Linux, ip and tc)
	$(VENV_PYTHON) benchmarks/bench_wire.py $(ARGS)

figures: setup ## draw benchmarks/figures from runs on the CPU: some two minutes
	$(VENV_PYTHON) -m pip install -q -r benchmarks/requirements.txt
	$(VENV_PYTHON) benchmarks/figures.py

clean: ## remove what setup and the tests made; checkpoints stay
	rm -rf .venv __pycache__ */__pycache__ .ruff_cache
