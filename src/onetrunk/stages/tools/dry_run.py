"""`--dry_run` of the stages: what a run would do. Loads no weights, trains and writes nothing, asks no judge.

Settings, rows, tokenizer and the model's config are read and checked as in a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from onetrunk.checkpoints.folders import require_free, require_no_training
from onetrunk.data.pairs import ALL, labelled_groups
from onetrunk.data.prompts import check_completions
from onetrunk.feedback.costs import CostConfig
from onetrunk.judges.constitution import load_constitution
from onetrunk.judges.judge_config import JudgeConfig
from onetrunk.models.adapters import check_targets
from onetrunk.models.base_model import check_supported, decoder_layers, load_tokenizer
from onetrunk.models.loading import expand, load_config
from onetrunk.models.reward_model import load_reward_tokenizer
from onetrunk.ppo.config import PPOConfig, check_pretraining, plan_batches, planned_steps
from onetrunk.ppo.setup import (
    ModelInputs,
    check_rows,
    join_stages,
    load_episodes,
    longest_prompt_of,
    policy_tokenizer,
    prepare_dataset,
    tokens_of,
)
from onetrunk.rewards.specs import PROCESS_MODEL, read_spec
from onetrunk.stages.arguments import (
    AskingArguments,
    EpisodeArguments,
    ModelArguments,
    PPOArguments,
    PPODataArguments,
    RewardTrainingArguments,
    SFTArguments,
    TrainingDataArguments,
)
from onetrunk.stages.distill import DistillDataArguments, StudentArguments, load_labels, load_student_tokenizer
from onetrunk.stages.eval import EvalArguments, named_opponent
from onetrunk.stages.ppo import require_functions
from onetrunk.stages.prefs.arguments import PrefsArguments
from onetrunk.stages.prefs.sampling import open_source
from onetrunk.stages.reward import load_kwargs, score_peft_config
from onetrunk.stages.rows import (
    TrainingRows,
    check_tokenizer,
    load_dataset_rows,
    load_preference_rows,
    load_prompt_rows,
    load_training_rows,
    prompt_rows,
)
from onetrunk.stages.sft import as_messages
from onetrunk.utils.options import parse_adapter_layers


def sft(data: TrainingDataArguments, args: SFTArguments, model_args: ModelArguments) -> None:
    require_new(args)
    check = as_messages if args.text_as_messages else check_completions
    rows, held_out = load_training_rows(data, args.seed, check)
    name, kwargs = model_args.model_name_or_path, model_args.base_kwargs(args, "sft")
    config = load_config(name, kwargs["revision"], kwargs["trust_remote_code"])
    if model_args.use_peft:
        check_targets(model_args.peft_config(), without_weights(AutoModelForCausalLM, config))
    tokenizer = load_tokenizer(name, revision=kwargs["revision"], trust_remote_code=kwargs["trust_remote_code"])
    if args.chat_template_path is None:
        check_tokenizer(tokenizer, name, (rows, held_out), config.vocab_size)
    show(
        f"{'a LoRA adapter on' if model_args.use_peft else 'all weights of'} {name}",
        training_lines(args, rows, held_out),
    )


def reward(data: TrainingDataArguments, args: RewardTrainingArguments, model_args: ModelArguments) -> None:
    require_new(args)
    show_scorer(args, model_args, *load_preference_rows(data, args.seed))


def distill(data: DistillDataArguments, args: RewardTrainingArguments, student: StudentArguments) -> None:
    """Print what `onetrunk distill` would do; teachers are not loaded."""
    require_new(args)
    rows, held_out, singles = load_labels(data, args.seed)
    print(f"teacher: {', '.join(data.teacher or ['the column probability'])}; further rows: {len(singles or ()):,}")
    show_scorer(args, student, rows, held_out)


def show_scorer(args: RewardTrainingArguments, model_args: ModelArguments, rows: TrainingRows, held_out: Any) -> None:
    """Check the model of a reward model, and print what would be trained."""
    name, kwargs = model_args.model_name_or_path, load_kwargs(args, model_args, "a reward model")
    source = kwargs["revision"], kwargs["trust_remote_code"]
    is_student = isinstance(model_args, StudentArguments)
    tokenizer = load_student_tokenizer(model_args, kwargs) if is_student else load_reward_tokenizer(name, *source)
    if name:
        config = load_config(name, *source)
        check_tokenizer(tokenizer, name, (rows, held_out), config.vocab_size)
        score_peft_config(args, model_args, without_weights(AutoModelForSequenceClassification, config))
    what = "a reward adapter on" if model_args.use_peft else "a reward model from"
    show(f"{what} {name or 'student_config'}", training_lines(args, rows, held_out))


def ppo(data: PPODataArguments, args: PPOArguments, model_args: ModelArguments, *judges: Any) -> None:
    """Print what `onetrunk ppo` would do; `judges` are the settings of judges, which are not loaded."""
    name = model_args.model_name_or_path
    require_new(args)
    join_stages(args)
    kwargs = {**model_args.init_kwargs(), **(args.model_init_kwargs or {})}
    source = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    config = load_config(name, **source)
    check_supported(config)
    model = without_weights(AutoModelForCausalLM, config)
    parse_adapter_layers(args.adapter_layers, len(decoder_layers(model)))
    check_targets(model_args.peft_config(), model)
    parts = [part for part in load_prompt_rows(data, args.seed) if part is not None]
    tokenizer = policy_tokenizer(name, None, kwargs)
    prompts = [part.select_columns(["prompt"]) for part in parts if "prompt" in part.column_names]
    if prompts:  # An environment may say them.
        check_tokenizer(tokenizer, name, prompts, config.vocab_size)
    tokens_of(args.stop_tokens or [], tokenizer)
    prepared, lines = prompt_lines(data, args, name, tokenizer, parts)
    require_rewards(data.reward_funcs or [])
    show(f"a LoRA adapter on {name}", [*lines, *_batch_lines(args, len(prepared))])
    print("weights, memory and time: onetrunk plan")


def evaluate(args: EvalArguments, settings: JudgeConfig, model_args: ModelArguments) -> None:
    name, config = model_args.model_name_or_path, args.ppo_config(model_args.init_kwargs())
    require_no_training(args.output_dir)
    rows = prompt_rows(load_dataset_rows(args), is_open=bool(args.environment))
    opponent = named_opponent(args, model_args, bool(settings.judge))
    tokenizer = policy_tokenizer(name, None, model_args.init_kwargs())
    _, lines = prompt_lines(args, config, name, tokenizer, [rows])
    require_rewards(args.reward_funcs or [])
    show(f"{name}, compared with {opponent or 'no other model'}", [*lines, *judge_lines(settings)])


def prefs(args: PrefsArguments, settings: JudgeConfig, prices: CostConfig, model_args: ModelArguments) -> None:
    source = open_source(args, model_args)
    each = "given completions" if args.completions == "given" else f"{args.num_generations} completions each"
    prompts = "as many as there are" if source.total is None else f"{min(source.total, args.limit or source.total):,}"
    show(model_args.model_name_or_path or "none", [f"prompts: {prompts}, {each}", *judge_lines(settings)])


def judge(args: AskingArguments, settings: JudgeConfig, prices: CostConfig) -> None:
    require_no_training(args.output_dir)
    rows = load_dataset_rows(args)
    groups = labelled_groups(rows, rows.column_names, args.dataset_config or ALL)
    pairs = sum(len(list(group.pairs())) for group in groups)
    lines = [f"rows: {len(groups):,} with {pairs:,} pairs, each in both orders and for each principle"]
    show(", ".join(settings.judge or []), [*lines, *judge_lines(settings)])


def show(model: str, lines: Sequence[str]) -> None:
    print("\n".join(["dry run: nothing is trained or written", f"model: {model}", *lines]))


def require_rewards(reward_funcs: Sequence[str]) -> None:
    """Import the reward functions, and read the configs of the reward models; servers are not asked."""
    require_functions(reward_funcs)
    for spec in map(read_spec, reward_funcs):
        if spec.kind.is_model:
            load_config(expand(spec.text.removeprefix(PROCESS_MODEL).partition("#")[0]))


def require_new(args: Any) -> None:
    """Raise ValueError if the output folder of a training holds a run that it neither resumes nor replaces."""
    if args.resume_from_checkpoint is None:
        require_free(args.output_dir, args.overwrite_output_dir)


def without_weights(model_class: Any, config: Any) -> PreTrainedModel:
    """Return a model that takes no memory for its weights."""
    with torch.device("meta"):
        return model_class.from_config(config)


def judge_lines(settings: JudgeConfig) -> list[str]:
    """Return a line about the judge, whose constitution is read."""
    if not settings.constitution:
        return []
    constitution = load_constitution(settings.constitution)
    names = ", ".join(settings.judge or []) or "the model itself"
    return [f"judge: {names}, by {constitution.name} with {len(constitution.principles)} principles"]


def training_lines(args: Any, rows: TrainingRows, held_out: Any) -> list[str]:
    """Return the rows and steps of a training by Trainer's arithmetic, without rows that are left out later."""
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * math.ceil(len(rows) / size))
    held = "none" if held_out is None else f"{len(held_out):,}"
    return [f"rows: {len(rows):,}, held out: {held}", f"run: about {steps:,} optimizer steps of {size} rows"]


def prompt_lines(
    data: EpisodeArguments, args: PPOConfig, name: str, tokenizer: Any, parts: Sequence[TrainingRows]
) -> tuple[TrainingRows, list[str]]:
    """Return the first of the sets of prompts, tokenized and checked, and lines about it and its episodes."""
    episodes = load_episodes(ModelInputs(name, None, **data.episode_parts()), args, tokenizer)
    prepared = [prepare_dataset(part, tokenizer, args, episodes) for part in parts]
    check_rows(name, args, prepared, episodes)
    longest = longest_prompt_of(prepared[0], args)
    lines = [f"rows: {len(prepared[0]):,} prompts, of at most {longest} tokens"]
    if episodes is not None:
        turns = f"at most {args.max_turns} turns" if args.max_turns else "max_turns is not set"
        if args.max_context_length is not None:
            turns += f"; contexts of at most {args.max_context_length} tokens are compacted"
        lines.append(f"episodes: {episodes}; {turns}")
    return prepared[0], lines


def _batch_lines(args: PPOArguments, num_prompts: int) -> list[str]:
    plan = plan_batches(args, args.world_size)
    check_pretraining(args, num_prompts)
    steps = planned_steps(args, num_prompts)
    rollouts = math.ceil(steps / args.steps_per_rollout)
    passes = rollouts * args.rollout_batch_size / num_prompts
    completions = rollouts * args.rollout_batch_size * args.num_generations
    return [
        f"rollout: {args.rollout_batch_size} prompts x {args.num_generations} completions on {args.world_size}"
        f" process(es): {plan.rows_per_rank} completions each",
        f"update: {args.num_ppo_epochs} epochs x {args.num_minibatches} minibatches of {plan.rows_per_minibatch}"
        f" completions per process = {args.steps_per_rollout} optimizer steps per rollout",
        f"forward: at most {plan.rows_per_pack} rows"
        + (f" and {args.microbatch_tokens} tokens" if args.microbatch_tokens else ""),
        f"run: {rollouts} rollouts = {steps} optimizer steps, {completions:,} completions of at most"
        f" {args.max_completion_length} tokens, {passes:.2f} passes over the prompts",
    ]
