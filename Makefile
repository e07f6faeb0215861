# make reproduce [DATA=rows.tsv.gz] [SCALE=laptop|full]   environment + every claim + tables, figures and report
# make figures, make report                               from the tables and runs that are there
# make test                                               environment + tests
# make check                                              environment + lint, format and type checks
# make bench-ingest                                       rows/s of the ingest beside TorchRec's and polars'
# make bench-sync                                         milliseconds and bytes of one averaging
# make bench-peers                                        step time and memory beside plain TorchRec and torch DDP
# make shaped EXPERIMENT=qps_scaling                      an experiment on hosts in miniature, three times; its table
# make simulate                                         tables and figures of the cost model
# make lock                                               pin requirements/*.txt anew from pyproject.toml
# ACCEL=cpu (default) or ACCEL=cuda chooses the pinned list.

PYTHON ?= python3
ACCEL ?= cpu
SCALE ?= laptop
DATA ?=

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-$(ACCEL)

.PHONY: environment reproduce figures report test check lock clean

environment: $(INSTALLED)

$(INSTALLED): requirements/$(ACCEL).txt requirements/cuda_runtime.txt pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit(f"Python 3.11 to 3.13 is needed (Hydra 1.3 does not start on 3.14), found {v[0]}.{v[1]}; set PYTHON=")'
	@# The CPU and CUDA builds of FBGEMM own the same files: a list is never installed over the other one.
	@if [ -x $(PY) ] && ! ls $(VENV)/.installed-* 2>/dev/null | grep -qv -- '-$(ACCEL)$$'; then :; else $(PYTHON) -m venv --clear $(VENV); fi
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/$(ACCEL).txt
	@# A package index may serve torch's CUDA build where no CPU build is at hand; it does not import without these.
	@$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/cuda_runtime.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(PY) -m sparse2d.environment
	@touch $@

# Every claim of experiments/claims.yaml, then tables, figures and the report; goes on where it was stopped.
reproduce: environment
	$(PY) -m sparse2d.reproduce scale=$(SCALE) $(if $(DATA),'data_path="$(DATA)"')

# Those whose tables are there.
figures: environment
	$(PY) paper_figures

# Tables of the runs that are there, results/REPORT.md and results/report.html.
report: environment
	$(PY) -m sparse2d.report

# Two files at a time: many tests wait for ranks or start programs; what shares a file shares its datasets.
PYTEST := $(PY) -m pytest --numprocesses 2 --dist loadfile
test: environment
	$(PYTEST) -m "not slow"
	$(PYTEST) -m slow

check: environment
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# torch asks for CUDA's libraries on Linux whatever the build; the CPU list overrides them away.
UV_COMPILE := $(VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --no-header --no-annotate pyproject.toml
lock: environment
	$(UV_COMPILE) --extra cuda --extra dev --output-file requirements/cuda.txt
	$(UV_COMPILE) --extra cpu --extra dev --override requirements/cpu_overrides.txt | grep -v "== 'never'" > requirements/cpu.txt
	grep -vxFf requirements/cpu.txt requirements/cuda.txt | grep -v '^fbgemm-gpu==' > requirements/cuda_runtime.txt

clean:
	rm -rf results/runs results/data results/sweeps results/reproduced results/plans

# Rows/s and peak memory of the ingest beside TorchRec's, polars' and mere reading; writes results/tables/ingest.csv.
.PHONY: bench-ingest
bench-ingest: environment
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps "iopath>=0.1.10" "portalocker>=3" "polars>=1.30" "polars-runtime-32>=1.30"
	$(PY) experiments/ingest/bench.py $(BENCH_INGEST)

# Milliseconds and bytes of one averaging, touched rows beside all rows; writes results/tables/sync_cost.csv and its figure.
# In a network namespace of its own, where the system allows one, so that no other traffic is counted.
.PHONY: bench-sync
bench-sync: environment
	@export TORCH_CPP_LOG_LEVEL=ERROR; isolated=$$(unshare -rn sh -c 'ip link set lo up' 2>/dev/null && echo "unshare -rn"); \
	$$isolated sh -c 'ip link set lo up 2>/dev/null; exec $(PY) experiments/sync_cost/bench.py $(BENCH_SYNC)'
	$(PY) paper_figures sync_cost

# Bytes that ranks send beside the cost model's; writes results/tables/byte_validation.csv.
.PHONY: validate-bytes
validate-bytes: environment
	$(PY) -m sparse2d.train -m experiment=byte_validation
	$(PY) -m sparse2d.simulate validate_runs runs=[results/runs/byte_validation]

# Step time and peak memory of this trainer, of plain TorchRec and of torch DDP; writes results/tables/peers.csv.
.PHONY: bench-peers
bench-peers: environment
	$(PY) experiments/peers/bench.py

# An experiment of QPS (qps_scaling, placement, sync_interval_qps, group_size) on the testbed, and its table; goes on where it was
# stopped. Needs root or user namespaces, and iproute2.
.PHONY: shaped
shaped: environment
	$(PY) experiments/shaped.py $(EXPERIMENT)
	$(PY) -m sparse2d.report tables=[$(EXPERIMENT)]

# Every table and figure of the cost model; needs no GPU and a few seconds.
.PHONY: simulate
simulate: environment
	for name in exfm_scaling ctr_table best_m memory_scaling imbalance lookup_latency validate recommend; do \
	  $(PY) -m sparse2d.simulate experiment=$$name || exit 1; done
	$(PY) -m sparse2d.simulate experiment=imbalance table=imbalance_column_wise workload.paper=null \
	  'parallelism.sharding=[table_wise,column_wise,row_wise]' 'workload.fitted_on=[]' 'constants.fitted_on=[]'
	$(PY) paper_figures exfm_scaling best_m scaling_limits
