# make demo, make test, make lint, make docs, make dist: each sets itself up on a fresh machine; a second run finds that done.

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

# What makes the site and the packages, without torch: docstrings are read, and nothing is imported.
DOCS := .venv-docs
READY_DOCS := $(DOCS)/.ready
# What pyproject.toml lists as extras, without the package and what that needs.
EXTRAS = $(PYTHON) -c "import sys, tomllib; \
	extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
	print(*(line for name in sys.argv[1:] for line in extras[name]), sep='\n')"

# The oldest and the newest torch that README names, and each minor version of Triton that they or those between pin.
TORCHES := 2.11.0 2.15.0
TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0
VERSIONS := .versions
AOT := tests/aot

.DELETE_ON_ERROR:
.PHONY: beside demo test test-all ledger lint docs dist hub-kernel mutants test-browser test-versions

demo: $(READY)
	$(BIN)/tilewise demo

# What .ci/run installs on another core than the environment of the tests.
beside: $(READY_DOCS) $(READY_360)

# tests/gpu runs where PyTorch finds a CUDA device, one process at a time.
test: $(READY) $(READY_360)
	$(BIN)/python -m pytest -n 2 --dist worksteal --ignore=tests/gpu
	@if $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; \
	then $(BIN)/python -m pytest tests/gpu; \
	else echo "no CUDA device: tests/gpu left out"; fi

# What every kernel that is compiled ahead of time came to, see tests/ledger.py: a quarter of an hour.
COMPILED := $(abspath build)/ledger
ledger: $(READY) $(READY_360)
	rm -rf $(COMPILED)
	mkdir -p $(COMPILED)
	TILEWISE_LEDGER=$(COMPILED) $(BIN)/python -m pytest -n 2 --dist worksteal $(AOT)
	$(BIN)/python tests/ledger.py renew $(COMPILED)

# `make test` compiles what has no entry in the ledger, and few of the rest; this, all. And it asks whether tests notice.
test-all: ledger
	$(MAKE) test
	$(MAKE) mutants

# All that a CPU can test of every version that is promised: 14 GB, and more than an hour of two cores. Each torch comes
# with the Triton that it pins, and runs what needs no compiler; then each Triton compiles every case ahead of time.
TEST_TORCHES := $(TORCHES:%=test-torch-%)
TEST_TRITONS := $(TRITONS:%=test-triton-%)
.PHONY: $(TEST_TORCHES) $(TEST_TRITONS)
test-versions: $(TEST_TORCHES) $(TEST_TRITONS)

$(TEST_TORCHES): test-torch-%: $(VERSIONS)/.ready-torch-%
	$(VERSIONS)/torch-$*/bin/python -m pytest -n 2 --dist worksteal --ignore=tests/gpu --ignore=$(AOT)

$(TEST_TRITONS): test-triton-%: $(READY) $(VERSIONS)/.ready-triton-%
	TILEWISE_TRITON=$(abspath $(VERSIONS))/triton-$* $(BIN)/python -m pytest $(AOT) tests/backends/test_launcher.py

# Pages in a real browser, Debian's where there is none; `make test` leaves these tests out where it finds none.
test-browser: $(READY) $(READY_DOCS)
	@cd tests && ../$(BIN)/python -c "import browser, sys; sys.exit(browser.find() is None)" \
		|| { apt-get update -qq && apt-get install -y -qq chromium; }
	$(BIN)/python -m pytest -p no:xdist tests/tools/test_layouts_pictures.py tests/tools/test_site.py

# Plants faults, one at a time, and looks whether a test fails: some minutes.
mutants: $(READY) $(READY_360)
	$(BIN)/python tests/mutants.py -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, into build/site: a link, a heading or a parameter that does not exist is an error.
docs: $(READY_DOCS)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --config-file website/mkdocs.yml

# Wheel and source distribution, into build/dist; what is in them, and whether each can be installed and imported.
DIST := build/dist
dist: $(READY) $(READY_DOCS)
	rm -rf $(DIST) src/tilewise.egg-info/SOURCES.txt  # which would bring back what pyproject.toml no longer names
	$(DOCS)/bin/python -m build --quiet --no-isolation --outdir $(DIST)
	$(DOCS)/bin/twine check --strict $(DIST)/*
	$(BIN)/python tests/distribution.py $(DIST)/*

# tilewise as a kernel of the Hugging Face Hub, into build/hub-kernel; tests/tools/test_hub_kernel.py loads one.
hub-kernel:
	$(PYTHON) hub/build.py build/hub-kernel

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first, at the exact version of constraints.txt, so that pip has no newer one to consider.
$(READY): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -c constraints.txt torch
	$(INSTALL) -c constraints.txt -e '.[transformers,demo,test,lint]'
	touch $@

$(READY_DOCS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(EXTRAS) docs dist > $(DOCS)/needed.txt
	$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
		-c constraints.txt -r $(DOCS)/needed.txt
	touch $@

$(VENV)/.ready-triton-3.6.0: | $(BIN)/python
	rm -rf $(TRITON_360)
	$(INSTALL) --no-deps --target $(TRITON_360) triton==3.6.0
	touch $@

# setuptools, too, has no version that both accept.
$(VERSIONS)/.ready-torch-%: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VERSIONS)/torch-$*
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(VERSIONS)/constraints-$*.txt
	$(VERSIONS)/torch-$*/bin/python -m pip --disable-pip-version-check install --quiet --no-compile \
		-c $(VERSIONS)/constraints-$*.txt torch==$* -e '.[transformers,demo,test]'
	touch $@

$(VERSIONS)/.ready-triton-%: | $(READY)
	rm -rf $(VERSIONS)/triton-$*
	$(INSTALL) --no-deps --target $(VERSIONS)/triton-$* triton==$*
	touch $@
