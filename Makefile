# The usual commands of the project. `make` prints the main ones, `make help-all` all; `make -n ppo` prints commands and
# runs nothing.
#
# A target is a command of `rlhf`: rlhf/cli/from_make.py is handed make's variables, refuses those that the target does
# not take, and runs the command with the others as its options, in .venv or in a container. Finished stages are
# skipped, so a second `make ppo` takes seconds. Behind `##` is what help prints; a heading stands behind `##@`.

##@ Variables [default]
## HW           hardware the recipe is made for (see `make recipes`) [cpu]
## RECIPE       folder of a recipe version, given instead of HW, for example recipes/cpu-tiny/v2
## DATA         your own data: one or more files, "a.jsonl b.jsonl" or a pattern; no spaces in their names
## WEIGHTS      random: the architecture with random weights and stand-in data; or a checkpoint's folder or .gguf file
## SET          recipe values to change for this run, for example "ppo.steps=10 ppo.kl_coef=0.1"
## SEED         seed, used instead of the recipe's
## OUT          root of the run directories [runs, or a folder in it where WEIGHTS, DATA or SEED is set]
## RESUME       1: continue an interrupted stage from its newest checkpoint; 0: set it aside and begin anew
## FIT          memory limit for `make plan`, which looks for the fastest settings: 12GB, or card for the recipe's card
## PRICE        dollars per hour of one card; adds the cost to plan, bench, report, reproduce and after a stage
## RUNTIME      docker, podman: stages run in the container image; local: in .venv [docker; local for recipes for cpu]
## PIP_ARGS     more arguments for pip, for example "--extra-index-url URL" (for torch without CUDA, see README.md)

HW      ?= cpu
RUNTIME ?= $(if $(on_cpu),local,docker)
IMAGE   ?= rlhf-one-gpu:$(version)
PYTHON  ?= python3
VENV    ?= .venv
EXTRAS  ?= gpu math report serve tracking $(filter wandb trackio,$(REPORT_TO)) $(filter docs,$(MAKECMDGOALS)) \
           $(if $(filter test test-% fuzz lint bench-micro bench-gpu bench-against,$(MAKECMDGOALS)),dev)

MAIN    := help-all setup recipes plan rehearse fetch data-check sft rm ppo grpo dpo all evaluate report chat
TARGETS := $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' Makefile)
unknown := $(filter-out $(TARGETS),$(MAKECMDGOALS))
$(if $(unknown),$(error no target '$(firstword $(unknown))'; `make help-all` lists them))
$(foreach v,IMAGE PYTHON VENV,$(if $(filter 1,$(words $($v))),,$(error $v=$($v): give one word)))

.PHONY: $(TARGETS) checked
.NOTPARALLEL: # one GPU: stages never run side by side, whatever -j says
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
version  = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' rlhf/__init__.py)

