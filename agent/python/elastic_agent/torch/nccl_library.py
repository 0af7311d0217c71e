"""NCCL's shared library, as PyTorch has loaded it: the functions that are called, with the types of `nccl.h`."""

from __future__ import annotations

import ctypes

import torch

# The library's file. PyTorch's packages for CUDA load it, and then this is the one they have.
NAME = "libnccl.so.2"
# The oldest version that takes the configuration below.
_OLDEST = 21700

SUCCESS, REMOTE_ERROR, IN_PROGRESS = 0, 6, 7
_SUM = 0
# Gradients are of no other kinds.
_TYPES = {
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
# Bytes of the id by which the ranks of a new communicator find each other.
ID_BYTES = 128


class NcclError(RuntimeError):
    """NCCL is not there, or has failed."""


class _Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * ID_BYTES)]


class _Config(ctypes.Structure):
    """`ncclConfig_t` of 2.17. NCCL takes defaults for the fields that a newer version has."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


_COMM, _STREAM, _CODE = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
_PLACE = ctypes.POINTER(ctypes.c_void_p)


class Library:
    """NCCL's functions. All calls except `abort` return at once."""

    def __init__(self) -> None:
        """Raises NcclError where PyTorch has no NCCL, or one that is too old."""
        try:
            self._library = ctypes.CDLL(NAME)
        except OSError as error:
            raise NcclError(f"NCCL cannot be loaded: {error}") from None
        version = ctypes.c_int()
        self._call("ncclGetVersion", [ctypes.POINTER(ctypes.c_int)], ctypes.byref(version))
        # As NCCL counts: 22809 is 2.28.9.
        self.version = version.value
        if self.version < _OLDEST:
            raise NcclError(
                f"{NAME} is NCCL {self.version // 10000}.{self.version // 100 % 100}; 2.17 or newer is needed"
            )

    def new_id(self) -> bytes:
        """An id for a new communicator. Its ranks meet at this process."""
        found = _Id()
        self._do("ncclGetUniqueId", [ctypes.POINTER(_Id)], ctypes.byref(found))
        return bytes(found.bytes)

    def init(self, place: ctypes.c_void_p, ranks: int, id_: bytes, rank: int) -> None:
        """Begins a communicator, which NCCL writes to `place`. That must stay where it is."""
        undefined = -(2**31)
        fields = (ctypes.sizeof(_Config), 0xCAFEBEEF, _OLDEST, 0, undefined, undefined, undefined, None, undefined)
        config = _Config(*fields)
        types = [_PLACE, ctypes.c_int, _Id, ctypes.c_int, ctypes.POINTER(_Config)]
        arguments = (ctypes.byref(place), ranks, _Id.from_buffer_copy(id_), rank, ctypes.byref(config))
        self._do("ncclCommInitRankConfig", types, *arguments)

    def sum_up(self, tensor: torch.Tensor, comm: int, stream: int) -> None:
        """Begins to sum over all ranks; the sum replaces `tensor`."""
        types = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, _COMM, _STREAM]
        address = tensor.data_ptr()
        arguments = (address, address, tensor.numel(), _TYPES[tensor.dtype], _SUM, comm, stream)
        self._do("ncclAllReduce", types, *arguments)

    def abort(self, comm: int) -> None:
        """Ends a communicator, and what is under way on it at once. It takes up to a second to return."""
        self._call("ncclCommAbort", [_COMM], comm)

    def check(self, doing: str, comm: int) -> bool:
        """Whether nothing is in progress any more. Raises NcclError if NCCL has failed."""
        found = ctypes.c_int()
        self._do("ncclCommGetAsyncError", [_COMM, ctypes.POINTER(ctypes.c_int)], comm, ctypes.byref(found))
        self._check(doing, found.value)
        return found.value == SUCCESS

    def _call(self, name: str, types: list, *arguments: object) -> int:
        function = getattr(self._library, name)
        function.argtypes, function.restype = types, _CODE
        return function(*arguments)

    def _do(self, name: str, types: list, *arguments: object) -> None:
        self._check(name, self._call(name, types, *arguments))

    def _check(self, doing: str, code: int) -> None:
        if code in (SUCCESS, IN_PROGRESS):
            return
        texts = []
        for name, types, arguments in (
            ("ncclGetErrorString", [ctypes.c_int], (code,)),
            ("ncclGetLastError", [_COMM], (None,)),
        ):
            function = getattr(self._library, name)
            function.argtypes, function.restype = types, ctypes.c_char_p
            texts.append((function(*arguments) or b"").decode(errors="replace").strip())
        raise NcclError(f"{doing} failed with code {code}: {': '.join(filter(None, texts))}")


def takes(dtype: torch.dtype) -> bool:
    """Whether NCCL can add numbers of this kind."""
    return dtype in _TYPES
