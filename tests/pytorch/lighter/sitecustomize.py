"""On PYTHONPATH, this leaves out half of the processor time that a worker takes to start. PyTorch imports the shapes of
all operations on the "meta" device and kernels in Python with itself, and its compiler when a process makes its first
optimizer, only to say that this is not to be compiled. With this the shapes are imported when a sharded tensor needs
them, and nothing can be compiled. README's lines are tested without it."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types

SHAPES = "torch._meta_registrations"
COMPILER = "torch._dynamo"
LEFT_OUT = (SHAPES, "torch.distributed._meta_registrations", "torch._native", COMPILER)


class Lighter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name not in LEFT_OUT:
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name == COMPILER:
            # Its settings are read.
            spec.submodule_search_locations = [f"{folder}/_dynamo" for folder in path]
        return spec

    def exec_module(self, module):
        if module.__name__ == SHAPES:
            module.__getattr__ = lambda name: self.shape(module, name)
        elif module.__name__ == COMPILER:
            module.disable = lambda function, *_, **__: function
            module.disable_nested_graph_breaks = contextlib.nullcontext
            module.graph_break = lambda: None
            module.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
            module.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: None)

    def shape(self, module, name):
        """Imports the shapes when one is asked for."""
        if name.startswith("__"):
            raise AttributeError(name)
        del module.__getattr__
        found = importlib.machinery.PathFinder.find_spec(SHAPES, sys.modules["torch"].__path__)
        found.loader.exec_module(module)
        return getattr(module, name)


sys.meta_path.insert(0, Lighter())
