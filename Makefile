# Two commands on a fresh clone: `make demo` and `make test`. Everything lands in .venv, build/ and .cache/ of this checkout;
# outside of it only pip's cache grows. `make` alone lists the targets.
PYTHON ?= python3
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -q -c constraints.txt
TORCH_ARGS ?=
CACHE ?= -p no:cacheprovider
# Tests wait for real processes most of their time; 0 runs them one by one.
WORKERS ?= 4
ARGS ?=
SYSTEM_PACKAGES := git gcc libc6-dev tmux openssh-server openssh-client iproute2
# A scratch folder of its own for anything that would write to /tmp, removed at the end.
SCRATCH := scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && export TMPDIR="$$scratch"

.DEFAULT_GOAL := help
.PHONY: help demo install test test-deps check bench shots soak clean

help:  ## this list
	@echo "Overnight: a terminal control room for autonomous training research."
	@echo
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  PYTHON=python3.12  which Python makes .venv (3.10 or newer)"
	@echo "  WORKERS=4          how many tests run at once (0: one by one)"
	@echo "  TORCH_ARGS=...     extra arguments of pip for PyTorch, e.g. its CPU index"

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Overnight needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=python3.12 ..."; exit 1; }
	@echo "· making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.control-room: $(VENV)/.made pyproject.toml constraints.txt
	@echo "· installing the control room (about 60 MB to download)"
	@$(PIP) -e .
	@touch $@

# pip picks the build: where its configuration knows a CPU wheel of this release it is about 200 MB; PyPI's own build for Linux x86-64
# carries NVIDIA's libraries, about 3 GB in all, and is the one a GPU machine needs.
$(VENV)/.trainer: $(VENV)/.control-room
	@echo "· installing PyTorch for the trainer: about 200 MB if pip finds a CPU build, about 3 GB with NVIDIA's libraries otherwise"
	@$(PIP) $(TORCH_ARGS) torch==2.13.0
	@$(PIP) -e '.[trainer]'
	@touch $@

$(VENV)/.tests: $(VENV)/.trainer
	@echo "· installing the tools of the tests (about 60 MB)"
	@$(PIP) -e '.[trainer,tune,dev]'
	@touch $@

install: $(VENV)/.control-room  ## the control room alone: no PyTorch, `.venv/bin/overnight` works

ifdef SIMULATE
demo: $(VENV)/.control-room
	@$(VENV)/bin/overnight demo --simulate $(ARGS)
else
demo: $(VENV)/.trainer  ## the main job on this machine: agent, runs, leaderboard (SIMULATE=1: ten seconds, no PyTorch)
	@$(VENV)/bin/overnight demo $(ARGS)
endif

test: $(VENV)/.tests  ## all tests (ARGS='-k name' passes on to pytest)
	@$(SCRATCH) && $(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(CACHE) $(ARGS)

test-deps:  ## system packages some tests need (root; without them these tests are skipped and say so)
	@if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo "test-deps installs Debian packages as root; as it is, tests that need them are skipped with a reason: $(SYSTEM_PACKAGES)"; \
	else \
		missing=$$(for p in $(SYSTEM_PACKAGES); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || echo $$p; done); \
		[ -z "$$missing" ] || { echo "· installing" $$missing; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; }; \
	fi

check: $(VENV)/.tests  ## ruff, mypy (strict), import contracts
	@failed=0; $(PY) -m ruff check . || failed=1; $(PY) -m ruff format --check -q . || failed=1; $(PY) -m mypy || failed=1; $(VENV)/bin/lint-imports --no-cache || failed=1; exit $$failed

bench: $(VENV)/.tests  ## every benchmark of tests/bench, each prints a table
	@$(SCRATCH) && for b in $$(grep -l __main__ tests/bench/*.py); do echo; echo "== $$b"; $(PY) -m tests.bench.$$(basename $$b .py) $(ARGS) || exit 1; done

shots: $(VENV)/.tests  ## the pictures of the README, rendered from the real screens
	@$(SCRATCH) && $(PY) -m tests.shots $(ARGS)

soak: $(VENV)/.tests  ## a long randomised fault test of the ssh engine (root, needs test-deps)
	@$(SCRATCH) && $(PY) -m tests.soak $(ARGS)

clean:  ## remove .venv, build/, .cache/ and caches; labs stay
	@rm -rf $(VENV) build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache overnight.egg-info
