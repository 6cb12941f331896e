# Two commands on a fresh Debian 12 with Python 3.11, gcc and make: `make demo` and `make test`. Each makes .venv by itself.
SHELL := /bin/bash
PY := .venv/bin/python
# The engine's worker processes inherit it; warnings of the frameworks below are not ours to fix.
export PYTHONWARNINGS ?= ignore
DEMO_ARGS ?=
# A file of deploy/recipes without its ending.
RECIPE ?=
PYTEST_ARGS ?=

.PHONY: help setup audit demo demo-ppo test test-fleet test-own-fleets test-simulation test-trainer e2e-demo e2e-train unit check check-types units-1 units-2 bench-coserve bench-lend bench-loop bench-push bench-simulate bench-staleness bench-trainer faults faults-own-fleets faults-others soak gpu-check lock clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## .venv from the lock (the other targets do it by themselves)
	@deploy/bootstrap.sh

demo: setup ## train the demo policy on the idle seats of a live fleet; RECIPE=grpo, RESUME=1 continues, DEMO_ARGS="--steps 80"
	@$(PY) -m deploy.cli demo $(if $(RECIPE),--recipe deploy/recipes/$(RECIPE).toml) $(if $(filter-out 0,$(RESUME)),--resume) $(DEMO_ARGS)

demo-ppo: ## the same by PPO: ZeRO-2 policy, critic, reference and a reward model that is trained first; into runs/demo-ppo
	@$(MAKE) --no-print-directory demo RECIPE=ppo-critic DEMO_ARGS="--dir runs/demo-ppo $(DEMO_ARGS)"

test: setup ## every tier: unit; integration and faults with one fleet; end to end, which starts its own; simulated days
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target units-1 units-2
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-fleet test-trainer test-own-fleets e2e-train e2e-demo test-simulation

# None of the fleets keeps two cores busy: engines and workers that start are waited for. The longest begin.
TRAINER_TESTS := $(wildcard $(addprefix tests/integration/test_,trainer_*.py replay.py record.py exact_resume.py critic.py lora.py \
	packed_policy.py reward_model.py role_groups.py zero_stages.py bench_staleness.py))

OWN_FLEETS := $(addprefix tests/faults/test_,adapter_replica_killed.py fleet_stopped.py killed_in_a_push.py \
	lend_fleet.py replica_stopped.py)

test-fleet: # the queue, the gateway, what else shares one fleet, and faults
	@$(PY) -m pytest tests/integration tests/faults $(addprefix --ignore=,$(TRAINER_TESTS) $(OWN_FLEETS)) --durations 10 $(PYTEST_ARGS)

test-own-fleets: # faults that need a fleet of their own
	@$(PY) -m pytest $(OWN_FLEETS) --durations 10 $(PYTEST_ARGS)

test-trainer: # the trainer, without engines; and what checks it on a GPU, on a CPU
	@OMP_NUM_THREADS=1 NIGHTSHIFT_GPU_CHECK_DEVICE=cpu $(PY) -m pytest --noconftest tests/gpu $(PYTEST_ARGS)
	@$(PY) -m pytest $(TRAINER_TESTS) --durations 10 $(PYTEST_ARGS)

test-simulation: # fleets and days of the simulator, minutes of one core
	@$(PY) -m pytest tests/simulation --quiet --durations 10 $(PYTEST_ARGS)

e2e-demo e2e-train: # each starts its own fleet
	@$(PY) -m pytest $(addprefix tests/e2e/test_,$(if $(filter %-demo,$@),demo.py,serve_and_train.py adapter_run.py)) --durations 10 $(PYTEST_ARGS)

faults: setup ## the fault matrix: every fault, what it cost and how long the way back took, into runs/faults/report.json
	@rm -rf runs/faults
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target faults-own-fleets faults-others || true
	@$(PY) -m tests.fault_rows runs/faults own-fleets others

# side by side: a fleet that starts is waited for
faults-own-fleets:
	@$(PY) -m pytest $(OWN_FLEETS) -m fault --faults-report runs/faults/own-fleets.json $(PYTEST_ARGS)

