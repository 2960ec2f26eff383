"""Reward models under `accelerate launch`, with the options of `onetrunk reward`, which also launches by itself.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \\
        scripts/reward.py --config recipes/gsm8k-tiny/reward.yaml
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("reward"))
