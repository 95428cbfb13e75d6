#!/usr/bin/env bash
# One stage on several machines. On each of them, with the same checkout, the same recipe and one shared disk for OUT:
#
#   HEAD=node-0 NODES=2 DEVICES=8 cloud/torchrun.sh ppo --hw 8xh100 --out /shared/runs
#
# HEAD is the machine that the others meet at (PORT, 29400), DEVICES how many GPUs each has; NODES times DEVICES must be
# the recipe's hardware.count. The stages before it, and those that run in one process, come first: make sft, make rm.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -lt 1 ] || [ -z "${HEAD:-}" ] || [ -z "${NODES:-}" ] || [ -z "${DEVICES:-}" ]; then
    echo "usage: HEAD=host NODES=2 DEVICES=8 $0 STAGE --hw NAME [options of rlhf run]" >&2
    exit 2
fi

export RLHF_RUNTIME=local
if [ -d .venv ]; then PATH="$PWD/.venv/bin:$PATH"; fi
exec torchrun --nnodes "$NODES" --nproc-per-node "$DEVICES" --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "rlhf-${SLURM_JOB_ID:-$1}" --max-restarts 0 \
    -m rlhf.cli run "$@"
