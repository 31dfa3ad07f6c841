"""`bitline explain` as text: a plan, then what was weighed for each scheme, then what another machine or package would change."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from rich.cells import cell_len
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bitline.cli.console import out
from bitline.cli.render import at_commas, hanging, put, rate, size, table
from bitline.select import format_seconds, short_name

_NEAR = ("policy", "layer", "package", "machine")  # refusals of kernels that one expects here
_MOST_REASONS = 6
_NARROWEST = 20  # columns for the names of layers


def show(report: dict[str, Any], everything: bool = False) -> None:
    """Print a report. everything: every reason for every candidate, for each scheme."""
    _head(report)
    if not report["plans"]:
        out.print("no quantized linear layer in this checkpoint")
        return
    schemes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for plan in report["plans"]:
        schemes[plan["weights"]].append(plan)
    _plan(report, schemes)
    for scheme, plans in schemes.items():
        put(Text(f"\n{scheme}", "bold").append(": candidates, time relative to the chosen", "not bold"))
        _candidates(plans)
        _refusals(plans, everything)
    _installed(report)
    _elsewhere(report)


def _head(report: dict[str, Any]) -> None:
    out.print(f"[bold]{escape(report['path'])}[/], {report['format'] or 'not quantized'}", highlight=False, soft_wrap=True)
    put(hanging("on", at_commas(report["platform"], out.width - 8) + f"; activations {report['activations']}"))
    r, policy = report["rates"], report["policy"]
    speeds = f"{rate(r['bandwidth'], 'B/s')}, {rate(r['bf16'], 'op/s')} bf16, {rate(r['int8'], 'op/s')} int8"
    wanted = [f"{k} {policy[k]}" for k in ("kernel", "backend") if policy[k] != "auto"]
    wanted += [k.replace("_", " ") for k in ("batch_invariant", "deterministic") if policy[k]]
    wanted += [f"without {', '.join(map(short_name, policy['disabled']))}"] if policy["disabled"] else []
    asked = f"; asked for: {', '.join(wanted)}" if wanted else ""
    put(hanging("at", f"{speeds}: times are estimates by these{asked}"))


def _plan(report: dict[str, Any], schemes: dict[str, list[dict[str, Any]]]) -> None:
    """One table: under each scheme its layers, then the sums; columns are equally wide throughout.

    Where the kernels' names do not fit, they go into the scheme's line, or under the names of the layers.
    """
    ms, tp = [str(m) for m in report["m"]], report["tp"]
    header = ["layers", "N×K", *(["part"] if tp > 1 else []), *(f"M={m}" for m in ms), "packed", "kernel"]
    rows: list[tuple[str, str, list[str], str]] = []  # scheme, layers, what is said of them, style
    for scheme, plans in schemes.items():
        for p in plans:
            times = [format_seconds(p["cost_seconds"][m]) if m in p["cost_seconds"] else "-" for m in ms]
            cells = ["{}×{}".format(*p["shape"]), *([_part(p, tp)] if tp > 1 else []), *times, size(p["packed_bytes"])]
            style = "yellow" if p["degraded"] or p["note"] else ""
            rows.append((scheme, p["names"], [*cells, short_name(p["kernel"])], style))
    for cut, total in report["totals"].items():
        name = f"all, cut along {cut}" if cut else f"all {report['layers']} layers"
        times = [format_seconds(total["cost_seconds"][m]) for m in ms]
        rows.append(("", name, ["", *([""] if tp > 1 else []), *times, size(total["packed_bytes"]), ""], "bold"))
    widths = [max(cell_len(cells[i]) for _, _, cells, _ in rows) for i in range(len(header) - 1)]
    widths = [max(w, cell_len(h)) for w, h in zip(widths, header[1:], strict=True)]
    names = max(_NARROWEST, max(cell_len(row[1]) for row in rows))
    room = lambda: out.width - sum(widths) - 2 * len(widths)
    if narrow := room() < min(names, _NARROWEST):
        widths.pop()
    widths = [min(names, room()), *widths]
    left = {0, 1, len(header) - 1} | ({2} if tp > 1 else set())
    grid, last, alone = _columns(widths, left), "", ""
    grid.add_row(*(Text(h, "dim") for h in header[: len(widths)]))
    for scheme, name, cells, style in rows:
        if scheme and scheme != last:
            kernels = list(dict.fromkeys(short_name(p["kernel"]) for p in schemes[scheme]))
            alone = f" → {kernels[0]}" if narrow and len(kernels) == 1 else ""
            put(grid)
            put(Text(scheme + alone, "bold"))
            grid, last = _columns(widths, left), scheme
        under = f"\n→ {cells[-1]}" if narrow and scheme and not alone else ""
        grid.add_row(Text(name + under), *(Text(c, style) for c in (cells[:-1] if narrow else cells)))
    put(grid)
    if any("expert" in p["example"] for p in report["plans"]):
        out.print("every expert is counted once; a token visits a few of them", highlight=False)


def _columns(widths: list[int], left: set[int]) -> Table:
    """A grid of these widths, those of `left` with text and the others with numbers; the first column folds."""
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for i, width in enumerate(widths):
        grid.add_column(width=width, no_wrap=i > 0, overflow="fold", justify="left" if i in left else "right")
    return grid


def _part(plan: dict[str, Any], tp: int) -> str:
    ranks = "" if len(plan["ranks"]) == tp else f" rank{'s' * (len(plan['ranks']) > 1)} {_numbers(plan['ranks'])}"
    return f"{plan['cut']}/{tp}{ranks}"


def _numbers(ranks: list[int]) -> str:
    """`0, 2-5`."""
    spans: list[list[int]] = []
    for r in ranks:
        if spans and r == spans[-1][1] + 1:
            spans[-1][1] = r
        else:
            spans.append([r, r])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _candidates(plans: list[dict[str, Any]]) -> None:
    """Kernels that run some of the layers: how many times the chosen kernel's time they take."""
    ms = list(plans[0]["cost_seconds"])
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for p in plans:
        for c in p["candidates"]:
            if c["kind"] != "runs":
                continue
            runs[c["kernel"]].append(p)
            for m in ms:
                if m in c["cost_seconds"] and m in p["cost_seconds"]:
                    ratios[c["kernel"]][m].append(c["cost_seconds"][m] / p["cost_seconds"][m])
    grid = table("", "kernel", *(f"M={m}" for m in ms), "")
    score = lambda kernel: sum(map(math.log, (r for of_m in ratios[kernel].values() for r in of_m)))
    for kernel, of in sorted(runs.items(), key=lambda item: score(item[0]) / len(item[1])):
        chosen = [p for p in of if p["kernel"] == kernel]
        mark = Text("→", "green") if chosen else ""
        basis = next(c["cost_basis"] for c in of[0]["candidates"] if c["kernel"] == kernel)
        about = [] if len(of) == len(plans) else [f"runs {_shapes(of)} alone"]
        if chosen and len(chosen) < len(plans):
            about = [f"chosen for {_shapes(chosen)}"]
        elif not chosen and all(r == 1 for of_m in ratios[kernel].values() for r in of_m):
            about.append("same cost, lower priority")
        some = ", ".join((basis, *about))
        grid.add_row(mark, short_name(kernel), *(_times(ratios[kernel][m]) for m in ms), some)
    put(grid)
    for note in dict.fromkeys(p["note"] for p in plans if p["note"]):
        put(hanging("note", note, "yellow"))


