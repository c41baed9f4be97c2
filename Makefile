# Needs Python 3.11+ and make; each target does its own set-up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALL := -e '.[dev]' -c constraints.txt

# One thread a rank: the ranks share the cores, and a fork doesn't keep OpenMP's thread pool.
DIST_ENV := OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1 TORCH_COMPILE_DISABLE=1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test venv lint types fast dist kernels bench fuzz clean

help:
	@echo 'make demo    train a small policy by GRPO, with replay on and off; prints a table, draws a plot'
	@echo 'make test    everything that must pass: lint, types, fast, dist'
	@echo 'make lint    ruff check and ruff format --check'
	@echo 'make types   mypy, strict on rlreplay/'
	@echo 'make fast    tests of one process'
	@echo 'make dist    tests of several ranks (gloo, on this machine)'
	@echo 'make kernels the Triton kernels in their interpreter (installs triton, about a gigabyte)'
	@echo 'make bench   the CPU figures: scores, loaders, storage'
	@echo 'make fuzz    100,000 damaged payloads through every loader; about a minute'
	@echo 'make venv    only the set-up, in $(VENV); PYTHON=... picks the interpreter'
	@echo 'make clean   remove the venv, the caches and what the demo wrote'

demo: venv
	$(BIN)/python examples/grpo.py

test: lint types fast dist

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

# The tensors are small: more threads would take longer.
fast: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/fast

dist: venv
	$(DIST_ENV) $(BIN)/python -m pytest tests/dist

kernels: venv
	@if [ -n "$$PIP_FIND_LINKS" ]; then \
	    UV_FIND_LINKS=`printf '%s' "$$PIP_FIND_LINKS" | tr ' ' ','`; export UV_FIND_LINKS; \
	fi; \
	$(BIN)/uv pip install --python $(BIN)/python -e '.[dev,triton]' -c constraints.txt || \
	    $(BIN)/python -m pip install -e '.[dev,triton]' -c constraints.txt
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/fast/test_triton_scores.py \
	    tests/fast/test_triton_linear.py

bench: venv
	$(BIN)/python benchmarks/scores_cpu.py
	$(BIN)/python benchmarks/loaders.py
	$(BIN)/python benchmarks/storage.py

fuzz: venv
	$(BIN)/python tests/fuzz/fuzz_loaders.py --cases 100000 --seed 0

venv: $(STAMP)

# uv is several times faster than pip; it sees pip's find-links only if told, and nothing else of
# pip's configuration, so where it can't install, pip does.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "rlreplay needs Python 3.11 or newer; '$(PYTHON)' is `$(PYTHON) -V 2>&1`." \
	        "Name another one: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@if [ -n "$$PIP_FIND_LINKS" ]; then \
	    UV_FIND_LINKS=`printf '%s' "$$PIP_FIND_LINKS" | tr ' ' ','`; export UV_FIND_LINKS; \
	fi; \
	$(BIN)/python -m pip install --quiet -c constraints.txt uv && \
	    $(BIN)/uv pip install --python $(BIN)/python $(INSTALL) || { \
	    echo 'uv could not install; installing with pip'; \
	    $(BIN)/python -m pip install $(INSTALL); }
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build demo_output
	find rlreplay tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
