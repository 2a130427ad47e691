"""Sharding rules for a user's module, found by looking at what it computes; each cut is tried before it is proposed."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import ExitCode, LayoutError, PhalanxError
from phalanx.job.schema import Job
from phalanx.mesh.linear import is_linear
from phalanx.mesh.logical import full_name
from phalanx.nn.objective import CausalOutput
from phalanx.nn.probe import one_line
from phalanx.parallel.calling import call_with_batch, describe_batch
from phalanx.plan.coverage import pattern_of
from phalanx.plan.plan import Plan
from phalanx.plan.rules import matches
from phalanx.run.one_process.original_module import build_untouched
from phalanx.verify.batches import Batch, as_dtype, global_steps
from phalanx.verify.suggest_feed import fitting_batches
from phalanx.verify.suggest_flow import Cutting, Flow, find_cutting, watch
from phalanx.verify.suggest_trial import Visit, try_out

ANSWER = "suggested.json"
NUM_ROWS = 2
SMALL_HEAD = 128  # outputs: fewer are not worth a cut


@dataclass
class Suggestion:
    """`rules`: pattern -> (rule, why). `whole`: pattern of a linear layer or embedding that is left whole -> why.
    `why_none`: where no rule can be. `fed_with`: inputs that were made up, as the job has no dataset of its own.
    """

    rules: dict[str, tuple[str, str]] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    why_none: str = ""
    fed_with: str = ""


def main(payload: dict[str, Any]) -> int:
    """`payload`: job, run_dir, data_dir, plan. Writes ANSWER there."""
    job, plan = Job.model_validate_json(json.dumps(payload["job"])), Plan.from_json(payload["plan"])
    data_dir = Path(payload["data_dir"]) if payload["data_dir"] else None
    batch = global_steps(job, plan, data_dir, num_steps=1)[0][0]
    try:
        found = suggest(job, plan, batch, is_made_up=data_dir is None)
    except PhalanxError:
        raise
    except Exception as error:  # of the user's forward, in a part of it or with other features
        raise LayoutError(f"the forward of {job.model.kind} cannot be followed", why=one_line(error)) from None
    (Path(payload["run_dir"]) / ANSWER).write_text(json.dumps(asdict(found)))
    return ExitCode.OK


def suggest(job: Job, plan: Plan, batch: Batch, *, is_made_up: bool = False) -> Suggestion:
    """In float64, or where the module does not have that, in float32.

    A batch that `is_made_up` is token ids, or images; a module that takes neither is fed by its first layer.
    """
    failure = ""
    for number, fed in enumerate([batch, *(fitting_batches(_built(job, plan, "float32")) if is_made_up else ())]):
        for dtype in ("float64", "float32"):
            module = _built(job, plan, dtype)
            few = as_dtype([[{key: t[:NUM_ROWS] for key, t in fed.items()}]], getattr(torch, dtype))[0][0]
            try:
                args, kwargs = call_with_batch(module, few)
                module(*args, **kwargs)
            except LayoutError:
                if number == 0:
                    raise
                continue
            except Exception as error:
                failure = failure if number else one_line(error)  # of the batch that was given
                continue
            found = _Look(module, few).suggestion()
            return replace(found, fed_with=describe_batch(few)) if number else found
    fed_with = describe_batch({key: t[:NUM_ROWS] for key, t in batch.items()})
    own = 'give its dataset, data.source = "package.module:factory": its samples are what the forward takes'
    raise LayoutError(
        f"{job.model.kind} cannot be tried with {fed_with}" + (", which are made up" if is_made_up else ""),
        why=failure,
        fix=own if is_made_up else "the forward must run with a batch of the dataset, in evaluation mode on a CPU",
    )


def _built(job: Job, plan: Plan, dtype: str) -> nn.Module:
    module, _ = build_untouched(job, plan, dtype, materialize=True)
    _shake(module)
    return module.eval()


@torch.no_grad()
def _shake(module: nn.Module) -> None:
    """Weights that begin as zeros would hide who feeds whom."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.02 * noise.to(parameter.dtype))


@dataclass(frozen=True)
class _Group:
    columns: tuple[str, ...]
    row: str
    home: str  # the innermost module that holds them all

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.columns, self.row)


