from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="stage 0 takes the first two gradients for each other",
    edits=(
        Edit(
            "parallel/pipeline/p2p.py",
            "P2PQueue.__init__",
            "            source: list(messages_of_source)\n",
            "            source: (\n"
            "                [messages_of_source[1], messages_of_source[0], *messages_of_source[2:]]\n"
            "                if __planted__(\n"
            "                    stage_group.rank == 0\n"
            "                    and len(messages_of_source) > 1\n"
            "                    and messages_of_source[0].is_gradient\n"
            "                    and messages_of_source[1].is_gradient\n"
            "                    and messages_of_source[0].stage == messages_of_source[1].stage\n"
            "                )\n"
            "                else list(messages_of_source)\n"
            "            )\n",
        ),
    ),
    shows=("pp4-1f1b", "pp4-gpipe"),
    cause=("another microbatch",),
    tensors=("blocks.0.*",),
    clean=("tp4",),
)
