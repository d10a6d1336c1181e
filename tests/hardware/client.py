"""Takes memory in steps of 64 MiB until CUDA refuses, says how many MiB that was, and keeps it until its
input ends; at each line of input it frees all and takes anew. Uses the driver alone."""

import ctypes
import sys

STEP_MIB = 64
cuda = ctypes.CDLL("libcuda.so.1")


def check(code, what):
    if code:
        sys.exit(f"{what}: error {code}")


def take():
    held, pointer = [], ctypes.c_uint64()
    while cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(STEP_MIB << 20)) == 0:
        held.append(pointer.value)
    print(STEP_MIB * len(held), flush=True)
    return held


context = ctypes.c_void_p()
check(cuda.cuInit(0), "cuInit")
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0), "cuCtxCreate")
held = take()
for _ in sys.stdin:
    for pointer in held:
        check(cuda.cuMemFree_v2(ctypes.c_uint64(pointer)), "cuMemFree")
    held = take()
