#!/usr/bin/env bash
# One run over several hosts, without a scheduler or under any that starts this on each of them:
#   HOSTS=2 HOST_INDEX=0 FIRST_HOST=10.0.0.1 experiments/clusters/torchrun.sh parallelism=sparse_2d ...
# The same line on every host, but for HOST_INDEX (0, 1, ...). What follows are options of sparse2d.train. results_dir and
# data.out_dir must be folders that all hosts share. Started again, it goes on from the last checkpoint.
set -euo pipefail

exec "${TORCHRUN:-.venv/bin/torchrun}" \
    --nnodes "${HOSTS:?number of hosts}" --node-rank "${HOST_INDEX:?0 on the first host}" \
    --nproc-per-node "${RANKS_PER_HOST:-8}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${FIRST_HOST:?address of the first host}:${PORT:-29500}" \
    --rdzv-id "${RUN_ID:-sparse2d}" \
    -m sparse2d.train checkpoint=periodic "$@"
