# Few verbs. `make demo` and `make test` do everything that they need.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Their tests compute and leave the machine as it is, so two run at a time. Those of sandboxes look at all of it.
COMPUTING := $(addprefix tests/,unit/bench unit/engine unit/kernels unit/kernels_cpu integration/engine integration/kernels)

.PHONY: setup demo test soak vm sanitize check bench

setup:
	@$(PYTHON) cli/bootstrap.py

demo: setup
	@$(BIN)/dockyard demo

test: setup
	@failed=0; \
	$(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile $(COMPUTING) || failed=$$?; \
	$(BIN)/python -m pytest -m "not soak" $(COMPUTING:%=--ignore=%) || failed=$$?; \
	exit $$failed

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
