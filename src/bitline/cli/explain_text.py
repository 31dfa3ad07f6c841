"""`bitline explain` as text: the plan, the candidates of each scheme, and what other packages or hardware would change."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from rich.markup import escape
from rich.text import Text

from bitline.cli.console import out
from bitline.cli.explain_table import PlanTable, show_ranks
from bitline.cli.render import at_commas, hanging, put, rate, table
from bitline.expert_counts import active_experts
from bitline.select import format_seconds, short_name

_NEAR = ("policy", "layer", "package", "machine")  # refusals worth a line each: the kernel is for such schemes and this vendor
_MAX_REASONS = 6


def show(report: dict[str, Any], everything: bool = False) -> None:
    """Print a report. everything: every candidate's reason, for each scheme."""
    _show_head(report)
    if not report["plans"]:
        out.print("no quantized linear layer in this checkpoint")
        return
    schemes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for plan in report["plans"]:
        schemes[plan["weights"]].append(plan)
    PlanTable(report, schemes).print()
    if report["tensor_parallel"]:
        show_ranks(report["tensor_parallel"])
    kinds = ((p["experts"], p["experts_of_layer"], p["top_k"]) for p in report["plans"] if p["experts"])
    for held, count, top_k in dict.fromkeys(kinds):
        active = ", ".join(f"{active_experts(count, top_k, m) * held / count:.3g} at M={m}" for m in report["m"])
        where = f" on a rank with {held}" if held < count else ""
        out.print(f"of {count} experts a token has {top_k}: times are those of the {active} that are expected to run{where}",
                  highlight=False)  # fmt: skip
    for scheme, plans in schemes.items():
        head = ": candidates by time per token, times relative to the chosen kernel's"
        put(Text(f"\n{scheme}", "bold").append(head, "not bold"))
        _show_candidates(plans)
        _show_refusals(plans, everything)
    _show_merged(report)
    _show_if_installed(report)
    _show_other_hardware(report)


def _show_head(report: dict[str, Any]) -> None:
    out.print(f"[bold]{escape(report['path'])}[/], {report['format'] or 'not quantized'}", highlight=False, soft_wrap=True)
    put(hanging("on", at_commas(report["platform"], out.width - 8) + f"; activations {report['activations']}"))
    r, policy = report["rates"], report["policy"]
    rates = f"{rate(r['bandwidth'], 'B/s')}, {rate(r['bf16'], 'op/s')} bf16, {rate(r['int8'], 'op/s')} int8"
    wanted = [f"{k} {policy[k]}" for k in ("kernel", "backend") if policy[k] != "auto"]
    wanted += [k.replace("_", " ") for k in ("batch_invariant", "deterministic") if policy[k]]
    wanted += [f"without {', '.join(map(short_name, policy['disabled']))}"] if policy["disabled"] else []
    asked = f"; asked for: {', '.join(wanted)}" if wanted else ""
    measured = any(c["measured_here"] for p in report["plans"] for c in p["candidates"])
    but = ", but for those measured here" if measured else ""
    put(hanging("at", f"{rates}: times are estimates at these rates{but}{asked}"))
    if report["rates_note"]:
        put(hanging("note", report["rates_note"], "yellow"))


# ---- candidates that run -------------------------------------------------------------------------------------------------


