#!/bin/bash
# The vLLM servers of one machine: {{ launch.about }}
# Whoever reaches them can load adapters, so keep the ports (from {{ port }} on) inside your network. VLLM_PYTHON names the
# interpreter of the environment that has vLLM, where it is another one.
set -euo pipefail

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
{% if servers %}
for number in $(seq 0 {{ servers - 1 }}); do
    first=$(({{ offset }} + number * {{ per_server }}))
    CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + {{ per_server }} - 1))) \
        {{ server_command }} &
done
{% endif %}
{% if train.serves_reward %}
CUDA_VISIBLE_DEVICES={{ offset + servers * per_server }} "${VLLM_PYTHON:-python}" -m vllm.entrypoints.openai.api_server \
    --model {{ launch.reward | string | quote }} --runner pooling --host {{ host }} --port {{ reward_port }} &
{% endif %}
wait
