# Everything a newcomer needs is `make demo` and `make test`; the other targets are for developers. `make` lists them.

PYTHON ?= python3
METHOD ?= feddkc
OUT ?= out/demo$(if $(filter feddkc,$(METHOD)),,-$(METHOD))
FAST ?= 0
ARGS ?=
SEED ?= 1

BIN := .venv/bin
PROTOC := .protos-venv/bin
WIRE := fleetdistill/wire/v1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all matrix coverage mutation check docs format bench protos protos-check venv clean fuzz chaos kills run-kills sums stores wheels soak containers

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/.installed  ## Train a small fleet on real digits (METHOD=feddkc, OUT=folder)
	@$(BIN)/python examples/demo.py --method $(METHOD) --out $(OUT)

test: .venv/.installed  ## Run the tests but the long ones (FAST=1 leaves out the slow ones, ARGS="-k name" passes options to pytest)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m "not containers and not long and not matrix$(if $(filter 1,$(FAST)), and not slow)" $(ARGS)

test-all: .venv/.installed  ## Run all tests but those of make matrix, and keep pictures of the dashboard in out/dashboard (ARGS as for test)
	@PYTHONDONTWRITEBYTECODE= FLEETDISTILL_TESTS_PICTURES=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m "not containers and not matrix" $(ARGS)

matrix: .venv/.installed  ## Kill, replay, score and export with the methods and variants that test-all leaves out (ARGS as for test)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m matrix $(ARGS)

coverage: .venv/.installed  ## Run the tests and say which lines of both packages they reach (ARGS as for test)
	@PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered -m "not containers and not matrix$(if $(filter 1,$(FAST)), and not slow)" $(ARGS)

MUTANTS ?= 100

mutation: .venv/.installed  ## Change the formulas, one operator at a time, and count what their tests see (MUTANTS=100, SEED=1)
	@OMP_NUM_THREADS=1 PYTHONPATH=client_sdk:server:tests $(BIN)/python -m mutation --mutants $(MUTANTS) --seed $(SEED)

check: .venv/.installed  ## Lint, check formatting and types, and check the protocol
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@PYTHONPATH=client_sdk:server $(BIN)/lint-imports
	@$(BIN)/python tools/structure.py
	@$(MAKE) --no-print-directory protos-check

SERVE ?= 0

docs: .venv/.installed  ## Build the documentation site in out/site (SERVE=1 shows it on 127.0.0.1:8000)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(if $(filter 1,$(SERVE)),serve --dev-addr 127.0.0.1:8000,build --strict --quiet)
	@$(if $(filter 1,$(SERVE)),,echo "open out/site/index.html")

format: .venv/.installed  ## Format the code and mend what the linter can
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

MESSAGES ?= 1000000

fuzz: .venv/.installed  ## Send hostile messages to the server's checks and to devices (MESSAGES=1000000, SEED=1)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/fuzz/run.py --messages $(MESSAGES) --seed $(SEED)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/fuzz/decoder.py out/fuzz-corpus -runs=$(MESSAGES) \
	  -seed=$(SEED) -max_len=4096 -artifact_prefix=out/fuzz-

# One run where a seed is named, else the runs that docs/explanation/durability.md tells about.
RUNS ?= $(if $(filter file,$(origin SEED)),200,1)

chaos: .venv/.installed  ## Kill processes and spoil connections, and look for lost uploads (SEED=7, or RUNS=200; ARGS="--jobs 3")
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m chaos.run --seed $(SEED) --runs $(RUNS) $(ARGS)

KILLS ?= 200

kills: .venv/.installed  ## Kill apps with a device at random moments, and check their states and receipts (KILLS=200, SEED=1)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m chaos.app_kills --kills $(KILLS) --seed $(SEED)

run-kills: .venv/.installed  ## Kill commands and processes while operators change runs (KILLS=200, SEED=1)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m chaos.run_changes --kills $(KILLS) --seed $(SEED)

SESSIONS ?= 1000

sums: .venv/.installed  ## Make secure sums while messages get lost and repeated, and look for wrong or opened ones (SESSIONS=1000, SEED=1)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m chaos.secure_sums --sessions $(SESSIONS) --seed $(SEED)

