# Everything runs in .venv, made once with a Python that really works. Targets:
#   make serve ARGS="--port 9000"   set up and serve     make test ARGS="-k ledger"   set up and test
#   make lint   ruff and pyright    make docs            the site in build/site       make wheel   a wheel in dist/
#   make clean  remove what make made
#   make serve EXTRA=cuda12         on an NVIDIA GPU; cuda13 for CUDA 13, tpu on a TPU
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help serve test test-compile test-arm test-ray test-page lint docs wheel clean

ARGS ?=
EXTRA ?=
VENV := .venv
BIN := $(VENV)/bin
# pip compiles nothing, which would take it half of its time. Python keeps the bytecode of what it imports: the processes
# of the tests import the same files hundreds of times.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --editable
unexport PYTHONDONTWRITEBYTECODE
# What is installed: Jitney as it serves, and beside it what tests and lint need.
SERVE := $(VENV)/.jitney-serve$(EXTRA:%=-%)
DEV := $(VENV)/.jitney-dev
# A candidate must start, be new enough and be able to make environments: a version manager's shim may do none of it.
PROBE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))

help:
	@sed -n '2,5s/^# *//p' Makefile

$(BIN)/python:
	@for python in $${PYTHON:-} python3.13 python3.12 python3 \
	    $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.1[23]*/bin/python $$HOME/.pyenv/versions/3.1[23]*/bin/python; do \
	  if $$python -c '$(PROBE)' >/dev/null 2>&1; then \
	    echo "using $$($$python -c 'import sys; print(sys.executable, sys.version.split()[0])')"; \
	    exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	if command -v uv >/dev/null; then exec uv venv --seed --python 3.12 $(VENV); fi; \
	echo "Jitney needs Python 3.12 or newer with venv: apt install python3.12-venv, or install uv, then run make again." >&2; \
	exit 1

$(SERVE): pyproject.toml | $(BIN)/python
	$(INSTALL) ".$(EXTRA:%=[%])"
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	$(INSTALL) ".[dev]"
	@touch $(SERVE) $@

serve: $(SERVE)
	@exec $(BIN)/jitney serve $(ARGS)

# Two processes more than cores, since many tests wait for a browser or for processes of their own; at most six. A
# file's tests stay in one process, which keeps what its fixtures made; files come in their own order, since the longest
# have few tests and would else come last. All of it runs on the CPU, also beside a GPU, for whose memory the processes
# would fight. One process, for a debugger: ARGS="-n 0".
test: export JAX_PLATFORMS := $(or $(JAX_PLATFORMS),cpu)
# The testing processes are as many as there are processors and more: numpy's own threads would wait for each other.
test: export OPENBLAS_NUM_THREADS := 1
test: $(DEV)
	@testers=$$($(BIN)/python -c 'import os; print(min(6, 2 + (os.cpu_count() or 1)))'); \
	$(BIN)/python -m pytest -n $$testers --dist loadfile --no-loadscope-reorder $(ARGS)

# jax's CUDA plugin, without CUDA: enough to compile for a GPU, and kept out of .venv, where jax would look for one.
build/cuda: | $(DEV)
	@version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)'); $(BIN)/python -m pip install --quiet \
	  --no-deps --target $@ jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version

# The TPU's compiler, in the release that jax asks for; kept out of .venv, where jax would look for a TPU.
build/tpu: | $(DEV)
	@wanted=$$($(BIN)/python -c 'from importlib.metadata import requires; \
	  print(next(line.split(";")[0] for line in requires("jax") if line.startswith("libtpu")))'); \
	$(BIN)/python -m pip install --quiet --no-deps --target $@ "$$wanted"

# The whole table of kernel tiles, and the engine's steps, compiled for GPUs and TPUs that need not be there: twenty
# minutes on two cores. What came out is written beside the benchmarks. The CPU kernels compiled for each named CPU, and
# checked where this one runs them; and the default model's answers with every level of them: ten minutes more.
test-compile: export JITNEY_TEST_COMPILE := 1
test-compile: export JITNEY_CUDA_PLUGIN := build/cuda
test-compile: export JITNEY_TPU_PLUGIN := build/tpu
test-compile: export JITNEY_COMPILED := build/compiled
test-compile: $(DEV) build/cuda build/tpu
	@rm -rf $(JITNEY_COMPILED)
	@$(BIN)/python -m pytest tests/kernels/triton_gpu/test_triton_compiled.py tests/kernels/pallas_tpu/test_pallas_compiled.py \
	  tests/compiled $(ARGS)
	@JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/kernels/cpu/test_native_cpus.py \
	  tests/engine/core/test_engine.py::test_the_default_model_equals_the_reference $(ARGS)
	@$(BIN)/python docs/benchmarks/compiled_programs.py

# The CPU kernels for ARM, compiled by a cross compiler (g++-aarch64-linux-gnu, or ziglang) and run by an emulator, which
# takes half an hour: see tests/support/emulated_arm.sh.
test-arm: $(DEV) | build/typing/jitney
	@PYTHON=$(BIN)/python tests/support/emulated_arm.sh build/arm >/dev/null
	@JITNEY_ARM_PYTHON=$(CURDIR)/build/arm/python $(BIN)/python -m pytest -n 0 tests/kernels/cpu/test_native_cpus.py -k arm $(ARGS)

# A fleet on a cluster of Ray's, whose dozen processes would make whatever runs beside them late: two or three minutes, alone.
test-ray: export JITNEY_TEST_RAY := 1
test-ray: export JAX_PLATFORMS := $(or $(JAX_PLATFORMS),cpu)
test-ray: $(DEV)
	@$(BIN)/python -m pytest -n 0 tests/engine/fleet/test_ray.py $(ARGS)

# The pictures of the page in docs/images: every view, and an engine that is idle, loaded, overloaded, restarted and
# dead; three minutes with nothing beside them. docs/benchmarks/page_checks.py measures the page.
test-page: $(DEV)
	@$(BIN)/python docs/benchmarks/page_pictures.py $(ARGS)

# pyright cannot ask an editable install where jitney's packages are, so it gets a folder of links.
build/typing/jitney:
	@mkdir -p $@ && ln -sfn ../../../engine ../../../kernels ../../../dashboard ../../../__main__.py $@/

lint: $(DEV) | build/typing/jitney
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

# A link to a page or a heading that is not there ends it.
docs: $(DEV)
	@$(BIN)/zensical build --strict

wheel: | $(BIN)/python
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist jitney.egg-info .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
