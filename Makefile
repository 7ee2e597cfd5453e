# Needs Python 3.11 or newer and make; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin

FLOWERS := 1.40.0 1.42.0

# the tests begin hundreds of processes: Python keeps what it compiles of the libraries, whatever the caller's setting
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-all test-flowers test-nvflare lint docs package bench hardening clean

# the core alone, for the demo
.venv/core: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fewbytes needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e .
	@touch $@

.venv/installed: .venv/core
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[dev]'
	@touch $@

demo: .venv/core
	$(BIN)/fewbytes compare fedavg fedbn separate --dataset digits --clients 8 --alpha 0.5 --samples 40/80 \
		--model resnet8:width=8,stem=3x3 --rounds 15 --set epochs=5 --set lr=0.05 --set batch=20 --set momentum=0.9

# what every change must pass
test: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow"

# what takes long (tests/levels.py)
test-slow: .venv/installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

# before a release, and by who touches what all methods stand on; what has passed is then written down
test-all: lint docs package test test-slow test-flowers test-nvflare
	$(BIN)/python tests/levels.py

# the oldest and the newest version that the package takes, each laid over the one that is installed
test-flowers: .venv/installed
	for version in $(FLOWERS); do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
			--target .flowers/$$version flwr==$$version && \
		PYTHONPATH=.flowers/$$version $(BIN)/python -m pytest -n 2 --dist loadfile \
			tests/flower tests/process/test_deployment.py || exit 1; \
	done

# NVFlare pins versions of packages that others need newer, so it has an environment beside the usual one
.venv/nvflare: .venv/installed
	$(PYTHON) -m venv .nvflare
	$(abspath $(BIN))/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.nvflare/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/after.pth"
	.nvflare/bin/python -m pip install --quiet --disable-pip-version-check --no-compile 'nvflare>=2.9,<2.10'
	@touch $@

test-nvflare: .venv/nvflare
	PYTHONPATH=src .nvflare/bin/python -m pytest tests/nvflare

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/installed
	for script in benchmarks/speed/*.py; do $(BIN)/python $$script || exit 1; done

hardening: .venv/installed
	$(BIN)/python benchmarks/hardening

clean:
	rm -rf .venv .nvflare .flowers .mypy_cache .pytest_cache .ruff_cache .hypothesis

# the site, in build/docs; a warning is an error
docs: .venv/installed
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

# the wheel alone, in new environments
package: .venv/installed
	$(BIN)/python scripts/check_package.py
