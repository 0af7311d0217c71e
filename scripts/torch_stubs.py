"""Lets a PyTorch that was built for CUDA be imported without the CUDA libraries: puts one small library beside
PyTorch's own and links it under the name of every CUDA library that is missing there. Each of its functions returns an
error, so `torch.cuda.is_available()` is false. It is of no use on a machine that computes on its GPU.

usage: torch_stubs.py SITE_PACKAGES
"""

import pathlib
import re
import subprocess
import sys
import tempfile

# How NVIDIA's libraries, and the functions in them, begin.
LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so(\.\d+)*$")
FUNCTION = re.compile(r"(cu|nv|nccl)[A-Za-z]\w*$")
# No driver call of the CUDA runtime returns this number by accident.
ERROR = 999


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def symbols(library: pathlib.Path, which: str) -> set[tuple[str, str]]:
    """Names and versions of a library's `--undefined-only` or `--defined-only` symbols."""
    names = (line.split()[-1] for line in output("nm", "--dynamic", which, str(library)).splitlines() if line)
    return {(name, version) for name, _, version in (name.replace("@@", "@").partition("@") for name in names)}


def main(site_packages: pathlib.Path) -> None:
    folder = site_packages / "torch" / "lib"
    stub = folder / "libno_cuda.so"
    for path in folder.glob("*.so*"):
        if path == stub or path.is_symlink() and path.readlink().name == stub.name:
            path.unlink()
    own = sorted(folder.glob("*.so*"))
    present = own + sorted(site_packages.glob("nvidia/**/lib/*.so*"))
    there = {path.name for path in present}
    needed = {
        line.split()[1] for path in own for line in output("objdump", "-p", str(path)).splitlines() if "NEEDED" in line
    }
    missing = sorted(name for name in needed - there if LIBRARY.match(name))
    if not missing:
        print("torch_stubs: no CUDA library is missing")
        return
    defined = {name for path in present for name, _ in symbols(path, "--defined-only")}
    wanted = {
        (name, version)
        for path in own
        for name, version in symbols(path, "--undefined-only")
        if name not in defined and (version in missing or FUNCTION.match(name))
    }
    versions = sorted({version for _, version in wanted if version})
    with tempfile.TemporaryDirectory() as scratch:
        source, script = pathlib.Path(scratch, "stubs.c"), pathlib.Path(scratch, "versions")
        source.write_text("".join(f"int {name}(void) {{ return {ERROR}; }}\n" for name in sorted({n for n, _ in wanted})))
        script.write_text(
            "".join(
                f"{version} {{ global: {' '.join(f'{name};' for name, own in sorted(wanted) if own == version)} }};\n"
                for version in versions
            )
        )
        command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", str(stub), "-Wl,-soname,libno_cuda.so"]
        subprocess.run([*command, f"-Wl,--version-script={script}", str(source)], check=True)
    for name in missing:
        # PyTorch's libraries look in their own folder, so LD_LIBRARY_PATH need not be set.
        (folder / name).symlink_to(stub.name)
    print(f"torch_stubs: {len(wanted)} functions replace {len(missing)} CUDA libraries")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
