"""The balance of a pack: found = packed + refused + ignored, each with its reasons.

Enters: what a source found, and the refusals and ignored pieces of all its parts. Leaves: `Account`s; the last one is
of samples, and the manifest keeps it under `counts`. Costs: one pass over the refusals.

*Refused* is input of the right kind that could not be taken; the bad-budget limits it. *Ignored* is whatever was left
out by rule (system files, other endings, records beyond `--max-samples`); it is counted and never limited. A piece is
what becomes one sample: a picture, a record, a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stoker.errors import Refusal, count_kinds
from stoker.sources.contract import Account, Preparation


def make_accounts(
    preparation: Preparation,
    own: Sequence[Mapping[str, Any]],
    refused: Iterable[Refusal],
    ignored: Iterable[Mapping[str, int]],
    num_samples: int,
) -> list[Account]:
    """Return what became of all input; the last account is of samples.

    Args:
        preparation: Says how many pieces were found, unless the source has accounts of its own.
        own: The accounts of the source, as JSON; the last one is of samples.
        refused: By the source and by the quality gate.
        ignored: While scanning, and in each part.
        num_samples: In the store.

    Raises:
        RuntimeError: A piece of input was lost without a word: a fault in stoker or in the source.
    """
    if own:
        *others, samples = own
        # The gate leaves samples out after the source has counted them.
        dropped = samples["packed"] - num_samples
        gated = {"left out by the quality gate": dropped} if dropped else {}
        last = {**samples, "packed": num_samples, "refused": {**samples["refused"], **gated}}
        return [*map(Account.from_json, others), Account.from_json(last)]
    refused = list(refused)
    why_refused = count_kinds(refused)
    why_ignored: Counter[str] = Counter(count_kinds(refused, is_asked=True))
    for reasons in ignored:
        why_ignored.update(reasons)
    # A source that does not count: what is known of it balances by itself.
    found = preparation.found
    if found is None:
        found = num_samples + sum(why_refused.values()) + why_ignored.total()
    return [Account(preparation.unit, found, num_samples, why_refused, why_ignored)]
