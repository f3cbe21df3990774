"""Builds the C++ extensions (index builder, word cache, decoding steps); everything else about the package stands in pyproject.toml.

Decisions:
- The extensions are optional: without a working compiler the package still installs, and says so, because data
  preparation and generation have the same functions in Python.
- `-UNDEBUG`: Python's own build flags switch `assert` off, and with it the consistency checks of the C++ code.
- The C++ standard is fixed here: probing for it needs a compiler before setuptools can forgive its absence.
"""

import sys

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

NOT_BUILT = (
    "\n*** {name} was NOT built ({reason}).\n"
    "*** megalite works without it; building the index of a large data set, preprocessing one, or generating on a CPU will be slower.\n"
    "*** To get it: install a C++17 compiler (g++ or clang++), then run pip install again.\n"
)


class OptionalBuildExt(build_ext):
    """Says in one visible paragraph that the extension is missing, then lets the installation go on."""

    def build_extension(self, ext):
        try:
            super().build_extension(ext)
        except Exception as error:
            # compilers fail with exceptions of many unrelated classes; setuptools forgives them where `optional` is set
            print(NOT_BUILT.format(name=ext.name, reason=error), file=sys.stderr, flush=True)
            raise


setup(
    cmdclass={"build_ext": OptionalBuildExt},
    ext_modules=[
        Pybind11Extension(
            "megalite._index_builder",
            ["csrc/index_builder.cpp"],
            cxx_std=17,
            depends=[f"csrc/{name}.hpp" for name in ("blend", "sample_index", "shuffle")],
            extra_compile_args=["-O3", "-UNDEBUG", "-ffp-contract=off", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Pybind11Extension(
            "megalite._word_cache",
            ["csrc/word_cache.cpp"],
            cxx_std=17,
            extra_compile_args=["-O3", "-UNDEBUG"],
            optional=True,
        ),
        Pybind11Extension(
            "megalite._decode",
            ["csrc/decode.cpp"],
            cxx_std=17,
            depends=["csrc/decode_kernels.hpp"],
            # vectors of 64 bytes are passed between inlined functions only, so no other code meets their calling convention
            extra_compile_args=["-O3", "-UNDEBUG", "-Wno-psabi", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
    ],
)
