# The commands of the project. `make help` lists them; what needs the environment sets it up first, once.
PYTHON ?= python3.11
MACHINE := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo gpu || echo cpu)
DEVICE ?= $(MACHINE)
$(if $(filter-out cpu gpu,$(DEVICE)),$(error DEVICE=$(DEVICE): it is cpu or gpu))
CONFIG ?= configs/stage2/qwen3vl_8b_3v1.yaml
GPUS   ?=
PORT   ?= 29500
ARGS   ?=
# Where learners run: the nodes of a hostfile (docs/scaling.md), these GPUs of this machine, or so many processes.
HOSTFILE =
LEARNERS = $(if $(HOSTFILE),$(if $(GPUS),$(error HOSTFILE says which GPUS of each node: give one of the two))--hostfile "$(HOSTFILE)",$(if $(GPUS),--include "localhost:$(GPUS)",--num_gpus $(or $(RANKS),$(if $(filter gpu,$(DEVICE)),$(error say which GPUS learn, as in GPUS=3: GPU 0 may be a server's)),1)))
# vLLM for CPU and for GPUs do not fit into one environment: a machine with GPUs has a second one for what runs on CPU.
VENV    = $(if $(filter gpu-cpu,$(MACHINE)-$(DEVICE)),.venv-cpu,.venv)
BIN     = $(VENV)/bin
READY   = $(VENV)/.ready-$(DEVICE)
CPU_INDEX = https://download.pytorch.org/whl/cpu
EXTRA_INDEX = $(if $(filter cpu,$(DEVICE)),$$(curl -sfo /dev/null -m 5 $(CPU_INDEX)/torch/ && echo --extra-index-url $(CPU_INDEX)))

# DeepSpeed and its children must find this environment's programs (ninja, deepspeed) whatever the caller's PATH is.
export PATH := $(CURDIR)/$(BIN):$(PATH)
ifeq ($(DEVICE),cpu)
export DS_ACCELERATOR := cpu
endif
# DeepSpeed compiles one small operator for CPU; built here, once, so that two ranks never wait for each other's build.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions

.PHONY: help setup lock check-lock demo demo-grpo bench study test test-all test-faults soak lint audit server train grpo docs clean

##@ Environment
help: ## list the targets
	@awk -F ':[^#]*## ' '/^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  %-12s%s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv from the pinned requirements (skipped when up to date)

# Possessive quantifiers went past a lookahead, and enums were pickled in a way that checkpoints must not hold.
CHECK_PYTHON = import http, pickle, re, sys; sys.exit(sys.version_info[:2] != (3, 11) or \
  re.match("(?:(?!x).)*+", "abx").end() != 2 or b"getattr" in pickle.dumps(http.HTTPStatus.OK))
PINS = requirements.txt requirements-$(DEVICE).txt constraints-$(DEVICE).txt tools/torchvision_cpu.py
$(READY): $(PINS)
	@for other in $(filter-out $(READY),$(wildcard $(VENV)/.ready-*)); do \
	  echo "$(VENV) holds the set of $$other, which does not fit that of DEVICE=$(DEVICE); give DEVICE=$${other##*-}, or remove $(VENV) first"; exit 1; done
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -c '$(CHECK_PYTHON)' || { \
	  echo "$(or $(wildcard $(BIN)/python),$(PYTHON)) is not a usable Python 3.11. Early releases, such as Debian 12's 3.11.2, misread answers and cannot resume; use 3.11.5 or newer. Install one (pyenv install 3.11, or uv python install 3.11),$(if $(wildcard $(BIN)/python), remove $(VENV),) and run: make setup PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -r requirements-$(DEVICE).txt -c constraints-$(DEVICE).txt $(EXTRA_INDEX)
	$(if $(filter cpu,$(DEVICE)),$(BIN)/pip uninstall -q -y torchaudio torchcodec)
	$(BIN)/python tools/torchvision_cpu.py
	$(if $(filter cpu,$(DEVICE)),$(BIN)/python -c "from deepspeed.comm.torch import build_shm_op; build_shm_op()" > /dev/null)
	touch $@

lock: ## resolve requirements-$(DEVICE).txt and write constraints-$(DEVICE).txt: make lock DEVICE=gpu (no GPU needed)
	$(PYTHON) tools/lock.py $(DEVICE) $(ARGS) $(EXTRA_INDEX)

check-lock: ## fail if the lock of DEVICE no longer resolves, or a package is not in it; needs the package index
	$(PYTHON) tools/lock.py $(DEVICE) --check $(EXTRA_INDEX)

# What follows runs on CPU, whatever the machine has. Where there are GPUs, they are hidden from it.
ifeq ($(DEVICE),gpu)
demo demo-grpo bench study test test-all test-faults soak:
	CUDA_VISIBLE_DEVICES= $(MAKE) DEVICE=cpu VENV=.venv-cpu $@
else
##@ Try it (on CPU)
demo: $(READY) ## stage 2 from start to end on this machine's CPU: data, start model, server, learner, result
	$(BIN)/python -m tools.demo $(ARGS)

demo-grpo: $(READY) ## GRPO from start to end on this machine's CPU
	$(BIN)/python -m tools.demo_grpo $(ARGS)

##@ Measure (on CPU)
bench: $(READY) ## ours against honest baselines, side by side: a table, and benchmarks/results.json (some minutes)
	$(BIN)/python -m benchmarks $(ARGS)

study: $(READY) ## the runs behind docs/results.md that are still missing; hours on two cores, stop and resume at will
	$(BIN)/python -m studies.results $(ARGS)

##@ Test (on CPU)
# Two files at a time, in their order: the long ones, with real processes, come early. The longest tests are named.
TWO = -n 2 --dist loadfile --no-loadscope-reorder --durations=150 --durations-min=5

test: $(READY) ## the tests, real server and learner included
	$(BIN)/python -m pytest tests -q -m "not slow" $(TWO) $(ARGS)

test-all: $(READY) ## every test, the slow ones too
	$(BIN)/python -m pytest tests -q $(TWO) $(ARGS)

test-faults: $(READY) ## learners and servers killed, frozen and resumed, spoilt answers; the slow tests too
	$(BIN)/python -m pytest tests/faults -q $(ARGS)

soak: $(READY) ## 20 minutes of server and learner beside a hostile client, watched for what creeps (ARGS="--minutes 60"): runs/soak/soak.json
	$(BIN)/python -m studies.soak $(ARGS)

endif

##@ Check the code
lint: $(READY) ## ruff check and format check, and mypy on the flat modules of utils
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

DATABASE = https://pypi.org/pypi
audit: ## known vulnerabilities of the locked packages of DEVICE, if PyPI's database can be reached
	@curl -sf -m 10 $(DATABASE)/pip/25.0/json | grep -q '"vulnerabilities"' || { \
	  echo "nothing audited: $(DATABASE) gives no vulnerabilities, as behind a mirror or without a network"; exit 0; }; \
	tmp=$$(mktemp -d) && trap "rm -rf $$tmp" EXIT && sed 's/+cpu$$//' constraints-$(DEVICE).txt > $$tmp/lock.txt && \
	$(PYTHON) -m venv $$tmp/venv && $$tmp/venv/bin/pip install --disable-pip-version-check -q pip-audit && \
	$$tmp/venv/bin/pip-audit --disable-pip --no-deps -r $$tmp/lock.txt

##@ Train (settings in CONFIG)
# Something may run from this environment for weeks, so only `make setup` changes what is installed.
.PHONY: installed
installed:
	@test -e $(READY) || $(MAKE) --no-print-directory setup
	@test -z "$$(find $(PINS) -newer $(READY))" || { \
	  echo "the pinned requirements have changed; stop what runs from $(VENV), then: make setup"; exit 1; }

# GPUS= counts all GPUs of the machine. Those that the shell does not see are somebody else's.
COMMA := ,
UNSEEN = $(if $(CUDA_VISIBLE_DEVICES),$(filter-out $(subst $(COMMA), ,$(CUDA_VISIBLE_DEVICES)),$(subst $(COMMA), ,$(GPUS))))
OWN_GPUS = $(if $(UNSEEN),$(error GPUS=$(GPUS), but CUDA_VISIBLE_DEVICES=$(CUDA_VISIBLE_DEVICES): GPUS= counts all GPUs of the machine, and some of these are not for this shell; choose among them, or unset the variable))

server: installed ## rollout server: make server GPUS=0,1,2 CONFIG=configs/...
	$(OWN_GPUS)$(if $(GPUS),CUDA_VISIBLE_DEVICES="$(GPUS)") exec $(BIN)/python rollout_server.py --config "$(CONFIG)" $(ARGS)

train: installed ## stage-2 learner: make train GPUS=3 CONFIG=configs/... (on CPU: RANKS=2; several nodes: HOSTFILE=FILE)
	exec $(BIN)/python -m tools.launch $(LEARNERS) --master_port $(PORT) \
	  train_stage2.py --config "$(CONFIG)" $(ARGS)

grpo: CONFIG = configs/grpo/summary_1024.yaml
grpo: installed ## GRPO learner: make grpo GPUS=6,7 CONFIG=configs/grpo/... (on CPU: RANKS=2; several nodes: HOSTFILE=FILE)
	exec $(BIN)/python -m tools.launch $(LEARNERS) --master_port $(PORT) \
	  train_grpo.py --config "$(CONFIG)" $(ARGS)

##@ Upkeep
docs: $(READY) ## docs/config.md from the schema
	$(BIN)/python -m tools.make_config_docs

clean: ## remove caches (neither runs nor the environment)
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
