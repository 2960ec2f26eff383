"""Memory, time and cost of a PPO run before it is paid for: the same options as `onetrunk plan`.

On any machine, without a GPU:
    python scripts/plan.py --model Qwen/Qwen2.5-7B --hardware 8xH100-80GB

A recipe, with launch files for 2 machines:
    python scripts/plan.py --config recipes/llama-3.1-8b/ppo.yaml --model meta-llama/Llama-3.1-8B \\
        --hardware 8xH100-80GB --nodes 2 --write plans/llama
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("plan"))
