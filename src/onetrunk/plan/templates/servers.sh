#!/bin/bash
# The vLLM servers of the plan, @@{per_machine} on each machine that serves; they listen on the ports from @@{port} on.
# Whoever reaches them can load adapters, so keep the ports inside your network. VLLM_PYTHON names the interpreter of the
# environment that has vLLM, where it is another one.
set -euo pipefail

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
for number in $(seq 0 @@{last}); do
    first=$((@@{offset} + number * @@{devices}))
    CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + @@{devices} - 1))) \
        @@{command} &
done
wait
