# The usual commands of the project. `make` prints the main ones, `make help-all` all; `make -n ppo` prints commands and
# runs nothing.
#
# Each stage target calls `rlhf run STAGE --with-parents`, which first runs the stages that it builds on. Finished
# stages are skipped, so a second `make ppo` takes seconds. Text behind `##` is what `make help-all` prints: one line
# for each target and variable, below the heading behind `##@`.

##@ Variables [default]: what to run
## HW         hardware the recipe is made for (see `make recipes`) [cpu]
HW ?= cpu
## RECIPE     folder of a recipe version, given instead of HW, for example recipes/cpu-tiny/v2
RECIPE ?=
## RUN        run directory or a stage's, runs/NAME/vN/ppo, given instead of HW, OUT, SET and all of how it was made
RUN ?=
## DATA       your own data: one or more files, "a.jsonl b.jsonl" or a pattern; no spaces in their names
DATA ?=
## WEIGHTS    random: the architecture with random weights and stand-in data; or a checkpoint's folder or .gguf file
WEIGHTS ?=
## SET        recipe values to change for this run, for example "ppo.steps=10 ppo.kl_coef=0.1"
SET ?=
## SEED       seed, used instead of the recipe's
SEED ?=
## SEEDS      seeds for `make reproduce` ["0 1 2"]
SEEDS ?= 0 1 2
## OUT        root of the run directories [runs, or a folder in it where WEIGHTS, DATA or SEED is set]
OUT ?= $(OUT_DEFAULT)
## REUSE      another root of run directories, for example runs; runs in OUT build on its finished stages
REUSE ?=

##@ Variables [default]: train
## RESUME     1: continue an interrupted stage from its newest checkpoint; 0: set it aside and begin anew
RESUME ?=
## STOP_ON    checks that end a stage when they find something: nan high_kl, or all (docs/watch.md) [none: they warn]
STOP_ON ?=
## REPORT_TO  tensorboard, trackio or wandb: also send metrics there; wandb's key is in WANDB_API_KEY [none]
REPORT_TO ?=

##@ Variables [default]: plan, check data and measure
## FIT        memory limit for `make plan`, which looks for the fastest settings: 12GB, or card for the recipe's card
FIT ?=
## PRICE      dollars per hour of one card; adds the cost to plan, bench, report, reproduce and after a stage
PRICE ?=
## VRAM_CAP   limit on the memory used of a card, for example 24GB, to try what fits a smaller one
VRAM_CAP ?=
## GPU        which card to use, by its number in nvidia-smi or its UUID; several: 0,1 [the first; all for torchrun]
GPU ?=
## CHECK_ARGS more arguments for `make data-check`, for example "--heldout test.jsonl --tokenizer DIR --to report.json"
CHECK_ARGS ?=
## SHOW_ARGS  more arguments for `make data-show`, for example "--rows 20 --only unfinished"
SHOW_ARGS ?=
## REV        commit, branch or tag for `make bench-against` [where the branch left main; on main the commit before]
REV ?=
## BENCH_ARGS more arguments for a benchmark, for example "--steps 4 --shape longest" for `make bench`
BENCH_ARGS ?=

##@ Variables [default]: use a finished run
## STAGE      whose model `make chat` loads: base, sft, ppo, rloo, grpo, dpo or merge [the recipe's first policy]
STAGE ?=
## TEMPERATURE temperature of `make chat`; 0: always the likeliest token [the recipe's]
TEMPERATURE ?=
## PORT       port of `make serve` [8000]
PORT ?= 8000
## PROMPT     for `make score`: a prompt, with RESPONSE, an answer to it
PROMPT ?=
## RESPONSE   for `make score`: the answer to PROMPT
RESPONSE ?=
## FILES      for `make score`: files to score, instead of PROMPT and RESPONSE; no spaces in their names
FILES ?=
## SCORE_ARGS more arguments for `make score`, for example "--to runs/scores.jsonl"
SCORE_ARGS ?=
## AB_ARGS    more arguments for `make ab` and `make judge`, for example "--a sft --b dpo --limit 50"
AB_ARGS ?=
## SUMMARY    1: `make ab` prints win rates and agreement so far, and serves no page
SUMMARY ?=
## URL        an OpenAI-compatible endpoint, up to /v1, for `make judge`; its key is in OPENAI_API_KEY
URL ?=
## MODEL      name of the model at that endpoint, for `make judge`
MODEL ?=

