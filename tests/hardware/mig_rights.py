"""MIG instances on a GPU that is in MIG mode already: what others see of one, which device nodes it has, what keeps it
from being destroyed, and how long the driver takes. Makes one instance of the smallest profile where there is room, and
removes it; the mode and the other instances stay as they are. Needs root; prints JSON.

    python3 mig_rights.py

The variable NVML names another library than NVIDIA's."""

import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

NAMES = {0: "ok", 2: "INVALID_ARGUMENT", 3: "NOT_SUPPORTED", 4: "NO_PERMISSION", 6: "NOT_FOUND", 19: "IN_USE", 23: "INSUFFICIENT_RESOURCES", 999: "UNKNOWN"}
CAPABILITIES = pathlib.Path("/proc/driver/nvidia/capabilities")
NODES = pathlib.Path("/dev/nvidia-caps")
PLACES = 64


class Placement(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint), ("size", ctypes.c_uint)]


class ProfileInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("version", "id", "p2p", "slices", "most", "sms", "c", "d", "e", "j", "o")] + [("mib", ctypes.c_uint64), ("name", ctypes.c_char * 96)]


class ComputeInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("id", "slices", "most", "sms", "a", "b", "c", "d", "e")]


class InstanceInfo(ctypes.Structure):
    _fields_ = [("device", ctypes.c_void_p), ("id", ctypes.c_uint), ("profile", ctypes.c_uint), ("place", Placement)]


class Memory(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)] + [(name, ctypes.c_uint64) for name in ("total", "reserved", "free", "used")]


class Refused(Exception):
    pass


def code(number):
    return NAMES.get(number, str(number))


class Nvml:
    def __init__(self):
        self.library = ctypes.CDLL(os.environ.get("NVML", "libnvidia-ml.so.1"))
        self.need("nvmlInit_v2")

    def ask(self, name, *arguments):
        return getattr(self.library, name)(*arguments)

    def need(self, name, *arguments):
        answer = self.ask(name, *arguments)
        if answer:
            raise Refused(f"{name}: {code(answer)}")

    def gpus(self):
        count = ctypes.c_uint()
        self.need("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            gpu, now, then = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint()
            self.need("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(gpu))
            answer = self.ask("nvmlDeviceGetMigMode", gpu, ctypes.byref(now), ctypes.byref(then))
            yield gpu, answer == 0 and now.value == 1

    def uuid(self, device):
        text = ctypes.create_string_buffer(96)
        self.need("nvmlDeviceGetUUID", device, text, len(text))
        return text.value.decode()

    def devices(self, gpu):
        """UUIDs and handles of the MIG devices of a GPU, each with the number of its GPU instance."""
        count, found = ctypes.c_uint(), {}
        self.need("nvmlDeviceGetMaxMigDeviceCount", gpu, ctypes.byref(count))
        for index in range(count.value):
            device, instance = ctypes.c_void_p(), ctypes.c_uint()
            if self.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu, index, ctypes.byref(device)) == 0:
                self.need("nvmlDeviceGetGpuInstanceId", device, ctypes.byref(instance))
                found[self.uuid(device)] = (device, instance.value)
        return found

    def profiles(self, gpu):
        for number in range(32):
            info = ProfileInfo(version=ctypes.sizeof(ProfileInfo) | 2 << 24)
            if self.ask("nvmlDeviceGetGpuInstanceProfileInfoV", gpu, number, ctypes.byref(info)) == 0:
                yield info

    def places(self, gpu, profile):
        places, count = (Placement * PLACES)(), ctypes.c_uint(PLACES)
        self.need("nvmlDeviceGetGpuInstancePossiblePlacements_v2", gpu, profile, places, ctypes.byref(count))
        return places[: count.value]

    def instances(self, gpu, profile):
        handles, count = (ctypes.c_void_p * PLACES)(), ctypes.c_uint(PLACES)
        self.need("nvmlDeviceGetGpuInstances", gpu, profile, handles, ctypes.byref(count))
        return [self.info(ctypes.c_void_p(handle)) for handle in handles[: count.value]]

    def info(self, instance):
        info = InstanceInfo()
        self.need("nvmlGpuInstanceGetInfo", instance, ctypes.byref(info))
        return info

    def free(self, gpu):
        """The smallest profile and the first of its places that is free."""
        profiles = list(self.profiles(gpu))
        taken = [it.place for profile in profiles for it in self.instances(gpu, profile.id)]
        for profile in sorted(profiles, key=lambda it: (it.mib, it.name)):
            for place in self.places(gpu, profile.id):
                if all(it.start + it.size <= place.start or place.start + place.size <= it.start for it in taken):
                    return profile, place
        return None

    def reads(self, device):
        """What a device answers about its memory and its processes."""
        memory, count = Memory(version=ctypes.sizeof(Memory) | 2 << 24), ctypes.c_uint(0)
        listed = self.ask("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), None)
        return {"memory": code(self.ask("nvmlDeviceGetMemoryInfo_v2", device, ctypes.byref(memory))), "processes": code(listed)}


def seen():
    """What this process sees of all GPUs."""
    nvml, all_gpus = Nvml(), []
    for gpu, is_divided in nvml.gpus():
        if is_divided:
            devices = nvml.devices(gpu)
            found = {uuid: nvml.reads(device) for uuid, (device, _) in devices.items()}
            all_gpus.append({"parent": nvml.reads(gpu), "instances": found})
    print(json.dumps(all_gpus))


def hold():
    """Has all instances open, as a monitor does, until its input ends."""
    nvml = Nvml()
    handles = [nvml.devices(gpu) for gpu, is_divided in nvml.gpus() if is_divided]
    for devices in handles:
        for device, _ in devices.values():
            nvml.reads(device)
    print("ready", flush=True)
    sys.stdin.read()


def by(prefix, word="seen"):
    """What another process sees that is started so."""
    run = [*prefix, sys.executable, os.path.abspath(__file__), word]
    try:
        done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=20)
        return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr.strip()[-200:]}
    except (subprocess.TimeoutExpired, ValueError) as error:
        return {"failed": str(error)[-200:]}


def nodes():
    """The device nodes of capabilities, and those that the kernel lists for instances."""
    there = sorted(it.name for it in NODES.glob("nvidia-cap*")) if NODES.is_dir() else []
    listed = {}
    for file in sorted(CAPABILITIES.glob("gpu*/mig/gi*/**/access")):
        lines = dict(line.split(": ", 1) for line in file.read_text().splitlines() if ": " in line)
        listed[str(file.parent.relative_to(CAPABILITIES))] = int(lines.get("DeviceFileMinor", -1))
    return there, listed


class Made:
    """An instance, and how long its calls took."""

    def __init__(self, nvml, gpu, profile, place):
        self.nvml, self.seconds, self.compute = nvml, {}, None
        self.instance, before = ctypes.c_void_p(), set(nvml.devices(gpu))
        self.timed("create", "nvmlDeviceCreateGpuInstanceWithPlacement", gpu, profile.id, ctypes.byref(place), ctypes.byref(self.instance))
        try:
            self.id = nvml.info(self.instance).id
            compute, best = ctypes.c_void_p(), None
            for number in range(32):
                info = ComputeInfo()
                if nvml.ask("nvmlGpuInstanceGetComputeInstanceProfileInfo", self.instance, number, 0, ctypes.byref(info)) == 0:
                    best = info if best is None or info.sms > best.sms else best
            if best is None:
                raise Refused("no profile of a compute instance")
            self.timed("create_compute", "nvmlGpuInstanceCreateComputeInstance", self.instance, best.id, ctypes.byref(compute))
            self.compute = compute
            self.uuid = next(iter(set(nvml.devices(gpu)) - before), None)
        except Refused:
            self.remove()
            raise

    def timed(self, key, name, *arguments):
        began = time.monotonic()
        answer = self.nvml.ask(name, *arguments)
        self.seconds[key] = round(time.monotonic() - began, 3)
        if answer:
            raise Refused(f"{name}: {code(answer)}")

    def remove(self):
        """Removes it; the first refusal."""
        try:
            if self.compute is not None:
                self.timed("destroy_compute", "nvmlComputeInstanceDestroy", self.compute)
                self.compute = None
            if self.instance is not None:
                self.timed("destroy", "nvmlGpuInstanceDestroy", self.instance)
                self.instance = None
        except Refused as refused:
            return str(refused)
        return "ok"


def beside_a_monitor(nvml, gpu, made):
    """Whether the instance can be removed while another process has it open, and after that."""
    run = [sys.executable, os.path.abspath(__file__), "hold"]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as monitor:
        try:
            ready = monitor.stdout.readline().strip() == "ready"
            device = nvml.devices(gpu).get(made.uuid)
            count = ctypes.c_uint(0)
            if device:
                nvml.ask("nvmlDeviceGetComputeRunningProcesses_v3", device[0], ctypes.byref(count), None)
            beside = made.remove() if ready else "the other process did not start"
        finally:
            monitor.stdin.close()
            monitor.wait(10)
    return {"listed": count.value, "beside": beside, "after": made.remove()}


def skip(why):
    print(json.dumps({"skipped": why}))
    sys.exit(0)


def main():
    if os.geteuid() != 0:
        skip("instances are made by root alone")
    try:
        nvml = Nvml()
    except OSError as error:
        skip(f"no library of the driver: {error}")
    divided = [gpu for gpu, is_divided in nvml.gpus() if is_divided]
    if not divided:
        skip("no GPU is in MIG mode, which is not changed here")
    room = next(((gpu, *found) for gpu in divided if (found := nvml.free(gpu))), None)
    if room is None:
        skip("no room for an instance")
    gpu, profile, place = room
    before = set(nvml.devices(gpu))
    said = {"profile": profile.name.decode(), "start": place.start, "nodes_before": nodes()[0]}
    made = Made(nvml, gpu, profile, place)
    try:
        said["nodes"], said["kernel"] = nodes()
        if shutil.which("setpriv"):
            unprivileged = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
            said["unprivileged"] = by(unprivileged)
            if shutil.which("unshare"):
                hide = 'mkdir -p /dev/nvidia-caps; mount -t tmpfs none /dev/nvidia-caps; exec "$@"'
                said["without_nodes"] = by(["unshare", "--mount", "sh", "-c", hide, "sh", *unprivileged])
        first = made.uuid
        said["monitor"] = beside_a_monitor(nvml, gpu, made)
        said["seconds"] = made.seconds
        made = Made(nvml, gpu, profile, place)
        said["same_uuid_again"] = made.uuid == first
    finally:
        said["removed"] = made.remove()
    said["nodes_after"] = nodes()[0]
    said["others_stay"] = set(nvml.devices(gpu)) == before
    print(json.dumps(said))
    sys.exit(0 if said["removed"] == "ok" and said["others_stay"] else 1)


if __name__ == "__main__":
    {"seen": seen, "hold": hold}.get(sys.argv[1] if len(sys.argv) > 1 else "", main)()
