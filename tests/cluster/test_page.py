"""Every command of the page about several machines, typed on two hosts that have its addresses."""

import re
import shlex
import sys

import pytest

from benchmarks.network.hosts import Hosts
from tests.cluster.common import OFFBEAT, Command
from tests.test_docs import DOCS, EXAMPLE, Block, blocks, same_part

pytestmark = pytest.mark.cluster

PROMPT = re.compile(r"^(lab\d)\$ (.*)$", re.MULTILINE)
PROGRAMS = {"offbeat": OFFBEAT, "torchrun": (sys.executable, "-m", "torch.distributed.run")}
HERE = "lab1"  # where commands without a host's name are typed


class Desk:
    """Types commands on hosts."""

    def __init__(self, hosts: Hosts):
        self.hosts = {host.name: host for host in hosts}
        self.typed: list[str] = []

    def start(self, name: str, line: str) -> Command:
        program, *words = shlex.split(line.replace("\\\n", " "), comments=True)
        self.typed.append(program)
        return Command(self.hosts[name], *PROGRAMS[program], *words)

    def together(self, lines: list[tuple[str, str]]) -> str:
        """Each goes on while the next begins; what all have printed, the store last."""
        started = []
        for name, line in lines:
            started.append(self.start(name, line))
            if line.startswith("offbeat store"):
                started[-1].says("waiting for")
        return "".join(command.ended() for command in reversed(started))

    def copy(self, file: str) -> None:
        """From the first host to the others, as the page says."""
        first, *others = self.hosts.values()
        for host in others:
            (host.folder / file).write_bytes((first.folder / file).read_bytes())
            (host.folder / file).chmod(0o600)

    def do(self, block: Block) -> str | None:
        """What a block says; what was printed on hosts."""
        lines = PROMPT.findall(block.text)
        if block.file:
            for host in self.hosts.values():
                (host.folder / block.file).write_text(block.text)
        elif block.language == "hosts" or (lines and lines[0][1].startswith("torchrun")):
            return self.together(lines)
        elif block.language == "bash":
            for line in block.text.splitlines():
                self.start(HERE, line).ended()
                if line == "offbeat token":
                    self.copy("offbeat.token")
        return None


def test_the_page_about_several_machines(tmp_path):
    text = (DOCS / "hosts.md").read_text()
    with Hosts(2, tmp_path) as hosts:
        assert hosts[1].address == EXAMPLE
        desk = Desk(hosts)
        found = []
        for block in blocks(text):
            if "torchrun" in block.text:  # the script says where the token is, as above it
                for host in hosts:
                    script = host.folder / "train.py"
                    told = script.read_text().replace("join(", 'join(token="offbeat.token", ')
                    assert told != script.read_text()
                    script.write_text(told)
            printed = desk.do(block)
            if printed is not None:
                found.append(printed)
            if printed is not None and block.shown_output is not None:
                assert same_part(block.shown_output, printed), f"line {block.line}:\n{printed}"
        trained, asked, ranks = found
        assert "over the wire to 2 hosts" in " ".join(trained.split())
        assert len(re.findall(r"worker \d of 2: version \d+, accuracy 0\.\d+", trained)) == 2
        assert "answers and knows the token, encrypted" in asked
        assert len(re.findall(r"worker \d of 4: version \d+, accuracy 0\.\d+", ranks)) == 4
        commands = re.findall(r"^(?:lab\d\$ )?(offbeat|torchrun) ", text, re.MULTILINE)
        assert sorted(desk.typed) == sorted(commands)
