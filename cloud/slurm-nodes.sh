#!/usr/bin/env bash
# One stage on the GPUs of several machines, as a Slurm job; the stages before it are done:
#
#   sbatch cloud/slurm-nodes.sh ppo --hw 8xh100 --out /shared/runs
#   sbatch --nodes=1 --gpus-per-node=8 cloud/slurm-nodes.sh ppo --hw 8xh100 --out /shared/runs --resume
#
# SFT, reward model and DPO of a recipe with `engine: fsdp` need `accelerate launch` instead (docs/running.md).
# srun starts torchrun once on each machine; it starts a process for each GPU. A rank that dies ends the job.
#SBATCH --job-name=rlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=rlhf-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p) # which reads to the end, as pipefail wants
NODES=$SLURM_JOB_NUM_NODES
DEVICES=${SLURM_GPUS_PER_NODE##*:} # "h100:4" where the type was given
export HEAD NODES DEVICES HF_HUB_OFFLINE=1
exec srun --kill-on-bad-exit=1 cloud/torchrun.sh "$@"
