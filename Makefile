# Each target sets up what it needs: a fresh checkout and Python 3.11 are enough.
# Another interpreter: make PYTHON=python3.12 test

PYTHON := python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench

.PHONY: help demo test lint browser iproute2 cluster-test bench soak clean

help:
	@echo 'make demo    a short run that shows what offbeat does'
	@echo 'make test    lint, types and tests: what a change must pass'
	@echo 'make lint    ruff and mypy alone'
	@echo 'make cluster-test  runs over hosts made of network namespaces (as root)'
	@echo 'make bench   side by side with other ways of training (MNIST=folder for all of it)'
	@echo 'make soak    long runs that look for rare failures'
	@echo 'make clean   remove caches and build output'

# Half-made environments have no pip, so pip and not python says whether one is there.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo 'offbeat needs Python 3.11 or newer, and $(PYTHON) was not found:' \
	       'install it, or name another: make PYTHON=/path/to/python3.11' >&2; exit 1; }
	@test -x $(BIN)/pip || { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "offbeat needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1):" \
	       'install a newer one and name it: make PYTHON=/path/to/python3.11' >&2; exit 1; }; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo 'Installing offbeat and its tools into $(VENV); the first time takes some minutes.'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/offbeat demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Reports and live pages are tested in a real browser.
browser: $(STAMP)
	@for name in chromium chromium-browser google-chrome; do \
	  if command -v $$name >/dev/null; then exit 0; fi; \
	done; \
	echo 'Installing Chromium, in which reports and live pages are tested.'; \
	{ apt-get update && apt-get install --yes --no-install-recommends chromium; } \
	  >$(VENV)/chromium.log 2>&1 || { \
	  echo 'Chromium could not be installed ($(VENV)/chromium.log says why):' \
	       'install it by hand and run make test again' >&2; exit 1; }

test: lint browser
	$(BIN)/python -m pytest -n 2

# Hosts are made with iproute2. Where that cannot be, the reason is said and nothing is tested.
iproute2:
	@if ! command -v ip >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo 'Installing iproute2, with which hosts are made of network namespaces.'; \
	  { apt-get update && apt-get install --yes --no-install-recommends iproute2; } \
	    >$(VENV)/iproute2.log 2>&1 || \
	    echo 'iproute2 could not be installed ($(VENV)/iproute2.log says why).' >&2; \
	fi

cluster-test: $(STAMP) iproute2
	@if reason=$$($(BIN)/python -m benchmarks.network.hosts); then \
	  $(BIN)/python -m pytest -n 3 -m 'cluster and not soak' tests/cluster; \
	elif [ -n "$$reason" ]; then echo "cluster-test is skipped: $$reason"; \
	else exit 1; fi

# The other ways of training that `bench` measures beside offbeat are large: only it needs them.
$(BENCH_STAMP): $(STAMP)
	@echo 'Installing what offbeat is measured beside into $(VENV).'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[bench]' && touch $@ || \
	  echo 'That failed: the benchmarks run without it and say what is missing.' >&2

bench: $(BENCH_STAMP)
	$(BIN)/python -m benchmarks $(if $(MNIST),--mnist $(MNIST))

soak: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m soak --timeout 3600

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
