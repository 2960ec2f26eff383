"""PPO under `accelerate launch`: the same options as `onetrunk ppo`.

1 GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml \\
        scripts/ppo.py --config recipes/qwen2.5-0.5b/ppo.yaml

8 GPUs of one machine:
    accelerate launch --config_file accelerate_configs/ddp.yaml \\
        scripts/ppo.py --config recipes/qwen2.5-0.5b/ppo.yaml

2 machines with 8 GPUs each; run it on both, with --machine_rank 0 and 1:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_machines 2 --machine_rank 0 \\
        --main_process_ip HOST --main_process_port 29500 --num_processes 16 \\
        scripts/ppo.py --config recipes/qwen2.5-0.5b/ppo.yaml
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("ppo"))
