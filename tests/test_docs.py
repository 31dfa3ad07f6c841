"""The guides' toy kernel and toy format run as they are printed; links, file names and module names in the docs exist."""

import importlib
import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import bitline
import bitline.bench
import bitline.kernels.linear
import bitline.testing
from bitline.formats import discovery
from bitline.kernels import registry
from tiny import compressed, llama

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE_PAGES = sorted(DOCS.rglob("*.md"))
PAGES = [*SITE_PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))

LINK = re.compile(r"\[[^\]]*\]\(([^()\s]+)\)")
SOURCE_FILE = re.compile(r"(?<![\w./*])[\w/]+\.(?:py|cpp|h|json|toml|yml|sh)\b")
MODULE = re.compile(r"(?<![\w./-])bitline(?:\.[A-Za-z_]\w*)+(?!\w)(?<!\.md)")
SOURCES = [path.as_posix() for folder in ("src", "csrc", "benchmarks", "tests") for path in (ROOT / folder).rglob("*.*")]
# Files of checkpoints, and a project that is called like one.
NOT_OURS = re.compile(r"(?:\w+/)*(?:\w*config|params|index|tokenizer\w*|\w+_map)\.json|llama\.cpp")


def python_blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), flags=re.S)


def prose(path: Path) -> str:
    """A page without its code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M))


def anchors(path: Path) -> set[str]:
    """The anchors of a page: its headings, and the objects that an API page documents."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, flags=re.M))
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)", text, flags=re.M))


def test_toy_kernel_of_the_guide_passes_conformance_and_is_chosen():
    scope: dict = {}
    exec(compile(python_blocks("adding-a-kernel.md")[0], "adding-a-kernel.md", "exec"), scope)
    toy = scope["ToyInt8LinearKernel"]
    try:
        exec(python_blocks("adding-a-kernel.md")[1], scope)
        assert scope["layer"].choice.best.name == "ToyInt8LinearKernel"
        weight = bitline.quantize(torch.randn(48, 70), "W8A16", group_size=-1)
        x = torch.randn(3, 70)
        layer = bitline.QuantLinear(weight, act_dtype=torch.float32, kernel="ToyInt8LinearKernel")
        torch.testing.assert_close(layer(x), x @ weight.dequantize().T)
        weight = bitline.quantize(torch.randn(48, 70), "W8A8")
        weight = bitline.QuantizedWeight(weight.spec.replace(act=None), weight.codes, weight.scale)
        layer = bitline.QuantLinear(weight, act_dtype=torch.float32, kernel="ToyInt8LinearKernel")
        torch.testing.assert_close(layer(x), x @ weight.dequantize().T)
        verdict = toy.can_implement(bitline.quantize(torch.randn(48, 128), "W4A16").spec)
        assert not verdict and "uint4b8" in verdict.reason and verdict.fix
    finally:
        registry.unregister_kernel("ToyInt8LinearKernel")


def test_toy_format_of_the_guide_reads_and_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "registered", [])
    scope: dict = {}
    exec(compile(python_blocks("adding-a-format.md")[0], "adding-a-format.md", "exec"), scope)
    bitline.register_format(scope["ToyReader"])
    codes = torch.randint(-127, 128, (6, 10), dtype=torch.int8)
    scale = torch.rand(6) + 0.1
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "toy"}}))
    save_file({"a.b.toy_codes": codes, "a.b.toy_scale": scale, "norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    opened = bitline.open_checkpoint(tmp_path)
    (record,) = opened.layers()
    assert record.name == "a.b" and opened.dense_names() == ["norm.weight"]
    assert torch.equal(record.weight().dequantize(), codes.float() * scale[:, None])
    save_file({"a.b.toy_codes": codes, "a.b.toy_scale": scale[:5].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(bitline.CheckpointError, match=r"a\.b\.toy_scale.*found \[5\], expected \[6\]"):
        bitline.open_checkpoint(tmp_path).layers()


@page
def test_links_resolve(page):
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.is_file():
            broken.append(f"{link}: no such file")
        elif target.suffix == ".md" and DOCS in page.parents and DOCS not in target.parents:
            broken.append(f"{link}: outside docs/, so the site does not have it; name the page in backquotes instead")
        elif anchor and anchor not in anchors(target):
            broken.append(f"{link}: no such heading")
    assert not broken, "\n".join(broken)


@page
def test_files_that_a_page_names_exist(page):
    """A page may leave out leading folders: `device/epilogue.py` in a table of the Hopper kernels."""
    named = {name for name in SOURCE_FILE.findall(page.read_text()) if not NOT_OURS.fullmatch(name)}
    named = {name for name in named if not Path(name).stem.isupper()}  # NAME.cpp: the reader fills it in
    missing = [name for name in sorted(named) if not (ROOT / name).is_file() and not any(p.endswith(f"/{name}") for p in SOURCES)]
    assert not missing, f"no such file: {missing}"


@page
def test_modules_that_a_page_names_exist(page):
    missing = []
    for dotted in sorted(set(MODULE.findall(page.read_text()))):
        found: object = bitline
        try:
            for i, part in enumerate(parts := dotted.split(".")[1:], 2):
                found = getattr(found, part, None) or importlib.import_module(".".join(["bitline", *parts[: i - 1]]))
        except ImportError:
            missing.append(dotted)
    assert not missing, f"no such module or attribute: {missing}"


def test_site_navigation_has_every_page_once():
    def files(entries):
        for entry in entries:
            for value in entry.values():
                yield from files(value) if isinstance(value, list) else [value]

    nav = sorted(files(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert nav == [str(path.relative_to(DOCS)) for path in SITE_PAGES]


@pytest.mark.parametrize(
    ("name", "module"),
    [("bitline", bitline), ("kernels-linear", bitline.kernels.linear), ("testing", bitline.testing)],
)
def test_api_pages_have_every_public_name(name, module):
    text = (DOCS / "api" / f"{name}.md").read_text()
    missing = [public for public in module.__all__ if public != "__version__" and not re.search(rf"\b{public}\b", text)]
    assert not missing, missing


def test_hopper_tables_are_what_the_results_say(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    runpy.run_path(str(ROOT / "benchmarks" / "hopper_tables.py"), run_name="__main__")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    written = (DOCS / "measured" / "h200-w4a16.md").read_text().splitlines()
    assert len(printed) > 60 and not set(printed) - set(written), "copy the tables that benchmarks/hopper_tables.py prints"


def test_performance_page_is_short():
    assert len((DOCS / "performance.md").read_text().splitlines()) <= 150


def test_architecture_has_the_import_order():
    from test_layers import ROWS

    table = re.findall(r"^\| (\d+) \| (.*) \|$", (DOCS / "architecture.md").read_text(), flags=re.M)
    written = [tuple(re.findall(r"`([\w.]+)`", modules)) for _, modules in table]
    assert written == list(ROWS)


def test_architecture_has_every_package_folder():
    text = (DOCS / "architecture.md").read_text()
    folders = {path.parent.name for path in (ROOT / "src" / "bitline").rglob("*/__init__.py")}
    missing = [name for name in sorted(folders) if name != "bitline" and f"{name}/" not in text]
    assert not missing, missing


def test_the_readme_example(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    path = str(compressed(tmp_path / "tiny", llama())[0])
    block = block.replace('"path/to/checkpoint"', repr(path)).replace('device="cuda"', 'device="cpu"')
    scope = {"module": llama()}
    exec(compile(block, "README.md", "exec"), scope)
    assert scope["y"].shape == (3, 4096) and scope["shard"].spec.k < 4096 and scope["model"].bitline_weights


def test_the_bench_example(tmp_path, monkeypatch):
    (block,) = (block for block in python_blocks("bench.md") if "run_problems" in block)
    block = block.replace('device="cuda", seconds=0.5', "seconds=0.01").replace("4096x4096", "64x128")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bitline.bench, "roofline", lambda report, path: Path(path).touch())  # test_bench.py draws one
    scope: dict = {}
    exec(compile(block, "bench.md", "exec"), scope)
    assert scope["report"].ok and len(scope["report"].problems) == 2 and (tmp_path / "roofline.png").exists()
