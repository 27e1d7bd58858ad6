"""What the check says: its messages, as data.

A judge returns a Finding(word, row, values), and the row gives the sentences. To add a
line, add a row here and return its Finding from the judge that knows. The printer,
--json and the tests then have it, too.
"""

import dataclasses
import textwrap

from ddp_check.trace import Finding

PAGES = {
    "hangs": "docs/hangs.md",
    "gradients": 'docs/silent-errors.md, "Loss and gradients"',
    "samples": 'docs/silent-errors.md, "Batches and random numbers"',
    "numbers": 'docs/silent-errors.md, "Evaluation and log"',
    "resume": 'docs/silent-errors.md, "Stop and resume"',
}


@dataclasses.dataclass
class Row:
    """A line: what it says if the check has passed, what if not, and where to look."""

    ok: str
    bad: str
    help: str = ""
    page: str = ""


ROWS = {
    # Does it start, and do the ranks train together?
    "start": Row("", "it fails at the start: {error}", "{hint}{why}", "hangs"),
    "hang": Row(
        "", "it does not end within {timeout} s (--timeout)", "{hint}{why}", "hangs"
    ),
    "slow": Row(
        "",
        "not judged: everything else. A launch takes longer than {timeout} s",
        "It was still computing. Use fewer steps (--steps 20), a smaller model or less "
        "data, or raise --timeout.",
    ),
    "fails": Row("", "it fails after {steps} steps: {error}", "{why}", "hangs"),
    "no optimizer": Row(
        "",
        "not judged: anything. No step of a torch optimizer ran in torchrun's "
        "processes",
    ),
    "spawns": Row(
        "",
        "not judged: anything. It starts its own ranks with torch.multiprocessing",
        "The check starts the ranks with torchrun, so the script must leave that to "
        "torchrun.",
    ),
    "float32": Row(
        "",
        "not judged: small differences. It fails in float64: {error}",
        "So it was compared in float32, where only differences above 1% count.",
    ),
    "imitated": Row("", "not judged: {error}", "It needs real GPUs.\n{why}"),
    "alone": Row(
        "the ranks train together",
        "every rank trains alone",
        "Most steps call neither DDP's or FSDP's forward() nor a collective. Does the "
        "script call init_process_group(), and wrap the model?",
        "gradients",
    ),
    "not called": Row(
        "",
        "every rank trains alone: the DDP object is not called",
        "Compute each loss with the DDP object, not with the model inside it.",
        "gradients",
    ),
    "finite": Row(
        "", "the weights are not finite {when}", "Nothing else was checked. {hint}"
    ),
    "moves": Row(
        "training changes the weights: {steps} steps",
        "training does not change the weights: {steps} steps",
        "Is the gradient 0? Nothing else was checked.",
        "gradients",
    ),
    "left": Row(
        "no process is left",
        "processes are left after its end: {pids}",
        "Does the script wait for the processes that it starts?",
        "hangs",
    ),
    "address": Row(
        "",
        "it sets the address where the ranks meet: {address}",
        "Here they met at the address that torchrun sets. With another one they may "
        "wait for each other in vain, or meet another job. Leave it to torchrun.",
    ),
    "steps": Row(
        "all ranks make the same number of steps",
        "rank 0 makes {one} steps, rank 1 makes {two}",
        "All ranks need the same number of batches. Under Join they may differ, but "
        "then so does the state of Adam or momentum, and the ranks drift apart.",
        "hangs",
    ),
    "weights": Row(
        "all ranks have the same weights after each step",
        "the weights of the ranks differ from step {first} on",
        "Is each loss computed with the DDP object, not with the model inside it? Are "
        "the learning rates the same on all ranks? Does one rank change weights by "
        "itself?",
        "gradients",
    ),
    "same gpu": Row(
        "",
        "all ranks of a machine use GPU 0",
        'NCCL refuses that: "Duplicate GPU detected". Call '
        "torch.cuda.set_device(local_rank) first, where local_rank is "
        'int(os.environ["LOCAL_RANK"]). Torchrun does not pass --local_rank.',
        "hangs",
    ),
    "sharded": Row(
        "",
        "not judged: weights and gradients, which FSDP1 has sharded",
        "With FSDP2 (fully_shard) they are compared.",
    ),
    "tensor parallel": Row(
        "", "not judged: anything else, because of tensor parallelism"
    ),
    # What goes in
    "samples": Row(
        "the ranks train on different samples",
        "all ranks train on the same samples",
        "{share:.0%} of rank 0's samples are on rank 1 in the same step. Is there a "
        "sampler that gives each rank its own share?",
        "samples",
    ),
    "overlap": Row(
        "",
        "the ranks have samples in common in a step",
        "{share:.0%} of rank 0's samples are on rank 1, too. Is that intended, as in "
        "repeated augmentation?",
        "samples",
    ),
    "no samples": Row(
        "",
        "not judged: whether the ranks train on different samples",
        "The samples do not change from step to step, or no DataLoader and no module "
        "in train() mode gets any.",
    ),
    "whole epoch": Row(
        "",
        "the ranks have samples in common in an epoch",
        "{share:.0%} of rank 0's first epoch is in rank 1's, too. Does each rank go "
        "through all samples, or shuffle with a seed of its own?",
        "samples",
    ),
    "own data": Row(
        "",
        "the ranks have different data, and share its indices",
        "Sample 0 differs between the ranks, so some samples may never be used. Is the "
        "data made, sorted or split with a different seed on each rank?",
        "samples",
    ),
    "order": Row(
        "each epoch has its own order",
        "{which} the same order",
        "The same batches come again after {steps} steps. If they should be shuffled: "
        "is set_epoch() called?",
        "samples",
    ),
    "unseeded": Row(
        "",
        "it shuffles or splits data before the first step, without a seed",
        "Ranks may draw different splits. Call torch.manual_seed() first, with the "
        "same seed on all ranks.",
        "samples",
    ),
    "masks": Row(
        "the ranks draw different random numbers (dropout, noise)",
        "all ranks draw the same random numbers: {names}",
        "So they drop the same units, or add the same noise, though their samples "
        "differ. Seed each rank differently, after the model is built.",
        "samples",
    ),
    # What comes out
    "gradient": Row(
        "{ranks} ranks: the gradient is that of one process with the same samples in "
        "{same} of {steps} steps: {off:.0e}",
        "{ranks} ranks: the gradient is not that of one process with the same samples: "
        "{off:.0e} off in step {first}",
        "{scale} Is the loss a mean over the samples, not a sum, and not a mean over "
        "something else (tokens, pixels)? Does it compare samples with each other? "
        "Does everything that has weights run through the DDP object?",
        "gradients",
    ),
    "later gradient": Row(
        "",
        "{ranks} ranks: from step {first} on, the gradient is not that of one process "
        "with the same samples: {off:.0e} off",
        "{scale} The steps before are right. Does each rank update something from its "
        "own samples (a queue, a codebook, a running mean)? Is the loss a mean over "
        "what ranks may have unequal numbers of (tokens, boxes)? Or does a branch "
        "begin here?",
        "gradients",
    ),
    "buffers": Row(
        "",
        "{ranks} ranks: these buffers follow each rank's own samples: {names}",
        "From step {first} on, the gradient is not that of one process with the same "
        "samples: {off:.0e} off. DDP replaces buffers by rank 0's in the next "
        "forward(). Compute them from the samples of all ranks.",
        "gradients",
    ),
    "buffers differ": Row(
        "",
        "these buffers differ between ranks: {names}",
        "The gradients do not show it, but only rank 0's are saved.",
        "gradients",
    ),
    "uneven": Row(
        "",
        "{ranks} ranks: in step {first} the ranks have {rows} samples",
        "DDP gives each rank the same weight, so a sample counts more on a rank with "
        "fewer: {off:.0e}. Use drop_last=True if it matters.",
        "gradients",
    ),
    "not replayed": Row(
        "", "not judged: the gradients of {ranks} ranks", "{reason}", "gradients"
    ),
    "alone weights": Row(
        "one process alone trains to the same weights: {off:.0e}",
        "one process alone has a different gradient in the first step, though its "
        "samples are the same: {off:.0e} off",
        "Does the order of the ranks' samples matter, such as rows that are gathered "
        "and picked by number? Does each rank make its own weights or noise?",
        "gradients",
    ),
    "alone differs": Row(
        "",
        "one process alone trains to other weights: {off:.0e} apart after step {first}",
        "Its samples in each step are the same. Which of the two is right was not "
        "judged. Is the loss a mean over all samples of a step, on one process and on "
        "two ranks? Does it compare samples with each other?",
        "gradients",
    ),
    "global batch": Row(
        "one process trains on as many samples a step: {one:.4g}",
        "{one:.4g} samples a step on one process, {two:.4g} on two ranks: the global "
        "batch {how}",
        "If you want the same training on any number of ranks, divide the batch size "
        "by their number.",
        "gradients",
    ),
    "rates": Row(
        "",
        "the learning rate depends on the number of ranks: in step {first} it is {one} "
        "on one process, {two} on two ranks",
        "The samples of each step are the same. Does a schedule count the batches of a "
        "rank?",
        "gradients",
    ),
    "one process": Row("", "not judged: one process alone. {error}", "{why}"),
    "no step": Row("", "not judged: {what}, where it makes no step"),
    # Evaluation
    "batch norm": Row(
        "",
        "each rank has its own batch norm statistics",
        "{detail} Only rank 0's are saved, and small batches train differently.",
        "numbers",
    ),
    "printed": Row(
        "two ranks print the same {pattern} as one process: {two}",
        "two ranks do not print the {pattern} of one process: {two}, not {one}",
        "The weights were the same. Is each sample counted once? Is the number summed "
        "over all ranks? Does it depend on how the samples are split into batches?",
        "numbers",
    ),
    "not printed": Row("", "not judged: {pattern}", "{reason}"),
    "random": Row(
        "",
        "not judged: {what}",
        "Two launches of the same command differ. Seed everything that is random.",
        "samples",
    ),
    # Stop and resume
    "stopped": Row("", "after {action}, the ranks do not end", "{why}", "hangs"),
    "signal": Row(
        "",
        "SIGTERM does not stop it: it trains to its end",
        "A scheduler kills it soon after. Then all steps since the last save are lost.",
        "resume",
    ),
    "outside": Row(
        "",
        "not judged: what follows the first answer. It saves {path}",
        "All launches share this file, and may resume from each other's. Let it save "
        "in the folder where it runs, or in {{out}}.",
    ),
    "few": Row("", "not judged: stopping and resuming, which needs three steps"),
    "again": Row("", "launched again, it fails: {error}", "{hint}{why}", "resume"),
    "no rest": Row(
        "",
        "launched again, it makes {made} steps, and {left} were left",
        "{detail} Does it skip batches in each epoch, or take the number of steps for "
        "that of epochs?",
        "resume",
    ),
    "begin": Row(
        "",
        "launched again, it starts from weights that it never had",
        "Is everything loaded on all ranks, before DDP is made? Is it saved in half "
        "precision?",
        "resume",
    ),
    "all lost": Row("", "it starts over: all {lost} steps are lost", "", "resume"),
    "lost": Row(
        "it continues after step {done} ({lost} steps lost)",
        "it continues after step {done}: {lost} steps are lost",
        "It does not save when it gets SIGTERM.",
        "resume",
    ),
    "other samples": Row(
        "",
        "launched again, it trains on other samples than were left",
        "In its step {first} it does not have the samples of that step. Are the epoch "
        "and the place in it restored?",
        "resume",
    ),
    "rest": Row(
        "it trains as if nothing had happened: {apart}",
        "launched again, it trains differently: {off:.0e} apart in its step {first}",
        "Weights and samples were restored, and random numbers were the same. Are the "
        "optimizer and the scheduler? {rates}",
        "resume",
    ),
    "other noise": Row(
        "",
        "launched again, it draws other random numbers",
        "The random generator is not restored on {who}, nor is each step seeded. (If "
        "DataLoader workers draw them: their seed comes from it.){same} {then}",
        "resume",
    ),
    "saved otherwise": Row(
        "it saves the same files: {names}",
        "launched again, it saves another {name}: {off:.0e} apart",
        "{parts} The weights were the same after each step. Is an average of the "
        "weights, or the best score, not restored?",
        "resume",
    ),
    "prints otherwise": Row(
        "launched again, it prints the same {pattern}",
        "launched again, it prints a different {pattern}: {two}, not {one}",
        "Is a best score, a sum over the epoch or an average of the weights not "
        "restored?",
        "resume",
    ),
    # A failure, and two machines
    "failure": Row(
        "all ranks end, and the exit code is not 0",
        "one rank fails, and {what}",
        "Does the script catch the error?\n{why}",
        "hangs",
    ),
    "machines start": Row(
        "",
        "on two machines it fails: {error}",
        "Is RANK used in place of LOCAL_RANK, or LOCAL_RANK in place of RANK?\n"
        "{hint}{why}",
        "samples",
    ),
    "machines": Row(
        "it trains as two ranks on one machine do",
        "on two machines it trains differently from two ranks on one",
        "Is LOCAL_RANK used in place of RANK, or to make a seed?",
        "samples",
    ),
    "shared disk": Row(
        "",
        "two machines need a shared disk: {error}",
        "In folders of their own, they fail. In one folder, both train.",
        "samples",
    ),
    "machine batch": Row(
        "",
        "not judged: two machines. A step has {two} samples there, and {one} on one",
        "Does the script divide the batch size by the GPUs of one machine?",
    ),
    "both save": Row(
        "",
        "both machines save {names}",
        "On a shared disk they overwrite each other. Save if dist.get_rank() == 0.",
        "resume",
    ),
    "lines": Row("", "these lines of {name} did not run on two ranks: {lines}"),
    "left out": Row("", "not judged, because of a line above: {what}"),
}


