"""Builds the kernels in C beside what pyproject.toml says; without a C compiler the installation does without them."""

from setuptools import Extension, setup

SOURCES = ["library.c", "avx512.c", "avx2.c", "baseline.c"]
FOLDER = "grpo_pl/csrc"

setup(
    options={"bdist_wheel": {"py_limited_api": "cp311"}},  # one wheel for every Python: the library calls none of it
    ext_modules=[
        Extension(
            "grpo_pl._kernels",  # a plain library, which ctypes loads: it knows nothing of Python
            [f"{FOLDER}/{name}" for name in SOURCES],
            depends=[f"{FOLDER}/{name}" for name in ("library.h", "vectors.h", "decoding.h", "training.h")],
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=True,
            optional=True,
        )
    ],
)
