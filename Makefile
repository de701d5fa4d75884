# Every target sets itself up: its own virtual environment, one install, then the job. The stamp
# file makes sure that nothing is done twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
BENCH_STAMP := $(VENV)/.installed-bench
DOCS_STAMP := $(VENV)/.installed-docs
# Five workers for two cores: while some wait for a server or a signal, others compute.
TESTS := $(BIN)/pytest -q --workers 5 -m "not whole_gpu"

.DEFAULT_GOAL := help
.PHONY: run test test-gpu lint types check campaign proof exactly-once fuzz kills soak mutate bench audit docs clean help

run: $(STAMP) ## the main job: `stoker demo`, on data it makes itself
	$(BIN)/stoker demo

test: $(STAMP) ## the tests: contracts, parity, properties (about five minutes on two cores)
	$(TESTS)

lint: $(STAMP) ## ruff, as linter and as formatter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

check: lint types test ## everything that CI checks

test-gpu: $(STAMP) ## what needs a CUDA device; tests that measure its memory one after the other
	$(BIN)/pytest -q -n 8 -m "gpu and not whole_gpu"
	$(BIN)/pytest -q -m whole_gpu

campaign: $(STAMP) ## fuzz, fault injection, planted bottlenecks, all combinations: hours, on a quiet machine; STOKER_FUZZ_N=2000 STOKER_KILLS=20 makes it shorter
	$(BIN)/pytest -q -m "slow or random" --hypothesis-profile campaign

# Each goes on from its state in benchmarks/results, for this many seconds; SECONDS=36000 finishes them overnight.
SECONDS ?= 3600
PROOF := $(BIN)/python benchmarks/proof

proof: campaign exactly-once fuzz kills soak ## all campaigns, faults under stoker and its peers, and the tables of docs/faults.md
	$(BIN)/python benchmarks/faults.py
	$(PROOF)/figures.py --write

exactly-once: $(STAMP) ## a million random plans: is every sample trained on exactly once? goes on from its state
	$(PROOF)/exactly_once.py --seconds $(SECONDS)

fuzz: $(STAMP) ## ten million damaged inputs through every parser; goes on from its state
	$(PROOF)/fuzz.py --seconds $(SECONDS)

kills: $(STAMP) ## two thousand kills at random moments of pack, train, validate and save; goes on from its state
	$(PROOF)/kills.py --seconds $(SECONDS)

soak: $(STAMP) ## slopes of memory, files, threads and step time over MINUTES=360
	$(PROOF)/soak.py --minutes $(or $(MINUTES),360)

mutate: $(STAMP) ## change twenty random lines of loader, store and train: how many do the tests notice?
	$(BIN)/python tests/campaign/mutate.py --count 20 --seed 1

bench: $(BENCH_STAMP) ## the benchmarks, with their peers; JSON lands in benchmarks/results/
	for script in $$(grep -l '^if __name__' benchmarks/*.py); do echo "== $$script"; $(BIN)/python $$script || exit 1; done

audit: $(STAMP) ## the pinned versions against the database of known weaknesses, where it can be reached
	$(BIN)/python -m wheel_build.audit

docs: $(DOCS_STAMP) ## the documentation site, into site/; a warning is an error
	rm -rf site
	$(BIN)/python -m docs_build.site site
	@echo "site/index.html; search needs a server: $(BIN)/python -m http.server -d site"

clean: ## remove the environment and caches
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Always with the constraints: without them pip would take the newest torch and gigabytes of CUDA.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(BENCH_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
