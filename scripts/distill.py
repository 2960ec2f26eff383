"""Distillation under `accelerate launch`, with the options of `onetrunk distill`, which also launches by itself.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \\
        scripts/distill.py --config recipes/gsm8k-tiny/distill.yaml
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("distill"))