##@ Variables [default]: container
## RUNTIME    docker, podman: stages run in the container image; local: in .venv [docker; local for recipes for cpu]
RUNTIME ?= $(if $(on_cpu),local,docker)
## IMAGE      an existing image, used instead of one built from this folder
IMAGE ?= rlhf-one-gpu:$(version)
## BASE       base of the image, used instead of the one pinned in Dockerfile
BASE ?=
## FLASH_ATTN 1: compile flash-attn into the image; BASE must have nvcc [0: attention is torch's own]
FLASH_ATTN ?= 0

##@ Variables [default]: setup
## PYTHON     interpreter for `make setup`, 3.11 to 3.13 [python3]
PYTHON ?= python3
## VENV       folder of the installed packages [.venv]
VENV ?= .venv
## EXTRAS     extras of pyproject.toml [gpu,math,report,serve,tracking; dev, docs, wandb, trackio when needed]
EXTRAS ?= $(subst $(space),$(comma),$(strip gpu math report serve tracking $(filter wandb trackio,$(REPORT_TO)) \
          $(if $(filter $(for_dev),$(MAKECMDGOALS)),dev) $(filter docs,$(MAKECMDGOALS))))
for_dev := test test-image fuzz lint bench-micro bench-gpu bench-against
## PIP_ARGS   more arguments for pip, for example "--extra-index-url URL" (for torch without CUDA, see README.md)
PIP_ARGS ?=

##@ Variables [default]: develop
## TEST_ARGS  more arguments for pytest, for example "-m 'not slow'"
TEST_ARGS ?=
## CASES      number of malformed inputs that `make fuzz` tries [1050]
CASES ?=
## KILLS      number of times that `make fuzz` interrupts stages [119]
KILLS ?=
## ONLY       one group of `make fuzz`, or one case, for example run_dirs, kills or run_dirs:17
ONLY ?=

STAGES  := pretrain sft rm ppo rloo grpo dpo evaluate merge
TARGETS := engine $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' Makefile)

# What was given on the command line or in the environment is taken as it is: to make, a `$` in it would begin a name.
variables := $(shell sed -n 's/^\([A-Z_]*\) ?=.*/\1/p' Makefile)
from       = $(foreach v,$2,$(if $(filter $1,$(firstword $(origin $v))),$v))
typed     := $(sort $(call from,command,$(.VARIABLES)))
inherited := $(call from,environment,$(variables))
$(foreach v,$(filter $(typed) $(inherited),$(variables)),$(eval override $v := $$(value $v)))
# Not every shell expands the `~` of `OUT=~/runs`.
paths     := $(filter $(typed) $(inherited),RECIPE RUN DATA WEIGHTS OUT REUSE FILES VENV)
$(foreach v,$(paths),$(eval override $v := $$(patsubst ~/%,$$(HOME)/%,$$($v))))

export RLHF_VRAM_CAP := $(or $(VRAM_CAP),$(RLHF_VRAM_CAP))
# An empty CUDA_VISIBLE_DEVICES would hide every card. The order makes the numbers those of nvidia-smi.
$(if $(GPU),$(eval export CUDA_VISIBLE_DEVICES := $(GPU))$(eval export CUDA_DEVICE_ORDER := PCI_BUS_ID))
export PROMPT RESPONSE PIP_ARGS BASE # commands read them from there, whatever quotes they hold
.PHONY: $(TARGETS)
.DEFAULT_GOAL := help
.NOTPARALLEL: # one GPU: stages never run side by side, whatever -j says
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
comma := ,
space := $(subst ,, )

# Checked first: make would ignore a misspelt variable, and install packages before `rlhf` could refuse a value.
quoted     = '$(subst ','\'',$1)'
checker   := $(or $(shell test -x $(VENV)/bin/python && echo $(VENV)/bin/python),$(PYTHON)) bin/check_make.py
given     := $(foreach v,$(typed),$(call quoted,$v:command=$(value $v))) \
             $(foreach v,$(inherited),$(call quoted,$v:environment=$(value $v)))
checked   := $(shell $(checker) $(foreach t,$(MAKECMDGOALS),$(call quoted,$t)) -- $(given) 2>/dev/null)
why_not    = $(shell { $(checker) --; } 2>&1 | tail -n 1 || true)
unchecked  = `$(checker)`, which checks what make is given, does not run: $(why_not). \
             It needs Python 3.11, 3.12 or 3.13 (make setup PYTHON=python3.12), and make the folder of this Makefile
