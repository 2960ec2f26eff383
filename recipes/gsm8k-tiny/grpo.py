"""TRL's GRPOTrainer on what ppo.yaml trains: the same model, prompts, rewards, samples, steps and KL coefficient.

python recipes/gsm8k-tiny/grpo.py
"""

import argparse
from pathlib import Path

import datasets
from peft import LoraConfig
from rewards import annotation_score, answer_accuracy, final_line
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

RUNS = Path("runs/gsm8k-tiny")
GROUP, ROLLOUT, NUM_ROLLOUTS, EPOCHS, MINIBATCHES = 8, 64, 40, 2, 4
LONGEST_PROMPT = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--output_dir", default=str(RUNS / "grpo"))
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(RUNS / "sft")
    rows = datasets.load_dataset("json", data_files=str(RUNS / "train.jsonl"), split="train")
    rows = rows.filter(lambda row: len(tokenizer(row["prompt"])["input_ids"]) <= LONGEST_PROMPT)
    config = GRPOConfig(
        output_dir=given.output_dir,
        num_generations=GROUP,
        per_device_train_batch_size=ROLLOUT // MINIBATCHES,
        steps_per_generation=MINIBATCHES,
        num_iterations=EPOCHS,
        max_steps=NUM_ROLLOUTS * EPOCHS * MINIBATCHES,
        max_completion_length=256,
        learning_rate=given.learning_rate,
        beta=0.02,
        # Advantages in units of the reward, so that beta weighs the KL as it does in PPO.
        scale_rewards="none",
        reward_weights=[1.0, 0.25, 0.0],
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        seed=0,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        str(RUNS / "sft"),
        [annotation_score, final_line, answer_accuracy],
        config,
        rows,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
