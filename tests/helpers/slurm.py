"""A real Slurm on machines of namespaces: the first has slurmctld, the others slurmd, all of them munge."""

import os
import time
from pathlib import Path

from tests.helpers.machines import Machines

# The timeouts are for machines whose processors are busy, of whose jobs Slurm's own defaults would lose some.
CONF = """
ClusterName=plait
SlurmctldHost={head}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=200000,batch_sched_delay=1
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/ctld.pid
SlurmdPidFile=/run/slurm/d.pid
SlurmctldLogFile=/run/slurm/ctld.log
SlurmdLogFile=/run/slurm/d.log
SlurmdParameters=config_overrides
KillWait=30
MessageTimeout=100
TCPTimeout=60
SlurmdTimeout=1800
BatchStartTimeout=600
JobRequeue=1
ReturnToService=2
AccountingStorageType=accounting_storage/none
NodeName=DEFAULT CPUs=4 State=UNKNOWN
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
BEGIN = """
mkdir -p /run/munge /run/slurm/state /run/slurm/spool /run/key
chmod 755 /run/munge
cp "$FOLDER/munge.key" /run/key/key && chmod 400 /run/key/key
mkdir -p /run/etc && cp "$FOLDER/slurm.conf" "$FOLDER/cgroup.conf" /run/etc
mkdir -p /etc/slurm && mount --bind /run/etc /etc/slurm
munged --force --key-file=/run/key/key --socket=/run/munge/munge.socket.2 --pid-file=/run/key/pid \\
  --log-file=/run/key/log --seed-file=/run/key/seed
"""


PROGRAMS = (
    "slurmctld",
    "slurmd",
    "srun",
    "sbatch",
    "munged",
)  # Debian's packages slurmctld, slurmd, slurm-client, munge


def begin(machines: Machines, folder: Path) -> None:
    """Start it, as root; its settings lie in `folder`, which all machines see."""
    head, *nodes = machines
    lines = "\n".join(f"NodeName={n.name} NodeAddr={n.address} NodeHostname={n.name}" for n in nodes)
    (folder / "slurm.conf").write_text(CONF.format(head=head.name, address=head.address, nodes=lines), encoding="utf-8")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
    (folder / "munge.key").write_bytes(os.urandom(128))
    for machine in machines:
        machine.run("sh", "-ec", BEGIN, FOLDER=str(folder))
    head.run("slurmctld", "-f", "/etc/slurm/slurm.conf")
    for node in nodes:
        node.run("slurmd", "-N", node.name, "-f", "/etc/slurm/slurm.conf")
    deadline = time.monotonic() + 240
    while head.run("sinfo", "-h", "-o", "%T").split() != ["idle"]:
        assert time.monotonic() < deadline, head.run("sinfo", "-N", "-l")
        time.sleep(0.2)
