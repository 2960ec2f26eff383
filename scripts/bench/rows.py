"""Which runs a comparison is made of: the rows of a table, what ours and TRL run for each, and what is required."""

from __future__ import annotations

from dataclasses import dataclass

# Peak memory of the rows that adapt the top quarter, as a share of TRL's: at most, and aimed at.
MEMORY_FLOOR, MEMORY_TARGET = 0.33, 0.25
QUICK = "--shape tiny --prompt 8 --completion 8 --rollout 4 --microbatch 2 --iterations 2".split()
QUICK_LAYERS = "top-1"


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        label: in the table.
        shared: options of both processes.
        own: options of ours alone.
        floor, target: how many times less CPU time than TRL is required, and aimed at; None: nothing is.
        limits_memory: True where the peak memory is held to MEMORY_FLOOR.
    """

    label: str
    shared: tuple[str, ...]
    own: tuple[str, ...]
    floor: float | None = None
    target: float | None = None
    limits_memory: bool = False

    def quick(self) -> Row:
        """Return the same row on a tiny shape."""
        kept = [option for option in self.shared if option == "--mixed"]
        own = [QUICK_LAYERS if option.startswith("top-") else option for option in self.own]
        return Row(self.label, (*QUICK, *kept), tuple(own))

    def against_agilerl(self) -> Row:
        """Return the row in which AgileRL adapts the same layers, and ours scores by a rule and counts no sampling."""
        return Row(self.label, (*self.shared, *self.own[:2]), (*self.own[2:], "--learn_only"))


def _row(label: str, shared: str, own: str, *required: float, limits_memory: bool = False) -> Row:
    return Row(label, tuple(shared.split()), tuple(own.split()), *required, limits_memory=limits_memory)


_SMOLLM2 = "--shape smollm2 --mixed --prompt 48 --completion 48 --rollout 32 --microbatch 16"

# A small reward model is our choice of method: TRL runs the full one in that row too.
ROWS = {
    "equal-all": _row("equal lengths, adapters on all layers", "", "--adapter_layers all", 1.7, 2.2),
    "equal-top": _row("equal lengths, top quarter", "", "--adapter_layers top-4", 3.7, 5.0, limits_memory=True),
    "mixed-all": _row("mixed lengths, adapters on all layers", "--mixed", "--adapter_layers all", 3.2, 4.0),
    "mixed-top": _row("mixed lengths, top quarter", "--mixed", "--adapter_layers top-4", 6.0, 8.0, limits_memory=True),
    "mixed-small-reward": _row(
        "mixed lengths, top quarter, distilled reward model",
        "--mixed",
        "--adapter_layers top-4 --small_reward",
        7.0,
        10.0,
        limits_memory=True,
    ),
    "mixed-reward-adapter": _row(
        "mixed lengths, top quarter, the reward an adapter on the trunk",
        "--mixed",
        "--adapter_layers top-4 --reward_adapter",
    ),
    "big-vocab-equal": _row(
        "big vocabulary, equal lengths, top quarter", "--shape big_vocab", "--adapter_layers top-3"
    ),
    "big-vocab-mixed": _row(
        "big vocabulary, mixed lengths, top quarter", "--shape big_vocab --mixed", "--adapter_layers top-3"
    ),
    "smollm2-all": _row("SmolLM2-135M, mixed lengths, all 30 layers", _SMOLLM2, "--adapter_layers all"),
    "smollm2-top": _row("SmolLM2-135M, mixed lengths, top 8 of 30 layers", _SMOLLM2, "--adapter_layers top-8"),
    "smollm2-top-bf16": _row("the same in bfloat16", f"{_SMOLLM2} --dtype bfloat16", "--adapter_layers top-8"),
}


def choose_rows(names: list[str] | None, is_quick: bool, baseline: str = "trl") -> dict[str, Row]:
    """Return the rows of these names; None: all. Against AgileRL there are those whose reward is the plain one.

    Raises:
        ValueError: there is no row with one of these names.
    """
    known = {name: row for name, row in ROWS.items() if baseline != "agilerl" or "reward" not in name}
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise ValueError(f"there is no row {', '.join(unknown)}; the rows are {', '.join(known)}")
    chosen = {name: known[name] for name in (names or known)}
    chosen = {name: row.quick() for name, row in chosen.items()} if is_quick else chosen
    return {name: row.against_agilerl() for name, row in chosen.items()} if baseline == "agilerl" else chosen
