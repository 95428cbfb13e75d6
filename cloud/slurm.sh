#!/usr/bin/env bash
# One stage, with the stages before it, as a Slurm job on one GPU:
#
#   sbatch cloud/slurm.sh ppo HW=h100
#   sbatch --time=12:00:00 --partition=gpu cloud/slurm.sh dpo HW=4090 OUT=/scratch/$USER/runs
#
# Packages and downloads come first, where there is network: make setup HW=h100; make fetch HW=h100 RUNTIME=local.
# Two minutes before its time is up the job is told to stop; it is queued again and goes on from the last checkpoint.
#SBATCH --job-name=rlhf
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
# Twice what merging a 13B model is predicted to take (docs/running.md); 70B needs more.
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --signal=B:INT@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=rlhf-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

if [ $# -lt 1 ]; then
    echo "usage: sbatch $0 TARGET [VARIABLE=value ...]" >&2
    exit 2
fi

stop() { # the time is nearly up: the stage leaves its checkpoints, the next job resumes
    trap - INT
    kill -INT -- "-$job" 2>/dev/null || true # make and the stage below it: make alone would only wait
    wait "$job" || true
    if [ -n "${SLURM_JOB_ID:-}" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit 0
}
trap stop INT

export HF_HUB_OFFLINE=1 # compute nodes often have no network; `make fetch` was here before
set -m                  # a process group of its own, not deaf to SIGINT
make "$@" RUNTIME=local RESUME=1 &
job=$!
wait "$job"
