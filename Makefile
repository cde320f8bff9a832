# make demo and make test each set up .venv on a machine with nothing but Python 3.11 or newer.
PYTHON ?= python3
TORCH ?= torch==2.13.0
CHECKPOINTS ?=
VENV := .venv
BIN := $(VENV)/bin

MODELOPT := .venv-modelopt
FUZZ := .venv-fuzz
RUNS ?= 20000

.PHONY: demo test test-nightly package-check test-reference test-all test-modelopt fuzz lint bench clean

demo: $(VENV)/.demo
	$(BIN)/python -m fixtures.demo

test: lint
	$(BIN)/python -m pytest
	$(MAKE) package-check

# What somebody else's CI would run, on the trained checkpoint. The "released" package is made by a process of its own
# with another order of hashing, so that an equal one also proves that exports are reproducible.
TRAINED := fixtures/checkpoints/trained_mixed_dense_text
package-check: $(VENV)/.test
	rm -rf build/package-check
	PYTHONHASHSEED=1 $(BIN)/build-model export $(TRAINED) build/package-check/released --hash
	PATH="$(abspath $(BIN)):$$PATH" PYTHONHASHSEED=2 fixtures/package-check.sh $(TRAINED) \
		build/package-check/released build/package-check/work \
		--reference $(TRAINED)/reference.npz --min-acceptance 0.6
	cmp build/package-check/released/manifest.json build/package-check/work/package/manifest.json

# The random schedules of `make test` are a few hundred.
test-nightly: $(VENV)/.test
	SCHEDULES=20000 TRAINED_SCHEDULES=200 $(BIN)/python -m pytest tests/runtime/test_schedules.py \
		tests/runtime/test_trained_schedules.py

test-reference: $(VENV)/.reference
	$(BIN)/python -m pytest -m reference

test-all: $(VENV)/.test
	@test -d "$(CHECKPOINTS)" || { echo "CHECKPOINTS: expected a folder of checkpoints, found '$(CHECKPOINTS)'; give CHECKPOINTS=DIR" >&2; exit 2; }
	CHECKPOINTS="$(abspath $(CHECKPOINTS))" $(BIN)/python -m pytest -m checkpoints

# ModelOpt's own dequantization against ours, to the bit. It wants another transformers, hence another environment.
test-modelopt: $(MODELOPT)/.installed
	$(MODELOPT)/bin/python -m fixtures.modelopt.check fixtures/checkpoints/mo_* fixtures/checkpoints/trained_mo_*

fuzz: $(FUZZ)/.installed
	$(FUZZ)/bin/python -m fuzz.target --runs $(RUNS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.reference
	$(BIN)/python -m benchmarks.speculation

clean:
	rm -rf $(VENV) $(MODELOPT) $(FUZZ) demo-output build *.egg-info

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

LIBRARIES := numpy ml_dtypes onnx 'onnx-ir<2' onnxscript==0.7.2 pydantic click safetensors xxhash

$(MODELOPT)/.installed: Makefile
	$(PYTHON) -m venv $(MODELOPT)
	$(MODELOPT)/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(MODELOPT)/bin/python -m pip install --quiet --disable-pip-version-check \
		nvidia-modelopt==0.47.0 'transformers>=4.57,<5.15' requests $(LIBRARIES)
	@touch $@

$(FUZZ)/.installed: Makefile
	$(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check atheris $(LIBRARIES)
	@touch $@