needs     := $(if $(filter ok,$(firstword $(checked))),$(wordlist 2,$(words $(checked)),$(checked)))
# These targets work without the check.
risky     := $(filter-out help help-all clean,$(MAKECMDGOALS))
$(if $(needs),,$(if $(checked),$(error $(checked)),$(if $(risky),$(error $(unchecked)))))

# The recipe's device decides whether a container and CUDA's packages are needed; a container sees the paths it names.
on_cpu := $(filter cpu,$(firstword $(needs)))
named   = $(wordlist 2,$(words $(needs)),$(needs))
local   = $(filter local,$(RUNTIME))

# Extras that stamps newer than the pins say are installed; a target that needs no others installs nothing.
pins      := pyproject.toml requirements/cpu.txt
stamps    := $(shell find $(VENV) -maxdepth 1 -name '.ready-*' $(addprefix -newer ,$(pins)) 2>/dev/null)
installed := $(subst $(comma),$(space),$(patsubst $(VENV)/.ready-%,%,$(stamps)))
missing    = $(filter-out $(installed),$(subst $(comma),$(space),$(EXTRAS)))
stamp      = $(VENV)/.ready-$(EXTRAS)
lacking    = $(if $(missing)$(filter $(stamp),$(stamps)),$(stamp))
ready  = $(if $(local),setup,engine $(if $(filter file,$(origin IMAGE)),image))

# What `make` alone shows; lines of this file that say what a target or a variable is, all of them or those named.
MAIN           := help-all setup recipes plan fetch data-check sft rm ppo grpo dpo all evaluate report chat
MAIN_VARIABLES := HW RECIPE DATA OUT WEIGHTS SET SEED RESUME RUNTIME FIT PRICE PIP_ARGS
usage           = Usage: make TARGET [VARIABLE=value ...]     for example: make ppo HW=cpu
list_targets    = awk -F ':.*\#\# ' -v only=' $(1) ' '/^\#\#@ / {group = "\n" substr($$0, 5) "\n"} \
                  /^[a-z-]+:.*\#\# / && (only == "  " || index(only, " " $$1 " ")) \
                  {printf "%s  %-22s %s\n", group, $$1, $$2; group = ""}' Makefile
list_variables  = awk -v only=' $(1) ' '/^\#\#@ / {group = only == "  " ? "\n" substr($$0, 5) "\n" : ""} \
                  /^\#\# / {name = $$2; sub(/^\#\# [A-Z_]+ +/, ""); \
                  if (only == "  " || index(only, " " name " ")) \
                  {printf "%s  %-12s %s\n", group, name, $$0; group = ""}}' Makefile

##@ Start
help: ## list the targets and variables that people use most
	@echo '$(usage)'
	@$(call list_targets,$(MAIN))
	@echo; echo 'Variables [default]'
	@$(call list_variables,$(MAIN_VARIABLES))
help-all: ## list all targets and variables
	@echo '$(usage)'
	@$(call list_targets,)
	@$(call list_variables,)
setup: $(lacking) ## make .venv with the pinned packages; others do it when needed
recipes: setup ## list the recipes
	@$(VENV)/bin/rlhf recipes
fetch: $(ready) ## download the pinned model and data of a recipe and check them; afterwards stages run offline
	@$(rlhf) fetch $(strip $(recipe) $(sets))
plan: setup ## memory, time and cost of a recipe, predicted without a GPU; nothing is started
	@$(VENV)/bin/rlhf plan $(strip $(recipe) $(data) $(sets) $(price) $(fit))
data-check: setup ## check the quality of the files in DATA (exits with 3 on warnings, 1 on errors)
	@$(VENV)/bin/rlhf data check $(strip $(CHECK_ARGS) $(foreach f,$(DATA_FILES),'$(f)'))
data-show: setup ## show some rows of the files in DATA: the chosen answer beside the rejected one
	@$(VENV)/bin/rlhf data show $(strip $(SHOW_ARGS) $(foreach f,$(DATA_FILES),'$(f)'))

