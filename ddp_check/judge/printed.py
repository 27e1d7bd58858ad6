"""Numbers that rank 0 prints (--compare): as on one process, and after a resume."""

import decimal
import math
import re

from ddp_check.rows import judge, line


def judge_printed(patterns, two, replayed, float64):
    """With the weights of the ranks, one process must print what rank 0 does."""
    found = []
    for pattern in patterns:
        short, expected = shortened(pattern), printed(two, pattern)
        right = replayed is not None and replayed.verdict.right
        one = printed(replayed.one, pattern) if right else []
        if not expected:
            reason = "Rank 0 prints nothing like it."
            found.append(line("note", "not printed", pattern=short, reason=reason))
        elif not one:
            reason = "The weights of one process are not the same."
            if right:
                reason = "One process prints nothing like it."
            found.append(line("note", "not printed", pattern=short, reason=reason))
        else:
            pairs = zip(one, expected)
            same = len(one) == len(expected) and all(agree(*p, float64) for p in pairs)
            values = {"one": one[-3:], "two": expected[-3:], "pattern": short}
            found.append(judge(same, "printed", **values))
    return found


def judge_printed_again(patterns, two, again, float64):
    """The last numbers of a relaunch must be those of the undisturbed run."""
    found = []
    for pattern in patterns:
        expected, mine = printed(two, pattern), printed(again, pattern)
        count = min(len(expected), len(mine))
        pairs = list(zip(expected[-count:], mine[-count:])) if count else []
        other = [(a, b) for a, b in pairs if not agree(a, b, float64)]
        for one, two_ in (other or pairs)[:1]:
            values = {"pattern": shortened(pattern), "one": one, "two": two_}
            found.append(judge(not other, "prints otherwise", **values))
    return found


def agree(one, two, float64=True):
    """Whether two printed numbers are the same, but for the last digit."""
    if math.isnan(float(one)) or math.isnan(float(two)):
        return math.isnan(float(one)) and math.isnan(float(two))
    if "." not in one or not float64:
        return math.isclose(float(one), float(two), rel_tol=1e-2)
    unit = 10.0 ** decimal.Decimal(one).as_tuple().exponent
    return abs(float(one) - float(two)) <= max(1.5 * unit, 1e-6 * abs(float(one)))


def printed(run, pattern):
    """The numbers that rank 0 prints and that match; or those among the errors."""
    found = re.findall(pattern, run.said.get("rank0.out", ""))
    if not found:
        # All ranks write there: take a line that each of them prints once.
        lines = re.findall(pattern, run.said.get("errors", ""))
        found = [line for i, line in enumerate(lines) if line not in lines[:i]]
    number = r"[-+]?(\d+\.?\d*([eE][-+]?\d+)?|nan|inf)"
    numbers = [re.search(number, text) for text in found]
    return [number[0] for number in numbers if number]


def shortened(pattern):
    return pattern.split("(")[0].replace("\\s", " ").strip(" :=") or pattern