faults-others:
	@$(PY) -m pytest tests -m fault $(addprefix --ignore=,$(OWN_FLEETS)) --faults-report runs/faults/others.json $(PYTEST_ARGS)

soak: setup ## ten minutes of random faults on a whole Nightshift, into runs/soak/report.json and soak.png; SEED=7, MINUTES=10, EVERY_S=30
	@$(PY) -m tests.soak $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(EVERY_S),--every-s $(EVERY_S))

unit: setup ## the unit tier alone
	@$(PY) -m pytest tests/unit $(PYTEST_ARGS)

check: setup ## lint, format, types, unit tests and simulated days
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target units-1 units-2 check-types test-simulation

check-types:
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy

units-1 units-2: # half of them each, by their first letters
	@$(PY) -m pytest $(wildcard tests/unit/test_$(if $(filter %-1,$@),[a-g],[h-z])*.py) --quiet $(PYTEST_ARGS)

bench-coserve: setup ## users and rollouts on one engine, arm by arm, into runs/bench/coserve.json and .png; QUICK=1, ARMS="users guard", RESUME=1
	@PYTHONPATH=$(CURDIR) $(PY) tests/bench/bench_coserve.py $(if $(filter-out 0,$(QUICK)),--quick) $(if $(filter-out 0,$(RESUME)),--resume) \
		$(addprefix --arms ,$(ARMS)) $(BENCH_ARGS)

bench-lend: setup ## whole replicas lent to rollouts beside a static split, into runs/bench/lend.json and .png
	@PYTHONPATH=$(CURDIR) $(PY) tests/bench/bench_lend.py $(if $(filter-out 0,$(RESUME)),--resume) $(addprefix --arms ,$(ARMS)) \
		$(BENCH_ARGS)

bench-loop: setup ## every ratio of the loop into runs/bench/loop.json and loop.png
	@$(PY) tests/bench/bench_loop.py $(BENCH_ARGS)

bench-push: setup ## new weights for two replicas under users and rollouts, into runs/bench/push.json
	@PYTHONPATH=$(CURDIR) $(PY) tests/bench/bench_push.py $(if $(filter-out 0,$(RESUME)),--resume) $(BENCH_ARGS)

bench-staleness: setup ## reward against staleness and correction into runs/bench/staleness.json and .png; goes on where it was
	@$(PY) tests/bench/bench_staleness.py $(BENCH_ARGS)

bench-trainer: setup ## a step of the trainer beside a bare DeepSpeed loop into runs/bench/trainer.json and trainer.png
	@$(PY) tests/bench/bench_trainer.py $(BENCH_ARGS)

bench-simulate: setup ## how long a simulated day of 1,000 replicas takes, into runs/bench/simulate.json and simulate.png
	@PYTHONPATH=$(CURDIR) $(PY) tests/bench/bench_simulate.py $(BENCH_ARGS)

# Without `setup`, whose environment has vLLM and Ray: any Python with torch for CUDA and DeepSpeed will do.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),python3)

gpu-check: ## the trainer's tests on CUDA, then the same with a 1.4 B bfloat16 policy, packed and padded; GPU_PYTHON=/path/to/python
	@PYTHONPATH=$(CURDIR) $(GPU_PYTHON) -m pytest --noconftest tests/gpu $(PYTEST_ARGS)
	@PYTHONPATH=$(CURDIR) $(GPU_PYTHON) tests/bench/bench_trainer.py --device cuda --dtype bfloat16 --size 1.5b --groups 24 \
		--micro-batch-tokens 8192 --check-packing $(BENCH_ARGS)

audit: setup ## look the locked versions up in PyPI's advisories, with pip-audit; says "not checked" where it cannot
	@$(PY) deploy/advisories.py

lock: setup ## resolve pyproject.toml into requirements/ again; LOCK_ARGS="--upgrade"
	@deploy/lock.sh $(LOCK_ARGS)

DEMO_RUNS := runs/demo runs/demo-ppo $(patsubst deploy/recipes/%.toml,runs/demo-%,$(wildcard deploy/recipes/*.toml))

clean: ## remove .venv, caches and results of the demo, benches and faults; runs of your own stay
	@rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info $(DEMO_RUNS) runs/bench runs/faults runs/soak runs/.cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
