# `make demo` and `make test` each do everything on a fresh machine: environment, installation, work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tiny models run slower on two threads than on one.
export OMP_NUM_THREADS ?= 1
# Model hubs are never asked for anything by the suite or the demo.
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test test-all bench lint install examples notebooks clean

demo: install
	$(BIN)/gradscope demo --out runs

# Tests of one file stay on one worker and share what they set up; an idle worker steals from the other's end.
test: install
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow and not benchmark"

test-all: install
	$(BIN)/pytest -n 2 --dist worksteal -m "not benchmark"

bench: install
	$(BIN)/pytest tests/benchmarks -m benchmark -s -p no:xdist

lint: install
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

# Rebuilds the figures from the shipped reference runs.
examples: install
	$(BIN)/gradscope figures examples/*/ -o runs/figures

# Writes the .ipynb beside each notebook's text form.
notebooks: install
	$(BIN)/jupytext --to ipynb notebooks/*.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
