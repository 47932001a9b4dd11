"""Environment variables that child processes get: a list without tokens and keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

PASSED = frozenset(
    {"PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "VIRTUAL_ENV"}
    | {"PYTHONPATH", "PYTHONHOME", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
    | {"PYTHONNOUSERSITE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}
    | {"SYMPY_GROUND_TYPES", "MPMATH_NOGMPY"}
)
"""Variables by which an interpreter finds itself, its libraries and a temporary folder; limits on threads;
SymPy's choice of arithmetic."""
MODEL = frozenset(
    {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}
    | {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
    | {"HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "XDG_CACHE_HOME", "TOKENIZERS_PARALLELISM"}
    | {"GRPO_PL_NATIVE"}
)
"""Further variables of a process with a model: devices, the folders of caches, and the switch of kernels."""


def clean_environment(further: frozenset[str] = frozenset()) -> dict[str, str]:
    """The variables of this process that are passed on: ``PASSED``, the locale (``LC_*``) and ``further``."""
    passed = PASSED | further
    return {name: value for name, value in os.environ.items() if name in passed or name.startswith("LC_")}


@contextmanager
def reduced_to(environment: Mapping[str, str]) -> Iterator[None]:
    """Context manager: within it this process has exactly these variables, so that a process started there inherits no
    others."""
    before = dict(os.environ)
    for name in before.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.update(before)
