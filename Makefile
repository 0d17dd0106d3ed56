# Everything happens in $(VENV); uv is used where it is installed, `make UV=` forces pip.
SHELL := bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
UV ?= $(shell command -v uv)
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
SGLANG_VENV ?= .venv-sglang
DEMO_DIR ?= .tutti-demo
PYTEST_FLAGS ?=
FUZZ_SECONDS ?= 600

# A suite is a pytest marker expression; the suites of TEST_SUITES make up `make test`.
# To add one: name it here, give it a MARK_ and (if it runs in parallel) a JOBS_ line. PATHS_ spares
# a suite the collection of all the other tests; tests/conftest.py refuses a test of it elsewhere.
TEST_SUITES := unit native crash nvme sglang
MORE_SUITES := slow sglang-server
MARK_unit := not (native or crash or nvme or slow or sglang or gpu)
MARK_native := native and not slow
MARK_crash := crash and not slow
MARK_nvme := nvme and not slow
MARK_sglang := sglang and not slow
MARK_slow := slow and not sglang
MARK_sglang-server := sglang and slow
PATHS_native := tests/native
PATHS_crash := tests/crash tests/soak
PATHS_nvme := tests/qemu
PATHS_sglang := tests/sglang
PATHS_sglang-server := tests/sglang
JOBS_unit := 4
JOBS_native := 2
JOBS_crash := 4
JOBS_nvme := 2
JOBS_sglang := 2

NATIVE_SOURCES := $(shell find kernels -name '*.cpp' -o -name '*.h')
CPP_SOURCES = find kernels tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'
PYTHON_SOURCES := setup.py tutti kernels bench integration examples tests

ifneq ($(strip $(UV)),)
  CREATE_VENV := $(UV) venv --quiet --clear --seed --python $(PYTHON)
  INSTALL := $(UV) pip install --quiet --python $(PY)
else
  CREATE_VENV := $(PYTHON) -m venv --clear
  INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
endif

# Installs the requirements of an extra alone, so that the native library is not built again.
EXTRA = import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
install_extra = $(PY) -c '$(EXTRA)' $(1) > $(VENV)/$(1).txt && $(INSTALL) -r $(VENV)/$(1).txt

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z$$].*:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "make test-X     one suite: $(TEST_SUITES) $(MORE_SUITES)"

.PHONY: install
install: $(VENV)/.core ## the package with its native library, editable, in .venv

.PHONY: demo
demo: $(VENV)/.core ## builds what is missing and runs the demonstration on ordinary files
	$(BIN)/tutti demo --dir $(DEMO_DIR)

MODE ?= hicache
.PHONY: try-sglang
try-sglang: $(VENV)/.core sglang-venv build/view ## SGLang with Tutti on the CPU, a tiny model; MODE=linker for the linker
	@[ -e $(SGLANG_VENV)/.installed ] || { \
	  echo "without SGLang there is nothing to try: build/sglang-install.log has the reason" >&2; exit 1; }
	@env PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/view:$(CURDIR)/tests/sglang \
	  $(SGLANG_VENV)/bin/python tests/sglang/try_on_cpu.py $(MODE)

.PHONY: test
test: $(addprefix test-,$(TEST_SUITES)) ## every suite; what the machine lacks is skipped by name

.PHONY: $(addprefix test-,$(TEST_SUITES) $(MORE_SUITES))
$(addprefix test-,$(TEST_SUITES) $(MORE_SUITES)): test-%: $(VENV)/.test device-check
	@echo "== suite $*"
	@$(call test_python,$*) -m pytest -q -rs -n $(or $(JOBS_$*),0) --dist worksteal -m "$(MARK_$*)" $(PATHS_$*) $(PYTEST_FLAGS) || { \
	  status=$$?; [ $$status -ne 5 ] || echo "suite $* selects no test: mark one with $*," \
	  "or take the suite out of TEST_SUITES in the Makefile"; exit $$status; }

# SGLang's packages have a venv of their own (2.8 GB); without them the suite skips by name.
test_python = $(if $(filter sglang%,$(1)),$$([ -e $(SGLANG_VENV)/.installed ] && \
  echo "env PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/view $(SGLANG_VENV)/bin/python" || \
  echo $(PY)),$(PY))

test-sglang test-sglang-server: sglang-venv build/view
test-slow: build/view

.PHONY: sglang-venv
sglang-venv:
	@[ $(SGLANG_VENV)/.installed -nt tests/sglang/requirements.txt ] && \
	  [ $(SGLANG_VENV)/.installed -nt tests/sglang/install.sh ] || { \
	  rm -rf $(SGLANG_VENV); mkdir -p build; echo "installing SGLang into $(SGLANG_VENV)"; \
	  PYTHON=$(PYTHON) tests/sglang/install.sh $(SGLANG_VENV) > build/sglang-install.log 2>&1 && \
	  touch $(SGLANG_VENV)/.installed || \
	  echo "SGLang is not installed (see build/sglang-install.log): its suite will skip"; }