def _show_candidates(plans: list[dict[str, Any]]) -> None:
    """Kernels that run some of the layers, with their time over the chosen kernel's, the least time per token first."""
    ms = list(plans[0]["cost_seconds"])
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    per_token: dict[str, list[float]] = defaultdict(list)
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for p in plans:
        for c in p["candidates"]:
            if c["kind"] != "runs":
                continue
            runs[c["kernel"]].append(p)
            per_token[c["kernel"]].append(c["seconds_per_token"] / p["candidates"][0]["seconds_per_token"])
            for m in ms:
                if m in c["cost_seconds"] and m in p["cost_seconds"]:
                    ratios[c["kernel"]][m].append(c["cost_seconds"][m] / p["cost_seconds"][m])
    grid = table("", "kernel", *(f"M={m}" for m in ms), "")
    for kernel in sorted(runs, key=lambda kernel: sum(per_token[kernel]) / len(runs[kernel])):
        chosen_for = [p for p in runs[kernel] if p["kernel"] == kernel]
        mark = Text("→", "green") if chosen_for else ""
        cells = [_ratio_range(ratios[kernel][m]) for m in ms]
        note = _candidate_note(kernel, runs[kernel], chosen_for, plans, per_token[kernel])
        grid.add_row(mark, short_name(kernel), *cells, note)
    put(grid)
    for note in dict.fromkeys(p["note"] for p in plans if p["note"]):
        put(hanging("note", note, "yellow"))


def _candidate_note(
    kernel: str, runs: list[dict[str, Any]], chosen_for: list[dict[str, Any]], plans: list[dict[str, Any]],
    per_token: list[float],
) -> str:  # fmt: skip
    """How the cost is known, its time per token, and for which shapes the kernel runs or was chosen if not for all."""
    facts = [next(c for c in p["candidates"] if c["kernel"] == kernel) for p in runs]
    measured = [p for p, fact in zip(runs, facts, strict=True) if fact["measured_here"]]
    notes = [facts[0]["cost_basis"]] if len(measured) < len(runs) else []
    notes += [f"measured here for {_shapes(measured)}" if notes else "measured here"] if measured else []
    if behind := next((fact["ranks_behind"] for fact in facts if fact["ranks_behind"]), ""):
        notes.append(f"ranks behind: {behind}")
    if len(plans[0]["cost_seconds"]) > 1 and not chosen_for:
        notes.append(f"{_ratio_range(per_token)} per token")
    if chosen_for and len(chosen_for) < len(plans):
        notes.append(f"chosen for {_shapes(chosen_for)}")
    else:
        if len(runs) < len(plans):
            notes.append(f"supports {_shapes(runs)} only")
        if not chosen_for and all(r == 1 for r in per_token):
            notes.append("same cost, lower priority")
    return ", ".join(notes)


