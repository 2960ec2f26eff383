"""Which completions of a prompt may be compared: the names, and the check of their settings. Imports no library."""

PAIRINGS = ("all", "best_worst", "random")
# What a row is: a pair; a completion with a label, for KTO; the best or the worst completion of a prompt.
OUTPUT_ROWS = ("pairs", "unpaired", "best", "worst")
# How a pair gets its label, and what a stage's option says about it.
JUDGE_BY = ("pairs", "ratings")
JUDGE_BY_HELP = (
    "pairs: the judge sees both completions, in both orders. ratings: it rates each completion alone, and the label is"
    " 1/2 plus half of the difference: n questions for n completions instead of n (n - 1)."
)


def check_pairing(pairing: str, num_completions: int, pairs_per_prompt: int | None) -> None:
    """Check the settings of the pairing.

    Raises:
        ValueError: no prompt could have a pair, or the settings contradict each other.
    """
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing is {pairing!r}; set one of {', '.join(PAIRINGS)}")
    if num_completions < 2:
        raise ValueError(f"num_completions is {num_completions}; a pair needs two completions: set 2 or more")
    if (pairs_per_prompt is not None) != (pairing == "random"):
        raise ValueError(
            f"pairing is {pairing!r} and pairs_per_prompt is {pairs_per_prompt}; set pairs_per_prompt with the pairing"
            " 'random', and only there"
        )
    if pairs_per_prompt is not None and pairs_per_prompt < 1:
        raise ValueError(f"pairs_per_prompt is {pairs_per_prompt}; set it to 1 or more")
