# `make ppo HW=4090 SEED=3` runs `rlhf run ppo --with-parents --hw 4090 --seed 3`: a variable is the option of its name,
# and a command refuses an option that it does not have. `make -n ppo HW=4090` prints the command and runs nothing.
# `rlhf` runs a recipe for a GPU in the container image (rlhf/cli/container.py); RUNTIME=local runs it in .venv.

VENV   ?= .venv
PYTHON ?= python3
EXTRAS ?= gpu,math,serve,tracking,dev

# Of the options only what is typed counts: a DATA or PORT of the environment is another program's.
ONE    := HW RECIPE WEIGHTS SEED OUT RUNTIME PRICE FIT STAGE PROMPTS N TEMPERATURE PORT
ONE    += PROMPT RESPONSE URL MODEL REV
MANY   := SET DATA STOP_ON REPORT_TO ONLY SEEDS STAGES
OTHER  := RUN A B FILES REWARD RESUME GUIDE ARGS VRAM_CAP GPU IMAGE BASE CUDA VENV PYTHON EXTRAS PIP_ARGS
typed  := $(sort $(foreach v,$(.VARIABLES),$(if $(filter command%,$(origin $v)),$v)))
$(foreach v,$(filter-out $(ONE) $(MANY) $(OTHER),$(typed)),$(error there is no variable $v: $(ONE) $(MANY) $(OTHER)))
$(foreach v,$(typed),$(if $(strip $(value $v)),,$(error $v= is empty: give it a value, or leave it out)))
$(if $(filter HW,$(typed)),$(if $(wildcard $(foreach r,recipes my-recipes $(RLHF_RECIPES),$r/$(HW)-*)),,$(error HW=$(HW): no recipe is \
  for it in recipes/: $(sort $(notdir $(wildcard recipes/*-*))))))
$(foreach v,RESUME GUIDE,$(if $(filter-out 0 1,$($v)),$(error $v=$($v): write 1 or 0)))

quoted = '$(subst ','\'',$1)'
option = --$(shell echo $1 | tr A-Z_ a-z-)
one    = $(foreach v,$(filter $(ONE),$(typed)), $(call option,$v) $(call quoted,$(value $v)))
each   = $(foreach w,$(value $1),$(foreach x,$(or $(wildcard $w),$w), $(call option,$1) $(call quoted,$x)))
many   = $(foreach v,$(filter $(MANY),$(typed)),$(call each,$v))
flags  = $(if $(filter 1,$(RESUME)), --resume)$(if $(filter 0,$(RESUME)), --restart)$(if $(filter 1,$(GUIDE)), --guide)
args   = $(one)$(many)$(flags)$(if $(ARGS), $(ARGS))
run    = $(if $(RUN), $(call quoted,$(RUN)))
env    = $(if $(VRAM_CAP),RLHF_VRAM_CAP=$(VRAM_CAP) )$(if $(IMAGE),RLHF_IMAGE=$(IMAGE) )$(if \
         $(GPU),CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=$(GPU) )
rlhf   = $(env)$(VENV)/bin/rlhf
python = $(env)$(VENV)/bin/python
ready  = $(VENV)/.ready-$(EXTRAS)

TRAIN  := pretrain sft rm ppo rloo grpo dpo kto evaluate merge
PLAIN  := recipes doctor plan rehearse fetch reproduce report ab judge chat sample serve
BENCH  := bench bench-against bench-gpu bench-peer
TESTS  := test test-slow
USER   := help setup $(TRAIN) all $(PLAIN) compare score reward data-check data-show
DEV    := help-dev image shell $(BENCH) bench-memory bench-micro budgets tables $(TESTS) mutants digests test-vllm \
          test-image lint docs lock clean
.PHONY: $(USER) $(DEV)
.NOTPARALLEL: # one GPU: stages never run side by side, whatever -j says
SHELL := bash

help: ## list what one uses; `make help-dev` lists what developers use
	@sed -n 's/^\([a-z$$][^:]*\): .*## \(.*\)/\1\n    \2/p' Makefile | sed 's/^$$(TRAIN)/$(TRAIN)/; s/^$$(PLAIN)/$(PLAIN)/'
	@echo; echo 'variables: $(ONE) $(MANY) RUN A B FILES REWARD RESUME GUIDE ARGS'
help-dev:
	@sed -n 's/^\([a-z$$][^:]*\): .*#- \(.*\)/\1\n    \2/p' Makefile | sed 's/^$$(BENCH)/$(BENCH)/; s/^$$(TESTS)/$(TESTS)/'
.DEFAULT:
	@echo "no target '$@'; these are there: $(USER) $(DEV)" >&2; exit 2

setup: $(ready) ## install the pinned packages into .venv (PYTHON=, EXTRAS=, PIP_ARGS=); other targets do it when needed
$(ready): pyproject.toml requirements/cpu.txt
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_ARGS) -c requirements/cpu.txt -e '.[$(EXTRAS)]'
	@touch '$@'

$(TRAIN): $(ready) ## train a stage; first the ones that it builds on, unless they are done (HW= or RECIPE=, SET=, DATA=)
	$(rlhf) run $@ --with-parents$(run)$(args)
all: $(ready) ## train and evaluate every stage of the recipe
	for stage in $(TRAIN); do $(rlhf) run $$stage --if-needed --with-parents$(run)$(args) || exit; done
$(PLAIN): $(ready) ## the command of this name (HW= or RECIPE=, or RUN=); `.venv/bin/rlhf COMMAND --help` explains it
	$(rlhf) $@$(run)$(args)
compare: $(ready) ## compare runs on the same held-out prompts (A=runs/NAME/v1 B=...)
	$(rlhf) compare$(if $(A), $(call quoted,$(A)))$(if $(B), $(call quoted,$(B)))$(args)
score: $(ready) ## score answers with the trained reward model (FILES=, or PROMPT= RESPONSE=)
	$(rlhf) score$(run) $(FILES)$(args)
reward: $(ready) ## try rewards on the answers of DATA and on junk, before training (REWARD=my_rewards:polite)
	$(rlhf) reward $(REWARD)$(args)
data-check data-show: $(ready) ## check the rows of the files in DATA, or show some
	$(rlhf) $(subst -, ,$@) $(DATA)$(one)$(if $(filter SET,$(typed)),$(call each,SET))$(if $(ARGS), $(ARGS))

image: $(ready) #- build the container image; runs do it when needed (BASE=, PIP_ARGS=)
	@$(env)BASE='$(BASE)' PIP_ARGS='$(PIP_ARGS)' $(VENV)/bin/python -m rlhf.cli.container $(RUNTIME)
shell: image #- open a shell in it, in this folder
	$(or $(RUNTIME),docker) run --rm -it -v '$(CURDIR):$(CURDIR)' -w '$(CURDIR)' --entrypoint bash \
	  $$($(python) -m rlhf.cli.container $(RUNTIME))
$(BENCH): $(ready) #- measure memory, tokens/s and hours; without a GPU, beside a commit (REV=), beside TRL
	$(python) -m $(subst -,.,$@)$(args)
bench-memory: $(ready) #- compare predicted with measured peaks, in two steps of every stage
	$(python) -m bench.memory measure$(args)
bench-micro: $(ready) #- measure small functions with pytest-benchmark
	$(python) -m pytest bench/micro --benchmark-only --benchmark-autosave -q $(ARGS)
budgets: $(ready) #- fail if predicted memory, operations or launches are not as pinned (ARGS=--write pins them)
	$(python) -m bench.memory pinned$(args)
tables: $(ready) #- write results/README.md, recipes/README.md and the tables of docs/ that say what the code says
	$(python) -m bench.tables
$(TESTS): $(ready) #- run the tests of every commit, or the slow ones (ARGS="FILE ...")
	$(python) -m pytest -n auto --dist loadfile --no-loadscope-reorder -m '$(if $(filter %slow,$@),,not )slow' $(ARGS)
mutants digests test-vllm: $(ready) #- plant faults that tests must find; compare results bit by bit; sample with vLLM
	$(python) -m tests.$(@:test-%=%) $(ARGS)
test-image: $(ready) #- build the image for a CPU (CUDA=1: a GPU) and train in it
	CUDA='$(CUDA)' BASE='$(BASE)' PIP_ARGS='$(PIP_ARGS)' tests/image/test.sh $(VENV)/bin/python
lint: $(ready) #- run ruff, mypy, hadolint and shellcheck
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile && $(VENV)/bin/shellcheck .ci/run requirements/lock.sh tests/image/test.sh cloud/*.sh
docs: $(ready) #- build the documentation as a site, build/site
	$(VENV)/bin/pip install -q $(PIP_ARGS) -c requirements/cpu.txt -e '.[docs]' && $(VENV)/bin/mkdocs build --strict --quiet
lock: $(ready) #- pin the versions again, after a change in pyproject.toml
	$(VENV)/bin/pip install -q $(PIP_ARGS) uv && PATH="$(abspath $(VENV))/bin:$$PATH" requirements/lock.sh
clean: #- remove caches and build leftovers; never runs/ or .venv
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
