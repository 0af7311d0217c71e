"""What is wrong with a script, by the notes of its runs, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from . import compare
from .compare import Apart, Run

# How far two runs whose sums have another order may be apart, as a part of what the training has moved.
_LAST_BITS = 1e-3
# How far low precision may bring them apart.
_LOW_PRECISION = 0.05
# The agents' exit codes: of one that leaves, and of one whose job has failed.
LEFT = 3


@dataclass(frozen=True)
class Finding:
    """Something about the script that a person should know."""

    what: str
    advice: str
    # FILE:LINE of the script, where that is known.
    where: str = ""
    # Whether the script is safe nevertheless.
    safe: bool = False


def of_run(run: Run, leaving: str | None, longest: float) -> Iterator[Finding]:
    """What one run shows. leaving: the node that leaves. longest: seconds between two steps that are no danger."""
    errors = list(_ends(run, leaving))
    yield from errors
    if not run.of("enters"):
        if not errors:
            yield Finding(
                "the script has ended, and has entered neither an elastic.Session nor an elastic.Loop",
                "only these are checked: docs/pytorch-sessions.md says how a training loop becomes one",
            )
        return
    if broken := compare.not_finite(run):
        yield Finding(
            f"the loss of step {broken['step']} is {broken['loss']} on rank {broken['rank']}",
            "train with numbers that stay finite: nothing else can be compared",
        )
        return
    yield from _of_group(run)
    yield from _of_script(run, longest)


def _ends(run: Run, leaving: str | None) -> Iterator[Finding]:
    for one in run.of("error")[:1]:
        what = one["message"].strip().rstrip(".")[:1000]
        yield Finding(f"with {run.title} the script ends by {what}", "correct this, and check again", one["where"])
    if run.of("error"):
        return
    for node, where in run.stuck.items():
        state = "trained" if run.of("enters") else "entered a session or loop"
        done = f"it had done {run.last()} steps" if run.of("step") else f"it had not {state}"
        yield Finding(
            f"the script had not ended after {run.seconds:.0f} s, and {done} ({node})",
            "end it after its last step; if it only needs longer, give the check a --timeout",
            where,
        )
    if run.stuck:
        return
    for node, code in run.codes.items():
        if code != (LEFT if node == leaving else 0):
            cause = run.causes.get(node, "").rstrip(".")[:500]
            yield Finding(
                f"with {run.title} {node}'s agent ended with exit code {code}{': ' if cause else ''}{cause}",
                f"correct this; all ranks must call the same in the same order. {node}.log in the run's folder has more",
                next(iter(run.crashed.values()), ""),
            )
            return


def _of_group(run: Run) -> Iterator[Finding]:
    apart = compare.ranks_apart(run)
    if apart:
        step, one, other, parameter = apart
        yield Finding(
            f"after step {step} the workers of {one} and {other} have different numbers in {parameter}",
            "change what is in the state alike on all ranks; in a Loop, call mean_gradients for each model before its "
            "optimizer's step, and seed what is drawn by step_number, not by rank",
        )
    for what in compare.steps_done_again(run):
        yield Finding(what, "this is a fault of elastic_agent: please report it, with the logs")
    if wrong := compare.wrong_samples(run):
        yield Finding(wrong, "take all batches from session.steps, and give the loader only the session's sampler")
    for node in compare.lost_processes(run):
        yield Finding(
            f"the worker of {node} lost its process in a change of the group, and was started again",
            "leave init_process_group and DistributedDataParallel out, and do what takes long between two steps in `with "
            "session.aside():`",
        )


def _of_script(run: Run, longest: float) -> Iterator[Finding]:
    for one in run.of("outside"):
        name = one["what"].rpartition(".")[2]
        given = f"{one['argument']}={name}" if one["argument"] else f"state=elastic.State({name}={name})"
        yield Finding(
            f"{one['what']} ({one['type']}) changes during training and is not part of the state: a worker that joins "
            "would begin with its own",
            f"give it to the session by {given}, or to the State of the loop",
            one["where"],
        )
    for one in run.of("gradient")[:1]:
        yield Finding(
            "the gradient is changed after a batch that is not the last of its step: the result depends on the number "
            "of ranks",
            "clip by session.clip(norm), or only if session.step_is_complete",
            one["where"],
        )
    for one in run.of("own step")[:1]:
        yield Finding(
            "the script calls the optimizer's step() itself: each step is applied twice",
            "leave it out: session.step() does it, for all ranks or for none",
            one["where"],
        )
    pause = compare.longest_pause(run)
    if pause and pause["seconds"] > longest:
        yield Finding(
            f"{pause['seconds']:.0f} s passed between steps {pause['step']} and {pause['step'] + 1}: if a node joins "
            "meanwhile, this worker loses its process (quiesce_timeout)",
            "do what takes long in `with session.aside():`, or by session.evaluate(…)",
            pause["where"],
        )


def tolerance(run: Run, reference: Run) -> float:
    """How far two runs may be apart: not at all if both add in the same order."""
    if run.fact("bits") and reference.fact("bits"):
        return 0.0
    return max(_LAST_BITS, 16 * run.fact("eps", 0.0))


def is_comparable(run: Run) -> bool:
    """Whether the script's result is meant to be the same for any number of ranks."""
    return run.fact("kind") == "Session" and run.fact("fixed")


def why_not_comparable(run: Run) -> Finding:
    """Says what is not compared."""
    why = "steps grow with the group (rank_batch)" if run.fact("kind") == "Session" else "a Loop's data are its own"
    return Finding(
        f"the result may depend on the number of ranks, because {why}",
        "so only the ranks of each run were compared with each other",
        safe=True,
    )


def apart(run: Run, reference: Run) -> Apart | None:
    """The first step after which the two trainings are not the same."""
    most = tolerance(run, reference)
    return next((one for one in compare.steps_apart(run, reference) if one.far > most), None)


def of_length(run: Run, reference: Run) -> Iterator[Finding]:
    """Runs end after the same step."""
    if run.last() != reference.last():
        yield Finding(
            f"with {run.title} the training ended after {run.last()} steps, with {reference.title} after "
            f"{reference.last()}",
            "end it by epochs, or by what is the same for any number of ranks, such as session.step_number",
        )


def not_deterministic(found: Apart) -> Finding:
    """Two equal runs are apart."""
    return Finding(
        f"two equal runs on 1 rank differ from step {found.step} on, most in {found.parameter}: the script is not "
        "repeatable, so the check cannot tell what else changes its result",
        "draw no random numbers of its own that are not seeded, as by numpy.random.default_rng(), and read no clock",
    )


def depends_on_ranks(run: Run, found: Apart, one_rank: Run, *, seeded: bool) -> Finding:
    """The same pieces of a step give another result on several ranks."""
    drawn = next((note["of"] for note in (*run.of("random"), *one_rank.of("random"))), None)
    causes = "such as the loader's rank, own random numbers, or a value that ranks do not share"
    advice = f"find what a rank does in another way than one alone, {causes}"
    if not seeded:
        advice = (
            "each rank draws random numbers of its own, for example for its data, before the session begins: call "
            "torch.manual_seed (and those of numpy and random) first"
        )
    if drawn:
        advice = f"the loop draws from {drawn}, which is each rank's own: draw torch's numbers, which the session seeds"
    return Finding(
        f"the result depends on the number of ranks: with {run.title} it differs from step {found.step} on, most in "
        f"{found.parameter}",
        advice,
    )


def result(run: Run, reference: Run) -> str:
    """How a run compares with another, in a few words."""
    if found := apart(run, reference):
        return f"the parameters differ from step {found.step} on"
    bits = ", to the last bit" if tolerance(run, reference) == 0.0 else ""
    return f"the same parameters{bits}, and each sample once"


def is_a_sum() -> Finding:
    """The loss is no mean."""
    return Finding(
        "the loss is the sum over the batch, not its mean: the gradient depends on the number of ranks",
        "take the mean, or call session.backward(loss, count=…) with the number of what it sums over",
    )


def depends_on_cut(run: Run, reference: Run, found: Apart) -> Finding:
    """Only how steps are cut into batches makes a difference."""
    causes = [*run.fact("norms", []), *(["random numbers, as of Dropout"] if run.of("draws") else [])]
    far = max(one.far for one in compare.steps_apart(run, reference))
    what = (
        f"the result depends on how a step is cut into batches: from step {found.step} on, by up to {far:.0%} of what "
        "the training moves"
    )
    if not causes and far > _LOW_PRECISION:
        return Finding(
            f"{what}. So it depends on the number of ranks",
            "let the loss be a mean over samples. Over tokens, call session.backward(loss, count=tokens); over pairs of "
            "samples, session.gather(…)",
        )
    return Finding(
        f"{what}. The cause: {' and '.join(causes) or 'low precision'}",
        "with equal batches any number of ranks gives the same result, so the script is safe",
        safe=True,
    )


def after_changes(found: Apart) -> Finding:
    """A run with deaths, joins and leaves is not the same as one without."""
    return Finding(
        f"after a worker was killed, a node left and another joined, the training is another: from step {found.step} on, "
        f"most in {found.parameter}",
        "something that steps depend on is not part of the state, such as a count or an average in a variable of the "
        "script: give it to the session as state=elastic.State(…), or use session.step_number",
    )


def too_short(run: Run, missing: list[str]) -> Finding:
    """Not all changes were tried."""
    return Finding(
        f"the training ends after {run.last()} steps, before a node could {' and '.join(missing)}",
        "let it train for more epochs, or with smaller batches",
        safe=True,
    )
