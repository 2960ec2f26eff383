"""Measuring judges as a job: the same options as `onetrunk judge`. One process; a judge in this process takes one GPU.

1 GPU:
    python scripts/judge.py --config recipes/qwen2.5-0.5b/judge.yaml

A judge that needs several GPUs runs as a server, which this process then only asks:
    python scripts/judge.py --config recipes/qwen2.5-0.5b/judge.yaml \\
        --judge http://127.0.0.1:8000/v1 --judge_model Qwen/Qwen2.5-72B-Instruct --judge_max_concurrency 64
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("judge"))