test-nvme test-slow: nvme-guest

test-slow test-sglang-server: mooncake

.PHONY: mooncake
mooncake: $(VENV)/.test
	@[ $(VENV)/.mooncake -nt pyproject.toml ] || { \
	  $(INSTALL) "$$($(PY) -c '$(EXTRA)' cluster | grep mooncake)" && touch $(VENV)/.mooncake || \
	  echo "Mooncake is not installed: tests of the second tier with it will skip"; }

.PHONY: nvme-guest
nvme-guest: $(VENV)/.test
	@mkdir -p build; $(PY) tests/qemu/guest.py setup > build/qemu-install.log 2>&1 || \
	  echo "QEMU's guest is not installed (see build/qemu-install.log): its suite will skip"

# A GPU machine may have no network: these two use $(PYTHON) and its packages as they are.
GPU_PY := env PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/view:$(CURDIR)/tests $(PYTHON)

.PHONY: gpu-native
gpu-native:
	$(PYTHON) setup.py -q build_ext --inplace
	@$(MAKE) --no-print-directory build/view

CONTACT ?= build/first-contact
.PHONY: gpu-contact
gpu-contact: build/view ## the first nine minutes on a GPU, with $(PYTHON); goes on where it stopped
	@$(GPU_PY) -c 'import tutti.native; tutti.native.lib()' 2> build/native.log || \
	  $(PYTHON) setup.py -q build_ext --inplace
	$(GPU_PY) tests/gpu/first_contact.py --out $(CONTACT)

.PHONY: gpu-test
gpu-test: gpu-native ## tests on a GPU, with $(PYTHON); goes on where it stopped
	$(GPU_PY) tests/gpu/shards.py --out build/gpu-test

.PHONY: gpu-bench
gpu-bench: gpu-native ## measurements on a GPU, with $(PYTHON); goes on where it stopped
	$(GPU_PY) -m tutti.bench.gpu.shards --out bench/results/gpu

# Without a network: carry what tests/gpu/serving/carry.sh build/sglang-bundle has fetched elsewhere.
.PHONY: gpu-sglang
gpu-sglang: gpu-native ## SGLang's server on a GPU with each system, BENCH_DIR=... on the drive, TRACE=... for rates, ARGS=...
	PYTHON=$(PYTHON) tests/gpu/serving/start.sh --dir $(BENCH_DIR) $(if $(TRACE),--trace $(TRACE)) $(ARGS)

# Only on a machine with no other work; commits that changed code since make old results stale.
BENCH_DIR ?= .
.PHONY: bench
bench: $(VENV)/.test sglang-venv mooncake build/view ## every result of the store anew, BENCH_DIR=... on the drive, TRACE=... for the replay
	-$(PY) -m tutti.bench.store_results --dir $(BENCH_DIR) $(if $(TRACE),--trace $(TRACE)) \
	  --sglang "$(CPU_SGLANG)" $(if $(ONLY),--only $(ONLY))
	PYTHONPATH=build/view $(PY) -m tutti.bench.summary docs/results.md bench/results

# SGLang's packages on a CPU: the stand-in takes the place of operators that no wheel has for one.
# LMCache has a folder of its own there: the tests of its recipes need more of it than its client.
CPU_SGLANG_PATH := $(CURDIR)/build/view:$(CURDIR)/tests/sglang/stand_in:$(abspath $(SGLANG_VENV))/peers
CPU_SGLANG := env PYTHONSAFEPATH=1 PYTHONPATH=$(CPU_SGLANG_PATH) $(SGLANG_VENV)/bin/python

.PHONY: bench-peers
bench-peers: $(VENV)/.core sglang-venv build/view ## SGLang's backends against Tutti's on a CPU, BENCH_DIR=..., ARGS="--host-pages thp"
	$(CPU_SGLANG) -m tutti.cli bench peers --dir $(BENCH_DIR) $(ARGS)

KV_CACHE_URL ?= https://github.com/mlcommons/storage
.PHONY: bench-kv-cache
bench-kv-cache: $(VENV)/.core ## MLPerf's KV-cache benchmark on Tutti and on its own files, BENCH_DIR=..., KV_CACHE_URL=... of a mirror
	git init -q build/kv-cache
	revision=$$($(PY) -c 'from tutti.bench.yardsticks.run import REVISIONS as r; print(next(iter(r.values())))'); \
	  git -C build/kv-cache cat-file -e $$revision 2> /dev/null || \
	  git -C build/kv-cache fetch -q --depth 1 $(KV_CACHE_URL) $$revision; git -C build/kv-cache checkout -q $$revision
	$(PY) -m tutti.bench.yardsticks.run --kv-cache build/kv-cache/kv_cache_benchmark \
	  --dir $(firstword $(BENCH_DIR)) --out build/kv-cache.json $(ARGS)

