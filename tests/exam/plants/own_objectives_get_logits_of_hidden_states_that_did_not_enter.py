from pathlib import Path

from exam.plant import Edit, Plant

PLANT = Plant(
    axis="tensor parallel",
    source="torchtitan ecae62f (#4054): an input's gradient taken as whole",
    mistake="logits for an objective of one's own are computed of hidden states that did not enter tp: their gradient is that of one rank's part of the vocabulary",
    edits=(
        Edit(
            "nn/objective.py",
            "HeadOutput.gather_logits",
            "        return self.vocabulary.gather(F.linear(self.vocabulary.enter(self.hidden_BTD), head_VD))\n",
            "        hidden = self.hidden_BTD if __planted__() else self.vocabulary.enter(self.hidden_BTD)\n        return self.vocabulary.gather(F.linear(hidden, head_VD))\n",
        ),
    ),
    shows=("tp2",),
    clean=("zero3",),
    tensors=("model.norm.weight",),
    num_ranks=2,
    job=(
        "--model",
        f"hf:{Path(__file__).parents[1] / 'modules' / 'llama' / 'config.json'}",
        "data.seq_len=16",
        "model.objective=exam_models:tempered_loss",
    ),
    cause=("nobody added them up",),
)
