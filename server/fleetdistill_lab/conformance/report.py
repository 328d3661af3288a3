"""Rules of the wire format, and the result of checking them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fleetdistill.errors import ConfigurationError

PAGE = "docs/reference/wire-format.md"
"""The page that contains the rules."""


@dataclass(frozen=True)
class Rule:
    """A rule of the page.

    Attributes:
        name: Short name, unique within a list of rules.
        section: Heading of the section that contains the rule.
        text: The rule, one sentence.
    """

    name: str
    section: str
    text: str


@dataclass(frozen=True)
class Result:
    """Result of the checks of one rule.

    Attributes:
        rule: The rule.
        checks: Number of checks; 0 if the run did not get that far.
        found: Why the first failed check failed; empty if none failed.
    """

    rule: Rule
    checks: int
    found: str

    @property
    def passed(self) -> bool:
        """Whether the rule was checked and no check failed."""
        return self.checks > 0 and not self.found

    def __str__(self) -> str:
        state = "passed" if self.passed else "FAILED" if self.found else "NOT CHECKED"
        line = f"{state:<11}  {self.rule.name}: {self.rule.text} ({self.rule.section})"
        return f"{line}\n{'':<11}  found: {self.found}" if self.found else line


class Report:
    """Collects the results of checks.

    Args:
        rules: All rules that a run checks.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = {rule.name: rule for rule in rules}
        self._checks = dict.fromkeys(self._rules, 0)
        self._found: dict[str, str] = {}

    def expect(self, name: str, ok: object, found: str = "the rule is violated") -> bool:
        """Records a check.

        Args:
            name: Name of the rule.
            ok: Whether the other side kept the rule.
            found: What it did instead.

        Returns:
            Whether `ok` is true.

        Raises:
            ConfigurationError: There is no such rule.
        """
        if name not in self._rules:
            raise ConfigurationError(f"there is no rule {name!r}")
        self._checks[name] += 1
        if not ok:
            self._found.setdefault(name, found)
        return bool(ok)

    def results(self) -> list[Result]:
        """Returns one result per rule, in the order of the rules."""
        return [Result(rule, self._checks[name], self._found.get(name, "")) for name, rule in self._rules.items()]

    @property
    def passed(self) -> bool:
        """Whether all rules passed."""
        return all(result.passed for result in self.results())

    def __str__(self) -> str:
        results = self.results()
        count = sum(result.passed for result in results)
        return "\n".join([*map(str, results), f"{count} of {len(results)} rules of {PAGE} passed"])
