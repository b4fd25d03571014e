# Needs git, make and Python 3.11 or newer; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
REAL := .cache/real

.PHONY: setup fashion chromium demo test test-all lint format bench docs pictures reproduce real clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[all,dev]"
	touch $@

demo: setup  ## the main job on the embedded model and images
	$(BIN)/tokenmerge demo --out demo_out

# Real weights and photographs, where the folder that fetches them is next to the checkout. Tests skip what is absent.
real: setup
	@if [ -f ../shared/real/fetch_real.py ] && [ ! -f $(REAL)/.done ]; then \
		PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python ../shared/real/fetch_real.py $(REAL) && touch $(REAL)/.done \
		|| echo "real images could not be fetched; the tests that need them will be skipped"; fi

# The tests of the web demo drive Debian's Chromium; without the right to install it they are skipped.
chromium:
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -qq chromium >/dev/null) \
		|| echo "chromium could not be installed; the browser tests of the web demo will be skipped"

test: setup real chromium  ## the fast suite, under 10 minutes on two cores
	$(BIN)/pytest -n 2 -m "not slow"

# The slow check of `predict` reads Fashion-MNIST's 10,000 test images; without the right to install them it is skipped.
fashion:
	@test -d /usr/share/datasets/fashion-mnist || apt-get install -qq dataset-fashion-mnist \
		|| echo "dataset-fashion-mnist could not be installed; the test that needs it will be skipped"

test-all: setup real chromium fashion  ## with the slow checks
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

docs: setup pictures  ## the generated tables and pictures of the docs
	$(BIN)/python docs/make_tables.py
	$(BIN)/python docs/make_support_table.py
	$(BIN)/python docs/make_results.py docs/results/reproduced

PICTURES := docs/images/reproduced
pictures: setup chromium  ## from the embedded images, which may be published
	$(BIN)/tokenmerge reproduce fig1 fig7 figA1 --model embedded --images embedded --sample 70 --out .cache/pictures
	mkdir -p $(PICTURES) && cp .cache/pictures/fig*.png $(PICTURES)/
	$(BIN)/tokenmerge visualize embedded embedded --gmacs 0.45 --out .cache/pictures && cp .cache/pictures/compared.png docs/images/merge_maps.png
	TOKENMERGE_SCREENSHOTS=.cache/pictures $(BIN)/pytest tests/browser -k control && cp .cache/pictures/picked.png docs/images/web.png

# The paper with DeiT-Tiny and the 70 photographs whose names end with their class: 12 minutes.
reproduce: real
	mkdir -p $(REAL)/labelled && cp -r $(REAL)/photos/foolbox $(REAL)/photos/rvb $(REAL)/labelled/
	cd $(REAL)/labelled && find foolbox rvb -type f | sed -E 's/(.*_0*([0-9]+)\.[a-z]+)$$/\1,\2/' > ../labels.csv
	$(BIN)/tokenmerge reproduce all --sample 70 --images $(REAL)/labelled --labels $(REAL)/labels.csv --weights-dir ../shared/real \
		--train-images $(REAL)/labelled --train-labels $(REAL)/labels.csv --epochs 1 --out reproduced
	$(BIN)/tokenmerge reproduce table1 table2 --fair --sample 70 --images $(REAL)/labelled --labels $(REAL)/labels.csv \
		--weights-dir ../shared/real --out reproduced_fair

clean:
	rm -rf .venv .cache demo_out
