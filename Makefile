# Everything sets up its own environment in $(VENV) from requirements.lock; nothing has to be installed by hand.
#   make demo   the main job from end to end       make test   the whole suite       make lint   ruff and mypy
# PYTHON= names another interpreter (3.11 or newer), VENV= another place, PYTEST_ARGS= more arguments for pytest.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN = $(VENV)/bin
READY = $(VENV)/.ready

.DEFAULT_GOAL = help
.DELETE_ON_ERROR:
.PHONY: help demo demo-idle test crash bench-fleet compiled lint lock clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -3

demo: compiled
	@$(BIN)/python -m qlworker.control.demo

demo-idle: compiled
	@$(BIN)/python -m qlworker.control.demo --idle

# Two processes a core, because many tests wait for something to come.
JOBS ?= $(shell expr 2 \* $$(nproc))

test: compiled
	$(BIN)/python -m pytest -n $(JOBS) -q $(PYTEST_ARGS)

# Kills at every step, then N rounds at random; SEED= plans the same rounds again. One line and exit status 1 for a promise broken.
N ?= 30
SEED ?=
crash: compiled
	@$(BIN)/python -m tests.crash --rounds $(N) $(if $(SEED),--seed $(SEED))

# A simulated fleet against one replica on SQLite and two on PostgreSQL: about six minutes. SIZES="10 100" SECONDS_EACH=8 for less.
SIZES ?=
SECONDS_EACH ?= 20
bench-fleet: compiled
	@SECONDS_EACH=$(SECONDS_EACH) $(BIN)/python bench/fleet.py $(SIZES)

# Programs are started hundreds of times: without bytecode each start would compile everything anew where writing it is off.
compiled: $(READY)
	@$(BIN)/python -m compileall -q qlworker tests

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Made anew when the lock or the project's metadata changes. --require-hashes: what is installed is what was tested.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "qlworker needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1 || true): name another one," \
	    "for example make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3-venv)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# For maintainers: resolves the lock again. The oldest supported Python, so that it holds on every newer one.
lock:
	@rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet pip-tools
	build/lock/bin/pip-compile --quiet --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links \
	  --no-emit-trusted-host --no-header --extra control --extra postgresql --extra s3 --extra dev --build-deps-for editable \
	  --output-file requirements.lock pyproject.toml

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find qlworker tests -name __pycache__ -prune -exec rm -rf {} +
