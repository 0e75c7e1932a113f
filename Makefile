# Each target works alone on a fresh machine with make and Python 3.11 or newer (with venv); the first one run sets up .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NOTEBOOKS := $(filter-out nbs/7%.ipynb nbs/runs/explore.ipynb, $(wildcard nbs/*.ipynb nbs/runs/*.ipynb))
# Two notebooks run at a time; each taking every core would make both several times slower.
export OMP_NUM_THREADS ?= 1
.DEFAULT_GOAL := help
.PHONY: help paper pdf explore test notebooks bench clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## */\1\t/p' $(MAKEFILE_LIST) | expand -t 12

# The smoke grid shows that the road works on this machine; the paper is built from the largest scale whose rows are stored.
ifdef SCALE
paper: $(VENV)/paper.stamp ## run the smoke grid, then build the paper from the largest stored scale; with SCALE=cpu only build, without torch
	$(BIN)/qk paper --scale $(SCALE)
else
paper: $(VENV)/notebooks.stamp
	$(BIN)/qk grid run grids/smoke/characters.toml --workers 2
	$(BIN)/qk paper --scale smoke
	$(BIN)/qk paper
endif

pdf: $(VENV)/paper.stamp ## print the paper as paper/paper.pdf; needs a Chromium
	$(BIN)/qk paper $(if $(SCALE),--scale $(SCALE)) --pdf

explore: $(VENV)/notebooks.stamp ## look at the stored rows in a browser
	$(BIN)/qk explore

test: $(VENV)/dev.stamp ## run every notebook, then the tests
	$(BIN)/nbdev_test --path nbs --n_workers 2
	$(BIN)/python -m pytest -q tests

notebooks: $(VENV)/dev.stamp ## export the package, run the notebooks and keep their outputs, clean them
	$(BIN)/nbdev_export
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace $(NOTEBOOKS)
	$(BIN)/jupyter nbconvert --to notebook --inplace --CoalesceStreamsPreprocessor.enabled=True $(NOTEBOOKS)
	$(BIN)/nbdev_clean

bench: $(VENV)/dev.stamp $(VENV)/bench.stamp ## measure the instruments beside their peers, on one and on two threads of an idle machine
	for n in 1 2; do OMP_NUM_THREADS=$$n $(BIN)/jupyter nbconvert --to notebook --execute --inplace nbs/70_benchmarks.ipynb || exit 1; done
	$(BIN)/nbdev_clean --fname nbs/70_benchmarks.ipynb

clean: ## remove what can be made again; results and the work of grid cells stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis paper/paper.html paper/paper.pdf
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Building the paper from stored rows needs neither torch nor the other packages of the laboratory.
$(VENV)/paper.stamp: settings.ini setup.py pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import configparser; c = configparser.ConfigParser(); c.read("settings.ini"); print("\n".join(c["DEFAULT"]["paper_requirements"].split()))' > $@.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $@.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# One install command for everything: nbdev and its parts, installed one after another, resolve to versions that do not fit.
$(VENV)/%.stamp: settings.ini setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	touch $@