LMCACHE_SERVER := $(SGLANG_VENV)/lmcache-server
.PHONY: lmcache-server
lmcache-server: tests/sglang/lmcache-server.txt sglang-venv
	@[ $(LMCACHE_SERVER)/.installed -nt $< ] || { \
	  $(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps --disable-pip-version-check \
	  --target $(LMCACHE_SERVER) -r $< && touch $(LMCACHE_SERVER)/.installed || \
	  echo "LMCache's server is not installed: bench-serving names it as skipped"; }

# SGLang's packages lack its benchmark of conversations.
SGLANG_URL ?= https://github.com/sgl-project/sglang
SGLANG_REVISION := 0986bed8e279ce67659e4e473300fc3c5c717d6a
MULTITURN := build/sglang/benchmark/hicache/bench_multiturn.py
$(MULTITURN):
	@git init -q build/sglang; git="git -C build/sglang -c remote.origin.url=$(SGLANG_URL)"; \
	  $$git fetch -q --depth 1 --filter=blob:none origin $(SGLANG_REVISION) && \
	  $$git checkout -q $(SGLANG_REVISION) -- benchmark/hicache || \
	  echo "bench_multiturn was not fetched: bench-serving names it as skipped"

TINY_MODEL := build/tiny-model
ON_CPU := --device cpu --attention-backend torch_native --context-length 4096 --max-total-tokens 4096 --mem-fraction-static 0.3
SERVING = env OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 PYTHONSAFEPATH=1 \
  PYTHONPATH=$(CPU_SGLANG_PATH):$(abspath $(LMCACHE_SERVER)) $(SGLANG_VENV)/bin/python -m tutti.bench.yardsticks.serving --model $(TINY_MODEL) \
  --dir $(BENCH_DIR) --prompts 2 --rounds 3 --rate 16 --note "CPU, tiny model: counts, not speed" \
  $$([ ! -e $(MULTITURN) ] || echo --bench-multiturn $(MULTITURN))
$(TINY_MODEL)/tokenizer.json: | $(VENV)/.core sglang-venv build/view
	$(CPU_SGLANG) tests/sglang/tiny_model.py $(TINY_MODEL) 0 mha --tokenizer

# SGLang compiles its hashes when it first needs them, and a server that is flushed meanwhile ends;
# only Tutti loads them before that.
.PHONY: sglang-hashes
sglang-hashes: sglang-venv build/view
	@$(CPU_SGLANG) -c "from sglang.srt.mem_cache.utils import get_hash_str; get_hash_str([1, 2], None)"

.PHONY: bench-serving bench-serving-tp2
bench-serving: $(TINY_MODEL)/tokenizer.json $(MULTITURN) sglang-hashes lmcache-server ## SGLang's own clients against each system on a CPU, BENCH_DIR=..., ARGS="--systems hbm"
	$(SERVING) --passes 2 --small-capacity 8MiB --more="$(ON_CPU)" $(ARGS)

# A processor for each rank.
bench-serving-tp2: $(TINY_MODEL)/tokenizer.json $(MULTITURN) sglang-hashes ## the same with servers of two ranks, once each
	SGLANG_CPU_OMP_THREADS_BIND="0|1" $(SERVING) --passes 1 --systems hbm hicache-file tutti-hicache tutti-linker \
	  --more="$(ON_CPU) --tp 2" $(ARGS)

# Goes on after a finding; SEED repeats the sequence of operations.
SECONDS ?= 60
.PHONY: soak
soak: $(VENV)/.test build/view ## SECONDS=... SEED=... of random operations, kills and faults against a model
	PYTHONPATH=tests $(PY) -m soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) \
	  --out build/soak.json

# Debian's Prometheus, unpacked and not installed: without it the tests of alerts skip by name.
PROMETHEUS := build/prometheus
.PHONY: prometheus
prometheus:
	@[ -e $(PROMETHEUS)/usr/bin/promtool ] || command -v promtool > /dev/null || { mkdir -p $(PROMETHEUS) && \
	  (cd $(PROMETHEUS) && apt-get -q update && apt-get -q download prometheus && dpkg -x prometheus_*.deb . && \
	  rm prometheus_*.deb) > build/prometheus.log 2>&1 || \
	  echo "Prometheus is not unpacked (see build/prometheus.log): tests of alerts will skip"; }

test-unit: prometheus

# Optional: without these packages (no network, another platform) their tests skip by name.
.PHONY: device-check
device-check: $(VENV)/.test
	@export PIP_RETRIES=1; [ $(VENV)/.device-check -nt pyproject.toml ] || { \
	  $(call install_extra,device-check) && touch $(VENV)/.device-check || \
	  echo "device-check packages not installed: tests that compile device code will skip"; }