class _Look:
    """One module, and what a forward of it shows."""

    def __init__(self, module: nn.Module, batch: Batch) -> None:
        self._module, self._batch = module, batch
        self._parts = {full_name(name): part for name, part in module.named_modules()}
        self._flow: Flow = watch(module, self._call)
        self._rules: dict[str, tuple[str, str]] = {}
        self._whole: dict[str, str] = {}
        self._known: dict[Any, Cutting | str] = {}  # of a block what was found of the one like it

    def _call(self) -> Any:
        args, kwargs = call_with_batch(self._module, self._batch)
        return self._module(*args, **kwargs)

    def suggestion(self) -> Suggestion:
        for group in self._groups():
            self._propose(group)
        self._ends()
        for name, part in self._parts.items():
            if (is_linear(part) or isinstance(part, nn.Embedding)) and name not in self._rules:
                self._whole.setdefault(name, self._why_whole(name))
            if isinstance(part, nn.MultiheadAttention):
                self._whole[name] = "torch's own attention multiplies by its matrices itself"
        found = Suggestion(_by_pattern(self._rules, self._parts), {}, "" if self._rules else self._why_none())
        for name, why in self._whole.items():
            found.whole.setdefault(pattern_of(name), why)
        return found

    def _why_none(self) -> str:
        holders = {type(part).__name__ for part in self._parts.values() if list(part.parameters(recurse=False))}
        if not holders:
            return "the module has no parameters"
        if any(is_linear(part) or isinstance(part, nn.Embedding) for part in self._parts.values()):
            return ""  # of each it is said why it stays whole
        return (
            f"rules cut linear layers and embeddings, and its parameters are those of {', '.join(sorted(holders))}; "
            "parallel.dp_shard shards parameters of any module"
        )

    def _why_whole(self, name: str) -> str:
        if name in self._flow.called_often:
            return "it is called more than once in a forward"
        if name not in self._flow.outputs:
            return "a forward never calls it"
        return "no pair of layers was found in which one feeds another alone"

    # Pairs

    def _groups(self) -> list[_Group]:
        """Rows, and the columns that feed each of them and nobody else."""
        feeders = {name: self._flow.feeders(x) for name, x in self._flow.inputs.items()}
        to_result = self._flow.result_feeders()
        taken: set[str] = set()
        groups = []
        for row, feeding in feeders.items():
            columns = tuple(name for name in self._flow.outputs if name in feeding)
            if not columns or row in taken or taken & feeding or any(name not in feeders for name in columns):
                continue
            elsewhere = to_result | {n for other, names in feeders.items() if other != row for n in names}
            if elsewhere & feeding or self._is_tied((*columns, row)):
                continue
            taken |= {row, *columns}
            groups.append(_Group(columns, row, _common([*columns, row])))
        return groups

    def _is_tied(self, names: Sequence[str]) -> bool:
        own = [p for name in names for p in self._parts[name].parameters()]
        every = [p for _, p in self._module.named_parameters(remove_duplicate=False)]
        return any(sum(p is other for other in every) > 1 for p in own)

    def _propose(self, group: _Group) -> None:
        key = (
            tuple(pattern_of(name) for name in group.names),
            tuple(tuple(self._parts[name].weight.shape) for name in group.names),
        )
        first = self._known.get(key)
        if isinstance(first, _Group):
            self._copy(first, group)
            return
        if isinstance(first, str):
            self._whole |= dict.fromkeys(group.names, first)
            return
        refused = self._try(group)
        self._known[key] = refused or group  # type: ignore[assignment]
        if refused:
            self._whole |= dict.fromkeys(group.names, refused)

    def _copy(self, first: _Group, group: _Group) -> None:
        """What was found of a block, for another like it."""
        pairs = zip((*first.names, first.home), (*group.names, group.home), strict=True)
        translated = dict(pairs)
        for name, rule in list(self._rules.items()):
            inside = name == first.home or name.startswith(f"{first.home}.")
            if first.home and inside:
                self._rules.setdefault(group.home + name[len(first.home) :], rule)
            elif name in translated:
                self._rules.setdefault(translated[name], rule)

    def _try(self, group: _Group) -> str:
        """Adds the rules of a group, or says why it has none."""
        if self._drops_parts(group):
            home = pattern_of(group.home) or "the module itself"
            return f"{home} drops at random between its matrices: look again with 0 for that in model.args"
        cutting = find_cutting(self._flow, group.row, group.columns)
        if cutting is None:
            return f"what {pattern_of(group.row)} takes in depends on all features, not on those of a head alone"
        visit = self._visit(group)
        if visit.num_calls != 1:
            return f"{pattern_of(group.home)} is called {visit.num_calls} times in a forward"
        prefix = len(group.home) + 1 if group.home else 0
        trial = try_out(self._parts[group.home], [name[prefix:] for name in group.names], cutting, visit)
        if trial.refused:
            return trial.refused
        own, refused = self._surroundings(group, visit)
        if refused:
            return refused
        count = f" divide={','.join(trial.divide)}" if trial.divide else ""
        kind, why = own.pop(group.home, ("replicate", ""))
        if kind != "replicate" or count:
            told = (
                f"{', '.join(trial.divide)} count{'s' if len(trial.divide) == 1 else ''} what is cut" if count else ""
            )
            if self._rules.get(group.home):
                return f"{pattern_of(group.home)} has another cut inside"
            self._rules[group.home] = (kind + count, "; ".join(filter(None, (why, told))))
        self._rules |= {name: rule for name, rule in own.items() if name not in self._rules}
        for name, text in zip(group.columns, cutting.columns, strict=True):
            self._rules[name] = (text, f"{_short(group, name)} feeds {_short(group, group.row)} alone, {cutting.why}")
        feeding = ", ".join(_short(group, name) for name in group.columns)
        self._rules[group.row] = (cutting.row, f"takes what {feeding} put{'s' if len(group.columns) == 1 else ''} out")
        return ""

    def _drops_parts(self, group: _Group) -> bool:
        """Whether a dropout layer may run between columns and row, where masks of parts are not those of the whole."""
        dropping = [part for part in self._parts[group.home].modules() if _drops(part)]
        cut = {self._parts[name] for name in group.names}
        if any(cut & set(part.modules()) for part in dropping):
            return True  # attention that drops by itself, say: where in its forward is out of sight
        opened: set[str] = set()
        between: list[nn.Module] = []

        def drop(part: nn.Module, *_: object) -> None:
            between.extend([part] if opened else [])

        columns = [(self._parts[name], functools.partial(opened.add, name)) for name in group.columns]
        handles = [part.register_forward_hook(lambda *_, add=add: add()) for part, add in columns]  # type: ignore[misc]
        handles += [self._parts[group.row].register_forward_pre_hook(lambda *_: opened.clear())]
        handles += [part.register_forward_hook(drop) for part in dropping]
        try:
            self._call()
        finally:
            for handle in handles:
                handle.remove()
        return bool(between)

    def _visit(self, group: _Group) -> Visit:
        """A forward in which only this group's layers, and what enters their home, are cut off."""
        visit, home = Visit(), self._parts[group.home]

        def enter(part: nn.Module, args: Any, kwargs: Any) -> Any:
            visit.num_calls += 1
            visit.args = tuple(_freed(value) for value in args)
            visit.kwargs = {key: _freed(value) for key, value in kwargs.items()}
            args, kwargs = list(args), dict(kwargs)
            for holder, key in itertools.chain(((args, i) for i in range(len(args))), ((kwargs, k) for k in kwargs)):
                if _are_activations(holder[key]):
                    visit.entered = holder[key] = holder[key].detach().requires_grad_()
                    break
            return tuple(args), kwargs

        def leave(part: nn.Module, args: Any, output: Any) -> None:
            visit.output = output

        def column(part: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            visit.column_inputs.append(args[0])
            return output.detach().requires_grad_()

        def row(part: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            visit.row_input, visit.row_output = args[0], output.detach()
            return output.detach().requires_grad_()

        handles = [self._parts[name].register_forward_hook(column) for name in group.columns]
        handles += [self._parts[group.row].register_forward_hook(row)]
        handles += [home.register_forward_pre_hook(enter, with_kwargs=True), home.register_forward_hook(leave)]
        try:
            self._call()
        finally:
            for handle in handles:
                handle.remove()
        return visit

    def _surroundings(self, group: _Group, visit: Visit) -> tuple[dict[str, tuple[str, str]], str]:
        """Rules of the home, and of parameters in it that are not cut; or why there is none that would do."""
        home = self._parts[group.home]
        cut = {id(p) for name in group.names for p in self._parts[name].parameters()}
        left = {n: p for n, p in home.named_parameters() if id(p) not in cut and p.requires_grad}
        outputs = list(_tensors(visit.output))
        passes = visit.entered is None or _reached(outputs, [visit.entered])[0]
        between = dict(zip(left, _reached([visit.row_input], list(left.values())), strict=True))
        before = dict(zip(left, _reached(visit.column_inputs, list(left.values())), strict=True))
        after = dict(zip(left, _reached(outputs, list(left.values())), strict=True))
        own: dict[str, tuple[str, str]] = {}
        is_region = bool(group.home) and not passes
        for name in left:
            owner = full_name(".".join(filter(None, (group.home, name.rpartition(".")[0]))))
            sees_part = between[name] or (before[name] and is_region)
            if sees_part and after[name]:
                return {}, f"{name} of {pattern_of(group.home)} is used before and after the cut"
            if between[name] and not is_region:
                own[owner] = ("partial", "each rank puts its own part through it")
            if is_region and not sees_part and after[name]:
                if owner == group.home:
                    return {}, f"{name} of {pattern_of(group.home)} is used behind the cut"
                own[owner] = ("replicate", "it comes behind the row, where every rank has all")
        mixed = [name for name in left if own.get(_owner(group, name), ("",))[0] == "partial" and not between[name]]
        used = [name for name in mixed if after[name] or before[name]]
        if used:
            return {}, f"{used[0]} of {pattern_of(group.home)} is used outside the cut, and others beside it within"
        if is_region:
            own[group.home] = ("region", "what enters it goes to these layers alone")
        return own, ""

    # Embedding and head

    def _ends(self) -> None:
        heads = self._heads()
        ids = self._batch.get("inputs")
        for name, seen in self._flow.looked_up.items():
            part = self._parts[name]
            others = [n for n in self._sharing(part.weight) if n != name]
            is_input = ids is not None and seen.shape == ids.shape and bool((seen == ids).all())
            if not is_input:
                self._whole[name] = "it does not look up the tokens of the batch"
            elif name in self._flow.called_often or (part.max_norm or part.sparse or part.scale_grad_by_freq):
                self._whole[name] = "it is called more than once, or has an option that parts do not have"
            elif any(other not in heads for other in others):
                self._whole[name] = f"its weight is also that of {others[0]}, which is no head"
            else:
                self._rules[name] = ("vocab", "it looks up the tokens")
                self._rules |= {other: heads[other] for other in others}
        rows = {self._parts[name].weight.shape[0] for name in self._flow.looked_up if name in self._rules}
        for name, rule in heads.items():
            weight = self._parts[name].weight
            tied_to_whole = [n for n in self._sharing(weight) if n != name and n not in self._rules]
            if name in self._rules or tied_to_whole:
                continue
            if weight.shape[0] >= SMALL_HEAD or weight.shape[0] in rows:
                self._rules[name] = rule
            else:
                self._whole[name] = f"a head of {weight.shape[0]} outputs is not worth a cut"

    def _heads(self) -> dict[str, tuple[str, str]]:
        """Linear layers whose output the module returns."""
        found, result = {}, self._flow.result
        if isinstance(result, CausalOutput):
            holders = [n for n in self._parts if getattr(self._parts[n], "weight", None) is result.head_VD]
            return {
                name: ("vocab", "the objective multiplies by it")
                for name in holders
                if name not in self._flow.outputs
                or is_linear(self._parts[name])
                or isinstance(self._parts[name], nn.Embedding)
            }
        consumed = {n for x in self._flow.inputs.values() for n in self._flow.feeders(x)}
        for name, output in self._flow.outputs.items():
            if name in self._rules or name in consumed or not isinstance(self._parts[name], nn.Linear):
                continue
            if output is result:
                found[name] = ("vocab", "the module returns its logits")
            elif any(leaf is output for leaf in _tensors(result)):
                found[name] = ("column gather", "its logits are a part of what the module returns")
        return found

    def _sharing(self, weight: torch.Tensor) -> list[str]:
        named = self._module.named_parameters(remove_duplicate=False)
        return [full_name(name).rpartition(".")[0] for name, p in named if p is weight]


def _drops(part: nn.Module) -> bool:
    probability = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else getattr(part, "dropout", 0.0)
    return isinstance(probability, float) and probability > 0


def _owner(group: _Group, name: str) -> str:
    return full_name(".".join(filter(None, (group.home, name.rpartition(".")[0]))))


def _short(group: _Group, name: str) -> str:
    return name[len(group.home) + 1 :] if group.home else name


def _common(names: Sequence[str]) -> str:
    """The innermost module that holds all of `names`."""
    paths = [name.split(".")[:-1] for name in names]
    same = [steps[0] for steps in itertools.takewhile(lambda s: len(set(s)) == 1, zip(*paths, strict=False))]
    return ".".join(same)


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _freed(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _are_activations(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim >= 2


def _reached(outputs: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]) -> list[bool]:
    """Which of `inputs` any of `outputs` depends on."""
    roots = [out for out in outputs if out is not None and out.requires_grad]
    if not roots or not inputs:
        return [False] * len(inputs)
    grads = torch.autograd.grad(
        [out.square().sum() for out in roots], list(inputs), allow_unused=True, retain_graph=True
    )
    return [grad is not None and bool(grad.any()) for grad in grads]


def _by_pattern(rules: Mapping[str, tuple[str, str]], parts: Mapping[str, nn.Module]) -> dict[str, tuple[str, str]]:
    """One line for all blocks where they agree, and no other module is named so; else a line for each."""
    found: dict[str, tuple[str, str]] = {}
    for name, rule in rules.items():
        for pattern in _patterns(name):
            if {rules[other][0] if other in rules else "" for other in parts if matches(pattern, other)} == {rule[0]}:
                found.setdefault(pattern, rule)
                break
    return found


def _patterns(name: str) -> Iterator[str]:
    """layers.0.experts.1 -> layers.*.experts.*, layers.*.experts.1, layers.0.experts.1."""
    steps = name.split(".")
    numbers = [place for place, step in enumerate(steps) if step.isdigit()]
    for kept in range(len(numbers) + 1):
        starred = set(numbers[: len(numbers) - kept])
        yield ".".join("*" if place in starred else step for place, step in enumerate(steps))
