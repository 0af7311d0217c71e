"""Has sessions sum over the stand-in for NCCL (`trainer/cuda/fake-nccl`), which adds what is in the host's memory. What
passes with it says nothing of NCCL or of a GPU."""

import ctypes

from elastic_agent.torch import nccl, nccl_library

# NCCL's threads may outlive the owner of a stream.
_kept = []


class HostStream:
    """The stand-in's stream: how many operations were put on it, and how many have ended."""

    device_type = "cpu"

    def __init__(self, device):
        self._counts = (ctypes.c_uint64 * 2)()
        _kept.append(self._counts)
        self.address = ctypes.addressof(self._counts)

    def bind(self):
        pass

    def now(self):
        return None

    def wait_for(self, mark):
        pass

    def mark(self):
        return self._counts[0]

    def is_done(self, mark):
        return self._counts[1] >= mark


def install(library):
    """After this the file `library` is NCCL, and the host's memory a GPU's."""
    nccl_library.NAME, nccl.Stream = library, HostStream
