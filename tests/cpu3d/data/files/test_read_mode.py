import pytest

from cpu3d.data.files.reader import choose_read_mode, file_system
from cpu3d.errors import InputError

GIB = 2**30


def choose(asked=None, kind="ext4", needed=10, free=100, patches=True):
    return choose_read_mode(asked, file_system=kind, needed_bytes=needed * GIB, free_bytes=free * GIB, patches=patches)


@pytest.mark.parametrize(
    ("facts", "mode"),
    [
        ({}, "ram"),
        ({"needed": 25}, "ram"),
        ({"needed": 26}, "mmap"),
        ({"patches": False}, "mmap"),
        ({"kind": "tmpfs"}, "mmap"),
        ({"kind": ""}, "ram"),
        ({"kind": "", "patches": False}, "mmap"),
        ({"kind": "overlay", "patches": False}, "mmap"),
        *(
            ({"kind": kind}, "pread")
            for kind in ("nfs", "nfs4", "cifs", "smb3", "lustre", "fuse.sshfs", "fuse", "9p", "beegfs", "ceph", "gpfs")
        ),
    ],
)
def test_auto_follows_the_disk_the_memory_and_what_is_read(facts, mode):
    plan = choose(**facts)
    assert plan.mode == mode
    assert plan.reason.startswith(f"{mode} (")
    assert "\n" not in plan.reason


def test_the_budget_is_half_of_what_is_free_and_all_the_files_in_ram():
    assert choose("mmap", needed=300).page_budget_bytes == 50 * GIB
    assert choose("pread", needed=3).page_budget_bytes == 50 * GIB
    assert choose("ram", needed=90).page_budget_bytes == 90 * GIB


def test_ram_refuses_files_that_do_not_fit_and_says_what_to_do():
    assert choose("ram", needed=100).mode == "ram"
    with pytest.raises(InputError, match=r"ram must hold 101\.0 GiB .* got 100\.0 GiB free"):
        choose("ram", needed=101)


@pytest.fixture
def mounts(tmp_path):
    """mounts({mount point: type, ...}): a file such as /proc/self/mountinfo."""

    def write(points):
        lines = [
            f"{n} 1 98:0 / {point} rw,noatime shared:{n} master:1 - {kind} /dev/{n} rw" for n, (point, kind) in points
        ]
        path = tmp_path / "mountinfo"
        path.write_text("\n".join(lines) + "\n")
        return path

    return lambda *points: write(enumerate(points))


def test_the_longest_mount_point_above_a_path_is_the_one_it_lies_on(mounts):
    table = mounts(("/", "ext4"), ("/data", "nfs4"), ("/data/fast", "xfs"), ("/dat", "tmpfs"))
    kinds = {"/data/x/y": "nfs4", "/data": "nfs4", "/data/fast/store": "xfs", "/database": "ext4", "/": "ext4"}
    assert {path: file_system(path, table) for path in kinds} == kinds


def test_without_a_table_of_mounts_the_type_is_unknown(tmp_path):
    assert file_system(tmp_path, tmp_path / "none") == ""
