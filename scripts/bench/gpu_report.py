"""The speeds that the processes of `scripts/check_gpu.py` measured, and their chapter of the README of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.gpu_parts import AGAINST_OTHERS, FAILED, NOT_STARTED, PASSED, TIMED_OUT
from bench.processes import BASELINES

Markdown = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
PHASES = ("generate", "score", "update")
BAD = (FAILED, TIMED_OUT, NOT_STARTED)


def speeds(result: dict[str, Any], epochs: int = 2) -> dict[str, Any]:
    """Return tokens per second, share of the roofline and peak of each phase, and the cost of a decoded token.

    `generate` counts completion tokens, `score` and `update` those of prompts and completions; an update counts a
    token once for every epoch.
    """
    # The medians of the iterations that count: their first is left out on both sides.
    sampled, tokens = (sum(result[name]) / len(result[name]) for name in ("sampled_tokens", "tokens"))
    counted = {"generate": sampled, "score": tokens, "update": tokens * epochs}
    found: dict[str, Any] = {
        phase: {
            "tokens_per_s": round(counted[phase] / max(result["seconds"][phase], 1e-3)),
            "roofline": result["roofline"].get(phase),
            "peak_mb": result["phase_peak_mb"].get(phase),
        }
        for phase in PHASES
    }
    return {**found, **{name: result[name] for name in ("seconds", "peak_mb", "decode", "first_ratio")}}


def measurements(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the speeds of all iterations that ran, and the ratios to others' where those ran too."""
    ran = {name: part["result"] for name, part in parts.items() if part["status"] == PASSED}
    found: dict[str, Any] = {"iterations": {n: speeds(r) for n, r in ran.items() if "decode" in r}}
    if ours := ran.get(f"{AGAINST_OTHERS}-bf16"):
        found["others"] = {kind: _ratios(ran[kind], ours) for kind in BASELINES if kind in ran}
    return found


