# Trainyard: every action is one target with its arguments on the line. `make` alone prints the help below.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.SUFFIXES:

LOCK ?= $(or $(shell cat .venv/lock-name 2>/dev/null),cpu)
PYTHON ?= $(shell command -v python3.11 || command -v python3)
TRAINYARD = .venv/bin/python -m training

# They reach the shell as variables of its own, and make takes their values as they stand, like those of all variables on
# its command line: no name of a file is ever read as a command, be it the shell's or make's own.
GIVEN := CONFIG INPUT DATASET BASE TEACHER RUN CHECKPOINT MODEL EXAM HOURS DELTA NPROC SERVICE RUNTIME WHEELHOUSE EXTRA_CA EXTRA
with_origin = $(foreach name,$(2),$(if $(filter $(1),$(firstword $(origin $(name)))),$(name)))
$(foreach name,$(call with_origin,command environment,$(GIVEN) ARGS) $(call with_origin,command,$(.VARIABLES)),\
  $(eval override export $(name) := $$(value $(name))))

# A target that lacks a variable calls its command without it, which refuses in its own words: $(call need,CONFIG)
need = $(if $($(1)),,@$(TRAINYARD) $@)

##@ Set up
.PHONY: help setup test lint doctor smoke
help: ## Print this help
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nexample: make memfit CONFIG=recipes/reference/pretrain-1b.yaml ARGS="--vram 24GiB"\n'
	@printf 'every option of a command: .venv/bin/python -m training COMMAND --help; one JSON document: ARGS=--json\n'

setup: ## Make .venv from the lock file with hashes, once; made again when the lock changes (LOCK=cpu|cuda; EXTRA=trl|liger adds to it)
	@cmp -s docker/$(LOCK).lock .venv/installed.lock || flock docker/$(LOCK).lock $(MAKE) --no-print-directory venv
	@$(if $(EXTRA),.venv/bin/pip install -qq --disable-pip-version-check --no-deps --require-hashes -r "docker/$$EXTRA.lock" >&2 \
	 || { echo "EXTRA=$$EXTRA could not be installed; docker/trl.lock and docker/liger.lock are those there are" >&2; exit 3; })

.PHONY: venv
venv:
	@cmp -s docker/$(LOCK).lock .venv/installed.lock && exit 0; \
	 grep -q '^torch==' docker/$(LOCK).lock || { echo "LOCK=$(LOCK) is no whole environment; next: make setup LOCK=cpu" >&2; exit 2; }; \
	 "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	  || { echo "Python 3.11 is needed, found: $$("$(PYTHON)" --version 2>&1); next: make setup PYTHON=/path/to/python3.11" >&2; exit 3; }; \
	 echo "setting up .venv from docker/$(LOCK).lock (about a minute, 1.5 GB for cpu)" >&2; \
	 rm -rf .venv && "$(PYTHON)" -m venv .venv \
	 && .venv/bin/pip install -qq --disable-pip-version-check --require-hashes -r docker/$(LOCK).lock >&2 \
	 && echo $(LOCK) > .venv/lock-name && cp docker/$(LOCK).lock .venv/installed.lock \
	 && echo "set up; next: make demo, or make data-prepare INPUT=my.jsonl" >&2 \
	 || { echo "the packages could not be installed; see README.md, 'If the set-up fails'" >&2; exit 3; }

test: setup ## Run all tests, files side by side (ARGS="-m 'not slow'" for the quick ones, ARGS=-n0 one by one)
	@RUNTIME=local $(TRAINYARD) export-build $(if $(and $(shell command -v cmake),$(shell command -v c++)),--quantizer)
	@.venv/bin/python -m pytest -n auto --no-loadscope-reorder $(ARGS)

lint: setup ## Check the style
	@.venv/bin/ruff check training tests && .venv/bin/ruff format --check training tests

doctor: setup ## Tell what this machine has
	@$(TRAINYARD) doctor $(ARGS)

smoke: setup ## One tiny LoRA and QLoRA step on the GPU, held against the processor (ARGS=--cpu)
	@$(TRAINYARD) smoke $(ARGS)

##@ All of it at once
.PHONY: demo
demo: setup ## From the standard library's sources to an answering model, under 8 minutes on 2 cores
	@$(TRAINYARD) demo $(ARGS)

