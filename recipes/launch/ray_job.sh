#!/bin/bash
# PPO as a job of a running Ray cluster, on one node with 8 free GPUs:
#   OUTPUT_DIR=/shared/runs/ppo recipes/launch/ray_job.sh
# RAY_ADDRESS is the cluster's job server (default http://127.0.0.1:8265), where onetrunk is installed. OUTPUT_DIR must
# be on a disk that all nodes share: the job runs in a temporary copy of this repository. Run the command again to
# resume: Ray does not repeat a job. On `ray job stop`, Ray and the launcher both signal the training processes; they save a
# checkpoint in the time that ray_runtime_env.yaml leaves them.
set -euo pipefail
cd "$(dirname "$0")/../.."

ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" --no-wait \
    --runtime-env recipes/launch/ray_runtime_env.yaml --entrypoint-num-gpus 8 -- \
    onetrunk ppo --accelerate_config ddp \
    --num_processes 8 --rdzv_backend c10d --max_restarts 3 \
    --config recipes/qwen2.5-0.5b/ppo.yaml --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
    --output_dir "${OUTPUT_DIR:?a folder that all nodes share}" --resume auto
