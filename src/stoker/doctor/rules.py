"""From measurements to findings: pure functions, one per finding, ranked by predicted gain.

Enters: `Measurements`. Leaves: a list of `Finding`s, the largest gain first; empty for a healthy job. Costs
microseconds. The rules are in `rules_*.py`; each is a function of a `Case` that returns a finding or None and does
not depend on other rules.
"""

from __future__ import annotations

from stoker.doctor import rules_loading, rules_run, rules_step, rules_workers
from stoker.doctor.cases import Case, Rule, rule_name
from stoker.doctor.findings import Finding
from stoker.doctor.measurements import Measurements

RULES: tuple[Rule, ...] = (
    *rules_workers.RULES,
    *rules_loading.RULES,
    *rules_step.RULES,
    *rules_run.RULES,
)
FINDING_NAMES = (
    *(rule_name(rule) for rule in RULES),
    "full-precision",  # no rule gives it: it is found only by trying it (consultation.py)
)


def diagnose(measurements: Measurements) -> list[Finding]:
    """Return the findings; an empty list if there is nothing to fix.

    Findings that end the run come first, then the larger gain. The generic starved-by-loader is left out if
    another rule names the cause.
    """
    case = Case.of(measurements)
    found = [finding for rule in RULES if (finding := rule(case)) is not None]
    names = {finding.name for finding in found}
    if names & rules_loading.NAMED_CAUSES:
        found = [finding for finding in found if finding.name != "starved-by-loader"]
    return sorted(found, key=lambda finding: (not finding.ends_the_run, -finding.gain.likely))
