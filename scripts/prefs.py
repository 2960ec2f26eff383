"""Preference data as one job of many: the same options as `onetrunk prefs`.

1 GPU:
    python scripts/prefs.py --config recipes/qwen2.5-0.5b/prefs.yaml

8 GPUs of one machine, one process each, on an eighth of the prompts:
    for i in 0 1 2 3 4 5 6 7; do
        CUDA_VISIBLE_DEVICES=$i python scripts/prefs.py --config recipes/qwen2.5-0.5b/prefs.yaml --shard $i/8 &
    done; wait
    python scripts/prefs.py --config recipes/qwen2.5-0.5b/prefs.yaml --merge_shards 8

A job array (slurm: --array=0-63) over a folder that all jobs see:
    python scripts/prefs.py --config recipes/qwen2.5-0.5b/prefs.yaml --shard $SLURM_ARRAY_TASK_ID/64
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("prefs"))
