# Everything runs from .venv, which the first target that needs it creates. Another interpreter: make PYTHON=python3.12 ...

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CACHE := $(CURDIR)/$(VENV)/.cache
# Only the folders that exist: git keeps no empty ones.
CODE := $(wildcard lightning_swarm tests examples benchmarks) docs/conf.py

export RUFF_CACHE_DIR := $(CACHE)/ruff
export MYPY_CACHE_DIR := $(CACHE)/mypy

.DEFAULT_GOAL := help
.PHONY: help demo quick test versions lightning wheel check exhaustive fmt lint type docs bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1	\2/p' Makefile | expand -t 16

demo: $(STAMP) ## train a small GPT on four local peers, of which one is killed, then on none; compare (a few minutes)
	@$(BIN)/python -m examples.bytes.demo $(ARGS)

# One thread per process: where several peers share the cores, threads that outnumber them wait for each other. Three workers
# on two cores, for tests of processes wait much. The thorough tests (long studies, the wheel, further cells of tables) run in
# `make check` only, and most cells of large tables in `make exhaustive` only.
test: $(STAMP) ## run the tests; some of them: make test ARGS="-n 0 tests/unit -k router"
	@echo "== test"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -o cache_dir=$(CACHE)/pytest \
		$(or $(ARGS),-m "not thorough and not benchmark")

# A changed test file may hold thorough tests alone: then pytest collects none, which is its exit status 5.
CHANGED = $(BIN)/python -m tests.quick.changed

quick: $(STAMP) ## check the changes since main in about a minute: style, types, the changed packages' unit tests
	@code=$$($(CHANGED) code $(BASE)) && tests=$$($(CHANGED) tests $(BASE)) || exit 1; \
	echo "== lint and type"; \
	if [ -n "$$code" ]; then \
		$(BIN)/ruff format --check --quiet --output-format concise $$code && $(BIN)/ruff check $$code || exit 1; \
	fi; \
	$(BIN)/mypy lightning_swarm || exit 1; \
	echo "== test"; \
	test -n "$$tests" || { echo "No unit tests belong to the changed files."; exit 0; }; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -o cache_dir=$(CACHE)/pytest \
		-m "not thorough and not benchmark" $$tests || test $$? = 5

# Each Lightning lies over the installed one. Each Python other than this environment's has an environment of its own with the
# pinned dependencies. If PATH has no such Python, uv is asked for one that it has installed. docs/versions.md says which
# failures are Lightning's own.
LIGHTNINGS := 2.5.0 2.5.6 2.6.0
VERSIONS_TESTS := tests/unit tests/parity tests/features tests/p2p/test_processes.py
PYTHONS := 3.11 3.12 3.13 3.14
PYTHONS_TESTS := tests/unit tests/parity tests/p2p
VERSIONS := $(CURDIR)/$(VENV)/versions
VERSIONS_PYTEST := -m pytest -q --show-capture=no --tb=line -o cache_dir=$(CACHE)/pytest

versions: $(STAMP) ## run the tests with older Lightnings and other Pythons (CI does not): make versions LIGHTNINGS=2.5.6 PYTHONS=
	@failed=; for version in $(LIGHTNINGS); do \
		echo "== test with Lightning $$version"; folder=$(VERSIONS)/$$version; \
		test -d $$folder || $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $$folder \
			lightning==$$version pytorch-lightning==$$version || { rm -rf $$folder; exit 1; }; \
		PYTHONPATH=$$folder OMP_NUM_THREADS=1 $(BIN)/python $(VERSIONS_PYTEST) $(VERSIONS_TESTS) || failed="$$failed, Lightning $$version"; \
	done; \
	own=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	for version in $(PYTHONS); do \
		test $$version != $$own || continue; \
		python=python$$version; $$python -c '' 2>/dev/null || python=$$(uv python find --no-project $$version 2>/dev/null) || { \
			echo "== no Python $$version here"; continue; }; \
		echo "== test with Python $$version"; folder=$(VERSIONS)/python$$version; \
		test $$folder/.installed -nt $(STAMP) || { $$python -m venv --clear $$folder && $$folder/bin/python -m pip install -qq \
			--disable-pip-version-check -c .ci/constraints.txt -e '.[dev,demo]' && touch $$folder/.installed; } && \
		OMP_NUM_THREADS=1 $$folder/bin/python $(VERSIONS_PYTEST) -m "not thorough and not benchmark" $(PYTHONS_TESTS) || \
			failed="$$failed, Python $$version"; \
	done; test -z "$$failed" || { echo "Failures with$${failed#,}: see docs/versions.md" >&2; exit 1; }

