# SPDX-FileCopyrightText: The sgl_moe_jit authors
# SPDX-License-Identifier: Apache-2.0
#
# make demo       the main job on a small real model; installs only what that needs
# make test       every test that this machine can run
# make lint       ruff, mypy and clang-format, all pinned
# make gpu-test   the tests that need a GPU
# make bench      the benchmarks
# make test-floor the tests that depend on them, with the oldest supported tvm-ffi and transformers

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet
PINNED := $(PIP) -c constraints.txt
FLOOR_TVM_FFI := 0.1.11
FLOOR_TRANSFORMERS := 5.17.0

CXX_FILES := $(shell find csrc include benchmarks -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.h')

.PHONY: demo test lint gpu-test bench test-floor clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python -m sgl_moe_jit demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

gpu-test: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu

bench: $(VENV)/.bench
	$(BIN)/python -m sgl_moe_jit bench

test-floor: $(VENV)/.floor
	PYTHONPATH=$(CURDIR)/$(VENV)/floor-tvm-ffi $(BIN)/python -m pytest -n auto tests/jit tests/ops
	PYTHONPATH=$(CURDIR)/$(VENV)/floor-transformers $(BIN)/python -m pytest -n auto tests/integrations

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PINNED) -e '.[transformers]'
	touch $@

# The compiler from PyPI serves machines without a CUDA toolkit. Of flashinfer the CUTLASS headers and
# the functions' signatures are tested, which takes none of its dependencies.
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PINNED) -e '.[dev,nvcc]'
	$(PINNED) --no-deps flashinfer-python
	touch $@

$(VENV)/.bench: pyproject.toml constraints.txt | $(BIN)/python
	$(PINNED) -e '.[bench,transformers]'
	touch $@

# Beside the pinned version, not instead of it: PYTHONPATH comes first.
$(VENV)/.floor: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target $(VENV)/floor-tvm-ffi apache-tvm-ffi==$(FLOOR_TVM_FFI)
	$(PIP) --upgrade --target $(VENV)/floor-transformers transformers==$(FLOOR_TRANSFORMERS)
	touch $@
