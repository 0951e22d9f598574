"""What an audit answers: findings, a report of what the function reaches, and the verdict that holds both.

Pure data; the same structs travel from the daemon to main.
"""

from typing import Final

import msgspec

from blockx.audit.tables import RULES_VERSION

FINDINGS_MAX: Final = 50
"""Of one source; whoever has more mends these first."""
MESSAGE_CHARS_MAX: Final = 600
"""Of one finding; quoted names are shortened before."""
_FINDINGS_SHOWN: Final = 3


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One place that a rule refuses."""

    rule: str
    line: int
    """From 1, as the compiler counts; 0: the source as a whole."""
    column: int
    """From 1, in characters; 0: the whole line."""
    message: str
    """What was found, and what to write instead."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a source reaches, as far as its text says so; each sorted and without repetition."""

    imports: tuple[str, ...] = ()
    """Modules, and names as ``module.name``."""
    tables: tuple[str, ...] = ()
    chains: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    """Which of ``tables``, ``chains`` and ``functions`` also has names that only a run knows."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted if there is no finding."""

    findings: tuple[Finding, ...] = ()
    report: Report = Report()

    @property
    def accepted(self) -> bool:
        """Nothing was refused."""
        return not self.findings


def refused(rule: str, message: str, line: int = 0, column: int = 0) -> Verdict:
    """A verdict of one finding."""
    return Verdict(findings=(Finding(rule=rule, line=line, column=column, message=message),))


def audit_token(digest: str) -> str:
    """What travels with a call whose source was accepted: under which rules, and which source."""
    return f"{RULES_VERSION}:{digest}"


def refusal(place: str, verdict: Verdict) -> str:
    """The message of a call that is refused: the first findings with their places."""
    shown = [
        f"{place}, line {finding.line}, column {finding.column}: {finding.message} [{finding.rule}]"
        for finding in verdict.findings[:_FINDINGS_SHOWN]
    ]
    more = len(verdict.findings) - len(shown)
    rest = f"; {more} more: blockx audit shows them" if more > 0 else ""
    return "LoadError: refused by the audit: " + "; ".join(shown) + rest
