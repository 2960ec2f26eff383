"""The stages of the command line: sft, judge, prefs, reward, distill, ppo, eval, and run, which chains them."""

import os

# Set before any stage imports trl or huggingface_hub: they read it once, and would report usage without it.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