##@ Train (a stage first runs the ones that it builds on, unless they are done)
pretrain: $(ready)  ## train a small base model from scratch, for recipes without a published one
sft: $(ready)       ## train SFT: supervised fine-tuning
rm: $(ready)        ## train the reward model on pairs of a chosen and a rejected answer
ppo: $(ready)       ## train PPO: the policy, on the reward model's scores
rloo: $(ready)      ## train RLOO: several answers to a prompt and no critic, for recipes with that section
grpo: $(ready)      ## train GRPO: advantages relative to the group, for recipes with that section
dpo: $(ready)       ## train DPO: the policy on the pairs themselves
evaluate: $(ready)  ## compare the trained policies on held-out prompts
merge: $(ready)     ## merge the trained adapter into its base model (SET=merge.stage=dpo: DPO's)
all: $(ready) ppo rloo grpo dpo evaluate merge ## run every stage of the recipe; its data must suffice for each
reproduce: $(ready) ## run the recipe once for each of SEEDS and compare with targets; as a guide has it: RECIPE=recipes/NAME/v1
	@$(rlhf) reproduce $(strip $(recipe) --seeds '$(SEEDS)' $(options) $(price))

##@ Use (after training)
report: setup ## write one page about a run: figures, curves, samples, provenance
	@$(VENV)/bin/rlhf report $(strip $(recipe) $(out) $(price))
ab: setup     ## rate answers of SFT and PPO (or others: AB_ARGS) blind, on a local page; SUMMARY=1 counts
	@$(VENV)/bin/rlhf ab $(strip $(recipe) $(out) $(if $(filter 1 yes true,$(SUMMARY)),--summary) $(AB_ARGS))
judge: setup  ## let a model rate the same pairs: URL=http://127.0.0.1:8000/v1 MODEL=NAME
	@$(VENV)/bin/rlhf judge $(strip $(recipe) $(out) --url '$(URL)' --model '$(MODEL)' $(AB_ARGS))
chat: $(ready)      ## talk with a trained model in the terminal (STAGE=dpo: DPO's)
	@$(rlhf) chat $(strip $(recipe) $(options) $(seed) $(stage) $(heat))
score: $(ready)     ## score answers with the trained reward model: PROMPT= RESPONSE=, or FILES="pairs.jsonl ..."
	@$(rlhf) score $(strip $(recipe) $(options) $(seed) $(scored) $(SCORE_ARGS))
serve: $(ready) merge ## merge if needed, and serve the model at an OpenAI-compatible address (PORT=8000)
	@$(rlhf) serve $(strip $(recipe) $(options) $(reuse) $(seed) --port $(PORT) $(if $(local),,--host 0.0.0.0))

# For the commands that are named as next, or as missing: the variables that were set, not their defaults.
of_runs := HW RECIPE RUN DATA OUT REUSE WEIGHTS SET SEED PRICE RUNTIME IMAGE VENV
named_next = $(foreach v,$(filter $(typed) $(inherited),$(of_runs)),$v='$($v)')
$(STAGES) chat score serve ab judge: export RLHF_MAKE = $(named_next)
$(STAGES):
	@$(rlhf) run $@ --with-parents $(strip $(recipe) $(options) $(reuse) $(seed) $(watching) $(restart) $(price))

scored    = $(if $(FILES),$(foreach f,$(FILES_FOUND),'$(f)'),--prompt "$$PROMPT" --response "$$RESPONSE")
recipe    = $(if $(RUN),'$(RUN)',$(if $(RECIPE),--recipe '$(RECIPE)',--hw $(HW)))
out       = $(if $(RUN),,--out '$(OUT)')
options   = $(out) $(data) $(if $(WEIGHTS),--weights '$(WEIGHTS)') $(sets)
data      = $(foreach f,$(DATA_FILES),--data '$(f)')
reuse     = $(if $(REUSE),--reuse '$(REUSE)')
sets      = $(foreach s,$(SET),--set '$(s)')
fit       = $(if $(FIT),--fit '$(FIT)')
seed      = $(if $(SEED),--seed $(SEED))
stage     = $(if $(STAGE),--stage $(STAGE))
heat      = $(if $(TEMPERATURE),--temperature '$(TEMPERATURE)')
price     = $(if $(PRICE),--price '$(PRICE)')
watching  = $(foreach t,$(filter-out none,$(REPORT_TO)),--report-to $(t)) $(foreach c,$(STOP_ON),--stop-on $(c))
restart   = $(resume) $(if_needed)
resume    = $(if $(filter 1 yes true,$(RESUME)),--resume,$(if $(filter 0 no false,$(RESUME)),--restart))
if_needed = $(if $(filter $@,$(MAKECMDGOALS)),,--if-needed)

