"""SFT under `accelerate launch`, with the options of `onetrunk sft`, which also launches by itself.

    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \\
        scripts/sft.py --config recipes/qwen2.5-0.5b/sft.yaml
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("sft"))
