# Needs Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

OLDEST_FLOWER := 1.40.0

.PHONY: demo test test-process test-oldest-flower lint bench hardening clean

.venv/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fewbytes needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: .venv/installed
	$(BIN)/fewbytes compare fedavg fedpurin separate --dataset digits --clients 10 --alpha 0.3 --rounds 20 \
		--set epochs=2 --set lr=0.1 --set batch=20 --set momentum=0.9

test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not process"

test-process: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m process

# all other tests run with the newest that the package takes; this one lies on top of it
test-oldest-flower: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target .oldest-flower flwr==$(OLDEST_FLOWER)
	PYTHONPATH=.oldest-flower $(BIN)/python -m pytest -n 2 --dist loadfile tests/flower tests/process/test_deployment.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	for script in benchmarks/speed/*.py; do $(BIN)/python $$script || exit 1; done

hardening: .venv/installed
	$(BIN)/python benchmarks/hardening

clean:
	rm -rf .venv .oldest-flower .mypy_cache .pytest_cache .ruff_cache .hypothesis
