# make venv   create .venv with the pinned dependencies and megalite in editable form
# make test   the whole test suite
# make lint   ruff (lint and format) and basedpyright
# make demo   the demonstration, on CPU
# make bench  the benchmarks
# make clean  remove everything that was built (make venv brings it back)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench venv clean

help:
	@sed -n 's/^# make/make/p' Makefile

venv: $(STAMP)

$(STAMP): setup.py pyproject.toml constraints.txt $(wildcard csrc/*.cpp)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "megalite needs Python >= 3.11; set PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing megalite and its pinned dependencies into $(VENV) (minutes at first)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'import megalite._index_builder' 2>/dev/null || \
		echo "note: the C++ index builder was not built (pip install -v -e . shows why); numpy takes its place"
	@touch $@

test: venv
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: venv
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

demo: venv
	@PATH="$(CURDIR)/$(BIN):$$PATH" examples/demo.sh

bench: venv
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[bench]'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/bench_train.py

clean:
	rm -rf $(VENV) build dist *.egg-info megalite/*.so .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
