#!/bin/bash
# one_step, server sampling, on 6 x H100-80GB: 4.7 s per iteration, by onetrunk plan
# Run it from the root of the repository, in the environment of onetrunk.
# The servers come first, in a shell of their own: bash recipes/launch/planned/servers.sh
set -euo pipefail

# Without it, processes that are started again after a crash hang in init_process_group.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
export CUDA_VISIBLE_DEVICES=$(seq -s, 0 1)
exec onetrunk ppo --accelerate_config recipes/launch/planned/accelerate.yaml --num_processes 2 --rdzv_backend c10d --max_restarts 3 --config recipes/llama-3.1-8b/ppo.yaml --model_name_or_path meta-llama/Llama-3.1-8B --activation_checkpointing false --activation_offloading false --schedule one_step --max_staleness 1 --use_vllm true --vllm_mode server --vllm_server_base_url http://localhost:8100 --overwrite_output_dir false --resume auto
