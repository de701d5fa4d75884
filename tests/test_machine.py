"""The machine as this process may use it: fake /proc and /sys trees, and an NVML that breaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stoker.machine import Gpu, GpuReader, Machine, probe, recommended_workers
from stoker.machine._disk import measure_read
from stoker.units import GIB, MIB

TOTAL_KIB = 32 * 1024 * 1024


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))
    return root


def linux(root: Path, groups: str = "", mounts: tuple[str, ...] = (), **more: object) -> Path:
    base = {
        "proc/meminfo": f"MemTotal: {TOTAL_KIB} kB\nMemAvailable:   {TOTAL_KIB // 2} kB\n",
        "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-7,16-23\n",
        "proc/cpuinfo": "processor : 0\nmodel name\t: Ryzen 7 7700\n",
        "sys/devices/system/cpu/online": "0-31\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": "\n".join(mounts) + "\n",
    }
    return write(root, base | more)


V2 = "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw"
V1_CPU = "31 24 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "32 24 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


def counted(value: int, kind: int = 3, failed: int = 0) -> SimpleNamespace:
    """A field value of NVML: an unsigned long long by default."""
    numbers = SimpleNamespace(ulVal=value, ullVal=value, uiVal=value)
    return SimpleNamespace(valueType=kind, nvmlReturn=failed, value=numbers)


class BrokenNvml:
    """Enough of pynvml for one GPU; the function named `failing` raises."""

    class NVMLError(Exception):
        pass

    def __init__(self, failing: str = "", count: int = 1, error: Exception | None = None):
        self.failing, self.error = failing, error or self.NVMLError("Unknown Error")
        self.answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlSystemGetDriverVersion": "580.1",
            "nvmlDeviceGetCount": count,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=16 * GIB, free=15 * GIB),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=93, memory=40),
            "nvmlDeviceGetPowerUsage": 200_500,
            "nvmlDeviceGetEnforcedPowerLimit": 450_000,
            "nvmlDeviceGetUUID": "GPU-abc",
            "nvmlDeviceGetName": b"RTX 4090",
            "nvmlDeviceGetCudaComputeCapability": (8, 9),
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetFieldValues": [counted(7 * GIB), counted(2 * GIB)],
            "nvmlDeviceGetPcieThroughput": 2_000_000,
            "nvmlDeviceGetTemperature": 71,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x40,
        }
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        if name not in self.answers:
            raise AttributeError(name)

        def call(*_arguments: object) -> object:
            self.calls.append(name)
            if name == self.failing:
                raise self.error
            return self.answers[name]

        return call


FIELDS_OF = {
    "nvmlDeviceGetMemoryInfo": {"memory_total_bytes", "memory_free_bytes"},
    "nvmlDeviceGetUtilizationRates": {"utilization_percent", "memory_utilization_percent"},
    "nvmlDeviceGetPowerUsage": {"power_watts"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_watts"},
    "nvmlDeviceGetUUID": {"uuid"},
    "nvmlDeviceGetName": {"name"},
    "nvmlDeviceGetCudaComputeCapability": {"compute_capability"},
    "nvmlDeviceGetCurrPcieLinkGeneration": {"pcie_generation"},
    "nvmlDeviceGetMaxPcieLinkGeneration": {"pcie_generation_max"},
    "nvmlDeviceGetCurrPcieLinkWidth": {"pcie_width"},
    "nvmlDeviceGetMaxPcieLinkWidth": {"pcie_width_max"},
    "nvmlDeviceGetFieldValues": {"pcie_received_bytes", "pcie_sent_bytes"},
    "nvmlDeviceGetTemperature": {"temperature_celsius"},
    "nvmlDeviceGetCurrentClocksEventReasons": {"throttle_reasons"},
}


def look(root: Path, nvml: object = None, environ: dict[str, str] | None = None, **options):
    nvml = BrokenNvml() if nvml is None else nvml
    return probe(root, root=root, nvml=nvml, environ=environ or {}, **options)


# --- cores ---------------------------------------------------------------------------------


def test_without_cgroups_affinity_decides(tmp_path):
    found = look(linux(tmp_path))
    assert (found.cores_total, found.cores_usable, found.cores_quota) == (32, 16, None)
    assert found.cpu == "Ryzen 7 7700"


@pytest.mark.parametrize(
    ("cpu_max", "quota", "usable"),
    [
        ("max 100000", None, 16),
        ("400000 100000", 4.0, 4),
        ("250000 100000", 2.5, 2),
        ("50000 100000", 0.5, 1),
        ("6400000 100000", 64.0, 16),
        ("", None, 16),
        ("rubbish", None, 16),
        ("100000 0", None, 16),
    ],
)
def test_cgroup_v2_quota(tmp_path, cpu_max, quota, usable):
    root = linux(tmp_path, "0::/job\n", (V2,), **{"sys/fs/cgroup/job/cpu.max": cpu_max})
    found = look(root)
    assert (found.cores_quota, found.cores_usable) == (quota, usable)


def test_cgroup_v2_outer_group_binds_the_inner(tmp_path):
    root = linux(
        tmp_path,
        "0::/slice/user/job\n",
        (V2,),
        **{
            "sys/fs/cgroup/slice/cpu.max": "200000 100000",
            "sys/fs/cgroup/slice/user/cpu.max": "max 100000",
            "sys/fs/cgroup/slice/user/job/cpu.max": "800000 100000",
            "sys/fs/cgroup/slice/memory.max": 3 * GIB,
            "sys/fs/cgroup/slice/memory.current": 1 * GIB,
            "sys/fs/cgroup/slice/user/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/slice/user/job/memory.current": GIB // 2,
        },
    )
    found = look(root)
    assert (found.cores_quota, found.cores_usable) == (2.0, 2)
    assert (found.ram_limit_bytes, found.ram_available_bytes) == (3 * GIB, 2 * GIB)


def test_cgroup_v2_in_a_container_shows_its_group_as_top(tmp_path):
    mount = "30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw"
    for path in ("/docker/abc", "/../other", "/elsewhere"):
        root = linux(
            tmp_path, f"0::{path}\n", (mount,), **{"sys/fs/cgroup/cpu.max": "300000 100000"}
        )
        assert look(root).cores_usable == 3


def test_cgroup_path_outside_the_mount_is_not_followed(tmp_path):
    root = linux(
        tmp_path,
        "0::/../other\n",
        (V2,),
        **{
            "sys/fs/other/cpu.max": "100000 100000",
            "sys/fs/cgroup/cpu.max": "300000 100000",
        },
    )
    assert look(root).cores_usable == 3


@pytest.mark.parametrize(("quota", "usable"), [(-1, 16), (300000, 3)])
def test_cgroup_v1_quota(tmp_path, quota, usable):
    root = linux(
        tmp_path,
        "4:cpu,cpuacct:/job\n3:memory:/job\n",
        (V1_CPU, V1_MEMORY),
        **{
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": quota,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": 100000,
        },
    )
    assert look(root).cores_usable == usable


def test_hybrid_cgroups_take_the_tighter_of_both(tmp_path):
    root = linux(
        tmp_path,
        "4:cpu,cpuacct:/\n0::/\n",
        (V1_CPU, "33 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"),
        **{
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": 500000,
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": 100000,
            "sys/fs/cgroup/unified/cpu.max": "600000 100000",
        },
    )
    assert look(root).cores_quota == 5.0


# --- memory --------------------------------------------------------------------------------


def test_memory_without_limit(tmp_path):
    found = look(linux(tmp_path))
    assert found.ram_total_bytes == 32 * GIB
    assert found.ram_available_bytes == 16 * GIB
    assert found.ram_limit_bytes is None


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({"memory.max": "max", "memory.current": GIB}, None, 16 * GIB),
        ({"memory.max": 4 * GIB, "memory.current": GIB}, 4 * GIB, 3 * GIB),
        ({"memory.max": 4 * GIB}, 4 * GIB, 4 * GIB),
        ({"memory.max": 4 * GIB, "memory.high": 2 * GIB}, 2 * GIB, 2 * GIB),
        ({"memory.max": 2 * GIB, "memory.current": 3 * GIB}, 2 * GIB, 0),
        ({"memory.max": 64 * GIB, "memory.current": GIB}, None, 16 * GIB),
        (
            {
                "memory.max": 4 * GIB,
                "memory.current": 3 * GIB,
                "memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            4 * GIB,
            3 * GIB,
        ),
    ],
)
def test_cgroup_v2_memory(tmp_path, files, limit, available):
    inside = {f"sys/fs/cgroup/job/{name}": value for name, value in files.items()}
    found = look(linux(tmp_path, "0::/job\n", (V2,), **inside))
    assert (found.ram_limit_bytes, found.ram_available_bytes) == (limit, available)


@pytest.mark.parametrize(
    ("limit", "expected"), [(9223372036854771712, None), (6 * GIB, 6 * GIB), (-1, None)]
)
def test_cgroup_v1_memory(tmp_path, limit, expected):
    root = linux(
        tmp_path,
        "3:memory:/job\n",
        (V1_MEMORY,),
        **{
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": limit,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 2 * GIB,
        },
    )
    found = look(root)
    assert found.ram_limit_bytes == expected
    assert found.ram_available_bytes == (16 * GIB if expected is None else 4 * GIB)


def test_a_bare_root_gives_unknowns_not_errors(tmp_path):
    found = look(tmp_path)
    known = (found.cores_total, found.cores_usable, found.ram_total_bytes, found.cpu)
    assert known == (None, None, None, None)
    assert found.disk.kind is None
    assert found.disk.bandwidth_class == "unknown"
    assert found.disk.free_bytes is not None


# --- disk ----------------------------------------------------------------------------------


def block(root: Path, name: str, number: str, rotational: int | None, partition: str = "") -> None:
    device = root / "sys/devices/pci0/block" / name
    (device / "queue").mkdir(parents=True, exist_ok=True)
    if rotational is not None:
        (device / "queue/rotational").write_text(f"{rotational}\n")
    target = device
    if partition:
        target = device / partition
        target.mkdir()
        (target / "partition").write_text("1")
    link = root / "sys/dev/block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


def mount_line(number: str, filesystem: str, source: str, point: str = "/") -> str:
    return f"29 1 {number} / {point} rw,relatime - {filesystem} {source} rw"


@pytest.mark.parametrize(
    ("name", "partition", "rotational", "kind", "bandwidth"),
    [
        ("nvme0n1", "nvme0n1p2", 0, "nvme", "nvme"),
        ("sda", "sda1", 1, "rotational", "hdd"),
        ("sdb", "", 0, "ssd", "ssd"),
        ("vda", "vda1", 1, "virtual", "unknown"),
        ("vda", "", 0, "virtual", "unknown"),
        ("sdc", "", None, None, "unknown"),
    ],
)
def test_block_devices(tmp_path, name, partition, rotational, kind, bandwidth):
    linux(tmp_path, mounts=(mount_line("8:1", "ext4", f"/dev/{name}"),))
    block(tmp_path, name, "8:1", rotational, partition)
    disk = look(tmp_path).disk
    assert (disk.kind, disk.bandwidth_class, disk.filesystem) == (kind, bandwidth, "ext4")
    assert disk.device == f"/dev/{name}"


@pytest.mark.parametrize(
    ("filesystem", "kind", "bandwidth"),
    [
        ("tmpfs", "tmpfs", "tmpfs"),
        ("nfs4", "network", "network"),
        ("fuse.sshfs", "network", "network"),
        ("overlay", "overlay", "unknown"),
        ("zfs", None, "unknown"),
    ],
)
def test_filesystems(tmp_path, filesystem, kind, bandwidth):
    linux(tmp_path, mounts=(mount_line("0:40", filesystem, "source"),))
    disk = look(tmp_path).disk
    assert (disk.kind, disk.bandwidth_class) == (kind, bandwidth)


def test_emulated_scsi_disk_is_virtual(tmp_path):
    linux(tmp_path, mounts=(mount_line("8:0", "xfs", "/dev/sda"),))
    block(tmp_path, "sda", "8:0", 1)
    write(tmp_path, {"sys/devices/pci0/block/sda/device/vendor": "QEMU    \n"})
    assert look(tmp_path).disk.kind == "virtual"


def test_raid_is_as_slow_as_its_slowest_member(tmp_path):
    linux(tmp_path, mounts=(mount_line("253:0", "xfs", "/dev/mapper/data"),))
    for name, number, rotational in (
        ("dm-0", "253:0", 0),
        ("nvme0n1", "1:1", 0),
        ("sda", "8:0", 1),
    ):
        block(tmp_path, name, number, rotational)
    slaves = tmp_path / "sys/devices/pci0/block/dm-0/slaves"
    slaves.mkdir()
    (slaves / "nvme0n1").symlink_to(tmp_path / "sys/devices/pci0/block/nvme0n1")
    assert look(tmp_path).disk.kind == "nvme"
    (slaves / "sda").symlink_to(tmp_path / "sys/devices/pci0/block/sda")
    assert look(tmp_path).disk.kind == "rotational"


def test_btrfs_is_found_by_the_name_of_its_device(tmp_path):
    linux(tmp_path, mounts=(mount_line("0:50", "btrfs", "/dev/nvme1n1"),))
    block(tmp_path, "nvme1n1", "259:0", 0)
    link = tmp_path / "sys/class/block/nvme1n1"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path / "sys/devices/pci0/block/nvme1n1")
    assert look(tmp_path).disk.kind == "nvme"


def test_the_longest_and_latest_mount_holds_the_path(tmp_path):
    data = tmp_path / "my data"
    data.mkdir()
    escaped = str(data).replace(" ", "\\040")
    mounts = (
        mount_line("0:1", "overlay", "overlay"),
        mount_line("0:2", "nfs4", "server:/x", escaped),
        mount_line("0:3", "tmpfs", "tmpfs", escaped),
        mount_line("0:4", "ext4", "/dev/x", f"{escaped}-other"),
    )
    linux(tmp_path, mounts=mounts)
    found = probe(data / "not" / "yet.h5", root=tmp_path, nvml=BrokenNvml(), environ={})
    assert found.disk.kind == "tmpfs"
    assert found.disk.free_bytes is not None
    assert found.disk.path.endswith("yet.h5")


def test_measured_disk(tmp_path):
    found = look(linux(tmp_path, mounts=(mount_line("0:40", "overlay", "o"),)), measure=True)
    assert found.disk.read_bytes_per_second > 1 * MIB
    assert found.disk.bandwidth_class in ("nvme", "ssd", "hdd")
    assert any("just written" in note for note in found.notes)
    assert not list(tmp_path.glob(".stoker-disk-*"))


def test_measuring_reads_a_given_big_file_and_leaves_it(tmp_path):
    file = tmp_path / "big.h5"
    file.write_bytes(b"x" * (33 * MIB + 5))
    notes: list[str] = []
    assert measure_read(file, notes, seconds=0.05) > 1 * MIB
    assert not any("just written" in note for note in notes)
    assert file.stat().st_size == 33 * MIB + 5


def test_measuring_without_direct_reads_says_so(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    notes: list[str] = []
    assert measure_read(tmp_path, notes, seconds=0.05) > 0
    assert any("buffered" in note for note in notes)


def test_measuring_where_nothing_can_be_written_is_a_note(tmp_path):
    notes: list[str] = []
    assert measure_read(Path("/proc/self"), notes, seconds=0.05) is None
    assert "could not be measured" in notes[0]


# --- GPUs ----------------------------------------------------------------------------------


def test_a_whole_gpu(tmp_path):
    nvml = BrokenNvml()
    found = look(linux(tmp_path), nvml)
    assert found.driver == "580.1"
    assert found.gpus == (
        Gpu(
            index=0,
            uuid="GPU-abc",
            name="RTX 4090",
            memory_total_bytes=16 * GIB,
            memory_free_bytes=15 * GIB,
            compute_capability=(8, 9),
            pcie_generation=1,
            pcie_generation_max=4,
            pcie_width=8,
            pcie_width_max=16,
            pcie_received_bytes=7 * GIB,
            pcie_sent_bytes=2 * GIB,
            power_watts=200.5,
            power_limit_watts=450.0,
            temperature_celsius=71,
            throttle_reasons=("power cap", "hardware thermal slowdown"),
            utilization_percent=93,
            memory_utilization_percent=40,
            visible=True,
        ),
    )
    assert found.gpus[0].pcie_bytes_per_second == pytest.approx(31.5e9, rel=0.01)
    assert found.notes == ()
    assert nvml.calls[-1] == "nvmlShutdown"


def test_the_table_covers_every_call_a_reading_makes():
    nvml = BrokenNvml()
    with GpuReader(nvml, {}) as reader:
        before = len(nvml.calls)
        reader.read()
        assert set(nvml.calls[before:]) == set(FIELDS_OF)


@pytest.mark.parametrize(
    "error", [BrokenNvml.NVMLError("Not Supported"), OSError("lost"), ValueError("utf-8")]
)
@pytest.mark.parametrize(
    "failing", sorted(set(BrokenNvml().answers) - {"nvmlDeviceGetPcieThroughput"})
)
def test_every_call_may_fail_alone(tmp_path, failing, error):
    nvml = BrokenNvml(failing, error=error)
    found = look(linux(tmp_path), nvml)
    assert isinstance(found, Machine)
    assert len([note for note in found.notes if str(error) in note]) == 1
    assert nvml.calls.count("nvmlShutdown") == (failing != "nvmlInit")
    if failing in FIELDS_OF:
        (gpu,) = found.gpus
        unknown = {name for name in Gpu.__dataclass_fields__ if getattr(gpu, name) is None}
        assert unknown == FIELDS_OF[failing]
    json.dumps(found.to_json())


def test_one_dead_gpu_of_three_leaves_the_others(tmp_path):
    nvml = BrokenNvml(count=3)
    answer = nvml.__getattr__("nvmlDeviceGetHandleByIndex")

    def second_is_lost(index):
        if index == 1:
            raise nvml.NVMLError("GPU is lost")
        return answer(index)

    nvml.nvmlDeviceGetHandleByIndex = second_is_lost
    found = look(linux(tmp_path), nvml)
    assert [gpu.index for gpu in found.gpus] == [0, 2]
    assert "GPU 1: GPU is lost" in found.notes


def test_shutdown_also_when_the_reader_of_the_readings_raises():
    nvml = BrokenNvml()
    reader = GpuReader(nvml, {})
    with pytest.raises(KeyError), reader:
        raise KeyError(reader.read())
    assert nvml.calls[-1] == "nvmlShutdown"
    assert reader.read() == ()


def test_a_repeated_failure_is_noted_once():
    with GpuReader(BrokenNvml("nvmlDeviceGetPowerUsage"), {}) as reader:
        for _ in range(5):
            reader.read()
        assert len(reader.notes) == 1


def test_old_bindings_and_unknown_bits(tmp_path):
    nvml = BrokenNvml()
    nvml.answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x1 | 0x4000
    del nvml.answers["nvmlDeviceGetCurrentClocksEventReasons"]
    (gpu,) = look(linux(tmp_path), nvml).gpus
    assert gpu.throttle_reasons == ("idle", "other (0x4000)")
    idle = BrokenNvml()
    idle.answers["nvmlDeviceGetCurrentClocksEventReasons"] = 1
    assert look(tmp_path, idle).gpus[0].throttle_reasons == ("idle",)
    assert Gpu(0).pcie_bytes_per_second is None


def test_without_the_package_there_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = probe(tmp_path, root=tmp_path)
    assert found.gpus == ()
    assert "nvidia-ml-py is not installed" in found.notes[0]


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [True, True]),
        ("0", [True, False]),
        ("1,0", [True, True]),
        ("", [False, False]),
        ("-1", [False, False]),
        ("-1,1", [False, False]),
        ("GPU-ab", [True, True]),
        ("GPU-zz", [False, False]),
    ],
)
def test_cuda_visible_devices(tmp_path, variable, visible):
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    found = look(linux(tmp_path), BrokenNvml(count=2), environ)
    assert [gpu.visible for gpu in found.gpus] == visible


# --- the rest ------------------------------------------------------------------------------


def some_machine(cores: int | None, tmp_path: Path) -> Machine:
    allowed = "" if cores is None else f"Cpus_allowed_list:\t0-{cores - 1}\n"
    root = linux(tmp_path, **{"proc/self/status": allowed, "sys/devices/system/cpu/online": ""})
    return look(root)


@pytest.mark.parametrize(
    ("cores", "gpu", "cpu"),
    [(1, 0, 0), (2, 1, 1), (4, 2, 3), (6, 3, 4), (8, 4, 4), (12, 4, 6), (16, 4, 8), (64, 4, 8)],
)
def test_recommended_workers(tmp_path, cores, gpu, cpu):
    found = some_machine(cores, tmp_path)
    assert found.cores_usable == cores
    for who, expected in (("gpu", gpu), ("cpu", cpu), ("none", 0)):
        choice = recommended_workers(found, who)
        assert choice.value == expected
        assert choice.reason
        if who != "none":
            assert str(cores) in choice.reason


def test_recommended_workers_with_unknown_cores(tmp_path):
    found = some_machine(None, tmp_path)
    assert recommended_workers(found, "gpu").value == 2
    assert "unknown" in recommended_workers(found, "cpu").reason


def test_this_machine_without_importing_torch():
    code = (
        "import sys, json; from stoker.machine import probe; found = probe();"
        "assert 'torch' not in sys.modules;"
        "print(json.dumps(found.to_json()))"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
    found = json.loads(text)
    assert 1 <= found["cores_usable"] <= found["cores_total"]
    assert 0 < found["ram_available_bytes"] <= found["ram_total_bytes"]
    assert found["disk"]["total_bytes"] > 0
    import torch

    assert found["torch"] == torch.__version__
    assert found["torch_cuda"] == torch.version.cuda


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (counted(5), 5),
        (counted(5, kind=2), 5),
        (counted(5, kind=1), None),  # 32 bits wrap many times a second
        (counted(5, failed=3), None),  # not supported by this GPU
    ],
)
def test_pcie_counters_are_believed_where_they_do_not_wrap(field, expected):
    nvml = BrokenNvml()
    nvml.answers["nvmlDeviceGetFieldValues"] = [field, counted(9)]
    with GpuReader(nvml, {}) as reader:
        (gpu,) = reader.read()
    assert (gpu.pcie_received_bytes, gpu.pcie_sent_bytes) == (expected, 9)
