"""The README and its Chinese translation stay in step: headings, commands, names and links."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
# In order, as both pages have them. A new section belongs into this table and into both pages.
HEADINGS = {
    "# offbeat": "# offbeat",
    "## Two commands": "## 两条命令",
    "## Install": "## 安装",
    "## An example": "## 示例",
    "## Your own loop": "## 用你自己的训练循环",
    "## What the demo prints": "## 演示的输出",
    "## Compare": "## 比较",
    "## Split models": "## 拆分模型",
    "## The disciplines": "## 同步策略",
    "## What it does not do": "## 它不做什么",
    "## Read on": "## 延伸阅读",
    "## Licence": "## 许可证",
}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """A heading, the fenced blocks below it, and the prose between them."""

    heading: str
    blocks: list[str]
    prose: str

    @property
    def names(self) -> Counter[str]:
        """What the prose sets in code: names, flags and commands are the same in any language."""
        return Counter(re.findall(r"`([^`\n]+)`", self.prose))

    @property
    def links(self) -> Counter[str]:
        return Counter(re.findall(r"\]\(([^)\s]+)\)", self.prose))

    @property
    def shape(self) -> list[str]:
        """The kind of each line of a list or a table, and how many columns the table has."""
        lines = [line for line in self.prose.splitlines() if line.startswith(("- ", "|"))]
        return [f"|{line.count('|')}" if line[0] == "|" else "-" for line in lines]


def sections(text: str) -> list[Section]:
    fences = FENCE.findall(text)
    # Comments in code look like headings, so blocks are set aside while the text is cut.
    hidden = FENCE.sub("\0", text)
    found = []
    for piece in re.split(r"^(?=#+ )", hidden, flags=re.MULTILINE):
        heading, _, rest = piece.partition("\n")
        if heading:
            blocks = [fences.pop(0) for _ in range(rest.count("\0"))]
            found.append(Section(heading, blocks, rest))
    return found


PAIRS = list(
    zip(sections(ENGLISH.read_text()), sections(CHINESE.read_text()), strict=False),
)
each_section = pytest.mark.parametrize(
    ("english", "chinese"), PAIRS, ids=[pair[0].heading.strip("# ") for pair in PAIRS]
)


def test_the_headings_are_the_same_in_number_level_and_order() -> None:
    assert [section.heading for section in sections(ENGLISH.read_text())] == list(HEADINGS)
    assert [section.heading for section in sections(CHINESE.read_text())] == list(HEADINGS.values())


@each_section
def test_blocks_of_code_are_identical(english: Section, chinese: Section) -> None:
    assert english.blocks == chinese.blocks


@each_section
def test_names_commands_and_links_in_the_prose_are_the_same(
    english: Section, chinese: Section
) -> None:
    assert english.names == chinese.names
    each_other = {ENGLISH.name, CHINESE.name}
    left, right = (
        Counter({link: n for link, n in section.links.items() if link not in each_other})
        for section in (english, chinese)
    )
    assert left == right


@each_section
def test_lists_and_tables_have_the_same_shape(english: Section, chinese: Section) -> None:
    assert english.shape == chinese.shape


def test_each_page_begins_with_a_link_to_the_other() -> None:
    for page, other in ((ENGLISH, CHINESE), (CHINESE, ENGLISH)):
        third_line = page.read_text().splitlines()[2]
        assert third_line.endswith(f"]({other.name})"), page.name


def test_the_translation_is_a_translation() -> None:
    for section in sections(CHINESE.read_text()):
        prose = re.sub(r"`[^`]*`|\([^)]*\)|\0", "", section.prose)
        if len(prose.strip()) > 40:
            chinese = len(re.findall(r"[\u4e00-\u9fff]", prose))
            assert chinese > 0.3 * len(re.sub(r"\s", "", prose)), section.heading


def test_sections_are_cut_at_headings_and_not_at_comments() -> None:
    first, second = sections("# a\n\nsee `x`\n\n```bash\n# not a heading\n```\n\n## b\n- [l](m)\n")
    assert (first.heading, first.blocks) == ("# a", ["```bash\n# not a heading\n```"])
    assert (first.names, second.links) == (Counter(["x"]), Counter(["m"]))
    assert (second.heading, second.shape) == ("## b", ["-"])
