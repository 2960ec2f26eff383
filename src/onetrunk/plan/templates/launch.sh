#!/bin/bash
# {{ launch.about }}
# Run it from the root of the repository, in the environment of onetrunk.{% include "before.txt" %}{% if launch.machines > 1 %}

# On each machine, with MAIN_HOST and NODE_RANK set.
{%- endif %}

set -euo pipefail

# Without it, processes that are started again after a crash hang in init_process_group.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240
{% for line in environment %}
{{ line }}
{% endfor %}
exec {{ command }}
