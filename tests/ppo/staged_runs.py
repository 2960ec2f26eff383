"""What the processes of test_stage_training run: `python staged_runs.py FOLDER [CASE ...]`, alone or launched.

`python staged_runs.py FOLDER go-on RUN [replicas]` goes on from a run that was stopped, in stages or as replicas.

The cases are those of two_processes.py. Alone, one process trains by itself; launched, the processes are the stages of
pipelines that sample, score and update.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from onetrunk.models.base_model import decoder_layers
from onetrunk.utils.startup import freeze_loaded
from tests.ppo import two_processes
from tests.ppo.support import make_trainer

STAGED = {"rollout_backend": "pipelined", "pipeline_training": True, "pipeline_stages": 2}
IS_ALONE = os.environ.get("WORLD_SIZE", "1") == "1"
# By case of two_processes.py: settings of the launched run, and those of both.
CASES = {"pretrained": {"pipeline_batches": 3}, "packed": {}, "stopped": {}, "autocast": {}}
CASES["dealt"] = {"max_rollout_rows": 2, "pipeline_split": [1, 1]}
BOTH = {"packed": {"trunk_cache": "off"}, "autocast": {"bf16": True}}


def note_layers(folder: Path) -> None:
    """Write which layers a process has the weights of."""
    trainer = make_trainer(folder / "layers", **two_processes.SHAPE, **two_processes.PLACE, **STAGED)
    held = [i for i, layer in enumerate(decoder_layers(trainer.model)) if layer.mlp.up_proj.base_layer.weight.numel()]
    base = trainer.model.get_base_model()
    outer = [part().weight.numel() > 0 for part in (base.get_input_embeddings, base.get_output_embeddings)]
    rank = trainer.accelerator.process_index
    (folder / f"layers-{rank}.json").write_text(json.dumps({"held": held, "outer": outer}))


def served(folder: Path, url: str) -> None:
    """Continue an adapter on rows of a server, in stages or alone."""
    stages = {"pipeline_training": True, "pipeline_split": [1, 1]}
    own = {"use_vllm": True, "vllm_server_base_url": url, "temperature": 0.8, **({} if IS_ALONE else stages)}
    two_processes.CASES["continued"] = own
    two_processes.run("continued", folder)


def main(folder: Path, names: list[str]) -> None:
    if names[:1] == ["served"]:
        served(folder, *names[1:])
        return
    if names[:1] == ["go-on"]:
        two_processes.go_on(folder, Path(names[1]), **({} if IS_ALONE or "replicas" in names else STAGED))
        return
    for name, settings in CASES.items():
        own = BOTH.get(name, {}) | ({} if IS_ALONE else {**STAGED, **settings})
        two_processes.CASES[name] = {**two_processes.CASES.get(name, {}), **own}
    for name in names or CASES:
        two_processes.run(name, folder)
    if not names:
        two_processes.resume(folder, **({} if IS_ALONE else STAGED))
    if not names and not IS_ALONE:
        note_layers(folder)


if __name__ == "__main__":
    freeze_loaded()
    main(Path(sys.argv[1]), sys.argv[2:])
