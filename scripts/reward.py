"""Reward models under `accelerate launch`: the same options as `onetrunk reward`.

1 GPU:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml \\
        scripts/reward.py --config recipes/gsm8k-tiny/reward.yaml

8 GPUs of one machine:
    accelerate launch --config_file accelerate_configs/ddp.yaml \\
        scripts/reward.py --config recipes/gsm8k-tiny/reward.yaml

2 machines with 8 GPUs each; run it on both, with --machine_rank 0 and 1:
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_machines 2 --machine_rank 0 \\
        --main_process_ip HOST --main_process_port 29500 --num_processes 16 \\
        scripts/reward.py --config recipes/gsm8k-tiny/reward.yaml

An adapter on a base that does not fit one GPU: its layers over all GPUs, which train as the stages of a pipeline:
    accelerate launch --config_file accelerate_configs/pipelined.yaml --num_processes 4 \\
        scripts/reward.py --config recipes/gsm8k-tiny/reward.yaml --use_peft true --pipeline_training true
"""

import sys

from onetrunk.cli import run

if __name__ == "__main__":
    sys.exit(run("reward"))
