# make demo and make test each set up .venv on a machine with nothing but Python 3.11 or newer.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CHECKPOINTS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-reference test-all lint bench clean

demo: $(VENV)/.demo
	$(BIN)/python -m fixtures.demo

test: lint
	$(BIN)/python -m pytest

test-reference: $(VENV)/.reference
	$(BIN)/python -m pytest -m reference

test-all: $(VENV)/.test
	@test -d "$(CHECKPOINTS)" || { echo "CHECKPOINTS: expected a folder of checkpoints, found '$(CHECKPOINTS)'; give CHECKPOINTS=DIR" >&2; exit 2; }
	CHECKPOINTS="$(abspath $(CHECKPOINTS))" $(BIN)/python -m pytest -m checkpoints

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.reference
	$(BIN)/python -m benchmarks.speculation

clean:
	rm -rf $(VENV) demo-output build *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu]'
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,test]'
	@touch $@

# torch comes first and by itself, so that whoever wants another build of it can say so: make TORCH='torch --index-url ...'
$(VENV)/.reference: pyproject.toml $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,test,reference]'
	@touch $@
