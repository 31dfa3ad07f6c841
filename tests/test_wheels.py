"""What `make wheels` builds: the sdist holds what git does, the wheels hold the native core for old systems. An installed wheel
does the main job where there is no compiler, and says what to install where transformers is missing.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from command import bitline
from wheel_environment import WheelEnvironment

pytest.importorskip("ziglang", reason="pip install ziglang builds the wheels")
pytest.importorskip("elftools", reason="pip install pyelftools auditwheel checks the wheels")
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.xdist_group("wheels")]  # one process builds

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tests" / "fixtures" / "checkpoints" / "ct_w4a16_g128_sym"
X86, ARM = (f"bitline-0.1.0-py3-none-manylinux_2_28_{machine}.whl" for machine in ("x86_64", "aarch64"))
LIBRARY = "bitline/_native/libbitline_native.so"
# Debian's libc6-arm64-cross: an ARM program's loader and libc.
ARM_LIBC = Path("/usr/aarch64-linux-gnu")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
needs_x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="installs the wheel for x86-64")


def release_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_wheel = release_script("check_wheel")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, ROOT / "release" / "build_wheels.py", folder / "dist", "--work", folder / "work"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "dist"


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewritten(wheel, folder, change):
    """A copy of a wheel whose files {name: bytes} a function has changed."""
    files = contents(wheel)
    change(files)
    copy = folder / wheel.name
    with zipfile.ZipFile(copy, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return copy


# ---- what is built -------------------------------------------------------------------------------------------------------


def test_files(dist):
    assert sorted(p.name for p in dist.iterdir()) == sorted([X86, ARM, "bitline-0.1.0.tar.gz"])


@pytest.mark.parametrize("name", [X86, ARM])
def test_wheel_contents(dist, name):
    files = contents(dist / name)
    python = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*") if p.suffix in (".py", ".typed")}
    metadata = {f"bitline-0.1.0.dist-info/{f}" for f in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert set(files) == python | metadata | {LIBRARY}
    assert files["bitline-0.1.0.dist-info/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert f"Tag: {name.removesuffix('.whl').split('-', 2)[2]}\n".encode() in files["bitline-0.1.0.dist-info/WHEEL"]
    assert str(ROOT).encode() not in files[LIBRARY] and str(Path.home()).encode() not in files[LIBRARY]


def test_native_cores(dist):
    for name, number in ((X86, 62), (ARM, 183)):
        assert contents(dist / name)[LIBRARY][:20] == b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00" + bytes([number, 0])
        found = check_wheel.check(dist / name)
        newest = tuple(int(part) for part in found.removesuffix(" or newer").split("glibc ")[1].split("."))
        assert newest <= (2, 28), found


def test_sdist_has_what_git_has(dist):
    if not (ROOT / ".git").exists():
        pytest.skip("this source tree has no git")
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True
    )
    with tarfile.open(dist / "bitline-0.1.0.tar.gz") as archive:
        files = {member.name.removeprefix("bitline-0.1.0/") for member in archive if member.isfile()}
    tracked = set(listed.stdout.split("\n")) - {"", ".gitignore", ".ci/run"}
    assert files == tracked | {"PKG-INFO"}


def test_a_wheel_that_must_not_be_uploaded_is_refused(dist, tmp_path):
    arm_library = contents(dist / ARM)[LIBRARY]
    linked_elsewhere = contents(dist / X86)[LIBRARY].replace(b"libpthread.so.0\0", b"libstdc++.so.6\0\0")
    newer = contents(dist / X86)[LIBRARY].replace(b"GLIBC_2.17\0", b"GLIBC_2.99\0")
    for change, message in (
        (lambda files: files.pop(LIBRARY), "missing"),
        (lambda files: files.pop("bitline/py.typed"), "missing"),
        (lambda files: files.update({"tests/test_wheels.py": b""}), "unexpected"),
        (lambda files: files.update({LIBRARY: arm_library}), "EM_AARCH64"),
        (lambda files: files.update({LIBRARY: linked_elsewhere}), "libstdc"),
        (lambda files: files.update({LIBRARY: newer}), "2, 99"),
    ):
        with pytest.raises(check_wheel.WheelError, match=message):
            check_wheel.check(rewritten(dist / X86, tmp_path, change))
    with pytest.raises(check_wheel.WheelError, match="name"):
        check_wheel.check(dist / X86.replace("manylinux_2_28", "linux"))


@pytest.mark.parametrize("required", [True, False])
def test_without_a_compiler_no_release_wheel_is_built(tmp_path, required):
    """An ordinary installation goes on without the native core; a release does not."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation",
               "--wheel-dir", tmp_path / "out", "--config-settings", f"build-dir={tmp_path / 'build'}", ROOT]  # fmt: skip
    variables = {"CXX": "/bin/false"} | ({"BITLINE_REQUIRE_NATIVE": "1"} if required else {})
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)
    built = [p.name for p in (tmp_path / "out").glob("*")]
    if required:
        assert done.returncode != 0 and not built, done.stdout[-2000:]
    else:
        assert done.returncode == 0 and built == ["bitline-0.1.0-py3-none-any.whl"], done.stdout[-2000:] + done.stderr[-2000:]


LOADS = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int argc, char** argv) {
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == NULL) return puts(dlerror()), 1;
  int (*abi)(void) = (int (*)(void))dlsym(library, "bitline_abi");
  int (*levels)(void) = (int (*)(void))dlsym(library, "bitline_isa_supported");
  return printf("%d %d\n", abi(), levels()) < 0;
}
"""


def test_the_arm_core_loads(dist, tmp_path):
    if EMULATOR is None or not ARM_LIBC.is_dir():
        pytest.skip("built and checked; apt-get install qemu-user libc6-arm64-cross loads it")
    from bitline import native

    (tmp_path / "core.so").write_bytes(contents(dist / ARM)[LIBRARY])
    (tmp_path / "loads.c").write_text(LOADS)
    compiler = release_script("zig_compiler").write_compiler(
        tmp_path / "c", "aarch64-linux-gnu.2.28", "-O3", "-g0", "-s", "-nostdlib++"
    )
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(dist.parent / "work" / "zig"), "ZIG_LOCAL_CACHE_DIR": str(dist.parent / "work" / "zig")}
    command = [compiler, "-x", "c", "-o", tmp_path / "loads", tmp_path / "loads.c"]
    subprocess.run(command, check=True, env=os.environ | cache)
    command = [EMULATOR, "-cpu", "max", "-L", ARM_LIBC, tmp_path / "loads", tmp_path / "core.so"]
    done = subprocess.run(command, capture_output=True, text=True)
    abi, levels = map(int, done.stdout.split())
    expected = ("portable", "neon", "neon_i8mm")
    assert abi == native.ABI and levels == sum(1 << native.LEVELS.index(level) for level in expected)


# ---- what is installed ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(dist, tmp_path_factory):
    return WheelEnvironment(tmp_path_factory.mktemp("plain") / "venv", dist / X86)


@needs_x86
def test_the_main_job_without_a_compiler(dist, tmp_path):
    environment = WheelEnvironment(tmp_path / "venv", dist / X86, extra="models")
    assert not any(shutil.which(name, path=str(environment.bin)) for name in ("cc", "c++", "gcc", "g++", "clang"))
    here = bitline("run", "smollm2", "--json", "--no-check", "--max-new-tokens", "24")  # downloads the model if need be
    assert here.returncode == 0, here.stderr
    done = environment.run("bitline", "run", "smollm2", "--json", "--max-new-tokens", "24")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report, expected = json.loads(done.stdout), json.loads(here.stdout)
    assert report["text"] == expected["text"] and report["new_tokens"] == expected["new_tokens"] > 4
    assert [row["kernel"] for row in report["plan"]] == [row["kernel"] for row in expected["plan"]]
    assert report["checks"] and all(check["ok"] for check in report["checks"])


@needs_x86
def test_the_installed_core_is_the_wheels(plain, dist):
    done = plain.run("python", "-c", "from bitline import native; print(native.find(), native.isa())")
    path, level = done.stdout.split()
    assert Path(path).is_relative_to(plain.bin.parent) and level != "None", done.stdout + done.stderr
    assert Path(path).read_bytes() == contents(dist / X86)[LIBRARY]


@needs_x86
@pytest.mark.parametrize("command", [("run", MODEL), ("quality", MODEL), ("run", "smollm2")], ids=lambda command: command[0])
def test_without_transformers_the_error_says_what_to_install(plain, command):
    done = plain.run("bitline", *command)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "needs transformers" in done.stderr and "pip install 'bitline[models]'" in done.stderr
    done = plain.run("bitline", *command, "--json")
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 1 and error["type"] == "BitlineError" and error["fix"] == "pip install 'bitline[models]'"


@needs_x86
@pytest.mark.parametrize(
    "command",
    [("doctor",), ("explain", MODEL), ("explain", MODEL, "--platform", "cuda:sm90"), ("inspect", MODEL), ("verify", MODEL)],
    ids=lambda command: command[0],
)
def test_without_transformers_other_commands_work(plain, command):
    done = plain.run("bitline", *command, "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert not done.stderr
    report = json.loads(done.stdout)
    if command[0] == "doctor":
        assert report["native"]["available"] and report["versions"]["transformers"] is None
