#!/bin/bash
# The vLLM servers of one machine: @@{about}
# Whoever reaches them can load adapters, so keep the ports (from @@{port} on) inside your network. VLLM_PYTHON names the
# interpreter of the environment that has vLLM, where it is another one.
set -euo pipefail

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
@@{servers}wait
