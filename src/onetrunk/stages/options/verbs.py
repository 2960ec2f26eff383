"""The verbs of the command line, and the modules that run them."""

VERBS = {
    "sft": "fine-tune a model on prompts and completions (a starting point for PPO)",
    "judge": "measure judges and reward models on pairs with the preferences of people",
    "prefs": "sample completions, have a judge compare them, write preference data",
    "reward": "train a reward model on preferences, whole or as an adapter for the policy's trunk",
    "distill": "train a small reward model on the scores of reward models or a judge",
    "ppo": "train a LoRA policy on one frozen base by PPO",
    "eval": "sample and score held-out prompts; win rate over the model before training, or another model",
    "run": "run several of these in a row, resumably",
    "plan": "memory, time and cost of a PPO run, and the best plan for some hardware, before it is paid for",
    "report": "write a page about how a run, several runs or a pipeline went",
    "merge": "add an adapter to its base: one model, for tools that do not load adapters",
    "recipes": "list the recipes that come with onetrunk, or copy one to the working folder",
    "serve": "run the vLLM server that ppo, prefs and eval sample from, or print its command",
    "config": "print a YAML file with every option of a stage, its default and what it does",
    "init": "write a recipe for your model, rows and rewards",
    "doctor": "report versions, GPU, packages, disk and Hub login, and how to install what is missing",
}
# Verbs with settings -> the module with their `main` and their `parse_VERB`, a partial whose `dataclass_types` are the
# settings classes.
SETTINGS_MODULES = {
    "sft": "onetrunk.stages.sft",
    "judge": "onetrunk.stages.judge",
    "prefs": "onetrunk.stages.prefs.stage",
    "reward": "onetrunk.stages.reward",
    "distill": "onetrunk.stages.distill",
    "ppo": "onetrunk.stages.ppo",
    "eval": "onetrunk.stages.eval",
    "serve": "onetrunk.stages.tools.serve",
    "merge": "onetrunk.stages.tools.merge",
}
# Verbs whose words are read by a parser of their own (`options/words.py`).
WORD_MODULES = {"run": "onetrunk.stages.run.chain", "report": "onetrunk.stages.tools.report"}
# Verbs whose modules import neither torch nor transformers. Their `main` raises ValueError for a mistake.
PLAIN_MODULES = {
    "plan": "onetrunk.stages.plan",
    "config": "onetrunk.stages.tools.print_config",
    "init": "onetrunk.stages.tools.init",
    "recipes": "onetrunk.stages.tools.recipes",
    "doctor": "onetrunk.stages.tools.doctor",
}
MODULES = SETTINGS_MODULES | WORD_MODULES | PLAIN_MODULES
