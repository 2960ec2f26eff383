"""The verbs of the command line: one record for each, from which everything else that depends on a verb is read.

A "place" is a text "module:function" that is imported when it is needed, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True)
class Verb:
    """A verb of the command line."""

    name: str  # The word after `onetrunk`.
    text: str  # What it does, for the help.
    # The module with `parse_NAME`, which takes the words after the verb, and `run`, which takes what that returns.
    # `parse_NAME` of a verb with settings is a partial whose `dataclass_types` are their classes.
    module: str
    reader: str = ""  # Without settings: place of what checks the words before the module is imported.
    is_light: bool = False  # Without settings: its module imports neither torch nor transformers.
    explained: str = ""  # The options that `--help` explains; "": all.
    needed: Mapping[str, Any] = field(default_factory=dict)  # Options without which it does not start, with examples.
    first_word: str = ""  # The option whose value may be the first word.
    columns: tuple[tuple[str, ...], ...] = ()  # Sets of columns of which its rows need one.
    trains: str = ""  # What a training trains: model, scores or policy. It can resume, and takes tensor parallelism.
    launches: bool = False  # On several processes.
    dry_run: str = ""  # Place of what prints what `run` would do. A verb that has it may be a stage of `onetrunk run`.
    remakes: str = ""  # A folder in its output that it replaces if its settings change.
    page: str = ""  # Place of what makes the report's blocks; "": those of a training.
    known_by: str = ""  # A file in its output, or a key of its metrics, which tells a report whose output it is.

    @property
    def has_settings(self) -> bool:
        """Whether it takes options and a YAML file."""
        return not (self.reader or self.is_light)

    @property
    def parser(self) -> Callable[..., Any]:
        """`parse_NAME` of its module, which is imported."""
        return resolve_name(f"{self.module}:parse_{self.name}")


_TRAINING = "model_name_or_path dtype dataset_name eval_size"
_RUN = "learning_rate num_train_epochs max_steps per_device_train_batch_size seed output_dir overwrite_output_dir"
_RUN += " save_steps eval_strategy report_to logging_steps bf16"
_SAMPLED = "model_name_or_path dtype dataset_name dataset_columns dataset_split output_dir max_completion_length"
_SAMPLED += " temperature seed judge constitution judge_model"
_ROWS = {"dataset_name": "rows.jsonl", "output_dir": "runs/new"}
_MODEL_AND_ROWS = {"model_name_or_path": "path/or/hub-name", **_ROWS}
_PAIRS, _PROMPTS = (("chosen", "rejected"),), (("prompt",), ("messages",))

# In the order of the help: stages as a model goes through them, then the verbs around them.
_TABLE = (
    Verb("sft", "fine-tune a model on prompts and completions (a starting point for PPO)",
         "onetrunk.stages.sft", dry_run="onetrunk.stages.tools.dry_run:sft", trains="model", launches=True,
         columns=(("prompt", "completion"), ("messages",), ("text",)), needed=_MODEL_AND_ROWS,
         explained=f"{_TRAINING} {_RUN} use_peft lora_r max_length packing"),
    Verb("judge", "measure judges and reward models on pairs with the preferences of people",
         "onetrunk.stages.judge", dry_run="onetrunk.stages.tools.dry_run:judge",
         page="onetrunk.report.report:judge_blocks", known_by="judges",
         needed={**_ROWS, "judge": ["reward:path/of/a/reward-model"]},
         explained="dataset_name dataset_columns dataset_split dataset_config output_dir judge constitution rubric"
         " judge_model judge_api_key_env judge_max_concurrency judge_batch_size judge_prices judge_budget_usd"
         " max_failed_fraction"),
    Verb("prefs", "sample completions, have a judge compare them, write preference data",
         "onetrunk.stages.prefs.stage", dry_run="onetrunk.stages.tools.dry_run:prefs", remakes="data",
         page="onetrunk.report.report:preference_blocks", known_by="statistics.json",
         needed={**_MODEL_AND_ROWS, "judge": ["rubric"], "constitution": "constitution.yaml"},
         explained=f"{_SAMPLED} overwrite_output_dir mode num_generations pairing completions shard limit"),
    Verb("reward", "train a reward model on preferences, whole or as an adapter for the policy's trunk",
         "onetrunk.stages.reward", dry_run="onetrunk.stages.tools.dry_run:reward", trains="scores", launches=True,
         columns=_PAIRS, needed=_MODEL_AND_ROWS, known_by="held_out",
         explained=f"{_TRAINING} {_RUN} use_peft lora_r adapter_layers max_length"),
    Verb("distill", "train a small reward model on the scores of reward models or a judge",
         "onetrunk.stages.distill", dry_run="onetrunk.stages.tools.dry_run:distill", trains="scores", launches=True,
         columns=_PAIRS, needed={**_MODEL_AND_ROWS, "teacher": ["path/of/a/reward-model"]}, known_by="fidelity",
         explained=f"{_TRAINING} {_RUN} teacher student_config student_tokenizer"),
    Verb("ppo", "train a LoRA policy on one frozen base by PPO",
         "onetrunk.stages.ppo", dry_run="onetrunk.stages.tools.dry_run:ppo", trains="policy", launches=True,
         columns=_PROMPTS, needed={**_MODEL_AND_ROWS, "reward_funcs": ["rewards.py:score"]}, known_by="policy",
         explained="model_name_or_path lora_r dataset_name eval_size rollout_batch_size num_rollouts"
         " max_completion_length use_vllm reward_funcs missing_eos_penalty beta num_ppo_epochs num_minibatches"
         " learning_rate per_device_train_batch_size output_dir overwrite_output_dir report_to judge"),
    Verb("eval", "sample and score held-out prompts; win rate over the model before training, or another model",
         "onetrunk.stages.eval", dry_run="onetrunk.stages.tools.dry_run:evaluate", launches=True,
         columns=_PROMPTS, needed={**_MODEL_AND_ROWS, "reward_funcs": ["rewards.py:score"]},
         known_by="samples-policy.jsonl",
         explained=f"{_SAMPLED} max_prompt_length reward_funcs reward_weights opponent tie_margin bf16"),
    Verb("run", "run several of these in a row, resumably",
         "onetrunk.stages.pipeline", reader="onetrunk.stages.options.reading:run_words",
         page="onetrunk.report.report:pipeline_blocks", known_by="pipeline.json"),
    Verb("plan", "memory, time and cost of a PPO run, and the best plan for some hardware, before it is paid for",
         "onetrunk.stages.plan", is_light=True),
    Verb("report", "write a page about how a run, several runs or a pipeline went",
         "onetrunk.stages.tools.report", reader="onetrunk.stages.options.reading:report_words", is_light=True),
    Verb("export", "make a result ready for other tools: merged, vllm, gguf or ollama",
         "onetrunk.stages.tools.export", first_word="model",
         needed={"model": "runs/new", "output_dir": "runs/merged"}),
    Verb("chat", "talk to a model or an adapter, also next to the model before training",
         "onetrunk.stages.tools.chat", first_word="model", needed={"model": "runs/new"}),
    Verb("recipes", "list the recipes that come with onetrunk, or copy one to the working folder",
         "onetrunk.stages.tools.recipes", is_light=True),
    Verb("serve", "run the vLLM server that ppo, prefs and eval sample from, or print its command",
         "onetrunk.stages.tools.serve", first_word="model", needed={"model": "path/or/hub-name"}),
    Verb("config", "print a YAML file with every option of a stage, its default and what it does",
         "onetrunk.stages.options.help", is_light=True),
)  # fmt: skip
VERBS = {verb.name: verb for verb in _TABLE}
