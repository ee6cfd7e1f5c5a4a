"""Stubs for torch, which is several GB with its CUDA libraries.

LMCache's server uses only the names of data types and a tuple for shapes. It never makes a tensor.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Inert:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Inert(name)
        setattr(self, name, value)
        return value

    def __call__(self, *arguments, **options):
        if len(arguments) == 1 and callable(arguments[0]) and not options:
            return arguments[0]  # a decorator
        return _Inert(self._name)

    def __or__(self, _other):
        return self

    __ror__ = __or__

    def __getitem__(self, _key):
        return self

    def __bool__(self):
        return False


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Inert(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        """Finds torch and its submodules, and leaves the rest to other finders."""
        if fullname.split(".")[0] == "torch":
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        """Makes an empty module."""
        return _Module(spec.name)

    def exec_module(self, module):
        """Adds the two names that must be classes."""
        if module.__name__ == "torch":
            module.Size = tuple
            module.Tensor = type("Tensor", (), {})


def install():
    """Installs the stubs. Must run before anything of lmcache is imported."""
    sys.meta_path.insert(0, _Finder())
    import lmcache

    if not hasattr(lmcache, "device_ops"):
        lmcache.device_ops = _Inert("device_ops")
