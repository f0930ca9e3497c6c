# Eyas: `make` lists what there is.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Python that creates the environment: 3.11 or newer.
PYTHON ?= python3
# Package index to take torch itself from; empty is pip's own, which on x86_64 serves a CUDA build of several GB:
# without a GPU, name the index of CPU builds that PyTorch's installation page gives.
TORCH_INDEX ?=
# Passed on to the command behind demo, test, serve and bench.
ARGS ?=
# Folder that `gen` writes eyas/v1 into.
OUT ?= .

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
LOG   := $(VENV)/setup.log
PIP   := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Installs $(1): all of pip's words go to the log, and a terminal shows on one line what is being done.
define install
{ echo "+ pip install $(1)"; $(PIP) $(1) 2>&1; } | tee -a $(LOG) | while IFS= read -r line; do \
		[[ -t 1 && $$line =~ ^\ *(Collecting|Downloading|Building|Installing|Preparing) ]] || continue; \
		printf '\r\e[K      %.90s' "$$line"; \
	done && { [ ! -t 1 ] || printf '\r\e[K'; } \
	|| { echo; echo "pip failed; the end of $(LOG):"; tail -n 15 $(LOG); exit 1; } >&2
endef

.PHONY: help
help: ## List the targets
	@echo "Eyas: lossless speculative decoding as services. Targets:"; echo
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile
	@echo; echo "Variables:"; echo
	@echo "  ARGS=...         more arguments for demo, serve, test and bench: make test ARGS='-k commit'"
	@echo "  PYTHON=...       Python that creates the environment, 3.11 or newer (default: python3)"
	@echo "  TORCH_INDEX=...  package index for torch at set-up, for instance one with CPU builds"

.PHONY: demo
demo: $(READY) ## Set up, fetch the default model, ask one question, show what was drafted and accepted
	@$(BIN)/eyas demo $(ARGS)

.PHONY: serve
serve: $(READY) ## Serve the default model on 127.0.0.1:8000 until Ctrl-C
	@$(BIN)/eyas up $(ARGS)

.PHONY: test
test: $(READY) ## Run the tests
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: bench
bench: $(READY) ## Measure against transformers on this CPU (ARGS="--prompts 6 --max-tokens 256")
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

.PHONY: lint
lint: $(READY) ## Check style, types and protos
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/buf lint

.PHONY: gen
gen: $(READY) ## Generate eyas/v1 from protos/
	@mkdir -p "$(OUT)"
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out="$(OUT)" --pyi_out="$(OUT)" \
		--grpc_python_out="$(OUT)" --mypy_grpc_out=quiet:"$(OUT)" $(wildcard protos/eyas/v1/*.proto)

.PHONY: clean
clean: ## Remove the environment and all caches (the fetched model stays)
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. A later run does nothing unless what is to be installed has changed.
.PHONY: setup
setup: $(READY) ## Create .venv and install everything into it

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Eyas needs Python 3.11 or newer, and \
	$(PYTHON) is $$($(PYTHON) --version 2>&1 || true). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "[1/3] environment in $(VENV) ($$($(PYTHON) --version))"
	@[ -x $(BIN)/pip ] || $(PYTHON) -m venv --clear $(VENV)
	@echo "[2/3] torch (200 MB as a CPU build; as a CUDA build, several GB with what it needs)"
	@$(call install,--no-deps $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') torch)
	@echo "[3/3] eyas and what else it needs (some minutes the first time)"
	@$(call install,-e '.[dev]')
	@touch $@
	@echo "ready; pip's own words are in $(LOG)"
