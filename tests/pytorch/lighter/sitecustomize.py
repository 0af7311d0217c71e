"""On PYTHONPATH, this leaves out half of the processor time that a worker takes to start. PyTorch imports the shapes of
all operations on the "meta" device and kernels in Python with itself, and its compiler when a process makes its first
optimizer, only to say that this is not to be compiled. With this, shapes are imported when a script uses them, as with
sharded tensors, and nothing can be compiled. README's lines are tested without it."""

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types

SHAPES = ("torch._meta_registrations", "torch.distributed._meta_registrations")
# What PyTorch imports last.
KERNELS = "torch._native"
COMPILER = "torch._dynamo"


class Later(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name not in (*SHAPES, KERNELS, COMPILER):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        # Its settings are read.
        spec.submodule_search_locations = [f"{folder}/_dynamo" for folder in path] if name == COMPILER else []
        return spec

    def exec_module(self, module):
        if module.__name__ == KERNELS:
            # Generators of random numbers are refused without it.
            importlib.import_module("torch._prims.rng_prims")
            return
        if module.__name__ in SHAPES:
            module.__getattr__ = lambda name: shape(module, name)
        else:
            module.OptimizedModule = type("OptimizedModule", (), {})
            module.eval_frame = types.SimpleNamespace(OptimizedModule=module.OptimizedModule)
            module.disable = lambda function, *_, **__: function
            module.disable_nested_graph_breaks = contextlib.nullcontext
            module.graph_break = lambda: None
            module.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
            module.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: None)


def shape(module, name):
    """Imports the module itself, and gives what has this name there."""
    if name.startswith("__"):
        raise AttributeError(name)
    del module.__getattr__
    parent = sys.modules[module.__name__.rpartition(".")[0]]
    found = importlib.machinery.PathFinder.find_spec(module.__name__, parent.__path__)
    found.loader.exec_module(module)
    return getattr(module, name)


sys.meta_path.insert(0, Later())