stores: .venv/.installed  ## Replay and kill runs of every method over PostgreSQL and an object store, too (ARGS as for test)
	@OMP_NUM_THREADS=1 FLEETDISTILL_TESTS_EVERY_RUN_APART=1 $(BIN)/pytest -n 2 --dist worksteal -m postgres \
	  tests/methods tests/reliability tests/store tests/intake tests/front tests/service $(ARGS)

containers: .venv/.installed  ## Build deploy/Containerfile and run the demo of deploy/compose.yaml, in minutes (Linux, as root)
	@OMP_NUM_THREADS=1 $(BIN)/pytest -m containers tests/deploy $(ARGS)

wheels: .venv/.installed  ## Look for wheels of every extra for each system and Python (needs an index; ARGS="--extras light")
	@$(BIN)/python tests/platforms/wheels.py $(ARGS)

MINUTES ?= 30

soak: .venv/.installed  ## Let front and engine serve a restless fleet; their memory may not grow (MINUTES=30, SEED=1)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m soak.soak --minutes $(MINUTES) --seed $(SEED)

bench: .venv/.installed  ## Run every benchmark, one after the other
	@set -e; for script in $(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)); do \
	  echo "== $$script"; $(BIN)/python "$$script"; done

# --- environments -----------------------------------------------------------------------------------------------------

venv: .venv/.installed  ## Create .venv, or bring it up to date with pyproject.toml

define require_python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "fleetdistill needs Python 3.11 or newer; \"$(PYTHON) --version\" says: $$($(PYTHON) --version 2>&1)" >&2; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
endef

# torch and torchvision are asked for together, so that pip takes a pair that fits.
# -qq keeps errors and drops pip's warnings about the places where it looks for packages.
.venv/.installed: pyproject.toml
	$(require_python)
	@echo "Installing into .venv (the first time downloads about 3 GB, needs 11 GB of disk and takes minutes) ..."
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

# The generator is pinned and old on purpose, so it lives apart: see protos/README.md.
.protos-venv/.installed: protos/requirements.txt
	$(require_python)
	@test -x $(PROTOC)/pip || $(PYTHON) -m venv .protos-venv
	@$(PROTOC)/pip install -qq --disable-pip-version-check -r $<
	@touch $@

# --- protocol ---------------------------------------------------------------------------------------------------------

# The same tree as under protos/, so copying it over client_sdk/ touches generated files only.
define generate
	@rm -rf .protos-venv/generated && mkdir -p .protos-venv/generated
	@$(PROTOC)/python -m grpc_tools.protoc -I protos --plugin=$(PROTOC)/protoc-gen-mypy \
	  --python_out=.protos-venv/generated --mypy_out=quiet:.protos-venv/generated protos/$(WIRE)/*.proto
	@$(PROTOC)/python -m grpc_tools.protoc -I protos --plugin=$(PROTOC)/protoc-gen-mypy_grpc \
	  --grpc_python_out=.protos-venv/generated --mypy_grpc_out=quiet:.protos-venv/generated \
	  $$(grep -l '^service ' protos/$(WIRE)/*.proto)
endef

protos: .protos-venv/.installed  ## Generate client_sdk/fleetdistill/wire/v1 from protos/
	$(generate)
	@rm -f client_sdk/$(WIRE)/*_pb2*.py client_sdk/$(WIRE)/*_pb2*.pyi
	@cp -R .protos-venv/generated/. client_sdk/

# What the protocol must stay compatible with: the newest release.
AGAINST ?= $(shell git describe --tags --abbrev=0 2>/dev/null)

protos-check: .protos-venv/.installed .venv/.installed  ## Check generated code, style and compatibility (AGAINST=tag)
	$(generate)
	@diff -rq -x __init__.py -x __pycache__ client_sdk/$(WIRE) .protos-venv/generated/$(WIRE) \
	  || { echo "client_sdk/$(WIRE) is not what protos/ generates: run make protos" >&2; exit 1; }
	@$(BIN)/buf lint protos
	@rm -rf .protos-venv/against && mkdir -p .protos-venv/against
	@if [ -z "$(AGAINST)" ]; then \
	  echo "no release yet: compatibility not checked"; \
	else \
	  git archive "$(AGAINST)" protos | tar -x -C .protos-venv/against; \
	  $(BIN)/buf breaking protos --against .protos-venv/against/protos; \
	fi

clean:  ## Remove caches, builds and the demo's output; keeps the environments
	@rm -rf dist build out/demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find client_sdk server examples tests benchmarks -name __pycache__ -type d -exec rm -rf {} +
