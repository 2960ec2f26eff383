"""The settings of a reward adapter that trains in pipeline stages. Imports no trainer; see `utils/options.py`."""

from __future__ import annotations

from dataclasses import dataclass

from onetrunk.utils.options import is_whole, option, require_split


@dataclass(repr=False)
class StageTrainingConfig:
    """How the layers of the base are divided over processes. List it before TrainingArguments among the bases."""

    pipeline_training: bool = option(
        False,
        "With use_peft: divide the layers of the frozen base over consecutive processes, which train as the stages of"
        " a pipeline, by the 1F1B schedule. Each process loads and holds the weights of its own layers only, so that a"
        " base that needs several devices can be trained on them; a pipeline counts as one process for rows (not yet"
        " run on hardware).",
    )
    pipeline_stages: int | None = option(
        None, "With pipeline_training: processes that form a pipeline, 2 or more; None: all processes."
    )
    pipeline_split: list[int] | None = option(
        None,
        "With pipeline_training: number of layers of each stage, 1 or more; their sum is the model's layers. None:"
        " equally many, the first stages one more where they do not divide.",
    )
    pipeline_batches: int | None = option(
        None,
        "With pipeline_training: microbatches that the per_device_train_batch_size rows are cut into, 1 or more. Fewer"
        " leave processes idle, more make them small; the result does not depend on it. None: 4 per stage, as far as"
        " there are rows.",
    )

    def __post_init__(self) -> None:
        if not isinstance(self.pipeline_training, bool):
            raise ValueError(f"pipeline_training is {self.pipeline_training!r}; it must be true or false")
        for name, least in (("pipeline_stages", 2), ("pipeline_batches", 1)):
            value = getattr(self, name)
            if value is not None and not (is_whole(value) and value >= least):
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}")
        names = ("pipeline_stages", "pipeline_split", "pipeline_batches")
        unused = next((name for name in names if getattr(self, name) is not None), None)
        if unused is not None and not self.pipeline_training:
            raise ValueError(f"{unused} is set and pipeline_training is not; set both, or leave {unused} out")
        require_split(self)
        if self.pipeline_training and self.fp16:
            raise ValueError(
                "pipeline_training is not supported with fp16, which scales gradients; set bf16, or neither"
            )
        super().__post_init__()
