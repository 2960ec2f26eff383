#!/bin/bash
# The vLLM servers of one machine: one_step, server sampling, on 6 x H100-80GB: 4.7 s per iteration, by onetrunk plan
# Whoever reaches them can load adapters, so keep the ports (from 8100 on) inside your network. VLLM_PYTHON names the
# interpreter of the environment that has vLLM, where it is another one.
set -euo pipefail

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for number in $(seq 0 0); do
    first=$((2 + number * 4))
    CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + 4 - 1))) \
        onetrunk serve meta-llama/Llama-3.1-8B --host 127.0.0.1 --dtype bfloat16 --max_lora_rank 16 --max_loras 3 --max_model_len 1024 --tensor_parallel_size 4 --port $((8100 + number)) ${VLLM_PYTHON:+--python "$VLLM_PYTHON"} &
done
wait
