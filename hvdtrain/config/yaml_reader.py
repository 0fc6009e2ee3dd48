"""Reading and writing YAML, of which nothing is executed."""

import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from hvdtrain.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """Safe YAML without duplicate keys and aliases.

    It reads 1e-3 and 0o17 as numbers, and 1:30 and 2026-11-28 as text, as YAML 1.2 does. What YAML 1.1 takes
    for another value than YAML 1.2, and somebody could mean, is refused: on, off, yes, no and 010.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Return the next node."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ComposerError(None, None, "an alias: write the value out", mark)
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.MappingNode):  # of a key that is there twice, the first value would be lost
            lines: dict[tuple[str, str], int] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if line := lines.get((key.tag, key.value)):
                    problem = f"the key {key.value!r} is given a second time; the first is in line {line}"
                    raise ComposerError(None, None, problem, key.start_mark)
                lines[key.tag, key.value] = key.start_mark.line + 1
        return node

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return the tag of a node."""
        tag: str = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        is_plain = kind is yaml.ScalarNode and implicit[0]
        if is_plain and (tag.endswith(":timestamp") or (tag.endswith((":int", ":float")) and ":" in value)):
            return "tag:yaml.org,2002:str"
        return tag

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return a node's value."""
        meant = ""  # of a value without quotes that versions of YAML read as others
        if isinstance(node, yaml.ScalarNode) and node.style is None:
            if node.tag.endswith(":bool") and node.value.lower() in ("on", "off", "yes", "no"):
                meant = "write true or false"
            elif node.tag.endswith(":int") and re.fullmatch(r"[-+]?0[0-9_]+", node.value):
                meant = "write a number without the leading zero"
        if meant:
            problem = f'{node.value} is ambiguous: {meant}, or "{node.value}" for the text'
            raise ConstructorError(None, None, problem, node.start_mark)
        try:
            if isinstance(node, yaml.ScalarNode):
                node.value.encode()  # half of a pair of code units cannot be written to a file
            return super().construct_object(node, deep)
        except (ValueError, OverflowError, LookupError, AttributeError) as error:  # such as 2026-13-45
            raise ConstructorError(None, None, str(error), node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` reads back as the same: it quotes texts such as 1e5."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value that comes twice twice."""
        return True


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:int", re.compile(r"^[-+]?0(o[0-7]+|[0-9_]+)$"), list("-+0")
    )


def write_yaml(values: Any) -> str:
    """Return values as YAML that ``parse_yaml`` reads back as the same."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str, source: str) -> Any:
    """Parse YAML without executing anything in it."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = f"{source} is not valid YAML{place}: {getattr(error, 'problem', error)}"
        is_syntax = isinstance(error, ScannerError | ParserError)  # which may be in the line before
        shown = text.splitlines()[max(0, mark.line - 1) : mark.line + 1] if mark and is_syntax else []
        raise ConfigError("\n  ".join([problem, *(line[:80] for line in shown)])) from None
