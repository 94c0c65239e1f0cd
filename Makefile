# The verbs of this project; .ci/run calls the same ones. `make demo` and `make test` need
# Python 3.11 or newer and nothing else: they prepare .venv themselves.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
SOURCES := engram_core engram_client service tests benchmarks examples

.PHONY: setup demo test faults check fix openapi kernels test-gpu machine bench clean

setup: $(STAMP)

# One pinned set of versions (constraints.txt); torch first, so that its pin decides which build.
$(STAMP): pyproject.toml constraints.txt proto/engram.proto csrc/CMakeLists.txt $(wildcard csrc/cpu/*)
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v[0]}.{v[1]}: run make PYTHON=python3.11 setup")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/engram demo

test: $(STAMP)
	$(BIN)/python -m pytest

# Every named fault is put into a copy of the product; a fault that no test catches is a failure.
faults: $(STAMP)
	$(BIN)/python -m tests.faults

check: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m service.documents --check

fix: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

openapi: $(STAMP)
	$(BIN)/python -m service.documents

# Compiles csrc, the kernels for every architecture, with warnings and register spills as errors
# (needs nvcc 13).
kernels: $(STAMP)
	bash csrc/check.sh

# On a machine with a GPU; a skipped test is a failure here.
test-gpu: $(STAMP)
	ENGRAM_REQUIRE_GPU=1 $(BIN)/python -m pytest tests/gpu

# The stateful machine of `make test` (10,000 steps) for longer and from a new seed, which it prints.
MACHINE_STEPS ?= 1000000
machine: $(STAMP)
	MACHINE_STEPS=$(MACHINE_STEPS) $(BIN)/python -m pytest -s tests/laws/test_machine.py

bench: $(STAMP)
	$(BIN)/python benchmarks/bench_hash.py
	$(BIN)/python benchmarks/bench_sessions.py
	$(BIN)/python benchmarks/bench_reference.py
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_service.py
	if [ -e /dev/nvidiactl ]; then $(BIN)/python benchmarks/bench_cuda.py && $(BIN)/python benchmarks/bench_small.py; fi

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis
