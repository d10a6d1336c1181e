"""What shares of one GPU get in compute when two programs run at once: by turns, and under MPS, with and without
percentages. Uses the driver alone, through ctypes: a kernel in PTX that only multiplies.

    python3 shares.py table [SECONDS]   measures, and prints JSON; starts and ends a daemon of MPS of its own
    python3 shares.py lists             two programs of different size, and what nvidia-smi lists of them"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

SMALL, LARGE = "0.25", "0.75"
PERCENT = {SMALL: "25", LARGE: "75"}
LAUNCH_MS = 2.0
THREADS = 256
MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

PTX = b"""
.version 6.0
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 out, .param .u32 turns)
{
    .reg .pred %p;
    .reg .f32 %a, %b, %c;
    .reg .b32 %n, %t, %g, %w, %i;
    .reg .b64 %o, %d;
    ld.param.u64 %o, [out];
    ld.param.u32 %n, [turns];
    cvta.to.global.u64 %o, %o;
    mov.u32 %t, %tid.x;
    mov.u32 %g, %ctaid.x;
    mov.u32 %w, %ntid.x;
    mad.lo.s32 %i, %g, %w, %t;
    cvt.rn.f32.u32 %a, %i;
    mov.f32 %b, 0f3F7FFFFE;
    mov.f32 %c, 0f3F800000;
again:
    fma.rn.f32 %a, %a, %b, %c;
    fma.rn.f32 %a, %a, %b, %c;
    fma.rn.f32 %a, %a, %b, %c;
    fma.rn.f32 %a, %a, %b, %c;
    sub.u32 %n, %n, 1;
    setp.ne.u32 %p, %n, 0;
    @%p bra again;
    mul.wide.u32 %d, %i, 4;
    add.u64 %d, %o, %d;
    st.global.f32 [%d], %a;
    ret;
}
"""


class Cuda:
    """The driver, with one kernel that is ready to be launched."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        count = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSORS, device)
        self.blocks = 8 * count.value
        self.multiprocessors = count.value
        module, self.kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
        self.call("cuModuleGetFunction", ctypes.byref(self.kernel), module, b"spin")
        self.out = self.taken(4 * self.blocks * THREADS)

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            sys.exit(f"{name}: error {code}")

    def taken(self, size):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer

    def launched(self, turns):
        """Runs the kernel once; returns how many ms it took."""
        values = (self.out, ctypes.c_uint32(turns))
        places = (ctypes.c_void_p * 2)(*[ctypes.cast(ctypes.pointer(it), ctypes.c_void_p) for it in values])
        began = time.perf_counter()
        self.call("cuLaunchKernel", self.kernel, self.blocks, 1, 1, THREADS, 1, 1, 0, None, places, None)
        self.call("cuCtxSynchronize")
        return 1000 * (time.perf_counter() - began)


def work(seconds):
    """Says that it is ready with its number of turns per launch, waits for a line, and counts what it gets done."""
    cuda = Cuda()
    given = sys.stdin.readline().split()  # the turns per launch, or 0 to find them
    turns = int(given[0])
    if turns == 0:
        turns = 1024
        while cuda.launched(turns) < LAUNCH_MS:
            turns *= 2
    cuda.launched(turns)
    print(json.dumps({"turns": turns, "multiprocessors": cuda.multiprocessors}), flush=True)
    sys.stdin.readline()
    began, launches = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        cuda.launched(turns)
        launches += 1
    taken = time.perf_counter() - began
    print(json.dumps({"turnsPerSecond": launches * turns / taken}), flush=True)


def hold(mib):
    cuda = Cuda()
    cuda.taken(mib << 20)
    print("held", flush=True)
    sys.stdin.readline()


class Worker:
    def __init__(self, variables, *words):
        self.process = subprocess.Popen(
            [sys.executable, __file__, *words],
            env=dict(os.environ, **variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def said(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a program ended: {self.process.wait()}")
        return line.strip()

    def end(self):
        self.process.kill()
        self.process.wait()


def together(seconds, turns, variables):
    """What each program gets in turns per second, when these run at once."""
    workers = {name: Worker(its, "work", str(seconds)) for name, its in variables.items()}
    try:
        for worker in workers.values():
            worker.tell(str(turns))
        ready = {name: json.loads(worker.said()) for name, worker in workers.items()}
        for worker in workers.values():
            worker.tell("go")
        got = {name: json.loads(worker.said())["turnsPerSecond"] for name, worker in workers.items()}
        return got, next(iter(ready.values()))
    finally:
        for worker in workers.values():
            worker.end()


def table(seconds):
    alone, ready = together(seconds, 0, {"1": {}})
    whole, turns = alone["1"], ready["turns"]
    rows = []

    def row(how, variables):
        got, seen = together(seconds, turns, variables)
        parts = {name: round(value / whole, 3) for name, value in got.items()}
        rows.append({"how": how, "parts": parts, "sum": round(sum(parts.values()), 3), "multiprocessors": seen["multiprocessors"]})

    row("one after the other: 0.25 alone", {SMALL: {}})
    row("by turns (no MPS)", {SMALL: {}, LARGE: {}})
    mps = shutil.which("nvidia-cuda-mps-control")
    if mps:
        with tempfile.TemporaryDirectory() as folder:
            clients = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
            variables = dict(os.environ, **clients)
            subprocess.run([mps, "-d"], env=variables, check=True)
            try:
                row("MPS, no percentages", {SMALL: clients, LARGE: clients})
                shares = {name: dict(clients, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=it) for name, it in PERCENT.items()}
                row("MPS, 25 % and 75 %", shares)
                row("MPS, 25 % alone", {SMALL: shares[SMALL]})
            finally:
                subprocess.run([mps], input="quit\n", text=True, env=variables, check=False, timeout=30)
    print(json.dumps({"rows": rows, "mps": bool(mps), "seconds": seconds, "turnsPerLaunch": turns, "multiprocessors": ready["multiprocessors"]}))


def lists():
    sizes = [512, 2048]
    workers = [Worker({}, "hold", str(mib)) for mib in sizes]
    try:
        for worker in workers:
            worker.said()
        query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
        said = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        listed = [line.split(", ") for line in said.splitlines() if line]
        used = sorted(int(it[1]) for it in listed if it[1].isdigit())
        between = used[-1] - used[0] if len(used) > 1 else 0
        print(json.dumps({"listed": len(listed), "usedMib": used, "differs": between >= sizes[1] - sizes[0] - 64}))
    finally:
        for worker in workers:
            worker.end()


if __name__ == "__main__":
    what, *rest = sys.argv[1:] or ["table"]
    if what == "work":
        work(float(rest[0]))
    elif what == "hold":
        hold(int(rest[0]))
    elif what == "lists":
        lists()
    elif what == "table":
        table(float(rest[0]) if rest else 6.0)
    else:
        sys.exit(__doc__)
