# Every target makes the environment first; nothing needs to be activated.
.PHONY: setup demo serve test lint check-long clean
.DEFAULT_GOAL := demo

BIN := .venv/bin
# One thread for each process that the tests start: on few cores more of them only spin.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

setup:
	@command -v python3 >/dev/null || { echo "setup: error: python3 is not installed: Python 3.11 is needed" >&2; exit 1; }
	@python3 deploy/bootstrap.py

demo: setup
	@$(BIN)/python -m deploy.demo

serve: setup
	@$(BIN)/phasegate up

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache >.lint-imports.log 2>&1 || { cat .lint-imports.log; exit 1; }

test: lint
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -m "not long"

# The minutes-long forms: `make check-long`, or one part of them with PART=name.
check-long: setup
	@$(ONE_THREAD) $(BIN)/python -m pytest -q -m long $(if $(PART),-k $(PART))

clean:
	@rm -rf .venv .setup.lock .setup.log .lint-imports.log .mypy_cache .ruff_cache .pytest_cache build *.egg-info
