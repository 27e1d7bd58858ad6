# Copy the commands, or use the targets. `make help` lists them.
# PYTHON: the Python to build on. If it has torch already, that torch is used.
PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
VENV_PYTHON = .venv/bin/python
RUN = PYTHON="$(CURDIR)/$(VENV_PYTHON)"
export PYTHON := $(PYTHON)

.PHONY: help setup setup-tests train train-1gpu train-4gpu train-cpu train-multi-node
.PHONY: test test-fast test-faults test-the-tests test-gpu recipes lint
.PHONY: bench bench-wire scale clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 20

setup: .venv/.torch ## make .venv, with torch and numpy

.venv/.torch:
	@$(PYTHON) .ci/install.py "$(TORCH)"
	@touch $@

setup-tests: .venv/.tests ## besides, what the tests need

.venv/.tests: .venv/.torch .ci/requirements.txt
	$(VENV_PYTHON) -m pip install -q -r .ci/requirements.txt
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

test: setup-tests ## all tests: some six minutes on two cores
	$(VENV_PYTHON) -m pytest -q -n 4 --dist worksteal $(ARGS) test_ddp_train.py .ci

test-fast: setup-tests ## the direct tests: seconds
	$(VENV_PYTHON) -m pytest -q -m "not processes and not faults" $(ARGS) test_ddp_train.py

test-faults: setup-tests ## the long form: 100 kills, 1,000 damaged checkpoints, lost nodes
	$(VENV_PYTHON) -m pytest -q -s -m faults $(ARGS) test_ddp_train.py .ci

test-the-tests: setup-tests ## break the program: does the test that should fail do so?
	$(VENV_PYTHON) .ci/breaks.py $(ARGS)

test-gpu: setup-tests ## all that needs a GPU, with a table at the end
	$(VENV_PYTHON) .ci/gpu.py $(ARGS)

recipes: setup-tests ## write the diffs of the recipes into the README anew
	$(VENV_PYTHON) .ci/make_recipes.py

lint: setup-tests ## ruff and shellcheck
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ruff check .
	.venv/bin/shellcheck run_single.sh run_multi_node.sh
	$(VENV_PYTHON) .ci/make_recipes.py --check

bench: setup ## speed against the bare loop, on this machine
	$(VENV_PYTHON) .ci/bench.py $(ARGS)

bench-wire: setup-tests ## speed over 100 Mbit/s between two hosts (root, Linux, ip and tc)
	$(VENV_PYTHON) .ci/bench_wire.py $(ARGS)

scale: setup ## what grows with the number of ranks
	$(VENV_PYTHON) .ci/scale.py $(ARGS)

clean: ## remove what setup and the tests made; checkpoints stay
	rm -rf .venv __pycache__ .ci/__pycache__ .ruff_cache