def _ratio_range(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    low, high = (f"{v:.2f}" if v < 9.995 else f"{v:.0f}" for v in (min(ratios), max(ratios)))
    return f"{low}x" if low == high else f"{low}-{high}x"


def _shapes(plans: list[dict[str, Any]]) -> str:
    shapes = dict.fromkeys("{}×{}".format(*p["shape"]) for p in plans)
    return ", ".join(list(shapes)[:4]) + (", …" if len(shapes) > 4 else "")


# ---- candidates that were refused ----------------------------------------------------------------------------------------


def _show_refusals(plans: list[dict[str, Any]], everything: bool) -> None:
    """Kernels for such schemes first, each reason once with its kernels and shapes; then the others."""
    near, faster = _near_refusals(plans)
    listed = sorted(near.items(), key=lambda item: item[0] not in faster)
    for (reason, fix), kernels in listed if everything else listed[:_MAX_REASONS]:
        refused = [p for ps in kernels.values() for p in ps]
        some = {tuple(p["shape"]) for p in refused} != {tuple(p["shape"]) for p in plans}
        text = ", ".join(kernels) + (f" ({_shapes(refused)})" if some else "") + f": {_with_fix(reason, fix)}"
        if (reason, fix) in faster:
            put(hanging("faster, but", text, "yellow"))
        else:
            put(hanging("refused", text, "dim"))
    if len(listed) > _MAX_REASONS and not everything:
        put(hanging("refused", f"{len(listed) - _MAX_REASONS} more reasons: --all", "dim"))
    others = _other_refusals(plans)
    if everything:
        for text, names in others.items():
            put(hanging("refused", f"{', '.join(names)}: {text}", "dim"))
    elif others:
        names = list(dict.fromkeys(name for names in others.values() for name in names))
        put(hanging("refused", f"{len(names)} kernels for other schemes (--all lists them)", "dim"))


def _near_refusals(
    plans: list[dict[str, Any]],
) -> tuple[dict[tuple[str, str], dict[str, list[dict[str, Any]]]], set[tuple[str, str]]]:
    """Refusals of kernels for such schemes: (reason, fix) -> kernel -> plans; and the reasons that refused a faster kernel."""
    near: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    faster: set[tuple[str, str]] = set()
    for p in plans:
        chosen_time = _estimate_per_token(p["candidates"][0])
        for c in p["candidates"]:
            if c["kind"] in _NEAR and c["does_scheme"]:
                near[c["reason"], c["fix"]][short_name(c["kernel"])].append(p)
                if c["estimated_seconds"] and _estimate_per_token(c) < chosen_time:
                    faster.add((c["reason"], c["fix"]))
    return near, faster


def _estimate_per_token(candidate: dict[str, Any]) -> float:
    """The time by which a kernel that cannot be measured is compared with others."""
    seconds: dict[str, float] = candidate["estimated_seconds"]
    return sum(value / int(m) for m, value in seconds.items())


def _other_refusals(plans: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Refusals of kernels for other schemes: reason -> kernels. Those for other vendors' hardware are shown apart."""
    others: dict[str, list[str]] = defaultdict(list)
    for p in plans:
        for c in p["candidates"]:
            if c["kind"] in ("runs", "vendor") or (c["kind"] in _NEAR and c["does_scheme"]):
                continue
            names = others[_with_fix(c["reason"], c["fix"])]
            if short_name(c["kernel"]) not in names:
                names.append(short_name(c["kernel"]))
    return others


def _with_fix(reason: str, fix: str) -> str:
    return reason + (f"; try {fix}" if fix else "")


# ---- elsewhere -----------------------------------------------------------------------------------------------------------


def _show_merged(report: dict[str, Any]) -> None:
    """Layers that load_model packs as one."""
    for p in report["merged"]:
        apart = p["separate_seconds"]
        times = [f"M={m} {format_seconds(v)} instead of {format_seconds(apart[m])}" for m, v in p["cost_seconds"].items()]
        shape = f"{p['shape'][0]}×{p['shape'][1]}"
        text = f"load_model packs {', '.join(p['names'])} as one layer {shape}, {p['layers']} times, on {short_name(p['kernel'])}"
        out.print()
        put(hanging("merged", "; ".join([text, *([", ".join(times)] if times else [])])))


def _show_if_installed(report: dict[str, Any]) -> None:
    for p in report["if_installed"]:
        text = f"{p['install']}: {', '.join(map(short_name, p['kernels']))} for {p['layers']} of {report['layers']} layers"
        for dim, total in p["totals"].items():
            now = p["now"][dim]["cost_seconds"]
            changes = [f"M={m} {format_seconds(v)} instead of {format_seconds(now[m])}" for m, v in total["cost_seconds"].items()]
            same = all(abs(v / now[m] - 1) < 0.005 for m, v in total["cost_seconds"].items())
            text += f"; {f'sharded along {dim}: ' if dim else ''}{'the same time' if same else ', '.join(changes)}"
        out.print()
        put(hanging("with", text, "green"))


def _show_other_hardware(report: dict[str, Any]) -> None:
    """Kernels for such schemes on other vendors' hardware, once for all layers."""
    vendors: dict[str, list[str]] = defaultdict(list)
    for p in report["plans"]:
        for c in p["candidates"]:
            if c["kind"] == "vendor" and c["does_scheme"] and short_name(c["kernel"]) not in vendors[c["reason"]]:
                vendors[c["reason"]].append(short_name(c["kernel"]))
    if any(vendors.values()):
        out.print("\nfor other hardware", style="dim", highlight=False)
    for reason, names in vendors.items():
        put(hanging("", f"{', '.join(names)}: {reason.partition('; this platform')[0]}", "dim"))