def _times(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    low, high = (f"{v:.2f}" if v < 9.995 else f"{v:.0f}" for v in (min(ratios), max(ratios)))
    return f"{low}x" if low == high else f"{low}-{high}x"


def _shapes(plans: list[dict[str, Any]]) -> str:
    shapes = dict.fromkeys("{}×{}".format(*p["shape"]) for p in plans)
    return ", ".join(list(shapes)[:4]) + (", …" if len(shapes) > 4 else "")


def _refusals(plans: list[dict[str, Any]], everything: bool) -> None:
    """What could have run, nearest first: each reason once, with the kernels and shapes that it is about."""
    best = {id(p): sum(p["cost_seconds"].values()) for p in plans}
    near: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    others: dict[str, list[str]] = defaultdict(list)
    faster: set[tuple[str, str]] = set()
    for p in plans:
        for c in p["candidates"]:
            if c["kind"] in _NEAR and c["does_scheme"]:
                near[c["reason"], c["fix"]][short_name(c["kernel"])].append(p)
                if c["cost_seconds"] and sum(c["cost_seconds"].values()) < best[id(p)]:
                    faster.add((c["reason"], c["fix"]))
            elif c["kind"] not in ("runs", "vendor") and short_name(c["kernel"]) not in others[_why(c)]:
                others[_why(c)].append(short_name(c["kernel"]))
    listed = sorted(near.items(), key=lambda item: item[0] not in faster)
    for (reason, fix), kernels in listed if everything else listed[:_MOST_REASONS]:
        about = [p for ps in kernels.values() for p in ps]
        some = {tuple(p["shape"]) for p in about} != {tuple(p["shape"]) for p in plans}
        text = ", ".join(kernels) + (f" ({_shapes(about)})" if some else "") + f": {reason}" + (f"; try {fix}" if fix else "")
        put(hanging("faster, but" if (reason, fix) in faster else "not", text, "yellow" if (reason, fix) in faster else "dim"))
    if len(listed) > _MOST_REASONS and not everything:
        put(hanging("not", f"{len(listed) - _MOST_REASONS} more reasons: --all", "dim"))
    if everything:
        for reason, names in others.items():
            put(hanging("not", f"{', '.join(names)}: {reason}", "dim"))
    elif others:
        names = list(dict.fromkeys(n for names in others.values() for n in names))
        put(hanging("not", f"{len(names)} kernels for other weights or inputs (--all lists them)", "dim"))


def _why(candidate: dict[str, Any]) -> str:
    return candidate["reason"] + (f"; try {candidate['fix']}" if candidate["fix"] else "")


def _installed(report: dict[str, Any]) -> None:
    for p in report["if_installed"]:
        text = f"{p['install']}: {', '.join(map(short_name, p['kernels']))} for {p['layers']} of {report['layers']} layers"
        for cut, total in p["totals"].items():
            now = p["now"][cut]["cost_seconds"]
            changes = [f"M={m} {format_seconds(v)} instead of {format_seconds(now[m])}" for m, v in total["cost_seconds"].items()]
            same = all(abs(v / now[m] - 1) < 0.005 for m, v in total["cost_seconds"].items())
            text += f"; {f'cut along {cut}: ' if cut else ''}{'the same time' if same else ', '.join(changes)}"
        out.print()
        put(hanging("with", text, "green"))


def _elsewhere(report: dict[str, Any]) -> None:
    """Kernels for other vendors' hardware, once for all layers."""
    vendors: dict[str, list[str]] = defaultdict(list)
    for p in report["plans"]:
        for c in p["candidates"]:
            if c["kind"] == "vendor" and c["does_scheme"] and short_name(c["kernel"]) not in vendors[c["reason"]]:
                vendors[c["reason"]].append(short_name(c["kernel"]))
    if any(vendors.values()):
        out.print("\nfor other machines", style="dim", highlight=False)
    for reason, names in vendors.items():
        put(hanging("", f"{', '.join(names)}: {reason.partition('; this platform')[0]}", "dim"))
