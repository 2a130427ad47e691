# Two commands: `make train` and `make test`. Each sets up .venv by itself; nothing but python3 (3.11 or newer) and make
# is needed before. `make test` also uses g++, with Python's headers, where it is there.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# The tests in four parts of about the same time, which run beside each other: most start processes and wait for them, so
# that three or four keep two cores busy. What is in none of these lists is the fourth part.
FILES = $(sort $(wildcard $(1:%=tests/%*.py)))
STARTS := $(call FILES,distributed/test_launch) tests/contracts tests/exam tests/examples
UNITS := $(call FILES,unit/test_[a-i] unit/test_[t-z]) tests/drills
LAYOUTS := $(call FILES,unit/test_[m-s] distributed/test_[a-k] distributed/test_lay)

.PHONY: help venv train test test-all test-elsewhere lint format exam bench bench-command bench-checkpoint gpu-check wheels docs clean

help:  ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

venv: $(READY)  ## .venv with every dependency and extra, at the versions of constraints.txt

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("phalanx needs Python 3.11 or newer; try make PYTHON=python3.12")'
	@$(PYTHON) -c 'import venv, ensurepip' || (echo "this python3 has no venv module; on Debian: apt-get install python3-venv" && exit 1)
	@# One that works stays: made anew over itself by another Python, it would be of both.
	$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[all,dev]'
	@# Also where the environment forbids Python to keep what it compiled: each process would compile it again.
	@$(BIN)/python -m compileall -q src
	@touch $(READY)

train: $(READY)  ## the main job: a small decoder on this interpreter's own source text, two ranks or more
	$(BIN)/phalanx train

test: $(READY)  ## lint, types, floors and the tests that CI runs
	$(MAKE) --no-print-directory lint
	@$(BIN)/python -m compileall -q src
	@$(BIN)/python -m pytest -m 'not long' $(STARTS) > .venv/starts.log 2>&1 & starts=$$!; \
	$(BIN)/python -m pytest -m 'not long' $(UNITS) > .venv/units.log 2>&1 & units=$$!; \
	$(BIN)/python -m pytest -m 'not long' $(LAYOUTS) > .venv/layouts.log 2>&1 & layouts=$$!; \
	$(BIN)/python -m pytest -m 'not long' $(addprefix --ignore ,$(STARTS) $(UNITS) $(LAYOUTS)); failed=$$?; \
	echo "waiting for the other parts"; \
	wait $$starts || failed=1; cat .venv/starts.log; wait $$units || failed=1; cat .venv/units.log; \
	wait $$layouts || failed=1; cat .venv/layouts.log; exit $$failed

test-all: $(READY)  ## and the long campaigns
	$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest

test-elsewhere: $(READY)  ## what asserts bits or deadlines, on other instruction sets, one core, busy cores; 45 minutes, resumable
	$(BIN)/python tests/support/elsewhere.py $(VARIANTS)

lint: $(READY)  ## format, lint, types, imports between floors
	$(BIN)/ruff format --check src tests tools examples benchmarks docs
	$(BIN)/ruff check src tests tools examples benchmarks docs
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo > .venv/floors.log || (cat .venv/floors.log; exit 1)

format: $(READY)  ## make the code look as lint wants it
	$(BIN)/ruff format src tests tools examples benchmarks docs
	$(BIN)/ruff check --fix src tests tools examples benchmarks docs

exam: $(READY)  ## bugs planted in phalanx: how many `phalanx verify` finds (docs/exam.md); an hour or two, resumable
	@cd tests && ../$(BIN)/python -m exam $(ARGS)

SMALL := model.dim=256 model.num_layers=6 model.num_heads=4 model.vocab_size=4096 train.global_batch_size=8
LARGE := model.dim=512 model.num_layers=8 model.num_heads=8 model.vocab_size=32000 train.global_batch_size=4

bench: $(READY)  ## training beside torch's own loops and other libraries, two models in fp32 and bf16; ARGS=...; up to an hour
	$(BIN)/phalanx bench train $(SMALL) data.seq_len=256 precision.compute=fp32 $(ARGS)
	$(BIN)/phalanx bench train $(SMALL) data.seq_len=256 precision.compute=bf16 $(ARGS)
	$(BIN)/phalanx bench train $(LARGE) data.seq_len=256 precision.compute=fp32 --turns 8 $(ARGS)
	$(BIN)/phalanx bench train $(LARGE) data.seq_len=256 precision.compute=bf16 --turns 8 $(ARGS)

bench-command: $(READY)  ## `phalanx train` from the command line on: first step, memory, tokens/s beside a bare DDP loop
	$(BIN)/python benchmarks/throughput

bench-checkpoint: $(READY)  ## saving and loading 1 GiB on 4 ranks beside torch's distributed checkpoints
	$(BIN)/python benchmarks/checkpoint.py

gpu-check:  ## on one GPU: phalanx beside other trainers and the matmul ceiling, kernels' parity; ten minutes, no .venv
	$(PYTHON) benchmarks/gpu_check

WHEELS := build/wheels
LINUX := $(foreach tag,_2_28 _2_27 _2_24 _2_17 2014 _2_12 2010 _2_5 1,--platform manylinux$(tag)_x86_64)

wheels:  ## fetch what gpu-check carries to a machine without network: Python 3.12 on x86-64 Linux, about 35 MB
	rm -rf $(WHEELS)
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version 3.12 --implementation cp $(LINUX) -c constraints.txt -r benchmarks/gpu_check/wheels.txt -d $(WHEELS)

docs: $(READY)  ## write what is generated from the code: the reference, the schema of jobs, tables of other pages in docs/
	$(BIN)/python docs/generate.py

clean:  ## everything that is not source
	rm -rf .venv build dist runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache src/*.egg-info
