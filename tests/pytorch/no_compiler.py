"""Import this first. PyTorch imports its compiler when a process makes its first optimizer, only to say that this is not
to be compiled: nearly half of a worker's start. After this nothing can be compiled. README's lines and `examples/` are
tested with the compiler."""

import contextlib
import sys
import types

import torch

compiler = types.ModuleType("torch._dynamo")
# Its settings are read.
compiler.__path__ = [f"{torch.__path__[0]}/_dynamo"]
compiler.disable = lambda function, *_, **__: function
compiler.disable_nested_graph_breaks = contextlib.nullcontext
compiler.graph_break = lambda: None
compiler.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
compiler.utils = types.SimpleNamespace(get_optimize_ddp_mode=lambda: None)
sys.modules[compiler.__name__] = torch._dynamo = compiler