def _ratios(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return their seconds over ours of each phase that they time, and our share of their memory."""
    times = {phase: s for phase, s in theirs["seconds"].items() if s and phase in PHASES}
    own = {phase: max(ours["seconds"][phase], 1e-3) for phase in times}
    ratio = {phase: round(s / own[phase], 2) for phase, s in times.items()}
    total = round(sum(times.values()) / sum(own.values()), 2)
    return {"ratio": {**ratio, "total": total}, "memory_share": round(ours["peak_mb"] / theirs["peak_mb"], 3)}


def verdict(parts: dict[str, dict[str, Any]]) -> tuple[int, str]:
    """Return the exit code, and one line: 0 only if every part that can run here passed."""
    counts: dict[str, int] = {}
    for part in parts.values():
        counts[part["status"]] = counts.get(part["status"], 0) + 1
    bad = [name for name, part in parts.items() if part["status"] in BAD]
    line = ", ".join(f"{count} {status}" for status, count in counts.items())
    if not counts.get(PASSED):
        return 1, f"{line}; nothing has been checked"
    return (1 if bad else 0), line + (f"; look at {', '.join(bad)}" if bad else "")


def chapter(results: dict[str, Any], markdown: Markdown, machine_line: Callable[[dict[str, Any]], str]) -> str:
    """Return the chapter of the README."""
    gpus = ", ".join(f"{gpu['name']} ({gpu['memory_gib']} GiB)" for gpu in results["gpus"]) or "no GPU"
    kind = "A dry run on a CPU with tiny shapes: it shows that every part runs, and measures nothing. "
    parts = results["parts"]
    lines = [(n, p["status"], f"{p['seconds']:.0f}" if "seconds" in p else "", _about(p)) for n, p in parts.items()]
    commands = "\n".join(part["command"] for part in parts.values() if "seconds" in part)
    text = [
        f"## GPU check\n\n{kind if results['is_dry'] else ''}{gpus}, CUDA {results['cuda']}; {machine_line(results)}"
        f" {results['verdict']}; {results['seconds']:.0f} s.\n",
        markdown(("part", "status", "s", ""), lines),
        *_iterations(results["measurements"], markdown),
    ]
    if parts.get("twins", {}).get("status") == PASSED:
        text.append(_twins(parts["twins"]["result"], markdown))
    if parts.get("graph", {}).get("status") == PASSED:
        found = parts["graph"]["result"]
        ways = ", ".join(f"{name} {found[name]['ms_per_token']} ms" for name in ("sampler", "step"))
        equal = f"it draws the tokens of the step, and those of the sampler in {found['equal_rows']:.0%} of the rows"
        text.append(f"A decoded token as a graph (decode_graph.py): {ways}; {equal}.\n")
    return "\n".join([*text, f"`{results['command']}` runs:\n\n```\n{commands}\n```\n"])


def _about(part: dict[str, Any]) -> str:
    what = f"{part['what']}; {part['reason']}" if "reason" in part else part["what"]
    if "passed" not in part.get("result", {}):
        return what
    result = part["result"]
    names = f": {', '.join(result['failures'])}" if result["failures"] else ""
    return f"{what}; {result['passed']} passed, {result['skipped']} skipped, {result['failed']} failed{names}"


def _decode_cells(one: dict[str, Any]) -> tuple[str, str, str]:
    speed = f"{one.get('tokens_per_s', 0):,} ({_share(one.get('roofline'))})"
    # Kernels are counted on a GPU only, operations of torch everywhere.
    number = f"{one['kernels']:.0f}" if "kernels" in one else f"{one['operations']:.0f} operations"
    return f"{one['seconds'] * 1e3:.1f}", speed, number


def _iterations(found: dict[str, Any], markdown: Markdown) -> list[str]:
    if not found["iterations"]:
        return []
    columns = ("model", *(f"{phase}, tokens/s" for phase in PHASES), "peak MB", "first ratio")
    columns += ("one token, ms", "tokens/s", "kernels")
    lines = []
    for name, row in found["iterations"].items():
        cells = [f"{row[phase]['tokens_per_s']:,} ({_share(row[phase]['roofline'])})" for phase in PHASES]
        lines.append((name, *cells, f"{row['peak_mb']:,}", str(row["first_ratio"]), *_decode_cells(row["decode"])))
    text = [
        "Tokens per second of each phase, in brackets the share of the roofline: the fewest seconds that the"
        " arithmetic allows, at the measured speed of matrix products and copies on this machine, over the measured"
        " seconds. The first ratio is the largest in the first step of a rollout: 1 if scoring and update compute the"
        " same bits. The last three columns are one decoded token of all rows together.\n",
        markdown(columns, lines),
    ]
    for kind, row in found.get("others", {}).items():
        ratios = ", ".join(f"{phase} {ratio}x" for phase, ratio in row["ratio"].items())
        text.append(
            f"Seconds of {BASELINES[kind].name} over ours, {AGAINST_OTHERS}-bf16: {ratios}; our peak memory is"
            f" {row['memory_share']:.0%} of its.\n"
        )
    if found.get("others"):
        text.append(
            "One iteration counts: ours adapts the top quarter of the layers and has a reward model; TRL adapts all"
            " layers and trains a full value model, and AgileRL has no reward model.\n"
        )
    return text


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _twins(result: dict[str, Any], markdown: Markdown) -> str:
    cases = {f"logprobs, {name}": case for name, case in result["logprobs"].items()}

    def cell(case: dict[str, Any], variant: str) -> str:
        if variant not in case:
            return ""
        memory = f", {case[variant]['extra_mib']:,.0f} MiB" if "extra_mib" in case[variant] else ""
        return f"{case[variant]['seconds'] * 1e3:.2f} ms{memory}"

    lines = [
        (
            name,
            *(cell(case, variant) for variant in ("naive", "torch", "kernel")),
            "; ".join(f"{case[key]:.1e}" for key in ("logprobs_difference", "gradients_difference") if key in case),
        )
        for name, case in cases.items()
    ]
    tokens, vocab, dtype = (result["shape"][name] for name in ("tokens", "vocab", "dtype"))
    sentence = f"The kernels against their twins: {tokens} tokens, vocabulary {vocab}, {dtype}."
    sentence += " The difference is that of kernel and twin, relative to the norm.\n\n"
    return sentence + markdown(("part", "naive", "torch", "kernel", "difference"), lines)
