"""Choose what SFT learns from: the model's own replies that are one whole sentence on the subject.

    python recipes/smollm2-135m-cpu/best_replies.py

It reads the pairs that `onetrunk prefs` wrote and writes each such reply once, as columns prompt and completion.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import rewards

from onetrunk.utils.files import atomic_write_text

FOLDER = Path("runs/smollm2-135m-cpu")


def main() -> int:
    kept = {}
    for line in (FOLDER / "prefs/data/preferences.jsonl").read_text().splitlines():
        row = json.loads(line)
        for side in ("chosen", "rejected"):
            given = {"prompts": [row["prompt"]], "completions": [row[side]]}
            whole = rewards.one_sentence(**given, completion_stopped=[row[f"{side}_stopped"]])
            if whole == rewards.on_subject(**given) == [1.0]:
                best = {"prompt": row["prompt"], "completion": row[side]}
                kept[json.dumps(best, sort_keys=True)] = best
    text = "".join(json.dumps(best) + "\n" for best in kept.values())
    atomic_write_text(FOLDER / "sft.jsonl", text)
    print(f"{len(kept)} replies in {FOLDER / 'sft.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
