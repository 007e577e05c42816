# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A process for each core; a file's tests share what they have prepared, so they stay together.
PROCESSES := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-gpu test-nightly test-clients test-lowest fuzz compile-matrix compile-matrix-all compile-matrix-tritons docs lint format bench clean

demo: $(STAMP)
	$(BIN)/python -m milepost.demo

# Every process that a test starts would compile what it imports, were no bytecode kept.
test: export PYTHONDONTWRITEBYTECODE=
test: $(STAMP)
	$(BIN)/python -m pytest $(PROCESSES) $(PYTEST_ARGS)

# On a machine with a CUDA GPU: the kernels and the engine beside the references on the CPU.
test-gpu: $(STAMP)
	$(BIN)/python -m pytest tests/gpu $(PROCESSES) $(PYTEST_ARGS)

# Nightly: answers of thousands of tokens, which take minutes.
test-nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly tests $(PROCESSES) $(PYTEST_ARGS)

# Scheduler and cache against an oracle: 2,000 random runs of 400 operations, on all cores. Others:
# `make fuzz FUZZ_ARGS="--seed 4000 --runs 500 --jobs 16"`.
fuzz: $(STAMP)
	$(BIN)/python -m tests.scheduler.fuzz $(FUZZ_ARGS)

# Every kernel for every chip, with Triton's own compiler: needs no GPU. What is known to compile is
# kept in tools/compile_matrix/known; `make compile-matrix MATRIX_ARGS=--keep` writes it.
compile-matrix: $(STAMP)
	$(BIN)/python tools/compile_matrix $(MATRIX_ARGS)

# Nightly: every case and size, nothing taken from a record.
compile-matrix-all: $(STAMP)
	$(BIN)/python tools/compile_matrix --all --fresh

# Nightly: Hopper's kernels with the other versions of Triton that come with a torch that we allow.
compile-matrix-tritons: $(STAMP)
	for version in 3.7.1 3.8.0 3.9.0; do \
		$(BIN)/python -m pip install --quiet --no-deps --target .cache/triton-$$version \
			triton==$$version && \
		PYTHONPATH=.cache/triton-$$version $(BIN)/python tools/compile_matrix --chips=sm_90 \
			--cache .cache/compile_matrix-$$version || exit 1; \
	done

# Clients of others against our server. Their libraries need a virtual environment of their own.
CLIENTS_VENV ?= .venv-clients
CLIENTS_NPM ?= @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.197 opencode-ai@1.18.33 \
	@continuedev/cli@1.5.47 @mariozechner/pi-coding-agent@0.73.1 @qwen-code/qwen-code@0.15.10
test-clients: $(STAMP)
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	$(CLIENTS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement tests/clients/requirements.txt
	command -v npm > /dev/null && npm install --silent --no-audit --no-fund --prefix $(CLIENTS_VENV)/node $(CLIENTS_NPM) || true
	CLIENTS_PYTHON=$(abspath $(CLIENTS_VENV))/bin/python CLIENTS_NODE=$(abspath $(CLIENTS_VENV))/node \
		$(BIN)/python -m pytest -m clients tests/clients $(PYTEST_ARGS)

# Nightly: what users meet, with the lowest versions that pyproject.toml allows. Old libraries warn of
# what new ones have changed, so warnings are no errors here; and some of transformers' own models
# that ours are compared with were mended only later.
LOWEST_VENV ?= .venv-lowest
test-lowest:
	test -x $(LOWEST_VENV)/bin/python || $(PYTHON) -m venv $(LOWEST_VENV)
	$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(LOWEST_VENV)/bin/uv pip install --quiet --python $(LOWEST_VENV)/bin/python \
		--resolution lowest-direct --editable '.[dev]'
	$(LOWEST_VENV)/bin/python -m pytest -W default -m "not slow and not clients and not nightly" \
		-k "not match_transformers" \
		$(PROCESSES) tests/server tests/cli tests/engine tests/models tests/disaggregation \
		tests/kv_events tests/load tests/tiers tests/test_sampling_params.py $(PYTEST_ARGS)

# The pages as a site, out/docs/site. Broken links are errors.
docs: $(STAMP)
	$(BIN)/python tools/site.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --package bench.kernels
	$(BIN)/mypy tools/dashboards

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python bench/cpu.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST_VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis
