"""Explains gradients whose numbers show nothing, by where the backward goes wrong.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.verify.compare import TraceComparison
from phalanx.verify.judged_layout import JudgedLayout

LOST_KEY_GRADIENTS_CAUSE = (
    "the loss agrees, and gradients of keys or values do not: what other ranks' tokens owe to this"
    " rank's keys and values does not come back to it"
)
# A rank makes the gradients of its queries of what it has: they owe nothing to what comes back.
WRONG_ATTENTION_BACKWARD_CAUSE = (
    "the loss agrees, and gradients of queries differ as those of keys and values do, so that not"
    " just what other ranks owe to keys is missing: the backward of attention is not that of its"
    " forward: tokens attend to other tokens in it (later ones, or others than a mask of documents"
    " or of a window shows), its softmax is of other sums, or what it is given or hands on is that"
    " of other tokens or heads"
)
WRONG_SCORES_GRADIENT_CAUSE = (
    "gradients of queries and keys differ, and those of values agree: the backward of the softmax"
    " goes wrong, whose sum over a row is that over all keys that its query attends to: that of a"
    " block of keys, or of another output"
)

KEYS_AND_VALUES = (("k", "keys"), ("v", "values"))


class BackwardDiagnosis:
    """Explains gradients by the first tensor that the backward meets and that is wrong."""

    def __init__(self, compared: TraceComparison, layout: JudgedLayout) -> None:
        self._compared, self._trace, self._layout = compared, compared.trace, layout
        self._tp, self._cp = layout.tp, layout.cp

    def explain(self, kind: str, off: Sequence[str], step: int) -> str:
        """The cause of gradients whose numbers show nothing, by where the backward goes wrong."""
        num_tensors = len(self._trace.order)
        if special := self._trace.describe_first_special_step(step):
            return (
                f"{len(off)} of {num_tensors} tensors differ, and in the steps before all agree:"
                f" this is the first step that has {special}, and what is computed otherwise for"
                " that is wrong, or something of the step before is left in gradients"
            )
        # What is nearer to the loss owes nothing to keys.
        if self._cp > 1 and step == 0 and _is_key_or_value_weight(off[-1]):
            return _explain_gradients_of_attention(off)
        if cause := self._explain_right_gradients_beyond(kind, off):
            return cause
        if len(off) < num_tensors:
            return (
                f"{len(off)} of {num_tensors} tensors differ: the backward goes wrong where it"
                f" meets {off[-1]}{self._describe_backward_features()}"
            )
        return self._explain_all_gradients(step)

    def _explain_right_gradients_beyond(self, kind: str, off: Sequence[str]) -> str:
        """The cause where the backward meets right gradients after the first wrong one; "" where it
        does not, or where that says nothing of this layout."""
        num_tensors = len(self._trace.order)
        if self._layout.is_plainly_data_parallel and self._do_gradients_beyond_agree(kind, off):
            return (
                f"{len(off)} of {num_tensors} tensors differ, and those that the backward meets"
                " later agree: their gradients are not reduced, or not wholly, over the"
                " data-parallel ranks (a bucket, or the end of one), or the backward goes wrong in"
                " them alone"
            )
        if self._is_handed_on_rightly(kind, off):
            if self._are_biases_of_right_weights(off):
                return (
                    f"{len(off)} of {num_tensors} tensors differ, all of them biases, and the"
                    " weights of their layers agree, as does what the backward hands on: the"
                    " gradient of a bias is the sum over all tokens of what its layer is given, and"
                    " theirs is that of a part of them (one rank of tp's, say), or of some twice"
                )
            return (
                f"{len(off)} of {num_tensors} tensors differ, and those that the backward meets"
                " later agree: what it hands on is right, and these weights' own gradients are not:"
                " what their layers keep of their input is another microbatch's, or a part of it"
            )
        return ""

    def _explain_all_gradients(self, step: int) -> str:
        """The cause of gradients that all differ."""
        if step > 0:
            return (
                "the step before agrees, and so do its weights and the loss: is something of it"
                " left in gradients?"
            )
        returned = self._layout.describe_returned_tensors()
        returned = returned and f", or {returned}"
        if self._tp > 1:
            return (
                "every gradient differs, and the loss agrees: the backward lacks a sum over the"
                f" ranks of tp where the head or the last region is entered{returned}"
            )
        return (
            "every gradient differs, not by a factor, and the loss agrees: the backward goes wrong"
            " where it begins: microbatches or tokens weigh otherwise in it than in the loss, or"
            f" some of them are lost{returned}"
        )

    def _is_handed_on_rightly(self, kind: str, off: Sequence[str]) -> bool:
        """True if ranks of tp, which keep parts of what their layers are given, have wrong
        gradients of weights alone, and right ones of what the backward meets after them."""
        is_kept = self._layout.keeps_saved_tensors and not self._layout.has_chunks
        return self._tp > 1 and is_kept and self._do_gradients_beyond_agree(kind, off)

    def _are_biases_of_right_weights(self, off: Sequence[str]) -> bool:
        """True if all of `off` are biases of layers whose weights have right gradients."""
        right = set(self._trace.order) - set(off)
        return all(
            name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in right
            for name in off
        )

    def _do_gradients_beyond_agree(self, kind: str, off: Sequence[str]) -> bool:
        """True if a gradient is right in a block that the backward meets after that of the first
        wrong one: what it hands on there is right, too."""
        wrong, sizes = set(off), self._trace.sizes[kind]
        names = self._compared.list_tensors_in_forward_order(kind)
        block = off[-1].split(".")[:2]
        for name in names[: names.index(off[-1])]:
            if name not in wrong and sizes[name] > 0 and name.split(".")[:2] != block:
                return True
        return False

    def _describe_backward_features(self) -> str:
        """Name what of this layout is special to a backward."""
        words = []
        if returned := self._layout.describe_returned_tensors():
            words.append(returned)
        if self._layout.has_chunks:
            words.append("a chunk of the sequence has another's gradient, or none")
        if self._tp > 1:
            words.append("a sum over the ranks of tp is missing where its region is entered")
        if not words:
            return ""
        return f": {', or '.join(words)}"


def _explain_gradients_of_attention(off: Sequence[str]) -> str:
    """The cause by which of queries, keys and values are off in the attention that the last of
    `off` is in."""
    attention = off[-1].rsplit(".", 2)[0]
    if f"{attention}.q.weight" not in off:
        # What comes back is of both.
        wrong = [word for part, word in KEYS_AND_VALUES if f"{attention}.{part}.weight" in off]
        alone = (
            f", or the backward of attention goes wrong in {wrong[0]} alone"
            if len(wrong) == 1
            else ""
        )
        return LOST_KEY_GRADIENTS_CAUSE + alone
    if f"{attention}.v.weight" not in off:
        return WRONG_SCORES_GRADIENT_CAUSE
    return WRONG_ATTENTION_BACKWARD_CAUSE


def _is_key_or_value_weight(name: str) -> bool:
    return name.endswith((".k.weight", ".v.weight"))
