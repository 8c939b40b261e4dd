# `make train` and `make test` set themselves up; they need only Python 3.11 and make.
# A distribution compiles Python with optimisation by profile; pyenv does not unless told to, and plain Python then takes
# half as long again. It must be able to make environments, and have the headers that inductor compiles with.
FITS := import ensurepip, os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")
PYTHON ?= $(or $(firstword $(foreach each,/usr/bin/python3.11 python3.11 python3,$(shell $(each) -c '$(FITS)' 2>/dev/null && echo $(each)))),python3)
PACKAGES := core $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml examples/*/pyproject.toml tools/*/pyproject.toml))
BIN := .venv/bin
TORCH_PYTHON ?= python3
GPU_PYTHON ?= 3.12
TORCH ?= 2.11
PARALLEL := -n 2 --dist loadgroup --durations=10 # one process for tests that share the pool of ranks, one for the others

.PHONY: install train check test test-all test-torch gpu gpu-wheels gpu-dry gpu-host figures faults mutants grid board third-parties lint docs release clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt $(PACKAGES:=/pyproject.toml)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[dev]' --quiet $(addprefix -e ./,$(PACKAGES))
	$(BIN)/plait plugins
	touch $@

train: install
	$(BIN)/plait train 'strategy=[fsdp2]'

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

docs: .venv/.docs # the pages as a site with a search, in build/docs/site; a broken link is an error
	$(BIN)/python docs/website.py

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt --no-build-isolation -e '.[docs]' --quiet
	touch $@

release: install # VERSION=0.2.0: sets the version of all packages, writes CHANGELOG.md, builds and checks; INDEX=URL: uploads
	$(BIN)/python tools/release.py $(VERSION) $(INDEX)

# If this is set, every process that a test starts compiles Plait's source again.
test test-all test-torch: export PYTHONDONTWRITEBYTECODE :=

# What one runs between two edits: the quick tests of the packages that changed, or of the core.
check: export PYTHONDONTWRITEBYTECODE :=
check: lint
	$(BIN)/python tools/quick_tests.py

test: lint # AGAIN=1: what fails is run once more, alone, and counts as unstable if it then passes
	$(BIN)/python -m pytest $(PARALLEL) $(if $(AGAIN),|| { [ $$? -eq 1 ] && $(BIN)/python -m tests.again; })

test-all: lint
	$(BIN)/python -m pytest -m 'not gpu' $(PARALLEL)

test-torch: install # the quick tests with another torch, in .torch-$(TORCH): TORCH=2.11 TESTS='tests/contract plugins/fsdp2'
	$(BIN)/python -m tools.other_torch $(TORCH) $(TESTS)

gpu-wheels: # where there is a network: what a machine with a GPU and Python $(GPU_PYTHON) lacks, into .gpu-wheels
	$(PYTHON) benchmarks/gpu_setup.py wheels --python $(GPU_PYTHON)

gpu: # on that machine: tests and benchmarks, with the torch of TORCH_PYTHON. GPU='--minutes 9 --only tests'
	$(TORCH_PYTHON) benchmarks/gpu_setup.py environment
	.gpu/venv/bin/python benchmarks/gpu.py $(GPU)

gpu-dry: install # the same parts with small models on the CPU, into .gpu
	$(BIN)/python benchmarks/gpu.py --dry-run --results .gpu $(GPU)

gpu-host: install # the host's side of GPU steps on a simulated GPU: tests and counts; 3 GB, of which 0.8 are downloaded
	$(BIN)/python -m tools.simulated_gpu.environment
	$(BIN)/python -m pytest -m 'not gpu' tools/simulated_gpu
	.gpu-host/bin/python -m tools.simulated_gpu.count 'strategy=[fsdp2]' model=llama3_1b precision.param=bfloat16

figures: install # start, save, resume, set-up and tokenising beside peers, one after the other, on an idle machine
	for each in startup peers second_start checkpoints worlds tokenising; do \
		$(BIN)/python benchmarks/$$each.py || exit 1; done

faults: install # plants 1,000 faults in real runs; the results are in docs/reliability.md. FAULTS='--count 50 --seed 7'
	$(BIN)/python -m tests.faults --write docs/reliability.md $(FAULTS)
	$(BIN)/python -m tests.faults --several --write docs/reliability.md $(FAULTS)

mutants: install # plants 300 random bugs; the table is in docs/testing.md. MUTANTS='--count 50 --seed 7'
	$(BIN)/python -m plait_mutation --write docs/testing.md $(MUTANTS)

grid: install # every family of decoders of transformers under strategies; the table is in plugins/transformers/README.md
	$(BIN)/python plugins/transformers/tests/grid.py --write plugins/transformers/README.md $(GRID)

board: install # runs the suites of all packages here and writes docs/board.md; BOARD=FOLDER takes the grades in it instead
	$(BIN)/python -m tools.board $(BOARD)

third-parties: install # runs the suites of the packages that docs/board/third-parties.toml names; `make board` adds them
	$(BIN)/python -m tools.third_parties $(THIRD_PARTIES)

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache
