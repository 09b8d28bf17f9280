# Every target sets up what it needs. `make help` lists them.
VENV   := .venv
EXTRAS ?= jax-cpu,torch,cli,plot,test
ARGS   ?=

# The first supported interpreter; the constraints are tried with the first name.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)

# -P keeps the repository root off sys.path, so that only what is installed can be imported.
RUN := $(VENV)/bin/python -P
# The given interpreter as it is, with the sources in the installed layout.
RUN_BARE = PYTHONPATH=$(CURDIR)/.src $(PYTHON) -P
LINKED = $(filter-out %/__pycache__,$(wildcard sparse_decode/*)) \
	pallas_kernels triton_kernels bridge

.PHONY: help demo demo-gpu test test-gpu lint types fix hooks wheel links clean
.DEFAULT_GOAL := help

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

demo: $(VENV)/.installed ## Set up, then run one decode step through every path
	$(RUN) examples/quickstart.py $(ARGS)

demo-gpu: links ## The same with PYTHON=... as it is (JAX and PyTorch with CUDA), no install
	$(RUN_BARE) examples/quickstart.py $(ARGS)

test: $(VENV)/.installed ## Set up, then run every test that needs no GPU; ARGS='-k name' selects
	CUDA_VISIBLE_DEVICES= $(RUN) -m pytest -n 2 --dist worksteal --timeout 600 -m "not gpu" $(ARGS)

# The tests marked gpu in two phases: those that mind no company, side by side, and those that want
# the machine for themselves. A phase in which no test is found fails, unless ARGS select and the
# other phase has some. PHASES=serial runs one of them alone.
WORKERS      ?= $(shell cores=$$(nproc); echo $$((cores < 12 ? cores : 12)))
SOAK_MINUTES ?= 10
PHASES       ?= parallel serial
parallel     := -n $(WORKERS) --dist worksteal -m 'gpu and not serial'
serial       := -m 'gpu and serial'
GPU_TESTS     = SPARSE_DECODE_GPU_TESTS=1 SPARSE_DECODE_SOAK_MINUTES=$(SOAK_MINUTES) \
	$(RUN_BARE) -m pytest

test-gpu: links ## Run every GPU test with PYTHON=... as it is, no install; PHASES= chooses
	@found=; failed=; \
	$(foreach phase,$(PHASES),$(call run_phase,$(phase));) \
	test "$$found" || { echo "no test was found" >&2; exit 1; }; \
	test -z "$$failed" || { echo "failed:$$failed" >&2; exit 1; }

# pytest's status is 5 where no test was found.
run_phase = $(if $($(1)),,$(error PHASES: expected parallel or serial, got $(1))) \
	echo "--- $(1)"; $(GPU_TESTS) $($(1)) $(ARGS); \
	case $$? in 0) found=1;; 5) $(if $(ARGS),,failed="$$failed $(1)");; \
	*) found=1; failed="$$failed $(1)";; esac

lint: $(VENV)/.installed-dev ## Check style and format
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

types: $(VENV)/.installed-dev links ## Look for type errors; what it finds is advice
	$(VENV)/bin/pyright .src/sparse_decode

fix: $(VENV)/.installed-dev ## Apply the style and the format
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

hooks: $(VENV)/.installed-dev ## Check style and format at every commit
	$(VENV)/bin/pre-commit install

wheel: $(VENV)/.installed ## Build the sdist, and the wheel from it, into dist/
	$(RUN) -m build --no-isolation

clean: ## Remove everything that the targets made
	rm -rf $(VENV) .src build dist *.egg-info .hypothesis .pytest_cache .ruff_cache

# The sources as they are installed, for type checkers and for interpreters without the package.
links:
	@rm -rf .src && mkdir -p .src/sparse_decode
	@ln -s $(addprefix ../../,$(LINKED)) .src/sparse_decode

$(VENV)/.installed: pyproject.toml constraints/cpu.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m pip install -c constraints/cpu.txt -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/python -m pip install -c constraints/cpu.txt -e '.[$(EXTRAS),dev]'
	@touch $@

$(VENV)/bin/python:
	@$(if $(PYTHON),,echo "No Python 3.11 or newer was found; set PYTHON=" >&2; exit 1)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("too old: " + sys.version)'
	$(PYTHON) -m venv $(VENV)
