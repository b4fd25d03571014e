# Needs git, make and Python 3.11 or newer; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
REAL := .cache/real

.PHONY: setup fashion demo test test-all lint format bench docs real clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[all,dev]"
	touch $@

demo: setup  ## the main job on the embedded model and images
	$(BIN)/tokenmerge demo --out demo_out

# Real weights and photographs, where the folder that fetches them lies beside the checkout. Tests skip what is absent.
real: setup
	@if [ -f ../shared/real/fetch_real.py ] && [ ! -f $(REAL)/.done ]; then \
		PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python ../shared/real/fetch_real.py $(REAL) && touch $(REAL)/.done \
		|| echo "real images could not be fetched; the tests that need them will be skipped"; fi

test: setup real  ## the fast suite, under 10 minutes on two cores
	$(BIN)/pytest -n 2 -m "not slow"

# The slow check of `predict` reads Fashion-MNIST's 10,000 test images; without the right to install them it is skipped.
fashion:
	@test -d /usr/share/datasets/fashion-mnist || apt-get install -qq dataset-fashion-mnist \
		|| echo "dataset-fashion-mnist could not be installed; the test that needs it will be skipped"

test-all: setup real fashion  ## with the slow checks
	$(BIN)/pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## speed on the embedded model; see docs/speed.md for the others
	$(BIN)/tokenmerge bench --method "ToMe(r=8)" --method "ATM(0.98, 0.04, 0.84)" --method "ATM(0.98, 0.04, 0.84, batch='each')"

docs: setup  ## the generated tables of the docs
	$(BIN)/python docs/make_support_table.py

clean:
	rm -rf .venv .cache demo_out