lightning: $(STAMP) ## run Lightning's own tests in a swarm (CI does not): make lightning SOURCE=path/to/lightning-2.6.6
	@test -n "$(SOURCE)" || { echo "Name Lightning's source of the installed version: make lightning SOURCE=path. See docs/versions.md" >&2; exit 1; }
	@$(BIN)/python -m benchmarks.lightning_suite "$(SOURCE)" $(ARGS)

# One after the other, also under -j: the cheap ones first, and their output apart.
check: ## lint, type, build the docs, run tests, the thorough ones too: what has to pass before a change is merged
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory type
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test ARGS="-m 'thorough and not exhaustive and not benchmark'"

exhaustive: ## run the tests that `make check` leaves out, an hour or two: before a release
	@$(MAKE) --no-print-directory test ARGS="-m 'exhaustive and not benchmark'"

# The wheel is built from the sdist, in isolation, and everything that it depends on comes from the package index. One commit
# always gives the same bytes: files get the commit's time, and pip builds with the pinned hatchling, under either of the names
# that its versions have for build constraints. A test builds a second time and compares.
WHEEL_ENVIRONMENT := $(CURDIR)/$(VENV)/wheel

wheel: export SOURCE_DATE_EPOCH = $(or $(shell git log -1 --format=%ct 2>/dev/null),1580601600)
wheel: $(STAMP) ## build dist/, install the wheel into an empty environment and try it there: before a release
	@echo "== wheel"
	@rm -rf dist $(WHEEL_ENVIRONMENT)
	@$(BIN)/python -m hatchling build -t sdist
	@PIP_CONSTRAINT=.ci/constraints.txt PIP_BUILD_CONSTRAINT=.ci/constraints.txt \
		$(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist dist/*.tar.gz
	@$(PYTHON) -m venv $(WHEEL_ENVIRONMENT)
	@$(WHEEL_ENVIRONMENT)/bin/python -I -m pip install -qq --disable-pip-version-check -c .ci/constraints.txt dist/*.whl
	@$(WHEEL_ENVIRONMENT)/bin/python -I -m pip check
	@SWARM_DIST=$(CURDIR)/dist SWARM_WHEEL_PYTHON=$(WHEEL_ENVIRONMENT)/bin/python \
		$(BIN)/python -m pytest -q -o cache_dir=$(CACHE)/pytest tests/packaging
	@$(BIN)/python -m pip hash dist/*

fmt: $(STAMP) ## format the code and mend what can be mended safely
	@$(BIN)/ruff check --fix-only --quiet $(CODE)
	@$(BIN)/ruff format $(CODE)

lint: $(STAMP) ## check format, style, which way imports go, and how text reads
	@echo "== lint"
	@$(BIN)/ruff format --check --quiet --output-format concise $(CODE) || { echo "Some files are not formatted: make fmt" >&2; exit 1; }
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/lint-imports --cache-dir $(CACHE)/import-linter > $(VENV)/imports.txt || { cat $(VENV)/imports.txt; exit 1; }
	@grep '^Contracts:' $(VENV)/imports.txt
	@$(BIN)/python -m tests.text.meter

type: $(STAMP) ## check the types
	@echo "== type"
	@$(BIN)/mypy

docs: $(STAMP) ## build the documentation into runs/docs
	@echo "== docs"
	@$(BIN)/sphinx-build -q -W --keep-going -d $(CACHE)/sphinx docs runs/docs

# Those that are to take less than 20 minutes together.
BENCHMARKS := decisions throughput streaming allreduce hops steps alone startup recovery overhead

bench: $(STAMP) ## run the benchmarks; one of them: .venv/bin/python -m benchmarks.recovery
	@failed=; for name in $(BENCHMARKS); do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "Failed:$$failed" >&2; exit 1; }

clean: ## remove what make made: .venv, runs/ (with its checkpoints), caches
	@rm -rf $(VENV) runs examples/existing_project/runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
	@find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: an installation that broke off is done again.
$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "lightning_swarm needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>/dev/null || echo "not to be had")." >&2; \
		echo "Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "== installing into $(VENV) (the first time takes some minutes)"
	@$(PYTHON) -m venv $(VENV) || { \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it comes with the package python3-venv." >&2; exit 1; }
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c .ci/constraints.txt -e '.[dev,demo]'
	@touch $@
