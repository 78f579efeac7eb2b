# fastcaps: two commands do everything on a fresh machine: `make demo` and `make test`.
#
# Everything lands in this checkout: the environment in .venv, builds in build/, caches in .cache/. Where pip looks for
# packages is pip's own setting (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), respected here.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.10.0
# torch and its Triton, the oldest and the newest that are tried.
VERSIONS ?= 2.10.0:3.6.0 2.14.1:3.8.0
PYTEST_ARGS ?=
SANITIZE_ARGS ?=
SOAK_ARGS ?=
MUTATE_ARGS ?=
# Test processes side by side, a file of tests to a process at a time; WORKERS=0 runs them in one.
WORKERS ?= auto
SIDE_BY_SIDE = --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile
DEMO_ARGS   ?=
# CUDA architectures of a wheel: with these it stays below 10 MB (docs/building.md).
WHEEL_CUDA  ?= 8.0;9.0;12.0

BIN := $(VENV)/bin
ABI  = build/abi/torch-$(TORCH)-$(notdir $(PYTHON))
export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export MPLCONFIGDIR := $(CURDIR)/.cache/matplotlib
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/torchinductor
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
export TORCH_HOME := $(CURDIR)/.cache/torch
export XDG_CACHE_HOME := $(CURDIR)/.cache

# CUDA kernels are compiled for one architecture here, the visible GPU's or else 9.0: nothing on this machine runs the
# others, and each would cost a build as much again. A wheel (make wheel) holds more of them.
ifndef TORCH_CUDA_ARCH_LIST
TORCH_CUDA_ARCH_LIST := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | paste -sd ';' -)
endif
ifeq ($(strip $(TORCH_CUDA_ARCH_LIST)),)
TORCH_CUDA_ARCH_LIST := 9.0
endif
export TORCH_CUDA_ARCH_LIST

# What the installed package is made from; Python files need no reinstall, the install is editable.
SOURCES := setup.py pyproject.toml lab/pyproject.toml CMakeLists.txt constraints.txt $(shell find csrc -type f 2>/dev/null)
NATIVE  := csrc tests bench -name '*.cpp' -o -name '*.h' -o -name '*.cu'
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow sanitize soak mutate lint format bench build docs sdist wheel abi-check versions clean distclean python compiler
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 chooses the interpreter for a new .venv, MAX_JOBS=4 the compiler processes,"
	@echo "  FASTCAPS_CUDA=1 compiles the CUDA kernels where torch has no CUDA too, TORCH_CUDA_ARCH_LIST='8.0;9.0' says for what,"
	@echo "  FASTCAPS_LEVELS=all the CPU kernels for every instruction set (default here: this machine's alone)"

demo: $(VENV)/.installed-demo ## train a small capsule network on real digits, show speed and pictures
	$(BIN)/fastcaps demo $(DEMO_ARGS)

test: $(VENV)/.installed-test ## run the tests, then the benchmarks' quick mode (speed is no reason to fail here)
	$(BIN)/python -m pytest tests lab/tests $(SIDE_BY_SIDE) $(PYTEST_ARGS)
	$(BIN)/python -m pytest bench

test-slow: $(VENV)/.installed-test ## run the tests marked slow
	$(BIN)/python -m pytest tests lab/tests -m slow $(SIDE_BY_SIDE) $(PYTEST_ARGS)

sanitize: $(VENV)/.installed-test ## run the kernels under the compiler's sanitizers (SANITIZE_ARGS=--short: a part)
	PYTHONPATH=tests $(BIN)/python -m tools.sanitize address thread cuda $(SANITIZE_ARGS)

soak: $(VENV)/.installed-test ## fuzz the functions and the raw ops for half an hour (SOAK_ARGS="--minutes 5")
	PYTHONPATH=tests $(BIN)/python -m tools.fuzz --minutes 30 --seed $$(date +%s) $(SOAK_ARGS)

mutate: $(VENV)/.installed-test ## plant faults in the kernels and count those that the tests see (MUTATE_ARGS="--count 50")
	for backend in cpu cuda triton; do $(BIN)/python -m tools.mutate $$backend $(MUTATE_ARGS) || failed=1; done; test -z "$$failed"

lint: $(VENV)/.installed-dev ## ruff, mypy and clang-format, all read-only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find $(NATIVE) | xargs $(BIN)/clang-format --dry-run -Werror

