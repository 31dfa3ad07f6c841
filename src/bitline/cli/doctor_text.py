"""`bitline doctor` as text."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from bitline.cli.console import out
from bitline.cli.render import at_commas, facts, hanging, put, rate, size, table
from bitline.select import short_name


def show(report: dict[str, Any]) -> None:
    """The report as text."""
    _show_head(report)
    _show_packages(report)
    _show_kernels(report["kernels"])
    out.print("\n[bold]environment[/] (overridden by the argument)", highlight=False)
    grid = facts()
    for v in report["environment"]:
        value = "" if v["value"] is None else f" = {v['value']}"
        grid.add_row(v["name"] + value, f"{v['effect']}; {v['argument']}")
    put(grid)
    for name, why in report["plugin_failures"].items():
        put(hanging("plug-in", f"{name} failed to load: {why}", "red"))


def native_line(report: dict[str, Any]) -> str:
    """The native core's instruction set and threads, or why there is none."""
    core = report["native"]
    if core["available"]:
        return f"{core['isa']} of {', '.join(core['isas'])}; {_count(core['threads'], 'thread')}, {core['threads_from']}"
    compiler = "" if report["compilers"]["C++"] else ". There is no C++ compiler: install g++ or clang++, then Bitline again"
    return f"no: {core.get('reason') or core.get('error')}{compiler}"


def _show_head(report: dict[str, Any]) -> None:
    versions = ", ".join(f"{k} {v or 'not installed'}" for k, v in report["versions"].items())
    out.print(f"[bold]bitline {report['bitline']}[/], Python {report['python']}, {report['system']}", highlight=False)
    grid = facts()
    grid.add_row("libraries", versions)
    for kind, c in report["compilers"].items():
        if c or kind in ("C", "C++"):
            grid.add_row(f"{kind} compiler", f"{c['version']} ({c['path']})" if c else "none")
    grid.add_row("native core", Text(native_line(report), "" if report["native"]["available"] else "yellow"))
    for d in report["devices"]:
        if "error" in d:
            grid.add_row(Text(d["device"], "red"), d["error"])
            continue
        parts = [d.get("name") or d["device"], _count(d["threads"], "thread") if "threads" in d else ""]
        parts += [f"{size(d['memory'])} of memory, {size(d['free'])} free" if "memory" in d else ""]
        parts += [f"read bandwidth {rate(d['bandwidth'], 'B/s')}"]
        grid.add_row(Text(d["device"], "bold"), "; ".join(filter(None, parts)))
        grid.add_row("", at_commas(d["platform"], out.width - 16))
    put(grid)


def _show_packages(report: dict[str, Any]) -> None:
    """Packages that are installed or would add kernels here, then the others."""
    out.print("\n[bold]optional packages[/]", highlight=False)
    grid, elsewhere = facts(), []
    for p in report["packages"]:
        here = ", ".join(map(short_name, p.get("kernels_here", ())))
        if p.get("error"):
            grid.add_row(p["package"], Text(p["error"], "red"))
        elif p["installed"]:
            use = f"here {here}" if here else "no kernel for this machine"
            grid.add_row(p["package"], f"{p['installed']}: {p['adds']}; {use}")
        elif here:
            text = Text("not installed", "yellow").append(f"; would add {here} here. {_capitalize(p['install'])}", "default")
            grid.add_row(p["package"], text)
        else:
            elsewhere.append(p)
    put(grid)
    if elsewhere:
        out.print("not installed, and for other hardware", style="dim", highlight=False)
    grid = facts()
    for p in elsewhere:
        grid.add_row(Text(p["package"], "dim"), Text(f"{p['adds']}; {p['install']}", "dim"))
    put(grid)


def _capitalize(text: str) -> str:
    return text if text.startswith("pip ") else text[:1].upper() + text[1:]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _show_kernels(kernels: list[dict[str, Any]]) -> None:
    """Kernels that ran with their errors, then those that cannot run here by their reasons."""
    out.print("\n[bold]kernels[/], each tested on one small GEMM", highlight=False)
    grid = table("", "kernel", "device", "scheme", "error", "allowed")
    for k in (k for k in kernels if k["ran"]):
        mark = Text("ok", "green") if k["ok"] else Text("FAILED", "bold red")
        grid.add_row(mark, k["kernel"], k["device"], k["scheme"], f"{k['error']:.1e}", f"{k['allowed']:.1e}")
    put(grid)
    for k in (k for k in kernels if k["ran"] and not k["ok"]):
        put(hanging(k["kernel"], str(k.get("detail")), "red"))
    reasons: dict[str, list[str]] = {}
    for k in (k for k in kernels if not k["ran"]):
        where = f" ({k['device']})" if len({x["device"] for x in kernels}) > 1 else ""
        reasons.setdefault(k.get("detail") or k.get("error", ""), []).append(short_name(k["kernel"]) + where)
    for reason, names in reasons.items():
        put(hanging("refused", f"{', '.join(names)}: {reason}", "dim"))