# The recipe's device decides whether a container and CUDA's packages are needed.
on_cpu := $(or $(filter hardware.device=cpu,$(SET)),$(if $(RUN)$(RECIPE),$(shell grep -sE '^[^#]*device"?: *"?cpu' \
          $(RECIPE)/recipe.yaml $(RUN)/manifest.json $(RUN)/*/manifest.json),$(filter %cpu,$(HW))))

# `checked` needs a few small packages, and refuses wrong variables before anything large is installed or built.
python = $(VENV)/bin/python
here   = $(if $(wildcard $(python)),+)$(python) -m rlhf.cli.from_make --goals '$(MAKECMDGOALS)'
rlhf   = $(here) --runtime '$(RUNTIME)' --image '$(IMAGE)' $(if $(on_cpu),,--gpu)
engine = $(if $(filter local,$(RUNTIME)),docker,$(RUNTIME))
image  = $(if $(filter file,$(origin IMAGE)),image,checked)
ready  = $(if $(filter local,$(RUNTIME)),setup,$(image))
targets = awk -F ':.*\#\# ' -v only=' $(1) ' '/^\#\#@ / && !/Variables/ {group = "\n" substr($$0, 5) "\n"} \
          /^[a-z-]+:.*\#\# / && (only == "  " || index(only, " " $$1 " ")) \
          {printf "%s  %-22s %s\n", group, $$1, $$2; group = ""}' Makefile

##@ Start
help: ## list the targets and variables that people use most
	@echo 'Usage: make TARGET [VARIABLE=value ...]     for example: make ppo HW=cpu'
	@$(call targets,$(if $(filter help-all,$(MAKECMDGOALS)),,$(MAIN)))
	@echo; sed -n 's/^##@ V/V/p; s/^## /  /p' Makefile
help-all: help checked ## list all targets and variables
	@$(here) help
setup: checked ## make .venv with the pinned packages (HW= RECIPE= SET= REPORT_TO=); others do it when needed
	@$(if $(on_cpu),CPU=1) bin/setup $(VENV) $(PYTHON) '$(strip $(EXTRAS))' $(PIP_ARGS)
checked:
	@bin/setup $(VENV) $(PYTHON) small $(PIP_ARGS)
	@$(rlhf) check
recipes: setup     ## list the recipes
fetch: $(ready)    ## download the pinned model and data of a recipe and check them; afterwards stages run offline
plan: setup        ## memory, time and cost of a recipe, predicted without a GPU; nothing is started
rehearse: setup    ## run a card recipe's whole chain on a CPU, two steps a stage, with a small model in its place
data-check: setup  ## check the quality of the files in DATA (exits with 3 on warnings, 1 on errors)
data-show: setup   ## show some rows of the files in DATA: the chosen answer beside the rejected one

##@ Train (a stage first runs the ones that it builds on, unless they are done)
pretrain: $(ready)  ## train a small base model from scratch, for recipes without a published one
sft: $(ready)       ## train SFT: supervised fine-tuning
rm: $(ready)        ## train the reward model on pairs of a chosen and a rejected answer
ppo: $(ready)       ## train PPO: the policy, on a reward model, functions or both
rloo: $(ready)      ## train RLOO: several answers to a prompt and no critic, for recipes with that section
grpo: $(ready)      ## train GRPO: advantages relative to the group, for recipes with that section
dpo: $(ready)       ## train DPO: the policy on the pairs themselves
kto: $(ready)       ## train KTO: the policy on answers that were judged one by one
evaluate: $(ready)  ## compare the trained policies on held-out prompts
merge: $(ready)     ## merge the trained adapter into its base model (SET=merge.stage=dpo: DPO's)
all: $(ready) ppo rloo grpo dpo kto evaluate merge ## run every stage of the recipe; its data must suffice for each
reproduce: $(ready) ## run the recipe once for each of SEEDS; GUIDE=1: as a published guide has it

##@ Use (after training)
report: setup       ## write one page about a run: figures, curves, samples, provenance
ab: setup           ## rate answers of SFT and PPO (or others: AB_ARGS) blind, on a local page; SUMMARY=1 counts
judge: setup        ## let a model rate the same pairs: URL=http://127.0.0.1:8000/v1 MODEL=NAME
chat: $(ready)      ## talk with a trained model in the terminal (STAGE=dpo: DPO's)
score: $(ready)     ## score answers with the trained reward model: PROMPT= RESPONSE=, or FILES="pairs.jsonl ..."
serve: $(ready) merge ## merge if needed, and serve the model at an OpenAI-compatible address (PORT=8000)

# How they run: these in .venv, and those in a container too.
recipes plan rehearse data-check data-show report ab judge bench-against bench-gpu bench-peer \
bench-peer-real bench-peer-supervised budgets results-index docs-tables:
	@$(here) $@
fetch pretrain sft rm ppo rloo grpo dpo kto evaluate merge reproduce chat score serve bench bench-ablation bench-memory:
	@$(rlhf) $@

##@ Container (GPU recipes run in it)
image: checked ## build the image; stages do it when needed (BASE= FLASH_ATTN=1)
	@bin/in-container --engine $(engine) --build $(IMAGE)
shell: $(image) ## open a shell in the container, with the same folders
	@$(rlhf) $@
test-image: setup ## build the image for a CPU (BASE=) and train in it, with docker, podman or buildah
	@tests/image/test.sh $(python)

##@ Measure
bench: $(ready)     ## run steps of sft, rm, ppo, rloo, grpo, dpo, kto: memory, tokens/s, projected hours, verdicts
bench-against: setup ## compare this code with REV's: time, measured in turn, and counted operations and memory
bench-ablation: $(ready) ## measure the published ways to save memory, one at a time, in steps of SFT
bench-memory: $(ready) ## compare predicted with measured peaks, in two steps of every stage that is predicted
bench-gpu: setup    ## measure what only a GPU can show (BENCH_ARGS="--box 55m"; --dry-run needs none)
bench-peer: setup   ## compare steps of PPO, RLOO or GRPO with TRL's (BENCH_ARGS="--stage grpo")
bench-peer-supervised: setup ## compare steps of SFT, reward model and DPO with TRL's, at its defaults and tuned
bench-peer-real: setup ## the same, and GRPO, on a recipe's own model and rows (RECIPE= DATA=)
budgets: setup      ## fail if predicted memory, operations or launches are not as pinned (BENCH_ARGS=--write: pin)
results-index: setup ## write results/README.md from the records, and recipes/README.md from the recipes
docs-tables: setup  ## write the tables of docs/ that say what the code says; a test compares them
bench-micro: setup  ## measure small functions with pytest-benchmark; each run is kept in .benchmarks
	@$(python) -m pytest bench/micro --benchmark-only --benchmark-autosave -q $(BENCH_ARGS)

##@ Develop
test: setup ## run the tests, files side by side on all cores
	@env -u PYTHONDONTWRITEBYTECODE $(python) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(TEST_ARGS)
test-vllm: setup ## sample with a real vLLM server, its CPU build, installed in .venv-vllm-0.32
	@$(python) -m tests.vllm $(TEST_ARGS)
test-studies: setup ## run the tests of studies/, which `make test` leaves out
	@$(python) -m pytest studies/tests -q $(TEST_ARGS)
fuzz: setup ## try malformed inputs and kills, generated from SEED; failures go to .fuzz (CASES= KILLS= ONLY=)
	@$(here) $@
	@$(if $(ONLY),,FUZZ_EXAMPLES=1000 $(python) -m pytest -q tests/fuzz/test_readers.py)
lint: setup ## run ruff, mypy, hadolint and shellcheck
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy
	@$(VENV)/bin/hadolint Dockerfile
	@$(VENV)/bin/shellcheck .ci/run bin/in-container bin/setup requirements/lock.sh tests/image/test.sh cloud/*.sh
docs: setup ## build the documentation as a site, build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo 'written to build/site/index.html; with search: python3 -m http.server -d build/site, then http://localhost:8000'
lock: checked ## pin the versions in requirements/cpu.txt, after a change in pyproject.toml
	@$(VENV)/bin/pip install --quiet $(PIP_ARGS) uv
	@PATH="$(abspath $(VENV))/bin:$$PATH" requirements/lock.sh
clean: ## remove caches and build leftovers; never runs/ or .venv
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find rlhf bench studies tests -type d -name __pycache__ -prune -exec rm -rf {} +