format: $(VENV)/.installed-dev ## rewrite Python and native sources in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find $(NATIVE) | xargs $(BIN)/clang-format -i

bench: $(VENV)/.installed-test ## run the whole benchmark (about an hour), and keep its record in bench/results
	FASTCAPS_LEVELS=all $(BIN)/python setup.py -q build_ext --inplace # what a wheel holds: it may choose shorter vectors
	$(BIN)/python -m pytest bench --full --record $(PYTEST_ARGS)

build: $(VENV)/.installed-test ## create .venv and (re)build the native library, nothing more
	$(BIN)/python setup.py -q build_ext --inplace

docs: $(VENV)/.installed-docs ## build the documentation site in build/site, links checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

sdist: $(VENV)/.installed-wheel ## make the source distribution in dist/
	$(BIN)/python -m build --sdist --no-isolation --outdir dist .

wheel: sdist ## build one wheel for all Pythons in dist/: audited, under 10 MB
	rm -rf build/wheel dist/*.whl
	TORCH_CUDA_ARCH_LIST='$(WHEEL_CUDA)' $(BIN)/python -m build --wheel --no-isolation --outdir build/wheel .
	PATH="$(BIN):$$PATH" $(BIN)/python -m auditwheel show build/wheel/*.whl
	PATH="$(BIN):$$PATH" $(BIN)/python -m auditwheel repair --strip --exclude libtorch_cpu.so --wheel-dir dist build/wheel/*.whl
	@ls -l dist/*.whl; test -z "$$(find dist -name '*.whl' -size +10000000c)" || \
		{ echo "fastcaps: the wheel has more than 10 MB" >&2; exit 1; }

abi-check: wheel ## try the wheel under another torch (TORCH=2.10.0) and PYTHON, in an environment of its own
	test -x $(ABI)/bin/python || $(PYTHON) -m venv $(ABI)
	$(ABI)/bin/python -m pip install --quiet torch==$(TORCH) numpy
	$(ABI)/bin/python -m pip install --quiet --no-deps --force-reinstall dist/*.whl
	cd build/abi && $(CURDIR)/$(ABI)/bin/python $(CURDIR)/scripts/abi_smoke.py

# Triton 3.6 interprets with no newer numpy.
versions: $(VENV)/.installed-test ## try this tree's library under the oldest and newest torch and Triton (3 GB of downloads each)
	set -e; for pair in $(VERSIONS); do torch=$${pair%:*}; python=build/versions/torch-$$torch/bin/python; \
		test -x $$python || $(PYTHON) -m venv build/versions/torch-$$torch; \
		$$python -m pip install --quiet torch==$$torch triton==$${pair#*:} 'numpy<2.4' pytest; \
		export PYTHONPATH=.; $$python scripts/abi_smoke.py; $$python scripts/abi_smoke.py triton; \
		TRITON_INTERPRET=1 $$python scripts/abi_smoke.py triton; done

clean: ## remove builds and caches
	rm -rf build dist .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info lab/*.egg-info
	rm -rf fastcaps/lib $(VENV)/.installed-*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean ## remove the environment too
	rm -rf $(VENV)

python:
	@command -v $(PYTHON) >/dev/null || { echo "fastcaps: no $(PYTHON); name an interpreter: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "fastcaps: $(PYTHON) is older than 3.10; name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "fastcaps: $(PYTHON) cannot make virtual environments; install its venv package (Debian: python3-venv)" >&2; exit 1; }

compiler:
	@for name in $$CXX c++ g++ clang++; do command -v "$$name" >/dev/null 2>&1 && exit 0; done; \
		echo "fastcaps: no C++ compiler; install one (Debian: apt-get install g++) or name it: make CXX=..." >&2; exit 1

# A virtual environment with the torch to build against and the build's own tools, so that the build needs no isolation.
$(BIN)/python: | python
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: $(SOURCES) | $(BIN)/python compiler
	$(INSTALL) torch setuptools cmake ninja
	$(BIN)/python setup.py -q build_ext --inplace # shows how far the compiler is; pip, which finds it done, would not
	$(INSTALL) --no-build-isolation --editable '.[$(subst demo,bench,$*)]' $(if $(filter-out wheel,$*),--editable ./lab) # together: pip has no fastcaps to look for
	@touch $@ $(if $(filter dev,$*),$(VENV)/.installed-test $(VENV)/.installed-demo) # dev holds both