# A name that is no file stays as it is, for `rlhf` to refuse.
FILES_FOUND := $(foreach f,$(FILES),$(or $(wildcard $f),$f))
DATA_FILES  := $(foreach f,$(DATA),$(or $(wildcard $f),$f))

# bin/in-container shows a container the same paths as the caller has.
engine_name = $(if $(local),docker,$(RUNTIME))
rlhf      = $(if $(local),$(VENV)/bin/rlhf,$(container) $(IMAGE))
python    = $(if $(local),$(VENV)/bin/python,$(container) --entrypoint python $(IMAGE))
container = bin/in-container --engine $(strip $(engine_name) $(if $(on_cpu),,--gpu) \
            $(if $(filter serve,$(MAKECMDGOALS)),--port $(PORT)) \
            $(foreach d,$(read_only),--read '$(d)') $(foreach d,$(written),--write '$(d)'))
read_only = $(abspath $(wildcard $(DATA) $(FILES)) $(named) $(filter-out recipes/%,$(RECIPE)) \
            $(filter-out random,$(WEIGHTS)) $(REUSE) $(RLHF_RECIPES))
written   = $(abspath $(if $(RUN),$(RUN)/..,$(OUT)) results)
build_args = FLASH_ATTN=$(if $(filter 1 yes true,$(FLASH_ATTN)),1,0) PIP_ARGS VERSION=$(version) COMMIT=$(commit)
version   = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' rlhf/__init__.py)
in_image  = rlhf bench recipes requirements Dockerfile
dirty     = $(if $(shell git status --porcelain -- $(in_image) 2>/dev/null),-dirty)
commit    = $(shell git rev-parse HEAD 2>/dev/null || echo unknown)$(dirty)
no_engine = RUNTIME=$(engine_name): there is no $(engine_name) on this machine. Install it (and for a GPU the NVIDIA \
            container toolkit), or run without a container: RUNTIME=local
no_daemon = RUNTIME=$(engine_name): $(engine_name) does not answer; `$(engine_name) info` says why (is its service up, \
            are you in its group?). Without a container: RUNTIME=local

# Runs with other weights, on other data or with another seed get a root of their own: runs/data-a, runs/data-a/seed-1.
OUT_DEFAULT = runs$(addprefix /weights-,$(notdir $(WEIGHTS:/=)))$(addprefix /data-,$(data_name))$(one_seed)
one_seed    = $(if $(filter reproduce,$(MAKECMDGOALS)),,$(addprefix /seed-,$(SEED)))
data_name   = $(basename $(patsubst %.gz,%,$(notdir $(firstword $(wildcard $(DATA))))))

##@ Container (GPU recipes run in it)
image: engine ## build the image; stages do it when needed
	@$(engine_name) build $(if $(BASE),--build-arg BASE='$(BASE)') $(addprefix --build-arg ,$(build_args)) -t $(IMAGE) .
shell: engine $(if $(filter file,$(origin IMAGE)),image) ## open a shell in the container, with the same folders
	@$(container) --entrypoint bash $(IMAGE)
engine:
	@command -v $(engine_name) >/dev/null || { echo '$(no_engine)' >&2; exit 1; }
	@$(engine_name) info >/dev/null 2>&1 || { echo '$(no_daemon)' >&2; exit 1; }
test-image: setup ## build the image for a CPU and train in it as another user, with docker, podman or buildah
	@tests/image/test.sh $(VENV)/bin/python

##@ Measure
bench: $(ready) ## measure steps of sft, rm, ppo, rloo, grpo, dpo: memory, tokens/s, projected hours, verdicts
	@$(python) -m bench $(strip $(recipe) $(sets) $(price) $(BENCH_ARGS))
bench-against: setup ## compare this code with REV's: time, measured in turn, and counted operations and memory
	@$(VENV)/bin/python -m bench.against $(strip $(if $(REV),--rev '$(REV)') $(recipe) $(sets) $(BENCH_ARGS))
bench-ablation: $(ready) ## measure the published ways to save memory, one at a time, in steps of SFT
	@$(python) -m bench.ablation $(strip $(recipe) $(sets) $(BENCH_ARGS))
bench-micro: setup ## measure small functions with pytest-benchmark; each run is kept in .benchmarks
	@$(VENV)/bin/python -m pytest bench/micro --benchmark-only --benchmark-autosave -q $(BENCH_ARGS)
bench-gpu: setup ## measure what only a GPU can show (BENCH_ARGS="--box 55m"; --dry-run needs none)
	@$(VENV)/bin/python -m bench.gpu $(BENCH_ARGS)
