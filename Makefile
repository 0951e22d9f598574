# The commands of the README by name. Needs only GNU make and Python 3.11 or newer with its venv module.
#
# Everything is installed into .venv from the lock files; packages of the system are never used. A
# stamp says which lock file .venv holds, so that a second `make run` starts at once. After moving the
# folder or to change the Python: `make clean`, then `PYTHON=python3.13 make run`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

# Packages from the caller's environment must not shadow the locked ones.
unexport PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX

.DELETE_ON_ERROR:
.PHONY: run test sim lint format bench compiled proto clean

run: $(VENV)/.installed
	$(BIN)/python blockx.py --config config.yaml

# make test WITHOUT=postgres leaves out the tests that need the server programs of PostgreSQL.
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n auto $(if $(WITHOUT),-m 'not $(WITHOUT)')

# Simulated worlds of the dispatcher, one a seed: make sim SEEDS=1000 START=0 RANDOM_SEEDS=20
SEEDS ?= 300
START ?= 0
RANDOM_SEEDS ?= 0
sim: $(VENV)/.installed-test
	$(BIN)/python -m tests.sim.run --seeds $(SEEDS) --start $(START) --random $(RANDOM_SEEDS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The aims for speed, reached or not, beside what users would pick instead; several minutes, on an idle machine.
# make bench COMPILED=1: of the compiled build.
bench: $(VENV)/.installed-peers $(if $(COMPILED),build/compiled)
	$(BIN)/python perf/aims.py $(if $(COMPILED),--compiled)

proto: $(VENV)/.installed-test
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. blockx/backends/proto/blockdb.proto

# A wheel whose hot path is compiled (mypyc, needs a C compiler) in dist/, unpacked in build/compiled, and what
# concerns it tested against that folder.
compiled: build/compiled
	BLOCKX_COMPILED=1 $(BIN)/python -m pytest -n auto -o pythonpath="build/compiled ." \
		tests/dispatcher tests/sim/test_worlds.py tests/executor tests/ipc tests/transport \
		tests/e2e/test_run.py tests/e2e/test_stop_and_death.py tests/e2e/test_memory_and_recycling.py

# With the launcher beside it the folder is what a checkout is: `python build/compiled/blockx.py`.
build/compiled: $(VENV)/.installed-dev setup.py $(shell find blockx -name '*.py')
	rm -rf build dist
	BLOCKX_COMPILED=1 $(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	$(PIP) install --no-deps --target $@ dist/*.whl
	cp blockx.py $@/
	@touch $@

clean:
	rm -rf $(VENV) out build dist

$(VENV)/.installed: requirements.lock | $(BIN)/python
	$(PIP) install -r $<
	@touch $@

$(VENV)/.installed-test: requirements-test.lock | $(BIN)/python
	$(PIP) install -r $<
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: requirements-dev.lock | $(BIN)/python
	$(PIP) install -r $<
	@touch $@ $(VENV)/.installed-test $(VENV)/.installed

$(VENV)/.installed-peers: requirements-peers.lock | $(BIN)/python
	$(PIP) install -r $<
	@touch $@ $(VENV)/.installed-dev $(VENV)/.installed-test $(VENV)/.installed

# Interrupted or failed half-way: make deletes the target, and the next run starts anew.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "blockx needs Python 3.11 or newer, but '$(PYTHON)' is" \
			"$$($(PYTHON) -V 2>&1 | tail -n 1). Choose another one: make PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv module. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 2; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