##@ Plan
.PHONY: recipe memfit bench-memfit bench check
recipe: setup ## List the recipes (ARGS="show NAME", "copy NAME TO", "check FILE", "explain FILE")
	@$(TRAINYARD) recipe $(or $(ARGS),ls)

memfit: setup ## Will it fit? CONFIG=recipe.yaml (ARGS="--solve batch --vram 10GiB data.seq_len=1024")
	$(call need,CONFIG)
	@$(TRAINYARD) memfit --config "$$CONFIG" $(ARGS)

bench-memfit: setup ## memfit's estimates against published measurements (ARGS="--rows --peers")
	@$(TRAINYARD) bench-memfit $(ARGS)

bench: setup ## Time every room beside what else does its work (ARGS="--room data" one alone)
	@$(TRAINYARD) bench $(ARGS)

check: setup ## Preflight of a recipe: data, tokenizer, memory, disk. CONFIG=recipe.yaml
	$(call need,CONFIG)
	@$(TRAINYARD) check --config "$$CONFIG" $(ARGS)

##@ Prepare
.PHONY: base-fetch data-prepare data-peek data-verify teacher-record tokenizer-train tokenizer-measure tokenizer-add
base-fetch: setup ## Fetch a pinned base model, hashes checked. BASE=name (ARGS="--pin" or "--from DIR")
	$(call need,BASE)
	@$(TRAINYARD) base-fetch "$$BASE" $(ARGS)

data-prepare: setup ## Records to a data set. INPUT=my.jsonl (or ARGS="--stdlib")
	@$(TRAINYARD) data-prepare $(if $(INPUT),"$$INPUT") $(ARGS)

data-peek: setup ## Look at records: what is trained, lengths, sources. DATASET=name@hash (ARGS="--tokenizer NAME")
	$(call need,DATASET)
	@$(TRAINYARD) data-peek "$$DATASET" $(ARGS)

data-verify: setup ## Hash every file of a data set, its tokens and its teachers' recordings. DATASET=name@hash
	$(call need,DATASET)
	@$(TRAINYARD) data-verify "$$DATASET" $(ARGS)

teacher-record: setup ## Record a teacher for method distill; goes on where it stopped. CONFIG=recipe.yaml TEACHER=base|run|file.gguf|URL
	$(call need,CONFIG)
	$(call need,TEACHER)
	@$(TRAINYARD) teacher-record --config "$$CONFIG" --teacher "$$TEACHER" $(ARGS)

tokenizer-train: setup ## Train a tokenizer on a data set's train split. DATASET=name@hash
	$(call need,DATASET)
	@$(TRAINYARD) tokenizer-train --dataset "$$DATASET" $(ARGS)

tokenizer-measure: setup ## Compare tokenizers on a data set. DATASET=name@hash (ARGS="NAME FOLDER FILE.gguf" or "--sweep 2048,4096")
	$(call need,DATASET)
	@$(TRAINYARD) tokenizer-measure --dataset "$$DATASET" $(ARGS)

tokenizer-add: setup ## Add tokens to a base's tokenizer. BASE=name, folder or file.gguf (ARGS="--token '<x>' --name NAME")
	$(call need,BASE)
	@$(TRAINYARD) tokenizer-add "$$BASE" $(ARGS)

##@ Train
.PHONY: train-calibrate train resume runs evaluate lm-eval
train-calibrate: setup ## The estimate against a few real steps on this machine. CONFIG=recipe.yaml (ARGS="--out record.json")
	$(call need,CONFIG)
	@$(TRAINYARD) train-calibrate --config "$$CONFIG" $(ARGS)

train: setup ## Train a recipe; Ctrl-C saves. CONFIG=recipe.yaml (NPROC=2 processes; ARGS="stop.max_steps=100")
	$(call need,CONFIG)
	@$(TRAINYARD) train --config "$$CONFIG" $(if $(NPROC),--ranks "$$NPROC") $(ARGS)

resume: setup ## Go on with a run. RUN=id or latest (NPROC=1: by another number of processes)
	$(call need,RUN)
	@$(TRAINYARD) resume "$$RUN" $(if $(NPROC),--ranks "$$NPROC") $(ARGS)

runs: setup ## List the runs and who waits, or show one: RUN=id or latest (ARGS="--with OTHER --plot loss.png --follow")
	@$(TRAINYARD) runs $(if $(RUN),"$$RUN") $(ARGS)

evaluate: setup ## Loss and exams of a model. CHECKPOINT=run, base or file (ARGS="--exam my-exam.jsonl --against MODEL")
	$(call need,CHECKPOINT)
	@$(TRAINYARD) evaluate "$$CHECKPOINT" $(ARGS)

lm-eval: setup ## The same exam by lm-eval, from an environment of its own. MODEL=file.gguf EXAM=my-exam.jsonl
	$(call need,MODEL,make lm-eval MODEL=/app/models/trained/demo/demo-Q8_0.gguf EXAM=my-exam.jsonl)
	$(call need,EXAM,make lm-eval MODEL=/app/models/trained/demo/demo-Q8_0.gguf EXAM=my-exam.jsonl)
	@$(TRAINYARD) lm-eval "$$MODEL" --exam "$$EXAM" $(ARGS)

##@ Ship
.PHONY: export-build export-gguf delta-export delta-import verify serve-eval serve-start serve-stop serve-status serve-restore
export-build: setup ## Fetch the pinned llama.cpp, verified; build the export image (ARGS=--quantizer: K-quants without it)
	@$(TRAINYARD) export-build $(ARGS)

export-gguf: setup ## Checkpoint to GGUF, with parity proved. CHECKPOINT=run, folder or base (ARGS="--quant F16,Q8_0")
	$(call need,CHECKPOINT)
	@$(TRAINYARD) export-gguf "$$CHECKPOINT" $(ARGS)

delta-export: setup ## Hand an adapter on: one zip without local paths. CHECKPOINT=run (ARGS="--name N")
	$(call need,CHECKPOINT)
	@$(TRAINYARD) delta-export "$$CHECKPOINT" $(ARGS)

delta-import: setup ## Take an adapter that was handed on; its base must be here. DELTA=file.delta.zip
	$(call need,DELTA)
	@$(TRAINYARD) delta-import "$$DELTA" $(ARGS)

verify: setup ## Walk the chain of hashes back from a model to the data. MODEL=file.gguf, run, base or data set
	$(call need,MODEL)
	@$(TRAINYARD) verify "$$MODEL" $(ARGS)

serve-eval: setup ## Swap a model into the running service, smoke it, put the old one back. MODEL=/app/models/...
	$(call need,MODEL)
	@$(TRAINYARD) serve-eval "$$MODEL" $(if $(SERVICE),--service "$$SERVICE") $(ARGS)

serve-start: setup ## Put a model into service. MODEL=/app/models/...
	$(call need,MODEL)
	@$(TRAINYARD) serve-start "$$MODEL" $(if $(SERVICE),--service "$$SERVICE") $(ARGS)

serve-stop: setup ## Stop the service
	@$(TRAINYARD) serve-stop $(if $(SERVICE),--service "$$SERVICE") $(ARGS)

serve-status: setup ## Ask the service what it serves
	@$(TRAINYARD) serve-status $(if $(SERVICE),--service "$$SERVICE") $(ARGS)

serve-restore: setup ## Finish the restore that a crash cut short
	@$(TRAINYARD) serve-restore $(if $(SERVICE),--service "$$SERVICE") $(ARGS)

##@ Decide
.PHONY: round trial promote rollback
round: setup ## Baseline, training within HOURS, verdict, export, a trial in the service. CONFIG=recipe.yaml HOURS=8
	$(call need,CONFIG)
	@$(TRAINYARD) round --config "$$CONFIG" $(if $(HOURS),--hours "$$HOURS") $(if $(EXAM),--exam "$$EXAM") $(if $(SERVICE),--service "$$SERVICE") $(ARGS)

trial: setup ## Score bare models on one exam. EXAM=my-exam.jsonl ARGS="MODEL MODEL"
	$(call need,EXAM)
	@$(TRAINYARD) trial --exam "$$EXAM" $(ARGS)

promote: setup ## Let a model that has won be the champion. MODEL=/app/models/...
	$(call need,MODEL)
	@$(TRAINYARD) promote "$$MODEL" $(ARGS)

rollback: setup ## Let the champion before be the champion again
	@$(TRAINYARD) rollback $(ARGS)

##@ Containers, where an engine is to run it
.PHONY: wheelhouse images
wheelhouse: setup ## Fetch the lock file's wheels, verified, for builds without a network (WHEELHOUSE=DIR)
	@$(TRAINYARD) wheelhouse $(ARGS)

images: setup ## Build and try the images (ARGS="--only llama --backend cpu --base debian:bookworm-slim")
	@$(TRAINYARD) images $(ARGS)
