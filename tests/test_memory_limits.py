"""Memory that this process may use: the machine's, or what its control groups leave of it."""

import pytest

from quire.config import available_bytes, memory_bytes

MIB = 1 << 20


def system(tmp_path, groups, files, available_mib=1000):
    """Write what Linux says of this process: its groups, and files of `/sys/fs/cgroup` by path."""
    for name, text in {
        "proc/self/cgroup": groups,
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable:  {available_mib * 1024} kB\n",
        **{f"sys/fs/cgroup/{path}": text for path, text in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("groups", "files", "limit", "left"),
    [
        ("0::/\n", {}, None, 1000),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "7\n"}, None, 1000),
        ("0::/\n", {"memory.max": f"{64 * MIB}\n", "memory.current": f"{24 * MIB}\n"}, 64, 40),
        (
            "0::/\n",
            {
                "memory.max": f"{64 * MIB}\n",
                "memory.current": f"{60 * MIB}\n",
                "memory.stat": f"anon 1\ninactive_file {30 * MIB}\n",
            },
            64,
            34,
        ),
        (
            "0::/a/b\n",
            {
                "a/memory.max": f"{32 * MIB}\n",
                "a/memory.current": f"{31 * MIB}\n",
                "a/b/memory.max": f"{48 * MIB}\n",
                "a/b/memory.current": "0\n",
            },
            32,
            1,
        ),
        ("0::/not/here\n", {"memory.max": f"{16 * MIB}\n", "memory.current": "0\n"}, 16, 16),
        (
            "5:cpu,memory:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{8 * MIB}\n",
                "memory/x/memory.usage_in_bytes": f"{9 * MIB}\n",
            },
            8,
            0,
        ),
        ("4:cpu:/x\n", {"memory.max": "1\n"}, None, 1000),
    ],
)
def test_limits_of_control_groups_lower_memory(tmp_path, groups, files, limit, left):
    root = system(tmp_path, groups, files)
    whole = memory_bytes(tmp_path / "nothing")
    assert memory_bytes(root) == (whole if limit is None else limit * MIB)
    assert available_bytes(root) == left * MIB


def test_memory_is_the_machines_where_no_group_is_known(tmp_path):
    assert memory_bytes(tmp_path) > 100 * MIB
    assert available_bytes(tmp_path) is None
    assert memory_bytes() > 100 * MIB
