# `make run` sets everything up and runs the main job; `make test` sets everything up and passes the tests; `make test-all` runs
# the exhaustive ones too, with SHARD=1/4 a quarter of them. `make wheels` builds what a release uploads, into dist/.

PYTHON ?= python3
BIN := .venv/bin
PROMPT ?= What is the capital of France, and what is it known for?
# pip names every download; on a terminal it shows their progress too.
PIP_OUTPUT := $(if $(MAKE_TERMOUT),,--progress-bar off)
PIP_INSTALL := $(BIN)/python -m pip --disable-pip-version-check install $(PIP_OUTPUT)
NATIVE := $(BIN)/python -c 'from bitline import native; print(native.find() or "")'
SPLIT := $(if $(SHARD),--splits $(word 2,$(subst /, ,$(SHARD))) --group $(word 1,$(subst /, ,$(SHARD))))

.PHONY: run test test-all test-gpu lint docs wheels sanitize sanitize-gpu clean

run: .venv/run
	$(BIN)/bitline run smollm2 --chat --prompt "$(PROMPT)"

test: .venv/test
	$(BIN)/python -m pytest -n auto $(SPLIT)

test-all: test .venv-vllm/ready
	$(BIN)/python -m pytest -n auto -m exhaustive $(SPLIT)
	$(if $(filter-out 1/%,$(SHARD)),,BITLINE_NATIVE_LIBRARY=$$($(NATIVE)) .venv-vllm/bin/python -m pytest -n 0 tests/in_vllm)

# Kernels on a GPU of this machine; every other test hides GPUs. Compiling for Hopper takes a minute of many processes.
test-gpu: .venv/test
	$(BIN)/python -m pytest -n auto tests/gpu

lint: .venv/test
	$(BIN)/ruff check src tests benchmarks fuzz examples release
	$(BIN)/ruff format --check src tests benchmarks fuzz examples release
	$(BIN)/mypy

# The documentation site in build/site, from docs/ and the docstrings; a broken link is an error. Its packages have an environment
# of their own, which holds neither torch nor Bitline. Links to sources, which the site does not have, become plain text.
docs: .venv-docs/ready
	.venv-docs/bin/zensical build --strict --clean
	find build/site -name index.html -exec sed -i -E \
		's#<a href="(\.\./)+(benchmarks|csrc|fuzz|src|tests)/[^"]*">([^<]*)</a>#\3#g' {} +

# The sdist and the wheels for x86-64 and aarch64, checked; docs/releasing.md describes them. zig compiles for minutes.
wheels: .venv/test
	$(BIN)/python release/build_wheels.py dist

# The native core under AddressSanitizer and UndefinedBehaviorSanitizer; needs GCC with its sanitizers, and a minute or two.
sanitize: .venv/test
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -G Ninja -S csrc -B build/sanitized -DBITLINE_SANITIZE=ON
	$(BIN)/ninja -C build/sanitized
	BITLINE_SANITIZED=$(CURDIR)/build/sanitized/libbitline_native.so $(BIN)/python -m pytest -n 0 tests/test_native_sanitizers.py

# The Hopper kernels under compute-sanitizer's four tools; needs an H100 or H200 and CUDA's tools.
sanitize-gpu: .venv/test
	$(BIN)/python tests/gpu/sanitize.py

# Every package is pinned, so that every set-up is the same one.
.venv/run: requirements.txt pyproject.toml $(wildcard csrc/*) $(wildcard csrc/*/*)
	$(PYTHON) -c 'import sys; sys.exit("Bitline needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	@echo "1 of 2: pip installs the pinned packages of requirements.txt into .venv."
	@echo "It downloads about 280 MB that are not in its cache, 190 MB of them torch for CPUs; torch with CUDA has several times that."
	$(PIP_INSTALL) -r requirements.txt
	@echo "2 of 2: the native core is compiled, in a few minutes on two CPU cores; nothing is downloaded."
	$(PIP_INSTALL) --no-deps --no-build-isolation -e .
	touch $@

.venv/test: .venv/run requirements-dev.txt requirements-providers.txt
	@echo "pip installs the packages of the tests: requirements-dev.txt, requirements-providers.txt"
	$(PIP_INSTALL) -r requirements-dev.txt
	$(PIP_INSTALL) --no-deps --target .venv/providers --upgrade -r requirements-providers.txt
	touch $@

.venv-docs/ready: requirements-docs.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip --disable-pip-version-check install $(PIP_OUTPUT) -r requirements-docs.txt
	touch $@

# vLLM for CPUs with Bitline in it, in an environment of its own: it pins other versions of torch and transformers.
.venv-vllm/ready: requirements-vllm.txt pyproject.toml .venv/run
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip --disable-pip-version-check install $(PIP_OUTPUT) --no-deps -r requirements-vllm.txt
	.venv-vllm/bin/python -m pip --disable-pip-version-check install $(PIP_OUTPUT) --no-deps --no-build-isolation -C wheel.cmake=false -e .
	touch $@

clean:
	rm -rf .venv .venv-docs .venv-vllm .cache build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
