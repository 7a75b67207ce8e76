"""Where ranks run: network namespaces with links of a limited speed, a quota of a core.

Only root may make them. Whatever is made is named after this process and removed when the context
ends; what a process that was killed has left behind is removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Device of a rank inside its namespace.
DEVICE = "rl0"
#: Bytes that a bucket lets through at once: messages below it would not be slowed.
_BURST = 32 * 1024
#: Bytes of a packet: with jumbo frames a core has time left beside the network.
_MTU = 9000
_CGROUPS = Path("/sys/fs/cgroup/cpu")
_NAMESPACES = Path("/run/netns")
_PREFIX = "rlp"
_PERIOD = 20_000
_CLONE_NEWNET = 0x40000000
#: The network for benchmarks of RFC 2544, which nothing else uses.
_NET = "198.18.113"


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Args:
        namespace: Name of its network namespace; empty for that of the caller.
        group: Folder of its control group; empty for that of the caller.
        core: The core that it is pinned to, in the order of the usable ones.
    """

    namespace: str = ""
    group: str = ""
    core: int = 0

    def enter(self) -> None:
        """Move this process there; before it has started any thread."""
        os.environ["LOCAL_RANK"] = str(self.core)  # by which the runtime pins
        if self.group:
            (Path(self.group) / "cgroup.procs").write_text(str(os.getpid()))
        if self.namespace:
            _set_namespace(_NAMESPACES / self.namespace)
            os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


@dataclass(frozen=True)
class Places:
    """Where the ranks of a launch run.

    Args:
        ranks: The place of each rank.
        address: At which they reach the caller.
    """

    ranks: tuple[Place, ...]
    address: str


def unable(*, links: bool, quota: bool) -> str:
    """Why this machine cannot limit links, or a rank, so; empty if it can."""
    if not (links or quota):
        return ""
    if os.geteuid() != 0:
        return "only root may make network namespaces and control groups"
    if links and not (shutil.which("ip") and shutil.which("tc")):
        return "ip and tc (iproute2) are not installed"
    if quota and not (_CGROUPS / "cgroup.procs").exists():
        return f"there are no control groups of version 1 at {_CGROUPS}"
    return ""


@contextlib.contextmanager
def places(
    ranks: int, *, nodes: int = 0, bandwidth: float = 0.0, slow: tuple[int, float] | None = None
) -> Iterator[Places]:
    """Make the places of some ranks, and remove them.

    A namespace stands for a host of one core, which its ranks share; without namespaces the ranks
    are dealt over the cores.

    Args:
        ranks: Number of ranks.
        nodes: Network namespaces over which they are spread, neighbours together; 0 for none.
        bandwidth: Bytes/s that each namespace sends.
        slow: A rank and the share of a core that it gets.
    """
    remove_leftovers()
    own = f"{_PREFIX}{os.getpid()}"
    with contextlib.ExitStack() as stack:
        names, cores = [""] * ranks, list(range(ranks))
        if nodes:
            stack.callback(_remove_network, own)
            made = _make_network(own, nodes, bandwidth)
            cores = [rank * nodes // ranks for rank in range(ranks)]
            names = [made[core] for core in cores]
        groups = [""] * ranks
        if slow is not None:
            stack.callback(_remove_group, own)
            groups[slow[0]] = _make_group(own, slow[1])
        address = f"{_NET}.254" if nodes else "127.0.0.1"
        yield Places(tuple(map(Place, names, groups, cores)), address)


def remove_leftovers() -> None:
    """Remove what processes that are gone have made."""
    for name in _made():
        match = re.match(rf"{_PREFIX}(\d+)", name)
        if match and not Path(f"/proc/{match[1]}").exists():
            _remove_network(match[0])
            _remove_group(match[0])


def _made() -> list[str]:
    folders = [_NAMESPACES, _CGROUPS, Path("/sys/class/net")]
    entries = [entry for folder in folders if folder.is_dir() for entry in folder.iterdir()]
    return [entry.name for entry in entries if entry.name.startswith(_PREFIX)]


def _make_network(own: str, nodes: int, bandwidth: float) -> list[str]:
    """Namespaces that a bridge joins, each with a token bucket for what it sends."""
    bridge = f"{own}b"
    _run(f"ip link add {bridge} type bridge")
    _run(f"ip addr add {_NET}.254/24 dev {bridge}")
    _run(f"ip link set {bridge} up")
    names = [f"{own}n{node}" for node in range(nodes)]
    for node, name in enumerate(names):
        outside = f"{own}v{node}"
        _run(f"ip netns add {name}")
        _run(f"ip link add {outside} type veth peer name {DEVICE} netns {name}")
        _run(f"ip link set {outside} mtu {_MTU} master {bridge} up")
        _run(f"ip -n {name} addr add {_NET}.{node + 1}/24 dev {DEVICE}")
        _run(f"ip -n {name} link set {DEVICE} mtu {_MTU} up")
        _run(f"ip -n {name} link set lo up")
        rate = f"tbf rate {bandwidth * 8:.0f}bit burst {_BURST} latency 50ms"
        _run(f"tc -n {name} qdisc add dev {DEVICE} root {rate}")
    return names


def _remove_network(own: str) -> None:
    """Remove the namespaces, their devices and the bridge of a process."""
    for name in _made():
        if name.startswith(f"{own}n"):
            _run(f"ip netns del {name}", check=False)
        elif name.startswith((f"{own}v", f"{own}b")):
            _run(f"ip link del {name}", check=False)


def _make_group(own: str, share: float) -> str:
    folder = _CGROUPS / own
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text(str(_PERIOD))
    (folder / "cpu.cfs_quota_us").write_text(str(round(share * _PERIOD)))
    return str(folder)


def _remove_group(own: str) -> None:
    folder = _CGROUPS / own
    if folder.is_dir():
        for process in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (_CGROUPS / "cgroup.procs").write_text(process)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _set_namespace(path: Path) -> None:
    """Move the calling thread into a network namespace."""
    library = ctypes.CDLL(None, use_errno=True)
    with path.open() as file:
        if library.setns(file.fileno(), _CLONE_NEWNET):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))


def _run(command: str, *, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=not check, timeout=20)