def line(word, row, **values):
    return Finding(word, row, values)


def judge(passed, row, word="WRONG", **values):
    return Finding("ok" if passed else word, row, values)


def sentences(finding):
    """(the line, what it means if it is not ok, the page) of a Finding."""
    row = ROWS[finding.row]
    if finding.word == "ok":
        return row.ok.format(**finding.values), "", ""
    page = PAGES.get(row.page, "") if finding.word in ("WRONG", "LOSES") else ""
    values = finding.values
    return row.bad.format(**values), row.help.format(**values).strip(), page


def not_judged(finding):
    """Whether it says that something was not judged. Then it is not counted as done."""
    line, help, _ = sentences(finding)
    return finding.word == "note" and "not judged" in f"{line} {help}"


def as_text(finding):
    """The lines that are printed."""
    line, help, page = sentences(finding)
    lines = [f"  {finding.word:<6} {line}"]
    more = []
    for text in help.splitlines():
        more += textwrap.wrap(text, 78) if len(text) > 78 else [text]
    if page:
        more.append(f"More: {page}")
    return "\n".join([*lines, *[f"         {text}" for text in more]])


def as_record(finding):
    """For --json."""
    line, help, page = sentences(finding)
    record = {"word": finding.word, "row": finding.row, "values": finding.values}
    return record | {"text": line, "help": help, "page": page}