.PHONY: fuzz
fuzz: $(VENV)/.test ## fuzzes the readers of foreign bytes for FUZZ_SECONDS
	$(call install_extra,fuzz)
	$(PY) tests/fuzz/run.py --seconds $(FUZZ_SECONDS)

.PHONY: lint
lint: $(VENV)/.lint build/view ## ruff, mypy, clang-format, import layers; changes nothing
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(CPP_SOURCES) | xargs -r $(BIN)/clang-format --dry-run -Werror
	MYPYPATH=build/view $(BIN)/mypy -p tutti 2>&1 | sed -E \
	  -e 's#^build/view/tutti/(bench|integration|kernels)/#\1/#' -e 's#^build/view/##'
	cd build/view && $(abspath $(BIN))/lint-imports --config $(CURDIR)/pyproject.toml \
	  --cache-dir $(CURDIR)/.import_linter_cache

.PHONY: fmt
fmt: $(VENV)/.lint ## formats Python and C++ in place
	$(BIN)/ruff check --fix --exit-zero --quiet $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(CPP_SOURCES) | xargs -r $(BIN)/clang-format -i

# The wheel for PyPI: for every Linux whose glibc is not older than this one's, stripped; the
# symbols are in build/debug.
.PHONY: wheel
wheel: $(VENV)/.publish ## dist/: a manylinux wheel and the sdist, of tutti-kv
	rm -rf dist build/wheel build/debug build/lib.* build/bdist.*
	TUTTI_DEBUG_FOLDER=$(CURDIR)/build/debug $(BIN)/python -m build --outdir build/wheel > build/wheel.log || { tail -20 build/wheel.log; exit 1; }
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist/

.PHONY: publish-check
publish-check: wheel ## what PyPI and a user's first minutes check: metadata, install, demo, types
	$(BIN)/twine check --strict dist/*
	PYTHON=$(PYTHON) MYPY=$(abspath $(BIN))/mypy tests/publish/check.sh dist/*.whl build/debug/_native.so.debug

.PHONY: docs
docs: $(VENV)/.docs build/view ## build/docs: the reference of the Python interface, from its docstrings
	$(PY) tests/publish/reference.py build/docs

.PHONY: clean
clean: ## removes what make and the tools made, .venv and the demo's data included
	rm -rf $(VENV) $(SGLANG_VENV) build dist *.egg-info .tutti-demo* tutti/_native.so tutti/scheduler/*.so
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find $(PYTHON_SOURCES) -name __pycache__ -prune -exec rm -rf {} +

# The package as an installation sees it, for tools that do not follow setuptools' folder mapping.
.PHONY: build/view
build/view:
	@rm -rf $@ && mkdir -p $@/tutti
	@ln -s $(CURDIR)/tutti/* $(addprefix $(CURDIR)/,bench integration kernels) $@/tutti/

$(VENV)/.venv:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "$(PYTHON) was not found: name a Python 3.11 or newer with PYTHON=..." >&2; exit 1; }
	@test -w . || { \
	  echo "$(CURDIR) cannot be written: copy or clone it to a place of your own" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is older than Python 3.11: name a newer one with PYTHON=..." >&2; exit 1; }
	@$(CREATE_VENV) $(VENV) || { \
	  echo "no environment in $(VENV): install python3-venv or uv, then repeat" >&2; exit 1; }
	@touch $@

# Started in the folder above a clone called tutti, Python would take the clone for a package without
# an __init__.py before it asks setuptools' finder. A package on sys.path comes before both.
$(VENV)/.core: $(VENV)/.venv pyproject.toml setup.py $(NATIVE_SOURCES) $(wildcard tutti/scheduler/*.py)
	@command -v $(or $(CXX),g++) > /dev/null || { \
	  echo "no C++ compiler: install g++, or name one with CXX=..." >&2; exit 1; }
	@echo "building Tutti in $(VENV), two or three minutes"
	@$(INSTALL) -e . || { echo "not installed, see above: without a package index (or a mirror that" \
	  "pip's settings name), install as CONTRIBUTING.md says under 'Without a network'" >&2; exit 1; }
	@site=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); mkdir -p $$site/tutti-checkout; \
	  ln -sfn $(CURDIR)/tutti $$site/tutti-checkout/tutti; echo tutti-checkout > $$site/tutti-checkout.pth
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.core
	$(call install_extra,test)
	$(call install_extra,plot)
	$(call install_extra,node)
	@touch $@

$(VENV)/.publish $(VENV)/.docs: $(VENV)/.%: pyproject.toml | $(VENV)/.core
	$(call install_extra,$*)
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/.core
	$(call install_extra,lint)
	$(call install_extra,node)
	@touch $@
