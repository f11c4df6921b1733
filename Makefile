# Everything runs in .venv, which is made when first needed and again when the requirements change.

# The first Python that is new enough and can make a virtual environment. 3.11 comes first: the whole suite runs on it.
PYTHON ?= $(shell for python in python3.11 python3 python3.12 python3.13 python3.14 python3.15; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; \
	done)
BIN := .venv/bin
# The versions that were tried on this Python (docs/developer/interpreters.md); those of 3.11 where there are none.
CONSTRAINTS := $(or $(wildcard constraints-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null).txt),constraints.txt)
READY := .venv/ready
INSTALL := $(BIN)/pip install --quiet --constraint $(CONSTRAINTS)

.PHONY: demo test test-avx2 families distributed conformance cases tpu-check operators check bench wheel clean

demo: $(READY)
	$(BIN)/torch-tpu demo --output demo-output

# What to run on: PLATFORM=xcpu is a PJRT plug-in for the CPU, reached as libtpu is. Without it, `make test` runs on
# XLA:CPU inside jaxlib, and the files named here on the plug-in too.
PLATFORM ?=
ON = $(if $(PLATFORM),--platform $(PLATFORM))
# One test file stays in one process, so a file may rely on the order of its own tests and on its own caches.
PYTEST := $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile
ON_PLUGIN_TOO := tests/plugin tests/compile/test_backend.py tests/device/test_fork.py tests/device/test_threads.py \
	tests/eager/test_donation.py tests/eager/test_late_failures.py tests/eager/test_fast_path.py \
	tests/reports/test_errors.py

test: $(READY)
	$(PYTEST) $(ON); status=$$?; $(if $(PLATFORM),,$(PYTEST) --platform xcpu $(ON_PLUGIN_TOO) &&) exit $$status

# The tests as on a processor without AVX-512: holds the kernels of PyTorch, MKL and oneDNN, and XLA's code, to AVX2.
test-avx2: $(READY)
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 XLA_FLAGS=--xla_cpu_max_isa=AVX2 \
		$(MAKE) test

# Tiny models of all families in tests/compile/families.py, compiled; `make test` takes a few of them.
families: $(READY)
	$(PYTEST) -m '' $(ON) tests/compile/test_models.py tests/compile/test_padded_families.py tests/compile/test_generate.py

# Several processes, the long tests too; `make test` takes the short ones.
distributed: $(READY)
	$(PYTEST) -m '' $(ON) tests/distributed

# Continues where it stopped. Options: make conformance OPTIONS="--ops '^linalg' --dtypes float32 --samples 3"
# The random programs run whether or not the database found differences.
# In another execution mode: make conformance MODE=fused; on the plug-in: make conformance PLATFORM=xcpu
MODE ?= strict
conformance: $(READY)
	$(BIN)/python -m tools.conformance --mode $(MODE) $(ON) $(OPTIONS); database=$$?; \
		$(BIN)/python -m tools.random_programs --mode $(MODE) $(ON) --count 2000 && exit $$database

# Runs a folder of small programs in strict, fused and compiled mode: make cases CASES=folder [PLATFORM=xcpu]
CASES ?=
cases: $(READY)
	@test -n "$(CASES)" || { echo "Which programs? make cases CASES=folder with files NUMBER_name.py"; exit 1; }
	$(BIN)/python -m tools.cases $(CASES) $(ON) $(OPTIONS)

# Compiles the programs of PyTorch's test database for TPUs (no TPU is needed); continues where it stopped.
# make tpu-check OPTIONS=--table=docs/tpu-operators.md also writes the page.
tpu-check: $(READY)
	$(BIN)/python -m tools.tpu_check $(OPTIONS)

# Which operators the device answers, and how: docs/operators.md
operators: $(READY)
	$(BIN)/python -m tools.operators --output docs/operators.md

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/eager.py --check

wheel: $(READY)
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv dist demo-output conformance-results tpu-check-results .mypy_cache .pytest_cache .ruff_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

# torch must come with the constraints: without them pip may choose another build of it, gigabytes larger.
$(READY): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "torch-tpu needs Python 3.11 or newer with the venv module, and found none."; \
		echo "Install one (on Debian or Ubuntu: python3 python3-venv), or name it: make test PYTHON=path/to/python3.11"; \
		exit 1; }
	@echo "Setting up .venv with $(PYTHON): a few minutes the first time."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e '.[demo,test]'
	@touch $@
