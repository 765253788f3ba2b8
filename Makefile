# looseleaf: `make demo` shows it, `make test` proves it. Both install what they need into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed

.PHONY: help demo test check format readme figures bench install clean

help:
	@echo "make demo    install, then show looseleaf at work on the embedded model"
	@echo "make test    install, then check and test everything"
	@echo "make check   formatting, lint, types, layering"
	@echo "make format  rewrite files the way the checks want them"
	@echo "make readme  rewrite the generated parts of the README"
	@echo "make figures draw the Kamera paper's figures from bench/results into docs/kamera"
	@echo "make bench   run the benches (BENCH='exact ttft', QUICK=1 for a minute each)"
	@echo "make clean   remove what make installed and built"

install: $(INSTALLED)

$(INSTALLED): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "looseleaf needs Python 3.11 or newer: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

demo: $(INSTALLED)
	$(BIN)/looseleaf demo

test: check
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy

readme: $(INSTALLED)
	$(BIN)/python tools/readme.py

figures: $(INSTALLED)
	$(BIN)/python tools/figures.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

BENCH ?= exact ttft
bench: $(INSTALLED)
	for name in $(BENCH); do $(BIN)/looseleaf bench $$name $(if $(QUICK),--quick) || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache demo-output
