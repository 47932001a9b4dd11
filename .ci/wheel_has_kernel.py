"""Checks that a wheel holds the kernels in C, and that this processor runs a variant of it. Needs no package.

usage: python .ci/wheel_has_kernel.py WHEEL
"""

import ctypes
import sys
import tempfile
import zipfile


class Kernel(ctypes.Structure):
    """The first fields of ``struct kernel`` in ``library.h``."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("panel", ctypes.c_int32),
        ("lanes", ctypes.c_int32),
        ("supported", ctypes.CFUNCTYPE(ctypes.c_int32)),
    )


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        (name,) = (name for name in archive.namelist() if name.startswith("grpo_pl/_kernels."))
        look_up = ctypes.CDLL(archive.extract(name, folder)).grpo_pl_kernel_3
        look_up.restype = ctypes.POINTER(Kernel)
        supported, n = [], 0
        while kernel := look_up(n):
            if kernel.contents.supported():
                supported.append(kernel.contents.name.decode())
            n += 1
    if not supported:
        sys.exit(f"{wheel}: no variant of its {n} runs here.")
    print(f"{name}: {', '.join(supported)}")


if __name__ == "__main__":
    main(sys.argv[1])
