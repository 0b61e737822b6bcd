"""Cases of `same_as` on meshes of four devices, which may belong to several processes."""

import dataclasses

import same_as_cases

FOUR = {"regions": 4, "steps": (2, 9, 14)}
MESHES = {"regions apart": (4,), "regions of two": (2, 1, 2)}
# The store is for jobs, and memory of the host for one process; both have tests of their own. The
# weights are those of three regions. The others have meshes of their own.
LEFT_OUT = ("jobs", "offload", "stages", "weights", "eight devices", "fsdp x tensor")
# On these meshes each of them shows nothing that the other does not.
SAME_HERE = {
    "cocodc, 4 slots": "cocodc, adaptive",
    "two-shot, 4 slots": "int8, two-shot",
    "noloco, 4 slots": "clock, noloco",
    "diloco, 2 slots": "diloco",
    "streaming_diloco, 2 slots x fsdp 2": "streaming_diloco, landing apart",
    "ddp, 2 slots x fsdp 2": "clock, ddp",
}


def cases() -> dict[str, same_as_cases.Case]:
    """By `CASE, MESH`; those of three regions have four."""
    found = {}
    for name, case in same_as_cases.cases().items():
        if name.startswith(LEFT_OUT) or name in SAME_HERE:
            continue
        for mesh, shape in MESHES.items():
            if "vmap" in name and mesh == "regions apart":
                continue  # a device has one region
            fields = dict(FOUR) | {"mesh": shape}
            if name in same_as_cases.OF_FOUR and not case.method().adapts:
                fields["method"] = same_as_cases.OF_FOUR[name]
            if case.method().adapts:
                if mesh == "regions of two":
                    continue
                fields["steps"] = (0, 9, 14)
            if case.away is not None:
                fields["away"] = away
            found[f"{name}, {mesh}"] = dataclasses.replace(case, **fields)
    found["adloco by twos, regions of two"] = dataclasses.replace(
        same_as_cases.adapting(lambda: same_as_cases.adloco(start=2), largest_microbatch=2),
        **{**FOUR, "mesh": MESHES["regions of two"], "steps": (0, 9, 14)},
    )
    for name, case in same_as_cases.stages().items():
        found[name] = case
    return found


def away(step: int) -> list[bool] | None:
    return None if step % 3 else [step % 2 == 0, True, step % 4 > 0, step % 9 > 0]
