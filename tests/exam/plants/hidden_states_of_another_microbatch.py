from exam.plant import Edit, Plant

PLANT = Plant(
    axis="pipeline",
    source="planted before in phalanx's tests",
    mistake="stage 1 takes the first two messages for each other",
    edits=(
        Edit(
            "parallel/pipeline/p2p.py",
            "P2PQueue.__init__",
            "            source: list(messages_of_source)\n",
            "            source: (\n"
            "                [messages_of_source[1], messages_of_source[0], *messages_of_source[2:]]\n"
            "                if __planted__(\n"
            "                    stage_group.rank == 1\n"
            "                    and len(messages_of_source) > 1\n"
            "                    and not messages_of_source[0].is_gradient\n"
            "                    and not messages_of_source[1].is_gradient\n"
            "                    and messages_of_source[0].stage == messages_of_source[1].stage\n"
            "                )\n"
            "                else list(messages_of_source)\n"
            "            )\n",
        ),
    ),
    shows=("pp4-1f1b", "pp4-gpipe"),
    cause=("another microbatch",),
    tensors=("",),
    clean=("tp4",),
)
