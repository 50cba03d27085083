# Few verbs. `make demo` and `make test` do everything that they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin

.PHONY: setup demo test soak vm sanitize check bench

setup:
	@$(PYTHON) cli/bootstrap.py

demo: setup
	@$(BIN)/dockyard demo

test: setup
	@$(BIN)/python -m pytest -m "not soak"

soak: setup
	@$(BIN)/python -m pytest -m soak

vm: setup
	@$(BIN)/python tests/vm/run.py

sanitize: setup
	@$(BIN)/python tests/sanitize_kernels.py

check: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/pyright

bench: setup
	@$(BIN)/python -m bench.run_all --quick
