#!/bin/bash
# @@{about}
# Run it from the root of the repository, in the environment of onetrunk.@@{before}
set -euo pipefail

# Without it, processes that are started again after a crash hang in init_process_group.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
@@{environment}exec @@{command}
