"""What the check says: its messages, as data.

A judge returns a Finding(word, row, values), and the row gives the sentences. To add a
line, add a row here and return its Finding from the judge that knows. The printer,
--json and the tests then have it, too.
"""

import dataclasses
import re
import textwrap

from ddp_check.trace import Finding

PAGES = {
    "hangs": "docs/hangs.md",
    "gradients": 'docs/silent-errors.md, "Loss and gradients"',
    "samples": 'docs/silent-errors.md, "Batches and random numbers"',
    "numbers": 'docs/silent-errors.md, "Evaluation and log"',
    "resume": 'docs/silent-errors.md, "Stop and resume"',
}


# [name] page, what it says if the check has passed, what if not, and what may help
TEXT = r"""
# Does it start, and do the ranks train together?
[start] hangs
bad: {ranks}it fails at the start: {error}
help: {hint}{why}
[hang] hangs
bad: {ranks}it does not end within {timeout} s (--timeout)
help: {hint}{why}
[slow]
bad: not judged: everything else. A launch takes longer than {timeout} s
help: It was still computing. Use fewer steps (--steps), a smaller model or less data,
     or raise --timeout.
[ends early] hangs
bad: rank {rank} ends after {made} steps, and the others wait for it
help: All ranks need the same number of batches, and must stop together. Does one of
     them call alone what all must call, such as DDP's forward() in an evaluation?
help: {why}
[fails] hangs
bad: {ranks}it fails in step {steps}: {error}
help: {hint}{why}
[no optimizer]
bad: not judged: anything. No step of a torch optimizer ran in torchrun's processes
[spawns]
bad: not judged: anything. It starts its own ranks with torch.multiprocessing
help: The check starts the ranks with torchrun, so the script must leave that to
     torchrun.
[float32]
bad: not judged: small differences. It fails in float64: {error}
help: So it was compared in float32, where only differences above 1% count.
[only here]
bad: not judged: anything. It fails only if the check watches it: {error}
help: Without that, the same launch does not fail. Please report this.
help: {why}
[imitated]
bad: not judged: anything else. On a CPU that pretends to be a GPU, it fails: {error}
help: Either it needs real GPUs, or the error is its own.
help: {why}
[alone] gradients
ok: the ranks train together
bad: every rank trains alone
help: Most steps call neither DDP's or FSDP's forward() nor a collective. Does the
     script call init_process_group(), and wrap the model?
[not called] gradients
bad: every rank trains alone: the DDP object is not called
help: Compute each loss with the DDP object, not with the model inside it.
[finite]
bad: the weights are not finite {when}
help: Nothing else was checked. {hint}
[moves] gradients
ok: training changes the weights: {steps} steps
bad: training does not change the weights: {steps} steps
help: Is the gradient 0? Nothing else was checked.
[left] hangs
ok: no process is left
bad: processes are left after its end: {pids}
help: Does the script wait for the processes that it starts?
[address]
bad: it sets the address where the ranks meet: {address}
help: Here they met at the address that torchrun sets. With another one they may wait
     for each other in vain, or meet another job. Leave it to torchrun.
[steps] hangs
ok: all ranks make the same number of steps
bad: rank 0 makes {one} steps, rank 1 makes {two}
help: All ranks need the same number of batches. Under Join they may differ, but then so
     does the state of Adam or momentum, and the ranks drift apart.
[weights] gradients
ok: all ranks have the same weights after each step
bad: the weights of the ranks differ from step {first} on
help: {names}Is each loss computed with the DDP object, not with the model inside it? Is
     a part of the model outside of it? Is the last forward() or backward() of a step
     under no_sync()? Does one forward() serve two calls of backward(), as in a GAN? DDP
     averages only in the first. Are the learning rates the same on all ranks? Does a
     rank change weights by itself, such as an initialization from its data?
[weights meet]
bad: the weights of the ranks differ in step {first}, and are the same again in {again}
help: Is this local SGD, which averages weights now and then? Otherwise look for a step
     that is made under no_sync(), or for weights that one rank changes by itself.
[parts]
bad: not judged: weights of which each rank has a part: {names}
help: On one process they have another shape.
[same gpu] hangs
bad: all ranks of a machine use GPU 0
help: NCCL refuses that: "Duplicate GPU detected". Call
     torch.cuda.set_device(local_rank) first, where local_rank is
     int(os.environ["LOCAL_RANK"]). Torchrun does not pass --local_rank.
[sharded]
bad: not judged: weights and gradients, which FSDP1 has sharded
help: With FSDP2 (fully_shard) they are compared.
[tensor parallel]
bad: not judged: anything else, because of tensor parallelism

# What goes in
[samples] samples
ok: the ranks train on different samples
bad: all ranks train on the same samples
help: {share:.0%} of rank 0's samples are on rank 1 in the same step. Is there a sampler
     that gives each rank its own share? If each rank makes its samples from random
     numbers: is its seed the same on all ranks?
[overlap] samples
bad: the ranks have samples in common in a step
help: {share:.0%} of rank 0's samples are on rank 1, too. Is that intended, as in
     repeated augmentation?
[no samples]
bad: not judged: whether the ranks train on different samples
help: There is one step, or its samples come in the next ones, too; or the data set
     makes others each time; or the check sees no tensors of samples, neither in what a
     DataLoader yields (objects of a class of their own?) nor in what a module in
     train() mode gets.
[whole epoch] samples
bad: the ranks have samples in common in an epoch
help: At least {share:.0%} of rank 0's first epoch is in rank 1's, too. Does each rank
     go through all samples, or shuffle with a seed of its own?
[own data] samples
bad: the ranks have different data, and share its indices
help: An index means other samples on each rank, so some may never be used. Is the data
     made, shuffled or split with another seed on each rank, or without one?
[order] samples
ok: each epoch has its own order
bad: {which} the same order
help: The same batches come again after {period}. If they should be shuffled: is
     set_epoch() called, each time with another number?
[masks] samples
ok: the ranks draw different random numbers in a step (dropout, noise)
bad: all ranks draw the same random numbers in {same} of {steps} steps: {names}
help: So they drop the same units, or add the same noise, though their samples differ.
     Seed each rank differently, after the model is built.

# What comes out
[gradient] gradients
ok: {ranks} ranks: the gradient is that of one process with the same samples in {same}
     of {steps} steps: {off:.0e}
bad: {ranks} ranks: the gradient is not that of one process with the same samples:
     {off:.0e} off in step {step}
help: {scale} Is the loss a mean over the samples, not a sum, and not a mean over
     something else (tokens, pixels)? Does it compare samples with each other? Does
     everything that has weights run through the DDP object?
[later gradient] gradients
bad: {ranks} ranks: in step {first} and later ones, the gradient is not that of one
     process with the same samples: {off:.0e} off
help: {scale} The steps before are right. Does each rank update something from its own
     samples (a queue, a codebook, a running mean)? Is the loss a mean over what ranks
     may have unequal numbers of (tokens, boxes)? Does a branch begin here? Or does it
     count batches, of which one process has more (pass --batch_size {{32}})?
[buffers] gradients
bad: {ranks} ranks: these buffers follow each rank's own samples: {names}
help: From step {first} on, the gradient is not that of one process with the same
     samples: {off:.0e} off. Unless broadcast_buffers=False, DDP replaces buffers by
     rank 0's in the next forward(). Compute them from the samples of all ranks.
[buffers differ] gradients
bad: these buffers differ between ranks: {names}
help: The gradients do not show it, but a checkpoint has only rank 0's.
[uneven] gradients
bad: {ranks} ranks: in step {first} the ranks have {rows} samples
help: DDP gives each rank the same weight, so a sample counts more on a rank with fewer:
     {off:.0e}. If it matters and all ranks have as many samples, use drop_last=True.
[not replayed] gradients
bad: not judged: the gradients of {ranks} ranks in {left} of {steps} steps
help: {reason}
[alone weights] gradients
ok: one process alone trains to the same weights: {off:.0e}
bad: one process alone has a different gradient in the first step, though its samples
     are the same: {off:.0e} off
help: Does the order of the ranks' samples matter, such as rows that are gathered and
     picked by number? Does each rank make its own weights or noise?
[alone differs] gradients
bad: one process alone trains to other weights: {off:.0e} apart after step {first}
help: Its samples in each step are the same. Which of the two is right was not judged.
     Is the loss a mean over all samples of a step, on one process and on two ranks?
     Does it compare samples with each other?
[alone norms] gradients
bad: one process alone trains to other weights: {off:.0e} apart after step {first}
help: Batch norm sees only the rows of its rank. Use nn.SyncBatchNorm, if that matters.
[global batch] gradients
ok: one process trains on as many samples a step: {one:.4g}
bad: {one:.4g} samples a step on one process, {two:.4g} on two ranks: the global batch
     {how}
help: If you want the same training on any number of ranks, divide the batch size by
     their number.
[rates] gradients
bad: the learning rate depends on the number of ranks: in step {first} it is {one} on
     one process, {two} on two ranks
help: The samples of each step are the same. Does a schedule count the batches of a
     rank?
[one process]
bad: not judged: one process alone. {error}
help: {why}
[no step]
bad: not judged: {what}, where it makes no step

# Evaluation
[batch norm] numbers
bad: each rank has its own batch norm statistics
help: {detail} A checkpoint has only rank 0's, and small batches train differently.
[printed] numbers
ok: two ranks print the same {pattern} as one process: {two}
bad: two ranks do not print the {pattern} of one process: {two}, not {one}
help: The weights were the same. Is each sample counted once? Is the number summed over
     all ranks? Does it depend on how the samples are split into batches? Is an average
     of the weights kept on one rank alone?
[not printed]
bad: not judged: {pattern}
help: {reason}
[random] samples
bad: not judged: {what}
help: Two launches of the same command differ. Seed everything that is random.

# Stop and resume
[stopped] hangs
bad: after {action}, {what}
help: {why}
[signal] resume
bad: SIGTERM does not stop it: it trains to its end
help: A scheduler kills it soon after. Then all steps since the last save are lost.
[outside]
bad: not judged: what follows the first answer. It saves {path}
help: All launches share this file, and may resume from each other's. Let it save in the
     folder where it runs, or in {{out}}.
[few]
bad: not judged: stopping and resuming, which needs three steps
[again] resume
bad: launched again, it fails: {error}
help: {hint}{why}
[no rest] resume
bad: launched again, it makes {made} steps, and {left} were left
help: {detail} Does it skip batches in each epoch, train again on those before the save,
     or take the number of steps for that of epochs?
[begin] resume
bad: launched again, it starts from weights that it never had
help: Is everything loaded on all ranks, before DDP is made? Is it saved in half
     precision, or an average of the weights (EMA) in their place? Do the names fit?
     load_state_dict(strict=False) does not fail.
[all lost] resume
bad: it starts over, and loses all steps: {lost}
[lost] resume
ok: it continues after step {done} (steps lost: {lost})
bad: it continues after step {done}, and steps are lost: {lost}
help: It does not save when it gets SIGTERM.
[other samples] resume
bad: launched again, it trains on other samples than were left
help: In its step {first} it does not have the samples of that step. Are the epoch and
     the place in it restored?
[rest] resume
ok: it trains as if nothing had happened: {apart}
bad: launched again, it trains differently: {off:.0e} apart in its step {first}
help: Weights and samples were restored, and random numbers were the same. Are the
     optimizer and the scheduler? {rates}
[other noise] resume
bad: launched again, it draws other random numbers
help: On {who}, the random generator is not where it was, nor is each step seeded. Is
     its state not restored, or has something drawn since then, as a DataLoader does
     when it starts? (Its workers' seeds come from it, too.){same} {then}
[other inputs] resume
bad: launched again, it has other samples, or other noise in them
help: The random generator is where it was, but the inputs are others than were left. So
     the rest was not judged. Does it go on where it was in its data?
[saved otherwise] resume
ok: it saves the same files: {names}
bad: launched again, it saves another {name}: {off:.0e} apart
help: {parts} The weights were the same after each step. Is an average of the weights,
     or the best score, not restored?
[prints otherwise] resume
ok: launched again, it prints the same {pattern}
bad: launched again, it prints a different {pattern}: {two}, not {one}
help: Is a best score, a sum over the epoch or an average of the weights not restored?

# A failure, and two machines
[failure] hangs
ok: all ranks end, and the exit code is not 0
bad: one rank fails, and {what}
help: Does the script catch the error?
help: {why}
[machines start] samples
bad: on two machines it fails: {error}
help: {hint}{why}
[machine ranks]
bad: not judged: two machines. It fails, and may expect other numbers of ranks: {error}
help: Here each machine has one rank. If {{ranks}} in its arguments stands for the ranks
     or GPUs of a machine, pass {{local_ranks}} instead. In a configuration of
     Lightning, leave out devices and num_nodes.
[machines] samples
ok: it trains as two ranks on one machine do
bad: on two machines it trains differently from two ranks on one
help: Is LOCAL_RANK used in place of RANK, or to make a seed? Does one rank of each
     machine draw numbers, as in an evaluation?
[shared disk] samples
bad: two machines need a shared disk: {error}
help: In folders of their own, they fail. In one folder, both train.
[machines alone] gradients
bad: on two machines every rank trains alone
help: On one they train together. Does it count GPUs, as torch.cuda.device_count() > 1,
     to know whether to use DDP? Ask dist.get_world_size(). LightningCLI needs
     --trainer.num_nodes there.
[machine samples] samples
bad: on two machines, both train on the same samples
help: Does a sampler get LOCAL_RANK, or the number of GPUs of one machine? Pass
     dist.get_rank() and dist.get_world_size().
[machine batch]
bad: not judged: two machines. A step has {two} samples there, and {one} on one
help: Does the script divide the batch size by the GPUs of one machine?
[both save] resume
bad: both machines save {names}
help: On a shared disk they overwrite each other. Save if dist.get_rank() == 0.
[left out]
bad: not judged, because of a line above: {what}
"""


@dataclasses.dataclass
class Row:
    ok: str
    bad: str
    help: str
    page: str


def read_rows(text):
    text = re.sub(r"\n {5}", " ", text)  # a long line goes on
    rows = {}
    _, *parts = re.split(r"^\[(.*)\] ?(.*)\n", text, flags=re.MULTILINE)
    for name, page, body in zip(parts[::3], parts[1::3], parts[2::3]):
        said = {"ok": [], "bad": [], "help": []}
        for kind, line in re.findall(r"^(\w+): (.*)", body, re.MULTILINE):
            said[kind].append(line)
        rows[name] = Row(*map("\n".join, said.values()), page)
    return rows


ROWS = read_rows(TEXT)


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
