# make demo, make test, make lint: each sets itself up on a fresh machine; a second run finds that done.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Bytecode of what is imported is written then; of all that is installed it would take half of the installation's time.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile

# Stamps: what they name is installed as pyproject.toml and constraints.txt say.
READY := $(VENV)/.ready
# The Triton that torch 2.11 pins: tests compile the kernels with it as well, in child processes.
TRITON_360 := $(VENV)/triton-3.6.0
READY_360 := $(if $(filter Linux,$(shell uname -s)),$(VENV)/.ready-triton-3.6.0)

.DELETE_ON_ERROR:
.PHONY: demo test lint

demo: $(READY)
	$(BIN)/tilewise demo

# tests/gpu runs where PyTorch finds a CUDA device, one process at a time.
test: $(READY) $(READY_360)
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/gpu
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(BIN)/python -m pytest tests/gpu; \
	else echo "no CUDA device: tests/gpu left out"; fi

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# torch first, at the exact version of constraints.txt, so that pip has no newer one to consider.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e '.[transformers,demo,test,lint]'
	touch $@

$(VENV)/.ready-triton-3.6.0: | $(READY)
	rm -rf $(TRITON_360)
	$(INSTALL) --no-deps --target $(TRITON_360) triton==3.6.0
	touch $@
