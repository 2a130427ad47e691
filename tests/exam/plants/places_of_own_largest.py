from exam.plant import Edit, Plant

PLANT = Plant(
    axis="compression",
    source="planted before in phalanx's tests",
    mistake="a rank puts what others sent at the places of its own largest elements",
    edits=(
        Edit(
            "parallel/hooks/topk.py",
            "TopK.reduce",
            "        all_places = wire.gather(torch.cat(places).to(torch.int32))\n",
            "        all_places = wire.gather(torch.cat(places).to(torch.int32))\n"
            "        if __planted__():\n"
            "            all_places = all_places[wire.rank].expand_as(all_places).clone()\n",
        ),
    ),
    shows=("ddp-topk",),
    cause=("sent", "places", "order"),
    clean=("ddp-int8",),
)