bench-memory: $(ready) ## compare predicted with measured peaks, in two steps of every stage that is predicted
	@$(python) -m bench.memory measure $(strip $(recipe) $(sets) $(BENCH_ARGS))
bench-outside: setup ## compare predicted memory with GPU runs that others measured (BENCH_ARGS="--only lora")
	@$(VENV)/bin/python -m bench.outside $(BENCH_ARGS)
budgets: setup ## fail if predicted memory, operations or launches are not as pinned (BENCH_ARGS=--write: pin anew)
	@$(VENV)/bin/python -m bench.memory pinned $(BENCH_ARGS)
results-index: setup ## write results/README.md from the records, and recipes/README.md from the recipes
	@$(VENV)/bin/python -m bench.results
bench-peer-supervised: setup ## compare steps of SFT, reward model and DPO with TRL's, at its defaults and tuned
	@$(VENV)/bin/python -m bench.peer.supervised $(strip $(recipe) $(sets) $(BENCH_ARGS))
bench-peer: setup ## compare a step of PPO, RLOO or GRPO with TRL's (BENCH_ARGS="--method grpo")
	@$(VENV)/bin/python -m bench.peer $(BENCH_ARGS)

##@ Develop
test: setup ## run the tests, files side by side on all cores
	@$(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(TEST_ARGS)
fuzz: setup ## try malformed inputs and kills, generated from SEED; failures go to .fuzz (CASES= KILLS= ONLY=)
	@$(VENV)/bin/python -m tests.fuzz $(strip $(seed) $(fuzzed))
	@$(if $(ONLY),,FUZZ_EXAMPLES=1000 $(VENV)/bin/python -m pytest -q tests/fuzz/test_readers.py)
fuzzed = $(if $(CASES),--cases $(CASES)) $(if $(KILLS),--kills $(KILLS)) $(if $(ONLY),--only '$(ONLY)')
lint: setup ## run ruff, mypy, hadolint and shellcheck
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(VENV)/bin/hadolint Dockerfile
	@$(VENV)/bin/shellcheck .ci/run bin/in-container requirements/lock.sh tests/image/test.sh cloud/*.sh
docs: setup ## build the documentation as a site, build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo 'written to build/site/index.html; with search: python3 -m http.server -d build/site, then http://localhost:8000'
docs-tables: setup ## write the tables of docs/ that say what the code says; a test compares them
	@$(VENV)/bin/python -m bench.docs_tables
lock: $(VENV)/bin/pip ## pin the versions in requirements/cpu.txt, after a change in pyproject.toml
	@$(VENV)/bin/pip install --quiet $(PIP_ARGS) uv
	@PATH="$(abspath $(VENV))/bin:$$PATH" requirements/lock.sh
clean: ## remove caches and build leftovers; never runs/ or .venv
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find $(wildcard rlhf bench tests) -type d -name __pycache__ -prune -exec rm -rf {} +

# ---- the environment: .venv, with a stamp in it that says which EXTRAS are installed from the files as they are now

$(VENV)/bin/pip:
	@$(PYTHON) -c '$(right_python)' 2>/dev/null || { echo "$(other_python)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(no_venv)" >&2; exit 1; }
	@echo "setup: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-%: $(pins) | $(VENV)/bin/pip
	@echo 'setup: installing rlhf[$*] at the versions in requirements/cpu.txt; the first time takes minutes'
	@$(if $(and $(on_cpu),$(if $(PIP_ARGS),,1)),echo 'setup: $(cuda_too)')
	@$(VENV)/bin/python bin/install.py $(VENV)/bin/pip install $(PIP_ARGS) -c requirements/cpu.txt -e '.[$*]'
	@$(VENV)/bin/python -c '$(summary)'
	@echo 'setup: `source $(VENV)/bin/activate` puts rlhf on your path'
	@touch $@

right_python = import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
other_python = setup: needs Python 3.11, 3.12 or 3.13, which $(PYTHON) is not. Try: make setup PYTHON=python3.12
no_venv      = setup: $(PYTHON) lacks the venv module (on Debian and Ubuntu: apt install python3-venv)
cuda_too     = torch may bring CUDA, gigabytes that a CPU has no use for; README.md (A smaller setup) has a way out
summary      = import torch; gpu = torch.cuda.is_available() and torch.cuda.get_device_name(); \
               print(f"setup: done, torch {torch.__version__}, GPU: {gpu or None}")
