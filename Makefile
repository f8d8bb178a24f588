# Commands of one word. Each does all of its own set-up in .venv; a second call finds it done. `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PRESET ?= smollm2
ARGS ?=
NAME ?= run
TESTS ?= tests
MINUTES ?= 10
SEED ?= 0
HOURS ?= 1

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Tests wait for processes half of their time: three at once keep two cores busy. Those that kill wait less. Four at
# most: each holds torch, and starts processes of its own.
test: JOBS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores + cores / 2)))
test-chaos test-long: JOBS ?= logical
SIDE_BY_SIDE = -n $(JOBS) --maxprocesses 4 --dist worksteal
export PYTHON VENV_FLAGS TORCH_INDEX
# Where it is set, each of a run's processes compiles our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test explore fuzz test-chaos test-long chaos-random test-sglang test-vllm test-gpu compose-test check fmt bench gallery setup clean

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo '  PRESET=tiny ARGS="--set trainer.lr=5e-3"   for run        TESTS=tests/unit JOBS=0   for test'
	@echo '  NAME=engine ARGS="..."                     for bench      HOURS=8             for test-long'
	@echo '  TORCH_INDEX=URL                            package index to take torch from'

run: .venv/.ready-run ## train a small LLM by reinforcement learning and watch its reward rise
	@STREAMRL_MAKE_FROM="$(PWD)" $(BIN)/streamrl-orchestrator run --preset $(PRESET) $(ARGS)

test: .venv/.ready-dev ## all tests that kill nothing
	@$(BIN)/python tests/alone.py $(PYTEST) $(SIDE_BY_SIDE) -m "not chaos and not long and not sglang" $(TESTS) $(ARGS)

chaos-random: .venv/.ready-dev ## random faults in random modes for MINUTES, drawn from SEED; every run is audited
	@$(BIN)/python -m benchmarks.chaos_random --minutes $(MINUTES) --seed $(SEED) $(ARGS)

test-chaos: .venv/.ready-dev ## kill real processes at named points of a run
	@$(PYTEST) $(SIDE_BY_SIDE) -m "chaos and not long" $(TESTS) $(ARGS)

test-long: .venv/.ready-dev ## tests that wait for minutes, further kills, what is installed without make; a soak of HOURS
	@$(PYTEST) $(SIDE_BY_SIDE) -m long $(TESTS) $(ARGS)
ifeq ($(strip $(TESTS) $(ARGS)),tests)
ifneq ($(HOURS),0)
	@$(BIN)/python -m benchmarks.soak --hours $(HOURS)
endif
endif

test-sglang: .venv/.ready-dev ## against the real SGLang of the environment SGLANG_VENV=DIR
	@$(PYTEST) -m sglang $(TESTS) $(ARGS)

test-vllm: .venv/.ready-dev ## against the real vLLM of the environment VLLM_VENV=DIR
	@$(PYTEST) tests/integration/test_server_engines.py -k vllm $(ARGS)

test-gpu: .venv/.ready-dev ## against a real GPU
	@$(PYTEST) tests/gpu -m gpu -n0 $(ARGS)

explore: .venv/.ready-dev ## events in any order for MINUTES, from a fresh SEED on: a run loses nothing and trains nothing twice
	@$(BIN)/python -m tests.property --minutes $(MINUTES) --seed $(SEED) $(ARGS)

fuzz: .venv/.ready-dev ## hostile input of every kind for MINUTES, drawn from SEED
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

compose-test: .venv/.ready-dev ## build the images, bring them up with docker compose, and kill what runs in them
	@STREAMRL_COMPOSE_TEST=$${STREAMRL_COMPOSE_TEST:-build} $(PYTEST) -o faulthandler_timeout=0 tests/compose $(ARGS)

check: .venv/.ready-dev ## ruff, formatting, pyright
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright

fmt: .venv/.ready-dev ## format, and repair what ruff can
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

bench: .venv/.ready-dev ## measure a figure: its last line is one JSON object
	@$(BIN)/python -m benchmarks.$(NAME) $(ARGS)

gallery: .venv/.ready-dev ## draw the pictures of docs/gallery.md anew, from two real runs
	@$(BIN)/python -m benchmarks.gallery $(ARGS)

setup: .venv/.ready-dev ## only the set-up, with the development tools

.venv/.ready-%: pyproject.toml .ci/setup
	@echo 'Setting up .venv'
	@.ci/setup $*

clean: ## remove the environment and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
